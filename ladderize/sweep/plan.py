"""The plan of a sweep: its models and their stages, made once. Layouts that do not fit are refused before anything
runs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ladderize.choices import errors_begin_with
from ladderize.layout import Layout
from ladderize.ranks.device import default_device
from ladderize.report.models import pareto_front
from ladderize.runtime.bench.inference import plan_bench
from ladderize.sweep.builder import StageBuilder
from ladderize.sweep.stages import Stage
from ladderize.sweep.sweep_file import AdaptEntry, AdaptWay, BenchEntry, SweepSpec, fit_layouts

DENSE = "dense"


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


@dataclass(frozen=True, eq=False)
class Contest:
    """A promotion: the best ``count`` of the entrants get the stage behind them."""

    entrants: tuple["Point", ...]
    count: int

    @property
    def stages(self) -> int:
        """The number of stages of adaptation that the entrants have."""
        return len(self.entrants[0].adapting)


@dataclass(frozen=True, eq=False)
class Point:
    """A layout, adapted in one way.

    asked, adapting: its stages of adaptation, in the file and as they run.
    contests: those that it must win to get them.
    is_entrant: it is there for the contest that it takes part in.
    """

    name: str
    planned: SweepLayout
    asked: tuple[AdaptEntry, ...] = ()
    adapting: tuple[Stage, ...] = ()
    evaluating: Stage | None = None
    contests: tuple[Contest, ...] = ()
    is_entrant: bool = False

    @property
    def made_by(self) -> Stage | None:
        """The stage that writes its model; None: the dense model."""
        return self.adapting[-1] if self.adapting else self.planned.converting


class SweepPlan:
    """The models of a sweep, dense first, and its benchmarks.

    Raises UserError for a model that is not sound or not dense, and for layouts that do not fit it or a benchmark.
    """

    def __init__(self, spec: SweepSpec) -> None:
        self.spec, self.builder = spec, StageBuilder(spec)
        layouts = fit_layouts(spec)
        for entry in spec.bench:
            with errors_begin_with(entry.where):
                # the dense model alone has no groups for an outer link
                device = entry.options.device or default_device()
                plan_bench(replace(entry.options, models=(spec.model,), outer_link=None, device=device))
        self.layouts = list(_layouts(self.builder, layouts))
        self.dense = self._point(SweepLayout(None, DENSE, Layout.dense(layouts[0].num_layers)))
        points = [point for way in spec.adapt for point in self._points(way)]
        adapted = {point.planned.key for point in points}
        points += [self._point(planned) for planned in self.layouts if planned.key not in adapted]
        order = [planned.key for planned in self.layouts]
        points.sort(key=lambda point: order.index(point.planned.key))  # which keeps the order of a layout's points
        self.points = _distinct([self.dense, *points])

    def _points(self, way: AdaptWay) -> Iterator[Point]:
        """Yield each layout adapted in one way, and the entrants of its contests."""
        once: dict[str, SweepLayout] = {}
        for planned in self.layouts:
            if way.adapts(planned.name):
                once.setdefault(planned.key, planned)
        contests: tuple[Contest, ...] = ()
        for count, stage in enumerate(way.stages):
            if stage.promote is not None:
                points = [
                    self._point(planned, way.stages[:count], contests, is_entrant=True) for planned in once.values()
                ]
                yield from points
                contests = (*contests, Contest(tuple(points), stage.promote))
        for planned in once.values():
            yield self._point(planned, way.stages, contests)

    def _point(
        self,
        planned: SweepLayout,
        asked: tuple[AdaptEntry, ...] = (),
        contests: tuple[Contest, ...] = (),
        *,
        is_entrant: bool = False,
    ) -> Point:
        """Return a layout adapted in one way."""
        ways = [way.stages for way in self.spec.adapt if way.adapts(planned.name)]
        name, last = planned.label, planned.converting
        adapting: list[Stage] = []
        for number, entry in enumerate(asked):
            assert last is not None
            name += _suffix(entry, [way[number] for way in ways if len(way) > number])
            last = self.builder.adaptation(entry, last, name, name.removeprefix(planned.label))
            adapting.append(last)
        evaluating = None
        if self.spec.evaluation is not None:
            reference = None if planned.converting is None else self.dense.evaluating
            evaluating = self.builder.evaluation(name, last, reference)
        return Point(name, planned, asked, tuple(adapting), evaluating, contests, is_entrant)

    def converted(self, entry: BenchEntry) -> list[Stage]:
        """Return the stages that make the layouts of a benchmark, each once."""
        stages = [planned.converting for planned in self.layouts if entry.times(planned.name)]
        return list({stage.key: stage for stage in stages if stage is not None}.values())

    def timed(self, point: Point) -> str:
        """Return the model that has a point's times, since speed depends on the layout alone."""
        converting = point.planned.converting
        return self.spec.model if converting is None else converting.model


def _layouts(builder: StageBuilder, layouts: Sequence[Layout]) -> Iterator[SweepLayout]:
    """Yield the layouts with the stages that make them. The layouts of a grid, which share a name, are told apart by
    their words."""
    entries = builder.spec.layouts
    names = [entry.name for entry in entries]
    for entry, layout in zip(entries, layouts, strict=True):
        assigned = f", {' and '.join(entry.options.assign)} assigned" if entry.options.assign else ""
        text = layout.words + assigned
        label = text
        if entry.name is not None:
            label = entry.name if names.count(entry.name) == 1 else f"{entry.name}: {text}"
        yield SweepLayout(entry.name, label, layout, builder.conversion(entry, layout, text))


def _suffix(entry: AdaptEntry, rivals: Sequence[AdaptEntry]) -> str:
    """Return the end of a name such as ``ladder 4:8+align``, with the options in which the stage differs from those of
    other ways of adapting: ``ladder 4:8+align(--samples 64)``."""
    common = set(entry.typed)
    for rival in rivals:
        if rival.options.method == entry.options.method:
            common &= set(rival.typed)
    differing = [typed for typed in entry.typed if typed not in common]
    return f"+{entry.options.method}" + f"({' '.join(differing)})" * bool(differing)


def _distinct(points: Sequence[Point]) -> list[Point]:
    """Return the points, each once: entries of the file may come to the same, and then one that need not win a contest
    stands for both. No name comes twice."""
    once: dict[object, Point] = {}
    for point in points:
        key = point.planned.key, point.adapting
        if key not in once or (once[key].contests and not point.contests):
            once[key] = point
    counts: Counter[str] = Counter()
    named = []
    for point in once.values():
        counts[point.name] += 1
        count = counts[point.name]
        named.append(point if count == 1 else replace(point, name=f"{point.name} #{count}"))
    return named


# ---- promotion ----


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
        flags = pareto_front([(entrant.speed, entrant.accuracy) for entrant in left])
        front = [entrant for entrant, is_on in zip(left, flags, strict=True) if is_on]
        ranked += sorted(front, key=lambda entrant: -entrant.accuracy)
        left = [entrant for entrant, is_on in zip(left, flags, strict=True) if not is_on]
    return ranked


def promoted(entrants: Sequence[Entrant], dense: Entrant | None, count: int) -> list[bool]:
    """Return True for each of the ``count`` best.

    dense: is ranked but takes no place: a layout that is neither faster nor better than dense comes after the others.
    """
    ranked = ranking([*entrants, *([dense] if dense is not None else [])])
    best = [id(entrant) for entrant in ranked if entrant is not dense][:count]
    return [id(entrant) in best for entrant in entrants]
