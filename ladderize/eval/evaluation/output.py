"""Where a run's results go: results.json after every task, and beside it what a model answered to each question.

A sample is one line of JSON in the layout of lm-eval's ``--log_samples``, so that lm-eval's tools and ``datasets`` read
the files too.
"""

import contextlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from ladderize.console import strict_json
from ladderize.errors import UserError
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import EvalResults, EvaluatedModel, ModelResult
from ladderize.files.documents import check_writable, read_own, write_json
from ladderize.files.parsing import parse_json
from ladderize.files.regular import inside, read_lines, resolved
from ladderize.files.temporaries import replacement, temporary_folder

MOST_NAME = 80  # characters of a model's or a task's name in a file's name


@dataclass
class Output:
    """The results so far. out: their file, if there is one. parent: the folder that paths of samples are relative to.
    writes: whether this process is the one that writes."""

    options: EvalOptions
    out: Path | None
    parent: Path
    writes: bool
    finished: list[ModelResult] = field(default_factory=list)
    _begun: bool = False
    _earlier: dict[str, ModelResult] = field(default_factory=dict)

    def resume(self) -> None:
        """Go on with what an earlier run of the same models and options left in ``out``, if it did."""
        if self.out is None or not (content := read_own(self.out)):
            return
        try:
            results = EvalResults.from_dict(content, self.out)
        except UserError:
            return
        if results.options == self.options:
            self._earlier = {entry.model.model: entry for entry in results.models if self._has_samples(entry)}
            self._begun = bool(self._earlier)  # its samples stay

    def earlier(self, described: EvaluatedModel) -> ModelResult:
        """An entry with the tasks that an earlier run finished of this model, and with its new description."""
        known = self._earlier.get(described.model)
        return replace(known, model=described) if known is not None else ModelResult(described)

    def _has_samples(self, entry: ModelResult) -> bool:
        found = [inside(self.parent, name) for name in entry.samples.values()]
        return all(path is not None and path.is_file() for path in found)

    def save(self, *unfinished: ModelResult, comparisons: Iterable[dict[str, Any]] = ()) -> EvalResults:
        """Write what there is, so that nothing is lost when something later fails."""
        results = EvalResults(self.options, [*self.finished, *unfinished], list(comparisons))
        if self.out is not None and self.writes:
            former = [] if self._begun else former_samples(self.out)
            write_json(self.out, results.to_dict())
            remove_samples(former)  # which nothing names any more
            self._begun = True
        return results

    def with_task(
        self, entry: ModelResult, result: Mapping[str, Any], samples: Mapping[str, Iterable[Mapping[str, Any]]]
    ) -> ModelResult:
        """``entry`` with a task of lm-eval, whose samples are on the disk before results.json names them."""
        if not self.writes:
            return entry.with_task(result, {})
        if not self._begun:  # or an earlier run's results.json would for a moment name this run's samples
            self.save(entry)
        folder = samples_folder(self.out) if self.out is not None else self.parent / "samples"
        others = [known for name, known in self._earlier.items() if name != entry.model.model]
        taken = {Path(path).parent.name.partition("-")[0] for known in others for path in known.samples.values()}
        number = next(number for number in count(len(self.finished)) if str(number) not in taken)
        entry = entry.with_task(result, write_samples(folder, number, entry.model.model, samples))
        self.save(entry)
        return entry


@contextlib.contextmanager
def open_output(options: EvalOptions, out: Path | None, *, writes: bool) -> Iterator[Output]:
    """Check that ``out`` can be written, with its samples; without it these are removed at the end. Raises
    UserError."""
    with contextlib.ExitStack() as stack:
        if out is not None:
            out = resolved(out, "--out ")
            check_writable(out, inputs=[options.perplexity])
            folder = samples_folder(out)
            if out == folder:
                raise UserError(
                    f"--out {out} has the name of the folder of its samples; name a file that ends in .json"
                )
            if folder.exists() and not folder.is_dir():
                raise UserError(f"--out {out}: its samples belong into {folder}, which is a file; name another --out")
            parent = out.parent
        elif writes:
            parent = stack.enter_context(temporary_folder("eval"))
        else:
            parent = Path(tempfile.gettempdir())
        yield Output(options, out, parent, writes)


# ---- samples ----


def samples_folder(out: Path) -> Path:
    """Beside results.json: ``results.samples``."""
    return out.with_name(f"{out.stem}.samples")


def write_samples(folder: Path, number: int, model: str, samples: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict:
    """Write each task's samples of the ``number``-th model under ``folder``; returns task -> path, relative to the
    folder's parent. Each file appears whole or not at all. Raises OSError, where the disk is full, say."""
    own = folder / f"{number}-{_as_name(Path(model).name)}"
    own.mkdir(parents=True, exist_ok=True)
    written: dict[str, str] = {}
    for task, logged in samples.items():
        path = own / f"{_as_name(task)}.jsonl"
        if path.relative_to(folder.parent).as_posix() in written.values():  # names that differ in such characters only
            path = own / f"{_as_name(task)}-{len(written)}.jsonl"
        with replacement(path) as file:
            for sample in logged:
                file.write(json.dumps(as_logged(sample), ensure_ascii=False, allow_nan=False) + "\n")
        written[task] = path.relative_to(folder.parent).as_posix()
    return written


def read_samples(parent: Path, result: ModelResult) -> dict[str, Iterator[dict[str, Any]]]:
    """Task -> its samples, read line by line from the files that this run wrote under ``parent``."""
    return {task: map(parse_json, read_lines(parent / path)) for task, path in result.samples.items()}


def as_logged(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample of lm-eval as its ``--log_samples`` writes it: what the model was given by name, answers and target as
    text. NaN and infinity, which JSON does not have, become null."""
    arguments = {
        f"gen_args_{number}": {f"arg_{place}": part for place, part in enumerate(given)}
        for number, given in enumerate(sample["arguments"])
    }
    answers = {key: _as_text(sample[key]) for key in ("resps", "filtered_resps")}
    logged: dict[str, Any] = strict_json({**sample, "arguments": arguments, **answers, "target": str(sample["target"])})
    return logged


def former_samples(out: Path) -> list[Path]:
    """The samples that an earlier results.json at ``out`` names: files in our folder beside it, nothing else."""
    folder, models, found = samples_folder(out), read_own(out).get("models") if out.is_file() else None, []
    for entry in models if isinstance(models, list) else []:
        named = entry.get("samples") if isinstance(entry, dict) else None
        for relative in named.values() if isinstance(named, dict) else []:
            named_path = out.parent / str(relative)
            path = inside(folder, str(named_path))
            if path is not None and path.suffix == ".jsonl" and path.is_file() and not named_path.is_symlink():
                found.append(path)
    return found


def remove_samples(paths: Iterable[Path]) -> None:
    """Remove files of samples, and their folders where these are empty then."""
    for path in paths:
        path.unlink(missing_ok=True)
        for folder in (path.parent, path.parent.parent):
            with contextlib.suppress(OSError):  # which still holds something
                folder.rmdir()


def _as_name(text: str) -> str:
    """A part of a file's name."""
    return re.sub(r"[^\w.-]", "_", text)[:MOST_NAME].lstrip(".") or "_"


def _as_text(value: Any) -> Any:
    return [_as_text(item) for item in value] if isinstance(value, list | tuple) else str(value)
