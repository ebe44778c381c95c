"""Opening a model with the backend that the options name."""

from pathlib import Path

from ladderize.eval.backends.base import EvalModel
from ladderize.eval.backends.hf import HFModel
from ladderize.eval.backends.runtime import RuntimeModel
from ladderize.eval.options import EvalOptions
from ladderize.ranks.group import Ranks


def open_model(name: str, folder: Path, options: EvalOptions, ranks: Ranks) -> EvalModel:
    """Open a model that was checked. name: as the user gave it; folder: where it lies; ranks: the processes that each
    have the whole model and share the work (of transformers; the runtime has ranks of its own). Raises UserError."""
    if options.backend == "runtime":
        return RuntimeModel.open(name, folder, options)
    return HFModel.open(name, folder, options, ranks)
