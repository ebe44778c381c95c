"""A model that ladderize's own runtime computes, on one or several ranks: the accuracy of what is timed."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.checkpoint.llama import expected_tensors
from ladderize.checkpoint.reading import read_checkpoint
from ladderize.checkpoint.tensors import TensorReader
from ladderize.eval.backends.base import EvalModel, WindowScores
from ladderize.eval.backends.hf import open_tokenizer
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import EvaluatedModel
from ladderize.predictions import write_head
from ladderize.ranks.device import default_device
from ladderize.ranks.group import launched
from ladderize.runtime.requests.options import RequestOptions
from ladderize.runtime.requests.service import Service, check_request, open_service
from ladderize.runtime.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def request_options(options: EvalOptions) -> RequestOptions:
    """What the runtime is asked for. Raises UsageError."""
    return RequestOptions(
        tp_size=options.tp_size,
        rows=options.batch_size,
        dtype=options.dtype,
        device=options.device or default_device(),  # type: ignore[arg-type]  # no index, by options.check
        trust_remote_code=options.trust_remote_code,
    )


class RuntimeModel(EvalModel):
    """A Llama on ranks that wait for what is asked."""

    def __init__(
        self,
        spec: ModelSpec,
        options: RequestOptions,
        tokenizer: "PreTrainedTokenizerBase | None",
        service: Service,
    ) -> None:
        self.name, self.spec, self.options, self.service = spec.name, spec, options, service
        self.tokenizer = tokenizer
        self.vocab_size: int = spec.config["vocab_size"]
        self.positions: int = spec.positions
        self.hidden_size: int = spec.config["hidden_size"]

    @classmethod
    def open(cls, name: str, folder: Path, options: EvalOptions) -> "RuntimeModel":
        """Open a checked model. Raises UserError or LayoutError for one that is no Llama, or not for ``tp_size``."""
        asked = request_options(options)
        spec = replace(check_request(str(folder), asked), name=name)
        tokenizer = open_tokenizer(name, folder, options)
        return cls(spec, asked, tokenizer, open_service(spec, asked))

    @cached_property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in expected_tensors(self.spec.config).values())

    def describe(self, add_bos: bool | None) -> EvaluatedModel:
        import torch
        import transformers

        return EvaluatedModel(
            model=self.name,
            layout=str(self.spec.layout),
            **self.spec.layout.to_config(),
            parameters=self.parameters,
            dtype=self.spec.dtype,
            device=self.options.device,
            torch_version=torch.__version__,
            transformers_version=transformers.__version__,
            add_bos_token=add_bos,
            backend="runtime",
            tp_size=self.options.tp_size,
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
        """See ``EvalModel``; how many windows are read at a time is the runtime's to say, by its budget of tokens."""
        from ladderize.runtime.requests.windows import WindowsJob

        found = self.service.ask(WindowsJob(windows, keep, reference), advance)
        if keep is not None and launched().rank == 0:
            self._keep_head(keep)
        return WindowScores(found.nll, found.kl, found.same_top)

    def _keep_head(self, folder: Path) -> None:
        assert self.spec.folder is not None
        checkpoint = read_checkpoint(self.spec.folder)
        name = "model.embed_tokens.weight" if self.spec.config.get("tie_word_embeddings") else "lm_head.weight"
        with TensorReader(checkpoint.folder) as reader:
            write_head(folder, reader.read(checkpoint.tensors[name], dtype=self.spec.torch_dtype))

    def harness(self, options: EvalOptions, add_bos: bool | None) -> Any:
        """Our model class for lm-eval. BOS is told explicitly, the same for all models."""
        from ladderize.eval.backends.runtime_lm import RuntimeLM

        harness = RuntimeLM.of(self.spec, self.options, self.service, self.tokenizer, add_bos)
        if options.apply_chat_template:
            harness.check_chat_template()
        return harness

    def close(self) -> None:
        self.service.close()
