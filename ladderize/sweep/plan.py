"""The plan of a sweep: its models and their stages. Layouts that do not fit are refused before anything runs."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ladderize.commands.adapt import adapt
from ladderize.commands.builder import option_words
from ladderize.errors import UserError
from ladderize.eval.results import EvalResults
from ladderize.eval.table import mean_accuracy
from ladderize.files.documents import read_document
from ladderize.layout import BLOCKING, Layout
from ladderize.ranks.device import default_device
from ladderize.report.models import pareto_front
from ladderize.runtime.bench.document import BenchDocument
from ladderize.runtime.bench.options import ModelChoice
from ladderize.runtime.bench.plan import plan_bench
from ladderize.sweep.builder import StageBuilder
from ladderize.sweep.stages import Stage, errors_begin_with
from ladderize.sweep.sweep_file import AdaptChoice, AdaptStage, SweepSpec, fit_layouts
from ladderize.sweep_document import StageState, Status

DENSE = "dense"
WAITING = StageState("adapt", "", "waiting")
LOST: tuple[Status, ...] = ("failed", "skipped")
StatusOf = Callable[[Stage], Status]


# ---- the parts of a plan ----


@dataclass(frozen=True)
class SweepLayout:
    """One layout.

    name: of its entry in the file.
    label: its name or its words; the layouts of a grid have both.
    converting: the stage that makes it; None: the dense model.
    """

    name: str | None
    label: str
    layout: Layout
    converting: Stage | None = None

    @property
    def key(self) -> str:
        """A value that is equal for two entries of the file that make one model."""
        return DENSE if self.converting is None else self.converting.key


@dataclass(frozen=True)
class Point:
    """A layout, adapted in one way.

    asked: its stages of adaptation in the file.
    adapting: those of them that run, up to a ``hold``.
    hold: stands for the others, which do not: waiting for a decision, not promoted, or skipped.
    """

    name: str
    planned: SweepLayout
    asked: tuple[AdaptStage, ...] = ()
    adapting: tuple[Stage, ...] = ()
    evaluating: Stage | None = None
    hold: StageState | None = None

    @property
    def stages(self) -> list[Stage]:
        made = (self.planned.converting, *self.adapting, self.evaluating)
        return [stage for stage in made if stage is not None]

    @property
    def made_by(self) -> Stage | None:
        """The stage that writes its model; None: the dense model, or the model is not made."""
        return None if self.hold is not None else self.adapting[-1] if self.adapting else self.planned.converting


@dataclass(frozen=True)
class SweepPlan:
    """The models and stages of a sweep.

    points: dense first.
    """

    points: list[Point]
    benches: list[Stage]

    @property
    def stages(self) -> list[Stage]:
        """All stages in the order in which they run, benchmarks last."""
        listed = [*(stage for point in self.points for stage in point.stages), *self.benches]
        return list({stage.key: stage for stage in listed}.values())

    @property
    def waiting(self) -> list[Point]:
        """The points whose stages are not all known yet."""
        return [point for point in self.points if point.hold == WAITING]


# ---- planning ----


class Planner:
    """A maker of plans. The plan is made anew whenever something was measured.

    root: the sweep's folder.

    Raises UserError for a model that is not sound or not dense, and for layouts that do not fit it or a benchmark.
    """

    def __init__(self, spec: SweepSpec, root: Path) -> None:
        self.spec, self.builder, self.root = spec, StageBuilder(spec), root
        layouts = fit_layouts(spec)
        self.dense = SweepLayout(None, DENSE, Layout.dense(layouts[0].num_layers))
        self.layouts = list(_layouts(self.builder, layouts))
        for setting in spec.bench:
            dtype, device = setting.given.get("dtype", "auto"), setting.given.get("device", default_device())
            with errors_begin_with(setting.where):
                # the dense model alone has no groups for an outer link
                plain = replace(setting.options, outer_link=None, device=device)
                plan_bench(ModelChoice(models=(spec.model,), dtype=dtype), plain, setting.link)

    def plan(self, status: StatusOf) -> SweepPlan:
        """Return the plan as far as it is known by now.

        status: of each stage.
        """
        dense = self._point(self.dense, (), None)
        benches = []
        for setting in self.spec.bench:
            timed = [one.converting for one in self.layouts if one.converting is not None and setting.times(one.name)]
            distinct = {stage.key: stage for stage in timed if status(stage) not in LOST}
            benches.append(self.builder.benchmark(setting, list(distinct.values())))
        timing_all = (bench for bench, made in zip(benches, self.spec.bench, strict=True) if not made.layouts)
        bench = next(timing_all, None)
        points = [point for way in self.spec.adapt for point in self._points(way, dense, bench, status)]
        adapted = {point.planned.key for point in points}
        points += [self._point(one, (), dense.evaluating) for one in self.layouts if one.key not in adapted]
        places = [one.key for one in self.layouts]
        points.sort(key=lambda point: places.index(point.planned.key))  # which keeps the order of a layout's points
        return SweepPlan(_distinct([dense, *points]), benches)

    def _points(self, way: AdaptChoice, dense: Point, bench: Stage | None, status: StatusOf) -> Iterator[Point]:
        """Yield each layout adapted in one way, and the points that decide on its promotion.

        bench: the benchmark that times every layout.
        """
        once: dict[str, SweepLayout] = {}
        for one in self.layouts:
            if not way.layouts or one.name in way.layouts:
                once.setdefault(one.key, one)
        left, reference = list(once.values()), dense.evaluating
        for count, stage in enumerate(way.stages):
            if stage.promote is not None:
                before = [self._point(one, way.stages[:count], reference) for one in left]
                yield from before
                holds = self._holds(before, dense, bench, stage.promote, status)
                for one, hold in zip(left, holds, strict=True):
                    if hold is not None:
                        yield self._point(one, way.stages, reference, count, hold)
                left = [one for one, hold in zip(left, holds, strict=True) if hold is None]
        for one in left:
            yield self._point(one, way.stages, reference)

    def _point(
        self,
        planned: SweepLayout,
        asked: tuple[AdaptStage, ...],
        reference: Stage | None,
        count: int | None = None,
        hold: StageState | None = None,
    ) -> Point:
        """Return a layout adapted in one way.

        reference: the dense model's evaluation.
        count, hold: the number of its stages, and the reason for no more; None: it gets all.
        """
        ways = [way.stages for way in self.spec.adapt if not way.layouts or planned.name in way.layouts]
        name, last = point_name(planned.label, asked, ways), planned.converting
        adapting: list[Stage] = []
        for number, stage in enumerate(asked[:count], 1):
            assert last is not None
            last = self.builder.adaptation(stage, last, point_name(planned.label, asked[:number], ways))
            adapting.append(last)
        is_evaluated = hold is None and self.spec.evaluation is not None
        evaluating = self.builder.evaluation(name, last, reference) if is_evaluated else None
        return Point(name, planned, asked, tuple(adapting), evaluating, hold)

    def timed(self, point: Point) -> str:
        """Return the model that has a point's times, since speed depends on the layout alone."""
        converting = point.planned.converting
        return self.spec.model if converting is None else converting.model

    # ---- promotion ----

    def _holds(
        self, before: Sequence[Point], dense: Point, bench: Stage | None, count: int, status: StatusOf
    ) -> list[StageState | None]:
        """Return None for each promoted layout, and the reason for each other one.

        before: the models before the stage.
        """
        times = [bench] if bench is not None else []
        holds = [_undecided([point.evaluating, *times], status) for point in before]
        of_dense = _undecided([dense.evaluating], status)
        if WAITING in (*holds, of_dense):
            return [hold or WAITING for hold in holds]
        entrants = [self._entrant(point, bench) for point, hold in zip(before, holds, strict=True) if hold is None]
        goes_on = iter(promoted(entrants, self._entrant(dense, bench) if of_dense is None else None, count))
        late = StageState("adapt", "", "not promoted", message=f"it is not among the {count} best")
        return [hold if hold is not None or next(goes_on) else late for hold in holds]

    def _entrant(self, point: Point, bench: Stage | None) -> "Entrant":
        """Return the measurements of a layout: the mean over its tasks, or without tasks minus the perplexity.

        bench: the benchmark with its times; None: fewer blocking sync points count as faster.
        """
        assert point.evaluating is not None
        path = self.root / point.evaluating.result
        (entry,) = EvalResults.from_dict(read_document(path, "results file"), path).models
        accuracy = mean_accuracy(entry)
        if accuracy is None:
            if entry.model.perplexity is None:
                raise UserError(
                    f"promote cannot choose: {path} has no metric between 0 and 1 of which more is better, and no"
                    " perplexity; add perplexity to the section eval"
                )
            accuracy = -entry.model.perplexity.perplexity
        if bench is None:
            layout = point.planned.layout
            return Entrant(accuracy, -(layout.attention_sync + layout.mlp_sync).count(BLOCKING))
        times = self.root / bench.result
        rows = BenchDocument.from_dict(read_document(times, "benchmark"), times).rows
        speeds = (row.speedup["end_to_end"] for row in rows if row.is_model and row.model == self.timed(point))
        return Entrant(accuracy, next(speeds, 0.0))  # 0: it failed the benchmark's check


