"""The plan of a sweep: its models and their stages. Layouts that do not fit are refused before anything runs."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ladderize.adapt.methods import ALIGN, BLOCKS, CONVERTED
from ladderize.checkpoint.config import check_config
from ladderize.checkpoint.opening import check_model, read_config
from ladderize.convert.recipe import Recipe
from ladderize.convert.sensitivity_file import LADDER, SPD
from ladderize.errors import LadderizeError, UserError
from ladderize.layout import Layout, check_split, format_ranges
from ladderize.modeling import check_transformers_runs
from ladderize.runtime.bench.options import ModelChoice
from ladderize.runtime.bench.plan import plan_bench
from ladderize.runtime.shards import check_runnable
from ladderize.sweep.builder import StageBuilder
from ladderize.sweep.promotion import entrant, promoted
from ladderize.sweep.stages import (
    BENCH_JSON,
    MODEL_FOLDER,
    RESULTS,
    SENSITIVITY_JSON,
    Stage,
    computing,
    errors_begin_with,
    finished_stage,
)
from ladderize.sweep.sweep_file import AdaptChoice, AdaptStage, BenchChoice, LayoutChoice, SweepSpec
from ladderize.sweep_document import THEN, Status

DENSE = "dense"
OF_CONVERTED = ("hidden_weight",)  # options of training that compare converted layers
Choice = TypeVar("Choice", AdaptChoice, BenchChoice)


# ---- the parts of a plan ----


@dataclass(frozen=True)
class Hold:
    """The reason why a point gets no further stages: waiting for a decision, not promoted, skipped, or failed."""

    status: Status
    message: str | None = None


WAITING = Hold("waiting")


@dataclass(frozen=True)
class LayoutGroup:
    """Entries of the file that have one layout; no entries: the dense model.

    layout: None while it is not known, or where there is none; ``hold`` has the reason.
    label: the name of the layout.
    converting: the stage that makes it.
    """

    choices: tuple[LayoutChoice, ...]
    layout: Layout | None
    hold: Hold | None = None
    label: str = DENSE
    converting: Stage | None = None

    @property
    def text(self) -> str:
        """The layout in words, or the rule that chooses it."""
        return layout_words(self.choices[0]) if self.layout is None else str(self.layout).partition(" layers: ")[2]

    @property
    def names(self) -> set[str]:
        """The names that ``layouts`` of an entry may use: its name, and its words, now or before it was chosen."""
        names = {choice.name for choice in self.choices if choice.name is not None}
        texts = {self.text, *map(layout_words, self.choices)}
        return names | texts | {f"{name}: {text}" for name in names for text in texts}


@dataclass(frozen=True)
class Point:
    """A layout, adapted in one way.

    asked: its stages of adaptation in the file.
    adapting: those of them that run, up to a ``hold``.
    model: its folder.
    timed: the model that has its times.
    control: the dense model after the same training.
    """

    name: str
    group: LayoutGroup
    asked: tuple[AdaptStage, ...] = ()
    adapting: tuple[Stage, ...] = ()
    evaluating: Stage | None = None
    model: str | None = None
    timed: str | None = None
    hold: Hold | None = None
    control: str | None = None

    @property
    def stages(self) -> list[Stage]:
        made = (self.group.converting, *self.adapting, self.evaluating)
        return [stage for stage in made if stage is not None]

    @property
    def identity(self) -> object:
        """A value that is equal for two entries of the file that make one point."""
        asked = [(stage.method, sorted(computing("adapt", stage.options).items())) for stage in self.asked]
        heads = [choice.head_map for choice in self.group.choices]
        made = self.group.converting.key if self.group.converting is not None else (self.group.label, str(heads))
        return made, str(asked), len(self.adapting)

    @property
    def results(self) -> str | None:
        return f"{self.evaluating.output}/{RESULTS}" if self.evaluating is not None else None


@dataclass(frozen=True)
class SweepPlan:
    """The models and stages of a sweep.

    points: dense first.
    benches: of the models that can be timed.
    notes: remarks on the file for the user.
    """

    points: list[Point]
    sensitivities: list[Stage]
    benches: list[Stage]
    notes: list[str]

    @property
    def stages(self) -> list[Stage]:
        """All stages in the order in which they run: the dense model and sensitivities first, benchmarks last."""
        dense, *others = self.points
        listed = [*dense.stages, *self.sensitivities, *(stage for point in others for stage in point.stages)]
        return list({stage.key: stage for stage in (*listed, *self.benches)}.values())

    @property
    def waiting(self) -> list[Point]:
        """The points whose stages are not all known yet."""
        return [point for point in self.points if point.hold == WAITING]


def layout_words(choice: LayoutChoice) -> str:
    """Return an entry's layout as the file has it."""
    parts = []
    for kind, layers, fraction in (
        (LADDER, choice.ladder, choice.ladder_fraction),
        (SPD, choice.spd, choice.spd_fraction),
    ):
        if kind in choice.auto:
            rule = f"{fraction:g} of the layers" if fraction is not None else "insensitive layers"
            if fraction is None and choice.max_ppl_increase is not None:
                rule = f"layers up to {choice.max_ppl_increase} of perplexity"
            parts.append(f"{kind} {rule} by sensitivity")
        elif layers is not None:
            parts.append(f"{kind} {layers}")
    return ", ".join(parts) + (f" (sync_tp_size {choice.sync_tp_size})" if choice.sync_tp_size is not None else "")


