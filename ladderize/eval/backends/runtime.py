"""A model that ladderize's own runtime computes, on one or several ranks: the accuracy of what is timed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.checkpoint.config import EMBEDDING, HEAD, is_tied, parameter_count
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.tensors import TensorReader
from ladderize.eval.backends.base import AnsweringModel, open_tokenizer
from ladderize.eval.options import EvalOptions
from ladderize.predictions import write_head
from ladderize.ranks.device import default_device
from ladderize.ranks.environment import launched
from ladderize.runtime.requests.continuous import Prompt, continue_prompts
from ladderize.runtime.requests.options import RequestOptions
from ladderize.runtime.requests.scoring import Ending, EndingScores, WindowScores, score_endings, score_windows_of_ids
from ladderize.runtime.requests.service import check_request, open_service
from ladderize.runtime.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RuntimeModel(AnsweringModel):
    """A Llama on ranks that wait for what is asked. spec: of ``check_request`` with the same options."""

    def __init__(self, spec: ModelSpec, options: RequestOptions, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        assert spec.folder is not None
        self.spec, self.folder, self.batch_size = spec, spec.folder, options.rows
        self.service = open_service(spec, options)
        super().__init__(
            spec.name,
            spec.config,
            tokenizer,
            vocab_size=spec.config["vocab_size"],
            positions=options.max_length or spec.positions,
            hidden_size=spec.config["hidden_size"],
            parameters=parameter_count(spec.config),
            dtype=spec.dtype,
            device=options.device,
            backend="runtime",
            tp_size=options.tp_size,
        )

    @classmethod
    def open(cls, name: str, folder: Path, options: EvalOptions) -> "RuntimeModel":
        """Open a checked model. Raises UserError or LayoutError for one that is no Llama, or not for ``tp_size``."""
        asked = RequestOptions(
            tp_size=options.tp_size,
            rows=options.batch_size,
            dtype=options.dtype,
            device=options.device or default_device(),  # no index, by options.check
            trust_remote_code=options.trust_remote_code,
        )
        spec = replace(check_request(str(folder), asked), name=name)
        return cls(spec, asked, open_tokenizer(name, folder, options))

    def score(
        self,
        windows: list[np.ndarray],
        *,
        batch_size: int,
        keep: Path | None = None,
        reference: Path | None = None,
        advance: Callable[[int], None] = lambda n: None,
    ) -> WindowScores:
        found: WindowScores = self.service.ask(score_windows_of_ids, windows, keep, reference, advance=advance)
        if keep is not None and launched().rank == 0:
            checkpoint = read_checkpoint(self.folder)
            name = EMBEDDING if is_tied(checkpoint.config) else HEAD
            with TensorReader(checkpoint.folder) as reader:
                write_head(keep, reader.read(checkpoint.tensors[name], dtype=self.spec.torch_dtype))
        return found

    def score_endings(self, endings: list[Ending], advance: Callable[[int], Any]) -> EndingScores:
        scores: EndingScores = self.service.ask(score_endings, endings, advance=advance)
        return scores

    def continue_prompts(self, prompts: list[Prompt], advance: Callable[[int], Any]) -> list[list[int]]:
        made: list[list[int]] = self.service.ask(continue_prompts, prompts, advance=advance)
        return made

    def harness(self, options: EvalOptions, add_bos: bool | None) -> Any:
        from ladderize.eval.backends.lm import AnsweringLM

        return AnsweringLM(self, add_bos)

    def close(self) -> None:
        self.service.close()
