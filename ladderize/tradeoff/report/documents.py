"""The documents that a report is made of: found in what the user named, read checked, each with its command."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from ladderize.adapt.methods import METRICS
from ladderize.choices import flag
from ladderize.convert.point_sensitivity import PointSensitivity
from ladderize.convert.read_sensitivity import read_point_sensitivity, read_sensitivity
from ladderize.convert.sensitivity_file import SensitivityDocument
from ladderize.errors import UserError
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import EvalResults
from ladderize.files.documents import read_document
from ladderize.files.regular import inside, resolved
from ladderize.planning.plans.document import PlanResult
from ladderize.planning.plans.options import PlanModel
from ladderize.runtime.bench.document import BenchDocument
from ladderize.runtime.bench.options import BenchOptions
from ladderize.tradeoff.report.retraining_plot import RetrainingRun, read_retraining
from ladderize.workflows.sweep_document import SweepDocument

SWEEP = "sweep.json"
# files of a folder that are looked at; others, such as config.json, belong to something else
OURS = ("results*.json", "bench*.json", "plan*.json", "sensitivity*.json")
# what tells the documents apart: keys that only this one has
TELLING_KEYS = {
    "sweeps": ("points", "benches"),
    "results": ("options", "models"),
    "training": ("rows", "environment", "checked"),
    "vllm": ("rows", "environment", "engine"),
    "benches": ("rows", "environment"),
    "plans": ("rows", "device", "links"),
    "sensitivities": ("blocks", "tau1"),
    "points": ("costs", "dense_nll"),
}
NOT_SHOWN = {
    "training": "bench --train, whose steps no report shows; name other files",
    "vllm": "bench --engine vllm, which no report shows; name other files",
}
STAGE_COMMANDS = 4  # of a sweep's: its own command makes them all
AnyDocument = TypeVar("AnyDocument")


@dataclass(frozen=True)
class FoundDocument(Generic[AnyDocument]):
    """One document. version: of ladderize, which wrote it; command: what made it, as a user types it."""

    path: Path
    document: AnyDocument
    version: str
    command: str


FoundResults = FoundDocument[EvalResults]


@dataclass
class FoundDocuments:
    """All that was found, in the order in which it was named."""

    sweeps: list[FoundDocument[SweepDocument]] = field(default_factory=list)
    results: list[FoundResults] = field(default_factory=list)
    benches: list[FoundDocument[BenchDocument]] = field(default_factory=list)
    plans: list[FoundDocument[PlanResult]] = field(default_factory=list)
    sensitivities: list[FoundDocument[SensitivityDocument]] = field(default_factory=list)
    points: list[FoundDocument[PointSensitivity]] = field(default_factory=list)
    retrainings: list[RetrainingRun] = field(default_factory=list)
    seen: set[Path] = field(default_factory=set)

    @property
    def empty(self) -> bool:
        return not (self.retrainings or any(getattr(self, kind) for kind in READERS))

    def commands(self, *kinds: str) -> list[str]:
        """What made the sweeps, and the documents of these kinds."""
        sweeps, own = (
            list(dict.fromkeys(one.command for kind in some for one in getattr(self, kind)))
            for some in (("sweeps",), kinds)
        )
        return sweeps + own[:STAGE_COMMANDS] if sweeps else own


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
        for pattern in OURS:
            for file in sorted(path for path in place.glob(pattern) if path.is_file()):
                _add_file(file, found, named=False)
        if (place / METRICS).is_file() and not place.name.endswith(".ladderize-work"):
            _add_retraining(place, found)
    if len(found.seen) == before:
        raise UserError(
            f"{folder} has no {SWEEP}, results*.json, bench*.json, plan*.json or sensitivity*.json, and no"
            f" {METRICS}; name a folder that `ladderize sweep` made, or files that eval or bench wrote"
        )
    return None


def _add_file(path: Path, found: FoundDocuments, command: str | None = None, *, named: bool = True) -> None:
    """named: by the user, rather than found in a folder, where what no report shows is passed over."""
    if path in found.seen:
        return
    found.seen.add(path)
    content = read_document(path, "sweep.json, results.json, bench.json, plan.json or sensitivity.json")
    kind = next((kind for kind, keys in TELLING_KEYS.items() if all(key in content for key in keys)), None)
    if kind is None:
        raise UserError(
            f"{path} is none of the documents that a report is made of: sweep.json, results.json, bench.json,"
            " plan.json, sensitivity.json; name one of these, or a folder with them"
        )
    if kind in NOT_SHOWN:
        if named:
            raise UserError(f"{path} is of {NOT_SHOWN[kind]}")
        return
    read, command_of = READERS[kind]
    document = read(content, path)
    version = str(content.get("ladderize_version", "unknown"))
    one = FoundDocument(path, document, version, command or command_of(document, path.name))
    getattr(found, kind).append(one)
    if kind == "sweeps":
        _add_stages(one, found)


def _add_retraining(folder: Path, found: FoundDocuments, name: str | None = None) -> None:
    if folder not in found.seen:
        found.seen.add(folder)
        found.retrainings.append(read_retraining(folder, name))


def _add_stages(sweep: FoundDocument[SweepDocument], found: FoundDocuments) -> None:
    """What a sweep points to: paths inside its folder only."""
    document = sweep.document
    stages = [*document.stages, *(stage for point in document.points for stage in point.stages)]
    commands = {stage.output: stage.command for stage in stages}
    for point in document.points:
        if point.results is not None:
            _add_stage(sweep.path, point.results, commands, found)
        if point.adaptation is not None and (_inside(sweep.path, point.adaptation) / METRICS).is_file():
            _add_retraining(_inside(sweep.path, point.adaptation), found, point.name)
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


# ---- the command of a document that does not say it: put together from its options ----


def _eval_command(document: EvalResults, file: str) -> str:
    models = [entry.model.model for entry in document.models]
    return _line("eval", models, _changed(vars(document.options), vars(EvalOptions())), file)


def _bench_command(document: BenchDocument, file: str) -> str:
    rows = dict.fromkeys((row.model, row.is_random) for row in document.rows if row.is_model)
    changed = _changed(vars(document.options), vars(BenchOptions(device=document.options.device)))
    if (link := document.link) is not None:
        by_hand = link.source == "given by hand"
        changed["link"] = f"{link.alpha_us:g},{link.beta_gb_s or float('inf'):g}" if by_hand else link.name
    models = [*(model for model, is_random in rows if not is_random), *document.failed]
    if not models:
        changed = {"random_weights": "SHAPE", "layout": ",".join(model for model, _ in rows), **changed}
    return _line("bench", models, changed, file)


def _plan_command(document: PlanResult, file: str) -> str:
    asked = document.model
    changed = _changed({**vars(asked), "model": None}, vars(PlanModel(shape="")))
    changed |= {name: value for name, value in vars(document.options).items() if value is not None}
    return _line("plan", [] if asked.model is None else [asked.model], changed, file)


def _sensitivity_command(document: SensitivityDocument | PointSensitivity, file: str) -> str:
    data = document.data
    given: dict[str, object] = {"mode": document.mode, "data": data.file, "sync_tp_size": document.sync_tp_size}
    given |= {"samples": data.samples, "seq_len": data.seq_len}
    if document.aligned is not None:
        given |= {"align": True, "align_samples": document.aligned.samples}
    if isinstance(document, PointSensitivity) and document.pairs:
        given["pairs"] = True
    return _line("sensitivity", [document.model], given, file)


def _changed(values: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value != defaults.get(name) and value is not None}


def _line(command: str, models: list[str], changed: Mapping[str, object], out: str) -> str:
    names = {"tp_sizes": "tp_size", "batch_sizes": "batch_size", "no_include_default_tasks": "no_default_tasks"}
    words = ["ladderize", command, *models]
    for option, value in changed.items():
        name = f"no_{option}" if value is False else option
        words.append(flag(names.get(name, name)))
        if not isinstance(value, bool):
            words.append(",".join(map(str, value)) if isinstance(value, list | tuple) else str(value))
    return shlex.join([*words, "--out", out])


# kind -> what reads it, and its command
READERS: dict[str, tuple[Callable[[Any, Path], Any], Callable[[Any, str], str]]] = {
    "sweeps": (SweepDocument.from_dict, lambda document, _: document.command),
    "results": (EvalResults.from_dict, _eval_command),
    "benches": (BenchDocument.from_dict, _bench_command),
    "plans": (PlanResult.from_dict, _plan_command),
    "sensitivities": (lambda _, path: read_sensitivity(path), _sensitivity_command),
    "points": (lambda _, path: read_point_sensitivity(path), _sensitivity_command),
}
