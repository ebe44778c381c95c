"""The documents that a report is made of: found in the files and folders that the user named, read and checked."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from ladderize.adapt.options import METRICS
from ladderize.convert.sensitivity_file import SensitivityDocument, read_sensitivity
from ladderize.data.rows import file_rows
from ladderize.errors import UserError
from ladderize.eval.results import EvalResults
from ladderize.files.documents import read_document
from ladderize.files.records import Record
from ladderize.files.regular import inside, resolved
from ladderize.runtime.bench.document import BenchDocument
from ladderize.sweep_document import SweepDocument

SWEEP = "sweep.json"
READABLE = "sweep.json, results.json, bench.json or sensitivity.json"
# the files of a folder that are read; others, such as config.json, belong to something else
PATTERNS = ("results*.json", "bench*.json", "sensitivity*.json")


@dataclass(frozen=True)
class MetricsLine(Record):
    """A line of metrics.jsonl: of a step, or of a validation."""

    step: int
    tokens: int | None = None  # read so far
    heldout_perplexity: float | None = None
    heldout_divergence: float | None = None
    dense_heldout_perplexity: float | None = None

    def value(self, key: str) -> float | None:
        """Return the measured value; None where it is no finite number, as in a training that diverged."""
        value = getattr(self, key)
        return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class RetrainingRun:
    """The validations of one retraining."""

    name: str  # of the sweep's point, else of its folder
    validations: list[MetricsLine]


Document = SweepDocument | EvalResults | BenchDocument | SensitivityDocument | RetrainingRun
Kind = TypeVar("Kind", bound=Document)


@dataclass
class FoundDocuments:
    """All documents by their file, a retraining by its folder, in the order in which they were named."""

    documents: dict[Path, Document] = field(default_factory=dict)
    # the names of results.json in their sweep, which begin with the stage and a hash of all that decides it
    stages: dict[Path, str] = field(default_factory=dict)

    def of(self, kind: type[Kind]) -> list[tuple[Path, Kind]]:
        return [(path, document) for path, document in self.documents.items() if isinstance(document, kind)]

    def add_folder(self, folder: Path) -> None:
        """Add the documents in a folder and in the folders below it."""
        below = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        files = [file for level in (folder, *below) for pattern in PATTERNS for file in sorted(level.glob(pattern))]
        for file in filter(Path.is_file, files):
            self.add_file(file, is_named=False)
        runs = [level for level in (folder, *below) if not level.name.endswith(".ladderize-work")]
        retrainings = [run for run in runs if (run / METRICS).is_file()]
        for run in retrainings:
            self.add_retraining(run, run.name)
        if not files and not retrainings:
            raise UserError(
                f"{folder} has no {SWEEP}, {', '.join(PATTERNS)} or {METRICS}; name a folder that `ladderize sweep`"
                " made, or files that eval or bench wrote"
            )

    def add_file(self, path: Path, *, is_named: bool = True) -> None:
        """Add a file's document, by a key that only one kind has; a ``bench --train`` in a folder is passed over."""
        if path in self.documents:
            return
        content = read_document(path, READABLE)
        if "points" in content:
            sweep = self.documents[path] = SweepDocument.from_dict(content, path)
            self.add_stages(path, sweep)
        elif "models" in content:
            self.documents[path] = EvalResults.from_dict(content, path)
        elif "costs" in content:
            self.documents[path] = read_sensitivity(path)
        elif "rows" in content:
            bench = BenchDocument.from_dict(content, path)
            if not bench.options.train:
                self.documents[path] = bench
            elif is_named:
                raise UserError(f"{path} is of bench --train, which has no place in a report; leave it out")
        else:
            raise UserError(f"{path} is none of the documents that a report is made of: {READABLE}")

    def add_stages(self, path: Path, sweep: SweepDocument) -> None:
        """Add the files that a sweep points to, all inside its folder."""

        def inner(name: str) -> Path:
            if (target := inside(path.parent, name)) is None:
                raise UserError(f"{path} names {name}, which lies outside of its folder")
            return target

        results = [point.results for point in sweep.points if point.results is not None]
        for name in (*results, *sweep.benches):
            file = inner(name)
            if not file.is_file():
                raise UserError(f"{path} names {name}, which is not there; run `ladderize sweep` again")
            self.add_file(file)
            self.stages[file] = name
        for point in sweep.points:
            if point.adaptation is not None and (inner(point.adaptation) / METRICS).is_file():
                self.add_retraining(inner(point.adaptation), point.name)

    def add_retraining(self, folder: Path, name: str) -> None:
        """Add the validations of a finished retraining, unless it is there already."""
        tokens, validations = 0, []
        for row in file_rows(str(folder / METRICS)):
            line = MetricsLine.from_dict(row.values, row.origin)
            tokens = tokens if line.tokens is None else line.tokens  # a validation follows its step
            if line.heldout_perplexity is not None:
                validations.append(replace(line, tokens=tokens))
        self.documents.setdefault(folder, RetrainingRun(name, validations))


def find_documents(paths: list[Path]) -> FoundDocuments:
    """Return all documents in the files and folders that a user named."""
    documents = FoundDocuments()
    for path in map(resolved, paths):
        if not path.exists():
            raise UserError(f"{path} does not exist; name a sweep's folder, or files that eval or bench wrote")
        file = path if path.is_file() else path / SWEEP
        if file.is_file():
            documents.add_file(file)
        else:
            documents.add_folder(path)
    return documents
