"""The documents that a report is made of: found in what the user named, and read checked."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from ladderize.adapt.retrain.curves import Curves, read_curves
from ladderize.adapt.retrain.metrics import METRICS
from ladderize.convert.sensitivity_file import SensitivityDocument, kind_of, read_sensitivity
from ladderize.errors import UserError
from ladderize.eval.results import EvalResults
from ladderize.files.documents import read_document
from ladderize.files.regular import inside, resolved
from ladderize.planning.plans.document import PlanResult
from ladderize.runtime.bench.document import BenchDocument
from ladderize.workflows.sweep_document import SweepDocument

SWEEP = "sweep.json"
# files of a folder that are looked at; others, such as config.json, belong to something else
OURS = ("results*.json", "bench*.json", "plan*.json", "sensitivity*.json")
# what tells the documents apart: keys that only this one has
TELLING_KEYS = {
    "sweep": ("points", "benches"),
    "results": ("options", "models"),
    "training": ("rows", "environment", "checked"),
    "vllm": ("rows", "environment", "engine"),
    "bench": ("rows", "environment"),
    "plan": ("rows", "device", "links"),
    "sensitivity": ("blocks", "tau1"),
    "points": ("costs", "dense_nll"),
}
NOT_SHOWN = {
    "training": "bench --train, whose steps no report shows; name other files",
    "vllm": "bench --engine vllm, which no report shows; name other files",
    "points": "sensitivity --mode points, which `ladderize plan` reads and no report shows; name other files",
}
AnyDocument = TypeVar("AnyDocument")


@dataclass(frozen=True)
class FoundDocument(Generic[AnyDocument]):
    """One document."""

    path: Path
    document: AnyDocument
    version: str  # of ladderize, which wrote it
    command: str | None = None  # what made it, where a sweep says so


FoundResults = FoundDocument[EvalResults]


@dataclass(frozen=True)
class FoundCurves:
    """Of one retraining."""

    folder: Path  # what it was written to
    curves: Curves
    name: str | None = None  # of the point of a sweep


@dataclass
class FoundDocuments:
    """All that was found, in the order in which it was named."""

    sweeps: list[FoundDocument[SweepDocument]] = field(default_factory=list)
    results: list[FoundResults] = field(default_factory=list)
    benches: list[FoundDocument[BenchDocument]] = field(default_factory=list)
    plans: list[FoundDocument[PlanResult]] = field(default_factory=list)
    sensitivities: list[FoundDocument[SensitivityDocument]] = field(default_factory=list)
    curves: list[FoundCurves] = field(default_factory=list)
    seen: set[Path] = field(default_factory=set)

    @property
    def empty(self) -> bool:
        return not (self.sweeps or self.results or self.benches or self.plans or self.sensitivities or self.curves)


def find_documents(paths: list[Path]) -> FoundDocuments:
    """Everything in the files and folders that a user named.

    Raises UserError for what is not there, is corrupt, or is no document of ladderize, and for a folder with none.
    """
    found = FoundDocuments()
    for path in paths:
        path = resolved(path)
        if not path.exists():
            raise UserError(f"{path} does not exist; name a sweep's folder, or files that eval or bench wrote")
        if path.is_dir():
            _add_folder(path, found)
        else:
            _add_file(path, found)
    return found


def _add_folder(folder: Path, found: FoundDocuments) -> None:
    if (folder / SWEEP).is_file():
        return _add_file(folder / SWEEP, found)
    before = len(found.seen)
    below = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    for place in (folder, *below):
        for file in _files_in(place):
            _add_file(file, found, named=False)
        if (place / METRICS).is_file() and not place.name.endswith(".ladderize-work"):
            _add_curves(place, found)
    if len(found.seen) == before:
        raise UserError(
            f"{folder} has no {SWEEP}, results*.json, bench*.json, plan*.json or sensitivity*.json, and no training"
            " curves; name a folder that `ladderize sweep` made, or files that eval or bench wrote"
        )
    return None


def _files_in(folder: Path) -> Iterator[Path]:
    for pattern in OURS:
        yield from sorted(path for path in folder.glob(pattern) if path.is_file())


def _add_file(path: Path, found: FoundDocuments, command: str | None = None, *, named: bool = True) -> None:
    """named: by the user, rather than found in a folder, where what no report shows is passed over."""
    if path in found.seen:
        return
    found.seen.add(path)
    content = read_document(path, "sweep.json, results.json, bench.json, plan.json or sensitivity.json")
    version = str(content.get("ladderize_version", "unknown"))
    kind = next((kind for kind, keys in TELLING_KEYS.items() if all(key in content for key in keys)), None)
    if kind == "sweep":
        _add_sweep(FoundDocument(path, SweepDocument.from_dict(content, path), version), found)
    elif kind == "results":
        found.results.append(FoundDocument(path, EvalResults.from_dict(content, path), version, command))
    elif kind == "bench":
        found.benches.append(FoundDocument(path, BenchDocument.from_dict(content, path), version, command))
    elif kind == "plan":
        found.plans.append(FoundDocument(path, PlanResult.from_dict(content, path), version))
    elif kind == "sensitivity":
        document = read_sensitivity(path, kind_of(str(content.get("mode"))))
        found.sensitivities.append(FoundDocument(path, document, version, command))
    elif kind is None:
        raise UserError(
            f"{path} is none of the documents that a report is made of: sweep.json, results.json, bench.json,"
            " plan.json, sensitivity.json; name one of these, or a folder with them"
        )
    elif named:
        raise UserError(f"{path} is of {NOT_SHOWN[kind]}")


def _add_curves(folder: Path, found: FoundDocuments, name: str | None = None) -> None:
    if folder not in found.seen:
        found.seen.add(folder)
        found.curves.append(FoundCurves(folder, read_curves(folder), name))


def _add_sweep(sweep: FoundDocument[SweepDocument], found: FoundDocuments) -> None:
    """A sweep, and what it points to: paths inside its folder only."""
    found.sweeps.append(sweep)
    document = sweep.document
    stages = [*document.stages, *(stage for point in document.points for stage in point.stages)]
    commands = {stage.output: stage.command for stage in stages}
    for point in document.points:
        if point.results is not None:
            _add_stage(sweep.path, point.results, commands, found)
        if point.adaptation is not None and (_inside(sweep.path, point.adaptation) / METRICS).is_file():
            _add_curves(_inside(sweep.path, point.adaptation), found, point.name)
    for name in (*document.sensitivities, *document.benches):
        _add_stage(sweep.path, name, commands, found)


def _add_stage(sweep: Path, name: str, commands: dict[str, str | None], found: FoundDocuments) -> None:
    path = _inside(sweep, name)
    if not path.is_file():
        raise UserError(f"{sweep} names {name}, which is not there; run `ladderize sweep` again")
    _add_file(path, found, commands.get(name, commands.get(str(Path(name).parent))))


def _inside(sweep: Path, name: str) -> Path:
    """A path that sweep.json names; raises UserError where it leaves the sweep's folder."""
    path = inside(sweep.parent, name)
    if path is None:
        raise UserError(f"{sweep} names {name}, which lies outside of its folder")
    return path
