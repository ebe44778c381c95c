"""Turn a dense Llama checkpoint into one that waits less for communication under tensor parallelism.

The commands as functions; docs/python.md shows each. ``import ladderize`` imports no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ladderize.adapt.merge.run import MergeReport, merge
    from ladderize.console import SILENT, Console
    from ladderize.convert.inspection import InspectionReport, inspect_checkpoint
    from ladderize.convert.pipeline import convert_checkpoint
    from ladderize.convert.recipe import Recipe, read_recipe
    from ladderize.convert.report import ConversionReport
    from ladderize.errors import LadderizeError, UsageError, UserError
    from ladderize.eval.harness import evaluate
    from ladderize.eval.options import EvalOptions
    from ladderize.eval.results import EvalResults
    from ladderize.layout import Layout, LayoutError
    from ladderize.modeling import load, load_tokenizer, register
    from ladderize.runtime.sampling import Sampling
    from ladderize.runtime.texts.corpus import CorpusDocument, sample_corpus
    from ladderize.runtime.texts.options import GenerateOptions
    from ladderize.runtime.texts.prompts import GenerateDocument, generate

__version__ = "0.1.0"
__all__ = [
    "SILENT",
    "Console",
    "ConversionReport",
    "CorpusDocument",
    "EvalOptions",
    "EvalResults",
    "GenerateDocument",
    "GenerateOptions",
    "InspectionReport",
    "LadderizeError",
    "Layout",
    "LayoutError",
    "MergeReport",
    "Recipe",
    "Sampling",
    "UsageError",
    "UserError",
    "__version__",
    "convert_checkpoint",
    "evaluate",
    "generate",
    "inspect_checkpoint",
    "load",
    "load_tokenizer",
    "merge",
    "read_recipe",
    "register",
    "sample_corpus",
]
# home -> public names; tests/test_api.py compares them with the imports above, which type checkers read
_HOMES = {
    "adapt.merge.run": ("MergeReport", "merge"),
    "console": ("Console", "SILENT"),
    "convert.inspection": ("InspectionReport", "inspect_checkpoint"),
    "convert.pipeline": ("convert_checkpoint",),
    "convert.recipe": ("Recipe", "read_recipe"),
    "convert.report": ("ConversionReport",),
    "errors": ("LadderizeError", "UsageError", "UserError"),
    "eval.harness": ("evaluate",),
    "eval.options": ("EvalOptions",),
    "eval.results": ("EvalResults",),
    "layout": ("Layout", "LayoutError"),
    "modeling": ("load", "load_tokenizer", "register"),
    "runtime.sampling": ("Sampling",),
    "runtime.texts.corpus": ("CorpusDocument", "sample_corpus"),
    "runtime.texts.options": ("GenerateOptions",),
    "runtime.texts.prompts": ("GenerateDocument", "generate"),
}
_HOME_OF = {name: f"ladderize.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
