"""The options of ``ladderize eval``, and a check of tasks' names that needs no lm-eval. Imports no torch."""

import importlib.util
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ladderize.choices import (
    DTYPE,
    MEASUREMENT,
    MEMORY,
    OUTPUT,
    SEQ_LEN,
    TP_SIZE,
    Dtype,
    argument,
    check_options,
    distinct_names,
    near_names,
    option,
)
from ladderize.errors import UsageError, UserError

MARGIN = 1.0  # points that may be lost
NAMED_TASKS = re.compile(r"^\W*(?:task|group|tag)[\"']?: *[\"']?([\w.-]+)", re.MULTILINE)
# A name may stand in another file, which one with such a line includes, or be written with an escape.
HIDDEN = re.compile(r"^\W*include\b(?!: *[\w-]+(?:\.yaml)?\s*$)|^\W*(?:(?:task|group|tag)\W|-).*\\[xuU]", re.MULTILINE)


@dataclass(frozen=True)
class EvalOptions:
    """The options of ``ladderize eval``; see its --help."""

    models: tuple[str, ...] = argument(
        "MODEL...", "Checkpoints: folders or hub ids. The first is the reference.", decides=False
    )
    tasks: tuple[str, ...] = option(
        "lm-eval tasks, groups or patterns.", (), panel=MEASUREMENT, metavar="A,B", parse=distinct_names
    )
    perplexity: str | None = option(
        "Text (.txt, .jsonl) or token ids (.npy, .npz, file.npz:array) to score.", panel=MEASUREMENT, metavar="FILE"
    )
    include_path: str | None = option(
        "A folder with your own lm-eval tasks; Python that they name is run.",
        panel=MEASUREMENT, metavar="DIR", needs="tasks",
    )  # fmt: skip
    limit: int | None = option("Samples per task, for a quick look.", panel=MEASUREMENT, min=1, needs="tasks")
    num_fewshot: int | None = option(
        "Few-shot examples.", panel=MEASUREMENT, min=0, shown="the task's own number", needs="tasks"
    )
    apply_chat_template: bool = option(
        "Format prompts with the model's chat template.", False, panel=MEASUREMENT, needs="tasks"
    )
    seq_len: int | None = option(
        "Tokens per window of --perplexity.", panel=MEASUREMENT, min=2, shown=SEQ_LEN.shown, needs="perplexity"
    )
    windows: int | None = option(
        "Score the first N windows of --perplexity only.", panel=MEASUREMENT, min=1, shown="all", needs="perplexity"
    )
    seed: int = option("Seed of sampling and of few-shot examples.", 0, panel=MEASUREMENT, min=0)
    engine: Literal["transformers", "vllm"] = option(
        "What computes: transformers on one device (`accelerate launch` shares the questions), or vLLM.",
        "transformers",
        panel=MEASUREMENT,
    )
    reference: Path | None = option(
        "Compare predictions with those that --keep-predictions kept.",
        panel=MEASUREMENT, metavar="DIR", shown="the first model's", needs="perplexity", decides=False,
    )  # fmt: skip
    tp_size: int = option(TP_SIZE, 1)  # of vLLM
    batch_size: int = option("Sequences per forward pass.", 8, panel=MEMORY, min=1)  # vllm: computed side by side
    max_length: int | None = option(
        "With --engine vllm: tokens of the longest text that it keeps room for. Of longer ones the end is read.",
        panel=MEMORY, min=2, shown="the model's positions",
    )  # fmt: skip
    dtype: Dtype = option(DTYPE, "auto")
    device: str | None = option("Where to compute, such as cpu or cuda:0.", panel=MEMORY, shown="cuda if there is one")
    out: Path | None = option("Write results as JSON, after every task.", panel=OUTPUT, metavar="FILE", decides=False)
    keep_predictions: Path | None = option(
        "Keep the first model's predictions on --perplexity, for --reference of later runs.",
        panel=OUTPUT, metavar="DIR", needs="perplexity", decides=False,
    )  # fmt: skip
    resume: bool = option(
        "Keep the tasks that --out has from a run with these options. Whether the models are the same is not checked.",
        False, panel=OUTPUT, needs="out", decides=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        if len({*self.models}) < len(self.models):
            raise UsageError("a model is named twice; name each once")
        if not self.tasks and self.perplexity is None:
            raise UsageError("nothing to evaluate: name --tasks, or a file for --perplexity")
        if self.reference is not None and self.keep_predictions is not None:
            raise UsageError(
                "--keep-predictions and --reference exclude each other: a reference is compared with nothing"
            )
        if self.engine == "transformers":
            if self.tp_size != 1 or self.max_length is not None:
                name = "--tp-size" if self.tp_size != 1 else "--max-length"
                raise UsageError(f"{name} needs --engine vllm; transformers computes on one device")
        elif self.device is not None:
            raise UsageError(f"--device {self.device} has no effect on vLLM, which computes where it was built for")
        elif self.reference is not None or self.keep_predictions is not None:
            raise UsageError("vLLM does not tell the probabilities of the whole vocabulary: no predictions to compare")


def check_margin(margin: float) -> None:
    """Raise UsageError for an impossible margin in points."""
    if not 0 < margin <= 100:
        raise UsageError(f"--margin must be above 0 and at most 100 points, not {margin:g}")


def check_task_names(options: EvalOptions) -> None:
    """Raise UserError for a name that stands in no file of tasks, so that it certainly names none. Only lm-eval, which
    takes many seconds, knows whether another one does, and what a pattern matches."""
    if options.include_path is not None and not Path(options.include_path).is_dir():
        raise UserError(f"--include-path {options.include_path} is not a folder")
    added = "" if options.include_path is None else _all_files(Path(options.include_path))
    package = importlib.util.find_spec("lm_eval")
    if package is None or package.origin is None or HIDDEN.search(added):
        return
    names = [name for name in options.tasks if {*name}.isdisjoint("*?[")]
    text = added + _all_files(Path(package.origin).parent / "tasks") if names else ""
    for name in names:
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is None:
            raise no_such_task(name, NAMED_TASKS.findall(text))


def _all_files(folder: Path) -> str:
    """Return the content of all files of tasks in a folder, and of the templates without a suffix that they include."""
    files = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    paths = [path for path in files if path.suffix in (".yaml", "") and path.is_file()]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def no_such_task(name: str, tasks: Iterable[str]) -> UserError:
    """Return the error about a name of ``--tasks`` that names none of the known tasks."""
    return UserError(
        f"no task has the name {name!r} or matches it{near_names(name, tasks)}; lm-eval's `lm_eval ls tasks` lists"
        " them, and --include-path adds your own"
    )
