"""The documents that a report is made of: found in the files and folders that the user named, read and checked."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ladderize.adapt.methods import METRICS
from ladderize.convert.sensitivity_file import SensitivityDocument, read_sensitivity
from ladderize.errors import UserError
from ladderize.eval.results import EvalResults
from ladderize.files.documents import read_document
from ladderize.files.parsing import parse_json
from ladderize.files.records import Record
from ladderize.files.regular import inside, read_lines, resolved
from ladderize.runtime.bench.document import BenchDocument
from ladderize.sweep_document import SweepDocument

SWEEP = "sweep.json"
READABLE = "sweep.json, results.json, bench.json or sensitivity.json"
# the files of a folder that are read; others, such as config.json, belong to something else
PATTERNS = ("results*.json", "bench*.json", "sensitivity*.json")


@dataclass(frozen=True)
class MetricsLine(Record):
    """A line of metrics.jsonl: of a step, or of a validation.

    tokens: the number that was read so far.
    """

    step: int
    tokens: int | None = None
    heldout_perplexity: float | None = None
    heldout_divergence: float | None = None
    dense_heldout_perplexity: float | None = None

    def value(self, key: str) -> float | None:
        """Return the measured value; None where it is no finite number, as in a training that diverged."""
        value = getattr(self, key)
        return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class RetrainingRun:
    """One retraining.

    name: of the sweep's point, else of its folder.
    validations: lines with the tokens that were read by then.
    """

    folder: Path
    name: str
    validations: list[MetricsLine]


@dataclass
class FoundDocuments:
    """All documents, in the order in which they were named.

    seen: their files, and the folders of retrainings.
    """

    sweeps: list[tuple[Path, SweepDocument]] = field(default_factory=list)
    results: list[tuple[Path, EvalResults]] = field(default_factory=list)
    benches: list[tuple[Path, BenchDocument]] = field(default_factory=list)
    sensitivities: list[SensitivityDocument] = field(default_factory=list)
    retrainings: list[RetrainingRun] = field(default_factory=list)
    seen: set[Path] = field(default_factory=set)


def find_documents(paths: list[Path]) -> FoundDocuments:
    """Return all documents in the files and folders that a user named.

    Raises UserError for a path that is not there, a file that is corrupt or no document of ladderize, and a folder with
    none.
    """
    found = FoundDocuments()
    for path in map(resolved, paths):
        if not path.exists():
            raise UserError(f"{path} does not exist; name a sweep's folder, or files that eval or bench wrote")
        if path.is_file():
            _add_file(path, found)
        elif (path / SWEEP).is_file():
            _add_file(path / SWEEP, found)
        else:
            _add_folder(path, found)
    return found


def _add_folder(folder: Path, found: FoundDocuments) -> None:
    """Add the documents in a folder and in the folders below it. Raises UserError where there are none."""
    before = len(found.seen)
    below = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    for place in (folder, *below):
        for file in [file for pattern in PATTERNS for file in sorted(place.glob(pattern)) if file.is_file()]:
            _add_file(file, found, is_named=False)
        if (place / METRICS).is_file() and not place.name.endswith(".ladderize-work"):
            _add_retraining(place, place.name, found)
    if len(found.seen) == before:
        raise UserError(
            f"{folder} has no {SWEEP}, {', '.join(PATTERNS)} or {METRICS}; name a folder that `ladderize sweep` made,"
            " or files that eval or bench wrote"
        )


def _add_file(path: Path, found: FoundDocuments, *, is_named: bool = True) -> None:
    """Add a file's document. Raises UserError if it is none of a report's; a ``bench --train`` in a folder is passed
    over."""
    if path in found.seen:
        return
    found.seen.add(path)
    content = read_document(path, READABLE)
    if "points" in content:  # a key that only one kind of document has
        sweep = SweepDocument.from_dict(content, path)
        found.sweeps.append((path, sweep))
        _add_stages(path, sweep, found)
    elif "models" in content:
        found.results.append((path, EvalResults.from_dict(content, path)))
    elif "costs" in content:
        found.sensitivities.append(read_sensitivity(path))
    elif "rows" in content:
        bench = BenchDocument.from_dict(content, path)
        if bench.options.train and is_named:
            raise UserError(f"{path} is of bench --train, which has no place in a report; leave it out")
        if not bench.options.train:
            found.benches.append((path, bench))
    else:
        raise UserError(f"{path} is none of the documents that a report is made of: {READABLE}")


def _add_stages(path: Path, sweep: SweepDocument, found: FoundDocuments) -> None:
    """Add the files that a sweep points to, all inside its folder. Raises UserError for one that is not there."""

    def place(name: str) -> Path:
        if (target := inside(path.parent, name)) is None:
            raise UserError(f"{path} names {name}, which lies outside of its folder")
        return target

    for name in (*(point.results for point in sweep.points if point.results is not None), *sweep.benches):
        if not place(name).is_file():
            raise UserError(f"{path} names {name}, which is not there; run `ladderize sweep` again")
        _add_file(place(name), found)
    for point in sweep.points:
        if point.adaptation is not None and (place(point.adaptation) / METRICS).is_file():
            _add_retraining(place(point.adaptation), point.name, found)


def _add_retraining(folder: Path, name: str, found: FoundDocuments) -> None:
    """Add the validations of a finished retraining. Raises UserError for a damaged file."""
    if folder in found.seen:
        return
    found.seen.add(folder)
    path = folder / METRICS
    read, validations = 0, []
    for number, text in enumerate(read_lines(path), 1):
        try:
            content: Any = parse_json(text, constants=True)
        except ValueError:
            raise UserError(f"{path}, line {number} is not JSON; the file may be damaged") from None
        line = MetricsLine.from_dict(content, f"{path}, line {number}")
        read = read if line.tokens is None else line.tokens  # a validation follows its step
        if line.heldout_perplexity is not None:
            validations.append(replace(line, tokens=read))
    found.retrainings.append(RetrainingRun(folder, name, validations))
