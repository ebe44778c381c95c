"""What a person sees of a sweep: the plan of ``--dry-run``, the live table while it runs, and the table at its end."""

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ladderize.adapt.methods import LORA
from ladderize.checkpoint.config import check_model
from ladderize.console import Console, human_bytes, human_seconds, printable
from ladderize.errors import UserError
from ladderize.eval.results import EvalResults, ModelResult
from ladderize.files.documents import read_document
from ladderize.files.records import Record
from ladderize.runtime.bench.document import BenchDocument
from ladderize.runtime.bench.rows import LEAST_ROUNDS
from ladderize.tradeoff.sweep.estimate import Estimator
from ladderize.tradeoff.sweep.plan import Planner
from ladderize.tradeoff.sweep.points import SweepPlan, summed
from ladderize.tradeoff.sweep.stages import STAGES, TIMED, FinishedStage, Stage, finished_stage, read_marker
from ladderize.workflows.sweep_document import StageState, SweepDocument

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

# ---- before ----


@dataclass(frozen=True)
class PlannedStage(Record):
    """seconds, bytes: about what it will take; None: nothing is known to estimate it from, or it is kept. on: how many
    GPUs, or processes, in words. share: of the machine, while it runs. needs: outputs that it reads."""

    stage: str
    title: str
    output: str
    command: str
    kept: bool
    on: str
    share: float
    needs: list[str]
    seconds: float | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class PlanDocument(Record):
    """``ladderize sweep --dry-run --json``. unplanned: points whose layout, or whose promotion, is decided by
    what is not measured yet: their other stages are known then. unplanned_seconds: about what each of them will take,
    of the whole machine's time. are_layouts_known: so that benchmarks have all their models. notes: what the user
    should know of the file."""

    model: str
    out: str
    stages: list[PlannedStage]
    unplanned: list[str]
    unplanned_seconds: list[float | None]
    are_layouts_known: bool
    notes: list[str]

    @classmethod
    def of(
        cls, plan: SweepPlan, planner: Planner, gpus: Sequence[str] = (), estimator: Estimator | None = None
    ) -> "PlanDocument":
        """With estimates from what earlier runs in the same folder took, else by the estimator."""
        root, spec = planner.root, planner.spec
        weights = [path.resolve() for path in check_model(spec.model, spec.revision).glob("*.safetensors")]
        parent = next(place for place in (root, *root.parents) if place.exists())
        size = sum(path.stat().st_size for path in weights)
        are_linked = all(path.stat().st_dev == parent.stat().st_dev for path in weights)
        found = [read_marker(entry) for entry in sorted((root / STAGES).glob("*"))]
        history = [marker for marker in found if marker is not None]

        outputs = {stage.key: stage.output for stage in plan.stages}
        guessed = []

        def seconds(stage: Stage) -> float | None:
            known = _seconds(stage, [marker for marker in history if marker.stage == stage.kind])
            if known is None and estimator is not None:
                known = estimator.seconds(stage)
                guessed.append(stage)
            return known

        def share(stage: Stage) -> float:
            return max(1, stage.launch.gpus) / len(gpus) if gpus and stage.kind != TIMED else 1.0

        def machine_seconds(stage: Stage) -> float | None:
            known = seconds(stage)
            return known * share(stage) if known is not None else None

        def planned(stage: Stage) -> PlannedStage:
            known = (stage.kind, stage.title, stage.output, stage.command)
            needs = [outputs[key] for key in stage.needs if key in outputs]
            on = stage.launch.words(len(gpus)) if stage.kind != TIMED else "alone"
            where = (on, share(stage), needs)
            if finished_stage(stage, root) is not None:
                return PlannedStage(*known, True, *where)
            alike = [marker for marker in history if marker.stage == stage.kind]
            needed: int | None = round(fmean(marker.bytes for marker in alike)) if alike else None
            if stage.kind == "convert":
                needed = 0 if are_linked and "head_map" not in stage.identity["recipe"] else size
            elif stage.kind == "adapt":
                needed = size * (2 if stage.identity["method"] == LORA else 1)
            return PlannedStage(*known, False, *where, seconds(stage), needed)

        stages = [planned(stage) for stage in plan.stages]
        later = [point for point in plan.points if point.layout is None or point.is_open]
        times = [
            summed(map(machine_seconds, planner.to_come(point))) if point.layout is None else None for point in later
        ]
        notes = [*plan.notes, *([estimator.words] if estimator is not None and guessed else [])]
        known = not any(point.layout is None and point.is_open for point in plan.points)
        return cls(spec.model, str(root), stages, [point.name for point in later], times, known, notes)

    @property
    def rows(self) -> list[dict[str, str]]:
        """A row for each stage."""

        def time(seconds: float | None) -> str:
            return "unknown" if seconds is None else f"about {human_seconds(seconds)}"

        rows = []
        for stage in self.stages:
            disk = "unknown" if stage.bytes is None else human_bytes(stage.bytes)
            about = {"": "kept", "on": "", "time": "", "disk": ""}
            if not stage.kept:
                about = {"": "to run", "on": stage.on, "time": time(stage.seconds), "disk": disk}
            rows.append({"stage": stage.title, **about})
        for name, seconds in zip(self.unplanned, self.unplanned_seconds, strict=True):
            about = {"": "planned when what decides it is measured", "on": "", "time": time(seconds), "disk": "unknown"}
            rows.append({"stage": name, **about})
        return rows

    @property
    def script(self) -> str:
        """The commands of all stages that are to run, as a shell takes them, each with a comment that says what must be
        done before."""
        stages = [stage for stage in self.stages if stage.stage != TIMED or self.are_layouts_known]
        later = [*self.unplanned, *(stage.title for stage in self.stages if stage not in stages)]
        numbers = {stage.output: number for number, stage in enumerate(stages, 1)}
        lines = [f"cd {shlex.quote(self.out)}"]
        for stage in stages:
            needs = ", ".join(map(str, sorted(numbers[output] for output in stage.needs)))
            when = f"after {needs}" if needs else "at any time"
            words = [f"{stage.title}: {'kept' if stage.kept else when}", *([stage.on] if stage.on else [])]
            lines.append(f"\n# {numbers[stage.output]}. {'; '.join(words)}")
            if not stage.kept:
                lines.append(f"mkdir -p {stage.output} && {stage.command}")
        lines += [f"\n# {name}: to be printed when what decides it is measured" for name in later]
        return "\n".join(lines)

    @property
    def total(self) -> str:
        """The sum of what is known, and of how many stages nothing is."""
        left = [stage for stage in self.stages if not stage.kept]
        times = [stage.seconds * stage.share if stage.seconds is not None else None for stage in left]
        times += self.unplanned_seconds
        known = [seconds for seconds in times if seconds is not None]
        missing = len(times) - len(known)
        kept = f"{len(self.stages) - len(left)} of {len(self.stages)} stages are kept"
        if not left and not self.unplanned:
            return f"{kept}; nothing is to be run"
        time = f"about {human_seconds(sum(known))}"
        if missing:
            time = f"more than {human_seconds(sum(known))}: of {missing} nothing is known yet"
        return f"{kept}; the others take {time}; at least {human_bytes(self.disk_bytes)} of disk"

    @property
    def disk_bytes(self) -> int:
        return sum(stage.bytes or 0 for stage in self.stages)


