"""Turn a dense Llama checkpoint into one that waits less for communication under tensor parallelism."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ladderize.convert.pipeline import convert_checkpoint
    from ladderize.layout import Layout
    from ladderize.modeling import load, register

__version__ = "0.1.0"
__all__ = ["Layout", "__version__", "convert_checkpoint", "load", "register"]

_HOMES = {
    "Layout": "ladderize.layout",
    "convert_checkpoint": "ladderize.convert.pipeline",
    "load": "ladderize.modeling",
    "register": "ladderize.modeling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
