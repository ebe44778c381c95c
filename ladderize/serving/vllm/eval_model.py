"""A model that vLLM computes, for ``ladderize eval --backend vllm``: the accuracy of what is served."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.checkpoint.dtypes import FLOAT_DTYPES
from ladderize.checkpoint.llama import parameter_count
from ladderize.checkpoint.reading import read_checkpoint
from ladderize.errors import UserError
from ladderize.eval.backends.base import EvalModel, WindowScores
from ladderize.eval.backends.chat import render_chats
from ladderize.eval.backends.hf import open_tokenizer
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import EvaluatedModel
from ladderize.layout import Layout
from ladderize.runtime.shards import check_runnable
from ladderize.serving.vllm.endings import score_ends
from ladderize.serving.vllm.engine import VLLMEngine, start_engine
from ladderize.serving.vllm.versions import installed_version, version_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ladderize.checkpoint.reading import Checkpoint


def check_vllm() -> None:
    """Raise UserError unless a vLLM that was tested is installed."""
    problem = version_problem(installed_version())
    if problem is not None:
        raise UserError(problem)


def open_vllm(name: str, folder: Path, options: EvalOptions) -> "VLLMModel":
    """Open a checked model, dense or converted, for ``ladderize.evaluate``. name: as the user gave it.

    Raises UserError or LayoutError: where vLLM is not there or cannot run it, or for another ``tp_size``.
    """
    check_vllm()
    return VLLMModel.open(name, folder, options)


class VLLMModel(EvalModel):
    """A model in vLLM's processes."""

    def __init__(
        self,
        name: str,
        checkpoint: "Checkpoint",
        options: EvalOptions,
        tokenizer: "PreTrainedTokenizerBase | None",
        engine: VLLMEngine,
    ) -> None:
        self.name, self.checkpoint, self.options = name, checkpoint, options
        self.tokenizer, self.engine = tokenizer, engine
        config = engine.llm.llm_engine.model_config
        self.vocab_size: int = config.get_vocab_size()
        self.positions: int = config.max_model_len - 1
        self.hidden_size: int = config.get_hidden_size()

    @classmethod
    def open(cls, name: str, folder: Path, options: EvalOptions, **more: Any) -> "VLLMModel":
        """See ``open_vllm``. more: arguments of vLLM's ``LLM``."""
        checkpoint = read_checkpoint(folder)
        config = checkpoint.config
        is_llama = config.get("model_type") in ("llama", "ladderized_llama") and not config.get("quantization_config")
        if is_llama:
            check_runnable(config, Layout.from_config(config), options.tp_size)
        tokenizer = open_tokenizer(name, folder, options)
        arguments = {
            "model": str(folder),
            "tensor_parallel_size": options.tp_size,
            "dtype": _dtype(checkpoint, options),
            "max_model_len": _positions(name, config, options) + 1,  # its last token is scored, and never read
            "max_num_seqs": options.batch_size,
            "seed": options.seed,
            "trust_remote_code": options.trust_remote_code,
            "skip_tokenizer_init": tokenizer is None,
            "disable_log_stats": True,
            **more,
        }
        return cls(name, checkpoint, options, tokenizer, start_engine(name, arguments))

    @property
    def no_predictions(self) -> str | None:
        return "vLLM tells the log-probabilities of single tokens, not of the whole vocabulary"

    def describe(self, add_bos: bool | None) -> EvaluatedModel:
        import torch
        import transformers
        from vllm.platforms import current_platform

        config = self.checkpoint.config
        layout = Layout.from_config(config)
        return EvaluatedModel(
            model=self.name,
            layout=str(layout),
            **layout.to_config(),
            parameters=_parameters(self.checkpoint),
            dtype=self.engine.dtype,
            device=current_platform.device_type,
            torch_version=torch.__version__,
            transformers_version=transformers.__version__,
            add_bos_token=add_bos,
            backend="vllm",
            tp_size=self.options.tp_size,
            vllm_version=installed_version(),
        )

    def score(
        self,
        windows: list[np.ndarray],
        *,
        batch_size: int,
        keep: Path | None = None,
        reference: Path | None = None,
        advance: Callable[[int], None] = lambda n: None,
    ) -> WindowScores:
        """See ``EvalModel``; how many windows are read at a time is vLLM's to say."""
        assert keep is None
        assert reference is None  # see ``no_predictions``
        scores = score_ends(
            self.engine, [window.tolist() for window in windows], [len(window) - 1 for window in windows], advance
        )
        return WindowScores(np.array([-score.log_likelihood for score in scores], dtype=np.float64))

    def harness(self, options: EvalOptions, add_bos: bool | None) -> Any:
        """lm-eval's vLLM class around the engine. BOS is told explicitly, the same for all models."""
        from ladderize.serving.vllm.lm import EngineLM

        found = EngineLM(
            self.engine,
            self.name,
            self.checkpoint.folder,
            self.tokenizer,
            max_length=self.positions,
            add_bos_token=add_bos,
            tp_size=options.tp_size,
            info={
                "model_dtype": self.engine.dtype,
                "layout": str(Layout.from_config(self.checkpoint.config)),
                "tp_size": options.tp_size,
            },
        )
        if options.apply_chat_template:
            assert self.tokenizer is not None
            render_chats(found, self.name, self.tokenizer)
        return found

    def close(self) -> None:
        self.engine.close()


def _dtype(checkpoint: "Checkpoint", options: EvalOptions) -> str:
    """The dtype to compute in. vLLM's own "auto" takes 16 bits for what is stored in 32; ours is: as stored."""
    if options.dtype != "auto":
        return options.dtype
    norm = checkpoint.tensors.get("model.norm.weight")
    return FLOAT_DTYPES.get(norm.dtype, "auto") if norm is not None else "auto"


def _positions(name: str, config: dict[str, Any], options: EvalOptions) -> int:
    """Tokens of the longest text that is read, which vLLM keeps room for."""
    positions = int(config.get("max_position_embeddings") or 2048)
    if options.max_length is not None and options.max_length > positions:
        raise UserError(f"--max-length {options.max_length} is more than the {positions} positions of {name}")
    return options.max_length or positions


def _parameters(checkpoint: "Checkpoint") -> int:
    if checkpoint.config.get("model_type") in ("llama", "ladderized_llama"):
        return parameter_count(checkpoint.config)
    return sum(math.prod(info.shape) for info in checkpoint.tensors.values())
