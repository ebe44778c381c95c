"""Turn a dense checkpoint into one that waits less for communication under tensor parallelism.

The commands as functions; docs/python.md shows each. ``import ladderize`` imports no torch: a name is imported when it
is first used, from the module that ``__init__.pyi`` gives.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOME_OF = {alias.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names}
__all__ = ["__version__", *_HOME_OF]  # noqa: PLE0604 - they are strings


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