def _seconds(stage: Stage, alike: list[FinishedStage]) -> float | None:
    """The mean of earlier stages of the same kind, which of retrainings is for each token."""
    if stage.kind != "adapt":
        times = [marker.seconds for marker in alike if marker.seconds is not None]
        return fmean(times) if times else None
    same = [one for one in alike if one.identity.get("method") == stage.identity["method"] and one.amount]
    if not same or not stage.amount:
        return None
    return stage.amount * sum(one.seconds or 0.0 for one in same) / sum(one.amount or 0 for one in same)


# ---- meanwhile ----

STYLES = {"waiting": "dim", "running": "bold yellow", "done": "green", "failed": "bold red", "skipped": "magenta"}
STYLES["not promoted"] = "dim"


class Board:
    """A live table on a terminal, a line for each change elsewhere; used as a context around a run. Nothing is drawn
    while a benchmark runs, but at its begin and end."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.plan: SweepPlan | None = None
        self.states: Mapping[str, StageState] = {}
        self.begun: dict[str, float] = {}
        self.live: Live | None = None

    def __enter__(self) -> "Board":
        if self.console.speaks and sys.stderr.isatty():
            from rich.console import Console as RichConsole
            from rich.live import Live

            self.live = Live(console=RichConsole(file=sys.stderr), auto_refresh=False, transient=False)
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is not None:
            self.draw()
            self.live.stop()

    def show(self, plan: SweepPlan, states: Mapping[str, StageState]) -> None:
        """What there is to do now. states: by key; looked at whenever something is drawn."""
        self.plan, self.states = plan, states
        self.draw()

    def changed(self, stage: Stage, state: StageState) -> None:
        if state.status == "running":
            self.begun[stage.key] = time.monotonic()
        if self.live is None:
            more = f" in {human_seconds(state.seconds or 0)}" if state.status == "done" else ""
            more = f": {state.message}" if state.message is not None and not more else more
            self.console.note(f"{stage.title}: {state.status}{more}")
        self.draw()

    def note(self, text: str) -> None:
        """A remark beside the table."""
        if self.live is not None:
            self.live.console.print(printable(text), markup=False, highlight=False)
        else:
            self.console.note(text)

    def draw(self) -> None:
        if self.live is not None and self.plan is not None:
            self.live.update(self._table(self.plan), refresh=True)

    def _table(self, plan: SweepPlan) -> "Table":
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("", "convert", "adapt", "eval"):
            table.add_column(column, no_wrap=bool(column))

        def cell(stage: Stage | None) -> Any:
            if stage is None or stage.key not in self.states:
                return Text("-", style="dim")
            state = self.states[stage.key]
            return Text(self._words(state), style=STYLES[state.status])

        for point in plan.points:
            left = [stage for stage in point.adapting if self.states[stage.key].status != "done"]
            adapting = next(iter([*left, *point.adapting[-1:]]), None)  # of several the one that is on
            cells = [cell(stage) for stage in (point.converting, adapting, point.evaluating)]
            if point.held is not None and not left:
                cells[1] = Text(point.held.status, style=STYLES[point.held.status])
            table.add_row(Text(printable(point.name)), *cells)
        for stage in (*plan.sensitivities, *plan.benches):
            table.add_row(Text(printable(stage.title)), *(Text(""), Text(""), cell(stage)))
        return table

    def _words(self, state: StageState) -> str:
        if state.status == "running" and state.stage != TIMED:  # no clock may run beside what is timed
            return f"running {human_seconds(time.monotonic() - self.begun.get(state.key, time.monotonic()))}"
        if state.status == "done":
            return "kept" if state.reused else f"done {human_seconds(state.seconds or 0)}"
        return state.status


# ---- at the end ----

TEXT_COLUMNS = ("point", "not promoted", "failed")  # columns that are no numbers


def sweep_rows(document: SweepDocument, root: Path) -> list[dict[str, str]]:
    """A row for each point, read from the files that the sweep has written in ``root``: what it costs in accuracy, and
    how much faster it is."""
    found = {point.name: one_result(root / point.results) for point in document.points if point.results is not None}
    dense = found.get(document.points[0].name)
    benches = [BenchDocument.from_dict(read_document(root / path, "benchmark"), path) for path in document.benches]
    rows = []
    for point in document.points:
        row, result = {"point": point.name}, found.get(point.name)
        if any(one.model.perplexity is not None for one in found.values()):
            row |= _perplexity(result, dense)
        for task in dict.fromkeys(name for one in found.values() for name in one.tasks):
            row[task] = _accuracy(result, dense, task)
        for number, bench in enumerate(benches, start=1):
            row[_title(bench, number)] = _speedup(bench, point.timed)
        if any(one.not_promoted is not None for one in document.points):
            row["not promoted"] = point.not_promoted or ""
        if any(one.failure is not None for one in document.points):
            row["failed"] = point.failure or ""
        rows.append(row)
    return rows


def one_result(path: Path) -> ModelResult:
    """Of a results.json of a sweep, which holds one model."""
    models = EvalResults.from_dict(read_document(path, "results file"), path).models
    if len(models) != 1:
        raise UserError(f"{path} holds {len(models)} models, but a sweep's evaluation holds one; run it again")
    return models[0]


def _perplexity(found: ModelResult | None, dense: ModelResult | None) -> dict[str, str]:
    own, base = (one.model.perplexity if one is not None else None for one in (found, dense))
    if own is None:
        return {"perplexity": "", "difference": ""}
    difference = f"{own.perplexity - base.perplexity:+.4f}" if base is not None and found is not dense else ""
    return {"perplexity": f"{own.perplexity:.4f}", "difference": difference}


def _accuracy(found: ModelResult | None, dense: ModelResult | None, task: str) -> str:
    """A task's first metric, and its difference to the dense model's."""
    values = found.tasks.get(task, {}) if found is not None else {}
    metrics = (key for key, value in values.items() if "," in key and isinstance(value, int | float))
    metric = next((key for key in metrics if "_stderr" not in key), None)
    if metric is None:
        return ""
    base = dense.tasks.get(task, {}).get(metric) if dense is not None and dense is not found else None
    return f"{values[metric]:.4f}" + (f" ({float(values[metric]) - float(base):+.4f})" if base is not None else "")


def _title(bench: BenchDocument, number: int) -> str:
    options = bench.options
    where = f"emulated tp {options.emulate_tp}" if options.emulate_tp is not None else f"tp {options.tp_size}"
    batch = f", batch {options.batch_sizes[0]}" if len(options.batch_sizes) > 1 else ""
    return f"decode speed-up [{number}: {where}{batch}]"


def _speedup(bench: BenchDocument, model: str | None) -> str:
    """Of the first batch size, with its 95 % interval where the rounds are enough for one."""
    row = next((row for row in bench.rows if row.is_model and row.model == model), None)
    if row is None:
        return ""
    interval = row.speedup_decode_interval if bench.options.repeat >= LEAST_ROUNDS else []
    ends = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if len(interval) == 2 else ""
    return f"{row.speedup_decode:.2f}x{ends}"