def point_name(label: str, stages: Sequence[AdaptStage]) -> str:
    """Return a name such as ``ladder 4:8, align + full 60k tokens``."""
    words = []
    for stage in stages:
        key, unit = ("samples", "windows") if stage.method in (ALIGN, BLOCKS) else ("max_tokens", "tokens")
        words.append(f"{stage.method} {stage.options[key]} {unit}" if key in stage.options else stage.method)
    return f"{label}, {THEN.join(words)}" if words else label


def named_apart(points: Iterable[Point]) -> list[Point]:
    """Return the points, with a number behind each name that another point has already."""
    counts: Counter[str] = Counter()
    named = []
    for point in points:
        counts[point.name] += 1
        count = counts[point.name]
        named.append(point if count == 1 else replace(point, name=f"{point.name} #{count}"))
    return named


# ---- checks of the fit ----


def check_fit(spec: SweepSpec, model: str, config: Mapping[str, Any], folder: Path) -> None:
    """Raise UserError, which names the entry, for a layout or a stage that this model cannot have.

    Layers that are yet to be chosen count as all layers.

    model: the dense model as stages name it.
    folder: its folder.
    """
    dense = Layout.from_config(config)
    if not dense.is_dense:
        raise UserError(f"{spec.model} is not dense ({dense}); a sweep converts the dense model")
    for setting in spec.bench:
        with errors_begin_with(setting.where):
            plan_bench(
                ModelChoice(models=(model,), dtype=setting.given.get("dtype", "auto")), setting.options, setting.link
            )
    file = spec.layouts[0].where.rpartition(": ")[0]
    trained = [stage.where for choice in spec.adapt for stage in choice.stages]
    for where in [*trained, *([f"{file}: sensitivity"] if spec.sensitivity is not None else [])]:
        with errors_begin_with(where):
            check_config(config, spec.model)  # these compute with float weights only
    if spec.eval_options is not None:
        with errors_begin_with(f"{file}: eval"):
            check_transformers_runs(spec.model, config, folder)
    for choice in spec.layouts:
        with errors_begin_with(choice.where):
            if choice.sync_tp_size is not None:
                check_split(config, choice.sync_tp_size, name="sync_tp_size")
            layout = choice.recipe().layout(dense)
            layout.check_model(config)
        names = LayoutGroup((choice,), None if choice.auto else layout).names
        for setting in (setting for setting in spec.bench if setting.times(names)):
            entry = choice.where.rpartition(": ")[2]
            with errors_begin_with(f"{setting.where} cannot time {entry} (layouts: names those that it times)"):
                check_runnable(config, layout, setting.options.ranks, name=setting.options.ranks_option)


