"""Opening a model with the backend that the options name."""

from pathlib import Path

from ladderize.errors import UsageError
from ladderize.eval.backends.base import EvalModel, OpenModel
from ladderize.eval.backends.hf import HFModel
from ladderize.eval.backends.runtime import RuntimeModel
from ladderize.eval.options import EvalOptions
from ladderize.ranks.group import Ranks


def open_model(
    name: str, folder: Path, options: EvalOptions, ranks: Ranks, engine: OpenModel | None = None
) -> EvalModel:
    """Open a model that was checked. name: as the user gave it; folder: where it lies; ranks: the processes that each
    have the whole model and share the work (of transformers; the others have ranks of their own). engine: opens a
    model in vLLM. Raises UserError."""
    if options.backend == "vllm":
        check_engine(options, engine)
        assert engine is not None
        return engine(name, folder, options)
    if options.backend == "runtime":
        return RuntimeModel.open(name, folder, options)
    return HFModel.open(name, folder, options, ranks)


def check_engine(options: EvalOptions, engine: OpenModel | None) -> None:
    """Raise UsageError where vLLM is to compute, and who calls has not said how: nothing in here imports vLLM."""
    if options.backend == "vllm" and engine is None:
        raise UsageError("the backend vllm needs engine=open_vllm, of ladderize.serving.vllm.eval_model")