def _layouts(builder: StageBuilder, layouts: Sequence[Layout]) -> Iterator[SweepLayout]:
    """Yield the layouts of the file, with the stages that make them."""
    names = [choice.name for choice in builder.spec.layouts]
    for choice, layout in zip(builder.spec.layouts, layouts, strict=True):
        assigned = f", {' and '.join(choice.assign)} assigned" if choice.assign else ""
        words = str(layout).partition(" layers: ")[2] + assigned
        name = choice.name
        label = words if name is None else name if names.count(name) == 1 else f"{name}: {words}"
        yield SweepLayout(name, label, layout, builder.conversion(choice, layout, words))


def point_name(label: str, asked: Sequence[AdaptStage], ways: Sequence[Sequence[AdaptStage]]) -> str:
    """Return a name such as ``ladder 4:8+align+full``, with the options in which stages differ from those of other ways
    of adapting: ``ladder 4:8+align(--samples 64)``."""
    name = label
    for number, stage in enumerate(asked):
        rivals = [way[number].options for way in ways if len(way) > number and way[number].method == stage.method]
        differing = dict(pair for rival in rivals for pair in stage.options.items() if pair not in rival.items())
        options = " ".join(map(str, option_words(adapt, "adapt", differing, "adapt")))
        name += f"+{stage.method}" + f"({options})" * bool(options)
    return name