# ---- planning ----


@dataclass(frozen=True)
class Way:
    """One way of adapting.

    stops: by the number of each layout that it is for, the number of its stages and the reason for no more; None: all
    stages.
    control: the dense model, adapted in the same way.
    """

    choice: AdaptChoice
    stops: Mapping[int, tuple[int, Hold] | None]
    control: Point | None = None


@dataclass(frozen=True)
class Planner:
    """A maker of plans. The plan is made anew whenever something was measured.

    root: the sweep's folder.
    """

    spec: SweepSpec
    builder: StageBuilder
    config: Mapping[str, Any]
    root: Path

    @classmethod
    def of(cls, spec: SweepSpec, builder: StageBuilder, root: Path) -> "Planner":
        """Return a planner. Raises UserError for a model that is not dense, and for layouts that do not fit it or a
        benchmark."""
        folder = check_model(spec.model, spec.revision)
        config = read_config(folder)
        check_fit(spec, builder.model, config, folder)
        return cls(spec, builder, config, root)

    def plan(self, lost: Collection[str] = ()) -> SweepPlan:
        """Return the plan as far as it is known by now.

        lost: keys of stages that failed, or need one that did.
        """
        sensitivities = {
            wanted: self.builder.sensitivity(self.spec.sensitivity_mode(wanted[0]), wanted[1])
            for wanted in self._sensitivities()
        }
        dense = self._point(LayoutGroup((), Layout.from_config(self.config)), (), None)
        groups = self._groups(sensitivities, lost)
        notes = [
            f"{other.where} is the layout of {group.choices[0].where} too, so it is measured once"
            for group in groups
            for other in group.choices[1:]
        ]
        settings = [_for_layouts(setting, groups) for setting in self.spec.bench]
        benches = [self._bench(setting, groups, lost) for setting in settings]
        timing_all = next((one for one, made in zip(benches, settings, strict=True) if not made.layouts), None)
        ways = [self._way(_for_layouts(way, groups), groups, dense, timing_all, lost) for way in self.spec.adapt]
        points = [dense, *self._points(groups, ways, dense.evaluating)]
        points += [way.control for way in ways if way.control is not None]
        first = {point.identity: number for number, point in reversed(list(enumerate(points)))}
        points = [points[number] for number in sorted(first.values())]
        is_known = not any(group.hold == WAITING for group in groups)
        return SweepPlan(named_apart(points), list(sensitivities.values()), benches if is_known else [], notes)

    def _sensitivities(self) -> list[tuple[str, int | None]]:
        """Return the sensitivities to measure: those that layouts are chosen by, else those of all kinds of layers in
        the grid."""
        if self.spec.sensitivity is None:
            return []
        wanted = [choice.sensitivity_of(kind) for choice in self.spec.layouts for kind in choice.auto]
        if not wanted:
            kinds = [(choice, kind) for choice in self.spec.layouts for kind in (SPD, LADDER)]
            wanted = [
                choice.sensitivity_of(kind) for choice, kind in kinds if (choice.spd if kind == SPD else choice.ladder)
            ]
        return list(dict.fromkeys(wanted))

    def _groups(
        self, sensitivities: Mapping[tuple[str, int | None], Stage], lost: Collection[str]
    ) -> list[LayoutGroup]:
        """Return the entries of the file, grouped by layout."""
        groups: dict[Any, LayoutGroup] = {}
        for choice in self.spec.layouts:
            needed = {kind: sensitivities[choice.sensitivity_of(kind)] for kind in choice.auto}
            layout, hold = None, WAITING
            if any(stage.key in lost for stage in needed.values()):
                hold = Hold("skipped", "the stage sensitivity that it needs failed")
            elif all(finished_stage(stage, self.root) is not None for stage in needed.values()):
                try:
                    layout = self._chosen(choice, needed)
                except LadderizeError as error:
                    hold = Hold("failed", f"{choice.where}: {error}")
            same = replace(choice, where="", name=None) if layout is None else (layout, choice.head_map)
            group = groups.get(same, LayoutGroup((), layout, hold if layout is None else None))
            groups[same] = replace(group, choices=(*group.choices, choice))
        names = Counter(choice.name for group in groups.values() for choice in group.choices[:1])
        return [self._labelled(group, names[group.choices[0].name]) for group in groups.values()]

    def _chosen(self, choice: LayoutChoice, needed: Mapping[str, Stage]) -> Layout:
        """Return the layout of an entry.

        needed: the sensitivity of each kind of layers that is chosen.
        """
        dense, chosen = Layout.from_config(self.config), {}
        for kind, stage in needed.items():
            _, selection = choice.selecting(kind, str(self.root / stage.output / SENSITIVITY_JSON)).resolve(dense)
            assert selection is not None
            chosen[kind] = format_ranges(selection.layers)
        return choice.recipe(chosen).layout(dense)

    def _labelled(self, group: LayoutGroup, alike: int) -> LayoutGroup:
        """Return a group with its name and the stage that makes it.

        alike: the number of groups with its name.
        """
        name, text = group.choices[0].name, group.text
        says_all = group.layout is not None and alike == 1
        label = text if name is None else name if says_all else f"{name}: {text}"
        if group.layout is None:
            return replace(group, label=label)
        recipe = replace(Recipe.from_layout(group.layout), head_map=group.choices[0].head_map)
        return replace(group, label=label, converting=self.builder.conversion(recipe, text))

    def _bench(self, setting: BenchChoice, groups: Sequence[LayoutGroup], lost: Collection[str]) -> Stage:
        """Return the benchmark of one model of each layout that the setting times, the dense one first."""
        timed = [one.converting for one in groups if one.converting is not None and setting.times(one.names)]
        return self.builder.benchmark(setting, [stage for stage in timed if stage.key not in lost])

    def _way(
        self,
        choice: AdaptChoice,
        groups: Sequence[LayoutGroup],
        dense: Point,
        bench: Stage | None,
        lost: Collection[str],
    ) -> Way:
        """Return a way of adapting, with the decisions so far.

        bench: the benchmark that times every layout.
        """
        stops: dict[int, tuple[int, Hold] | None] = {
            number: (0, group.hold) if group.hold is not None else None
            for number, group in enumerate(groups)
            if not choice.layouts or any(name in choice.layouts for name in group.names)
        }
        control = self._control(choice, [groups[number] for number in stops], dense) if choice.control else None
        for count, stage in enumerate(choice.stages):
            if stage.promote is None:
                continue
            open_ones = [number for number, stop in stops.items() if stop is None or stop[1] == WAITING]
            before = [self._point(groups[number], choice.stages[:count], dense.evaluating) for number in open_ones]
            holds = self._holds(before, dense, bench, stage.promote, lost)
            for number, hold in zip(open_ones, holds, strict=True):
                if hold is not None and stops[number] is None:
                    stops[number] = (count, hold)
        return Way(choice, stops, control)

    def _holds(
        self, before: Sequence[Point], dense: Point, bench: Stage | None, count: int, lost: Collection[str]
    ) -> list[Hold | None]:
        """Return None for each promoted layout, and the reason for each other one.

        before: the models before the stage.
        """
        if bench is not None and bench.key in lost:
            return [Hold("skipped", "the benchmark that decides it failed")] * len(before)

        def is_lost(point: Point) -> bool:
            return point.evaluating is not None and point.evaluating.key in lost

        left = [point for point in before if not is_lost(point)]
        judged = left if is_lost(dense) else [*left, dense]
        needed = [point.evaluating for point in judged] + ([bench] if bench is not None else [])
        if any(stage is None or finished_stage(stage, self.root) is None for stage in needed):
            holds: list[Hold | None] = [WAITING] * len(left)
        else:
            times = self.root / bench.output / BENCH_JSON if bench is not None else None
            entrants = [
                entrant(point.name, self.root / str(point.results), times, point.group.layout, point.timed)
                for point in judged
            ]
            reasons = promoted(entrants[: len(left)], entrants[-1] if len(judged) > len(left) else None, count)
            holds = [Hold("not promoted", reason) if reason is not None else None for reason in reasons]
        others = iter(holds)
        failed = Hold("skipped", "the evaluation that decides it failed")
        return [failed if is_lost(point) else next(others) for point in before]

    def _points(self, groups: Sequence[LayoutGroup], ways: Sequence[Way], reference: Stage | None) -> Iterator[Point]:
        """Yield the points of each layout: one for every way of adapting it, and those that decide on its promotion."""
        for number, group in enumerate(groups):
            for way in [way for way in ways if number in way.stops] or [Way(AdaptChoice("adapt"), {number: None})]:
                stop, stages = way.stops[number], way.choice.stages
                for count, stage in enumerate(stages):
                    if stage.promote is not None and (stop is None or count <= stop[0]):
                        yield self._point(group, stages[:count], reference)
                point = self._point(group, stages, reference, stop)
                yield replace(point, control=way.control.model) if way.control is not None else point

    def _point(
        self,
        group: LayoutGroup,
        asked: tuple[AdaptStage, ...],
        reference: Stage | None,
        stop: tuple[int, Hold] | None = None,
    ) -> Point:
        """Return a layout adapted in one way.

        reference: the dense model's evaluation.
        stop: the number of its stages, and the reason for no more; None: all stages.
        """
        name = point_name(group.label, asked)
        if group.layout is None:
            return Point(name, group, asked, hold=group.hold)
        last, adapting = group.converting, []
        for count, stage in enumerate(asked[: stop[0]] if stop is not None else asked, 1):
            last = self.builder.adaptation(stage, last, point_name(group.label, asked[:count]))
            adapting.append(last)
        timed, model = (
            f"{stage.output}/{MODEL_FOLDER}" if stage is not None else self.builder.model
            for stage in (group.converting, last)
        )
        point = Point(name, group, asked, tuple(adapting), timed=timed, hold=stop[1] if stop is not None else None)
        if stop is not None:
            return point
        has_eval = self.spec.evaluation is not None
        return replace(
            point,
            model=model,
            evaluating=self.builder.evaluation(model, name, last, reference) if has_eval else None,
        )

    def _control(self, choice: AdaptChoice, groups: Sequence[LayoutGroup], dense: Point) -> Point | None:
        """Return the dense model, trained in the same way; None where no layout can be made.

        Where layouts train their converted layers, it trains those that any of ``groups`` converts.
        """
        stages = control_stages(choice.stages, [group.layout for group in groups if group.layout is not None])
        holds = [group.hold for group in groups if group.hold is not None]
        unknown = [hold for hold in holds if hold.status != "failed"]
        if unknown:
            skipped = Hold("skipped", "the sensitivity that tells what it trains failed")
            return self._point(dense.group, stages, dense.evaluating, (0, WAITING if WAITING in unknown else skipped))
        return None if len(holds) == len(groups) else self._point(dense.group, stages, dense.evaluating)


def _for_layouts(choice: Choice, groups: Sequence[LayoutGroup]) -> Choice:
    """Return the entry. Raises UserError if its key ``layouts`` names an unknown one."""
    known = {name for group in groups for name in group.names}
    if unknown := [name for name in choice.layouts if name not in known]:
        raise UserError(
            f"{choice.where}: layouts names {unknown[0]!r}, but no layout has this name; known are"
            f" {'; '.join(group.label for group in groups)}"
        )
    return choice


def control_stages(stages: Sequence[AdaptStage], layouts: Sequence[Layout]) -> tuple[AdaptStage, ...]:
    """Return the stages for the dense model.

    Stages and options without effect on it are left out. In place of converted layers it trains those that any of
    ``layouts`` converts.
    """
    layers = format_ranges({layer for layout in layouts for layer in layout.converted_layers})
    made = []
    for stage in stages:
        options = {key: value for key, value in stage.options.items() if key not in OF_CONVERTED}
        if options.get("train", CONVERTED) == CONVERTED:
            options["train"] = layers
        made += [replace(stage, options=options, promote=None)] if stage.method != ALIGN else []
    return tuple(made)
