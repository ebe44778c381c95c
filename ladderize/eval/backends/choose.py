"""Opening a model with the backend that the options name."""

from pathlib import Path

from ladderize.eval.backends.base import EvalModel
from ladderize.eval.backends.hf import HFModel
from ladderize.eval.backends.runtime import RuntimeModel
from ladderize.eval.options import EvalOptions


def open_model(name: str, folder: Path, options: EvalOptions) -> EvalModel:
    """Open a model that was checked. name: as the user gave it; folder: where it lies. Raises UserError."""
    if options.backend == "runtime":
        return RuntimeModel.open(name, folder, options)
    return HFModel.open(name, folder, options)