def _distinct(points: Sequence[Point]) -> list[Point]:
    """Return the points, each once: entries of the file may come to the same. No name comes twice."""
    once: dict[object, Point] = {}
    for point in points:
        asked = str([(stage.method, stage.options) for stage in point.asked])
        once.setdefault((point.planned.key, asked, len(point.adapting)), point)
    counts: Counter[str] = Counter()
    named = []
    for point in once.values():
        counts[point.name] += 1
        count = counts[point.name]
        named.append(point if count == 1 else replace(point, name=f"{point.name} #{count}"))
    return named


def _undecided(stages: Sequence[Stage | None], status: StatusOf) -> StageState | None:
    """Return the reason why what these stages decide is not known yet, or never will be; None: all are done."""
    needed = [stage for stage in stages if stage is not None]
    if lost := [stage for stage in needed if status(stage) in LOST]:
        return StageState("adapt", "", "skipped", message=f"the stage {lost[0].kind} that decides it failed")
    return None if all(status(stage) == "done" for stage in needed) else WAITING


@dataclass(frozen=True)
class Entrant:
    """A layout before the stage that only the best get.

    accuracy, speed: more is better.
    """

    accuracy: float
    speed: float


def ranking(entrants: Sequence[Entrant]) -> list[Entrant]:
    """Return the entrants, the best first.

    Those on the Pareto front come first, then those on the front of the rest, and so on; on one front the more accurate
    first.
    """
    left, ranked = list(entrants), []
    while left:
        on = pareto_front([(one.speed, one.accuracy) for one in left])
        ranked += sorted((one for one, is_on in zip(left, on, strict=True) if is_on), key=lambda one: -one.accuracy)
        left = [one for one, is_on in zip(left, on, strict=True) if not is_on]
    return ranked


def promoted(entrants: Sequence[Entrant], dense: Entrant | None, count: int) -> list[bool]:
    """Return True for each of the ``count`` best.

    dense: is ranked but takes no place: a layout that is neither faster nor better than dense comes after the others.
    """
    known = [one for one in (dense, *entrants) if one is not None]
    best = [id(one) for one in ranking(known) if one is not dense][:count]
    return [id(one) in best for one in entrants]
