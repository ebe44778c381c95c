"""The options of ``ladderize eval`` and ``compare``, with their defaults. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ladderize.choices import (
    DTYPE,
    REVISION,
    SEQ_LEN,
    TP_SIZE,
    Dtype,
    check_options,
    distinct_names,
    option,
)
from ladderize.errors import UsageError
from ladderize.eval.task_names import check_task_names
from ladderize.files.records import Record

MARGIN = 1.0  # points that may be lost
EvalBackend = Literal["hf", "vllm"]  # what computes: transformers or vLLM


@dataclass(frozen=True)
class EvalOptions(Record):
    """The options of ``ladderize eval`` that all models share; see its --help."""

    tasks: tuple[str, ...] = option("lm-eval tasks, groups or patterns.", (), metavar="A,B", parse=distinct_names)
    include_path: str | None = option(
        "A folder with your own lm-eval tasks; Python that they name is run.", metavar="DIR", needs="tasks"
    )
    limit: int | None = option("Samples per task, for a quick look.", min=1, needs="tasks")
    num_fewshot: int | None = option("Few-shot examples.", min=0, shown="the task's own number", needs="tasks")
    apply_chat_template: bool = option("Format prompts with the model's chat template.", False, needs="tasks")
    batch_size: int = option("Sequences per forward pass.", 8, min=1)  # vllm: computed side by side
    dtype: Dtype = option(DTYPE, "auto")
    device: str | None = option("Where to compute, such as cpu or cuda:0.", shown="cuda if there is one")
    revision: str | None = option(REVISION)
    seed: int = option("Seed of sampling and of few-shot examples.", 0, min=0)
    perplexity: str | None = option(
        "Text (.txt, .jsonl) or token ids (.npy, .npz, file.npz:array) to score.", metavar="FILE"
    )
    seq_len: int | None = option("Tokens per window of --perplexity.", min=2, shown=SEQ_LEN.shown, needs="perplexity")
    windows: int | None = option(
        "Score the first N windows of --perplexity only.", min=1, shown="all", needs="perplexity"
    )
    backend: EvalBackend = option(
        "What computes: transformers on one device (`accelerate launch` shares the questions), or vLLM.", "hf"
    )
    tp_size: int = option(TP_SIZE, 1)  # of vLLM
    max_length: int | None = option(
        "With --backend vllm: tokens of the longest text that it keeps room for. Of longer ones the end is read.",
        min=2,
        shown="the model's positions",
    )

    def check(self, models: Sequence[str] = ()) -> None:
        """Raise UsageError for impossible values, options that have no effect, where nothing is asked, or for a model
        that is named twice; UserError for tasks that are not there."""
        if len({*models}) < len(models):
            raise UsageError("a model is named twice; name each once")
        if not self.tasks and self.perplexity is None:
            raise UsageError("nothing to evaluate: name --tasks, or a file for --perplexity")
        check_options(self)
        if self.tp_size != 1 and self.backend == "hf":
            raise UsageError(
                f"--tp-size {self.tp_size} needs --backend vllm; transformers computes a model on one device"
            )
        if self.backend == "vllm" and self.device is not None:
            raise UsageError(f"--device {self.device} has no effect on vLLM, which computes where it was built for")
        if self.max_length is not None and self.backend != "vllm":
            raise UsageError(f"--max-length {self.max_length} needs --backend vllm, which keeps room for whole texts")
        check_task_names(self.tasks, self.include_path)


def check_margin(margin: float) -> None:
    """Raise UsageError for an impossible margin in points."""
    if not 0 < margin <= 100:
        raise UsageError(f"--margin must be above 0 and at most 100 points, not {margin:g}")
