"""The output of a run: results.json, written after every task, and beside it a model's answer to each question.

A sample is one line of JSON in the layout of lm-eval's ``--log_samples``, so lm-eval's tools and ``datasets`` read
these files too.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ladderize.console import strict_json
from ladderize.errors import UserError
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import EvalResults, EvaluatedModel, ModelResult
from ladderize.files.documents import check_writable, read_own, write_json
from ladderize.files.regular import inside, resolved
from ladderize.files.temporaries import replacement

MOST_NAME = 80  # characters of a model's or a task's name in a file's name


@dataclass
class Output:
    """The results so far.

    out: their file, if there is one and this process writes it.
    earlier: results of a run that is resumed, by model.
    begun: True if this run has written ``out``.
    """

    options: EvalOptions
    out: Path | None
    finished: list[ModelResult] = field(default_factory=list)
    earlier: dict[str, ModelResult] = field(default_factory=dict)
    begun: bool = False

    def resume(self) -> None:
        """Take over results that an earlier run with the same options left in ``out``, if there are any."""
        if self.out is None or not (content := read_own(self.out)):
            return
        try:
            results = EvalResults.from_dict(content, self.out)
        except UserError:
            return
        if results.options == self.options:
            self.earlier = {entry.model.model: entry for entry in results.models if self._has_samples(entry)}

    def begin(self, described: EvaluatedModel) -> ModelResult:
        """Return the entry of a model with the tasks that an earlier run finished, and with its new description."""
        known = self.earlier.pop(described.model, None)
        return replace(known, model=described) if known is not None else ModelResult(described)

    def _has_samples(self, entry: ModelResult) -> bool:
        assert self.out is not None
        paths = [inside(self.out.parent, name) for name in entry.samples.values()]
        return all(path is not None and path.is_file() for path in paths)

    def save(self, *unfinished: ModelResult) -> None:
        """Write all results so far, so that a later failure loses nothing, with those of a resumed run whose models
        come later."""
        if self.out is not None:
            models = [*self.finished, *unfinished, *self.earlier.values()]
            write_json(self.out, EvalResults(self.options, models).to_dict())
            self.begun = True

    def finish(self, comparisons: list[dict[str, Any]]) -> EvalResults:
        """Write and return the results of all models of this run."""
        results = EvalResults(self.options, self.finished, comparisons)
        if self.out is not None:
            write_json(self.out, results.to_dict())
        return results

    def with_task(
        self, entry: ModelResult, result: Mapping[str, Any], samples: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> ModelResult:
        """Return ``entry`` with the results of a task. Its samples are on disk before results.json names them."""
        if self.out is None:
            return entry.with_task(result, {})
        if not self.begun:
            self.save(entry)  # an earlier run's results.json must not name this run's samples
        entry = entry.with_task(result, write_samples(samples_folder(self.out), entry.model.model, samples))
        self.save(entry)
        return entry


def open_output(options: EvalOptions, out: Path | None, *, writes: bool) -> Output:
    """Return the output of a run, after checking that ``out`` can be written, with its samples.

    writes: True for the process that writes.
    Raises UserError where it cannot be written.
    """
    if out is None:
        return Output(options, None)
    out = resolved(out, "--out ")
    check_writable(out, inputs=[options.perplexity])
    folder = samples_folder(out)
    if out == folder:
        raise UserError(f"--out {out} has the name of the folder of its samples; name a file that ends in .json")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {out}: its samples belong into {folder}, which is a file; name another --out")
    return Output(options, out if writes else None)


# ---- samples ----


def samples_folder(out: Path) -> Path:
    """Return the folder of samples: ``results.samples`` beside results.json."""
    return out.with_name(f"{out.stem}.samples")


def write_samples(folder: Path, model: str, samples: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, str]:
    """Write a model's samples of each task under ``folder``; returns task -> path, relative to the folder's parent.

    Each file appears whole or not at all.
    Raises OSError, for example where the disk is full.
    """
    of_model = folder / _as_name(model, Path(model).name)
    of_model.mkdir(parents=True, exist_ok=True)
    written: dict[str, str] = {}
    for task, logged in samples.items():
        path = of_model / f"{_as_name(task)}.jsonl"
        with replacement(path) as file:
            for sample in logged:
                file.write(json.dumps(as_logged(sample), ensure_ascii=False, allow_nan=False) + "\n")
        written[task] = path.relative_to(folder.parent).as_posix()
    return written


def as_logged(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample of lm-eval as its ``--log_samples`` writes it: the model's input by name, answers and target as
    text.

    NaN and infinity, which JSON lacks, become null.
    """
    arguments = {
        f"gen_args_{number}": {f"arg_{place}": part for place, part in enumerate(given)}
        for number, given in enumerate(sample["arguments"])
    }
    answers = {key: _as_text(sample[key]) for key in ("resps", "filtered_resps")}
    logged: dict[str, Any] = strict_json({**sample, "arguments": arguments, **answers, "target": str(sample["target"])})
    return logged


def _as_name(text: str, shown: str | None = None) -> str:
    """Return a part of a file name: ``shown`` (None: the text), with a hash of the text where the name is not the whole
    text."""
    name = re.sub(r"[^\w.-]", "_", shown or text)[:MOST_NAME].lstrip(".")
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _as_text(value: Any) -> Any:
    return [_as_text(item) for item in value] if isinstance(value, list | tuple) else str(value)
