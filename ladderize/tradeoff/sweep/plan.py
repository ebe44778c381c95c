"""From a sweep.yaml to its points and their stages: every layout that does not fit is refused before anything runs."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ladderize.adapt.methods import ALIGN, CONVERTED
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
from ladderize.tradeoff.sweep.builder import StageBuilder
from ladderize.tradeoff.sweep.points import (
    Held,
    LayoutGroup,
    PlannedPoint,
    SweepPlan,
    named_apart,
    names_one_by_one,
    point_name,
)
from ladderize.tradeoff.sweep.promotion import WAITING, Judge
from ladderize.tradeoff.sweep.stages import MODEL_FOLDER, SENSITIVITY_JSON, Stage, errors_begin_with, finished_stage
from ladderize.tradeoff.sweep.sweep_file import AdaptChoice, AdaptStage, BenchChoice, LayoutChoice, SweepSpec


def check_fit(spec: SweepSpec, model: str, config: Mapping[str, Any], folder: Path) -> None:
    """Raise UserError, which names the entry, for a layout or a stage that this model cannot have.

    model: the dense one, as stages name it; folder: its own. Layers that are yet to be chosen are taken as all of them.
    """
    dense = Layout.from_config(config)
    if not dense.is_dense:
        raise UserError(f"{spec.model} is not dense ({dense}); a sweep converts the dense model")
    for setting in spec.bench:
        with errors_begin_with(setting.where):
            timed = ModelChoice(models=(model,), dtype=setting.given.get("dtype", "auto"))
            plan_bench(timed, setting.options, setting.link)
    check_weights(spec, config, folder)
    layouts = []
    for choice in spec.layouts:
        with errors_begin_with(choice.where):
            if choice.sync_tp_size is not None:
                check_split(config, choice.sync_tp_size, name="sync_tp_size")
            layout = choice.recipe().layout(dense)
            layout.check_model(config)
            if spec.evaluation is not None:
                check_runnable(config, layout, spec.evaluation.tp_size, name="eval with --tp-size")
        layouts.append((choice, layout, LayoutGroup((choice,), None if choice.auto else layout).names))
    known = {name for *_, names in layouts for name in names}
    for setting in [for_known(setting, known) for setting in spec.bench]:
        for choice, layout, _ in [one for one in layouts if setting.times(one[-1])]:
            entry = choice.where.rpartition(": ")[2]
            with errors_begin_with(f"{setting.where} cannot time {entry} (layouts: names those that it times)"):
                check_runnable(config, layout, setting.options.ranks, name=setting.options.ranks_option)


def check_weights(spec: SweepSpec, config: Mapping[str, Any], folder: Path) -> None:
    """Raise UserError, which names the entry, for a stage that does not run weights such as this model's."""
    file = spec.layouts[0].where.rpartition(": ")[0]
    of_floats = [stage.where for choice in spec.adapt for stage in choice.stages]
    if spec.sensitivity is not None:
        of_floats.append(f"{file}: sensitivity")
    for where in of_floats:
        with errors_begin_with(where):
            check_config(config, spec.model)
    if spec.evaluation is not None and spec.evaluation.backend == "hf":
        with errors_begin_with(f"{file}: eval"):
            check_transformers_runs(spec.model, config, folder)


Stop = tuple[int, Held]  # before which stage of adaptation a layout is held, and why
OF_CONVERTED = ("hidden_weight",)  # options of training that compare converted layers
Choice = TypeVar("Choice", AdaptChoice, BenchChoice)


def for_known(choice: Choice, known: Collection[str]) -> Choice:
    """With the names that its key ``layouts`` holds one by one."""
    return replace(choice, layouts=names_one_by_one(choice.layouts, known))


@dataclass(frozen=True)
class Planner:
    """Makes the plan, and makes it anew when sensitivities are there. root: the sweep's folder."""

    spec: SweepSpec
    builder: StageBuilder
    config: Mapping[str, Any]
    root: Path

    @classmethod
    def of(cls, spec: SweepSpec, builder: StageBuilder, root: Path) -> "Planner":
        """Raises UserError for a model that is not dense, and for layouts that do not fit it or a benchmark."""
        folder = check_model(spec.model, spec.revision)
        config = read_config(folder)
        check_fit(spec, builder.model, config, folder)
        return cls(spec, builder, config, root)

    @property
    def dense(self) -> Layout:
        return Layout.from_config(self.config)

    def plan(self, usable: set[str] | None = None, lost: Collection[str] = ()) -> SweepPlan:
        """usable: keys of the conversions to time; None: all. lost: keys of stages that failed or were skipped."""
        sensitivities: dict[tuple[str, int | None], Stage] = {}
        for wanted in self._sensitivities():
            sensitivities[wanted] = self.builder.sensitivity(self.spec.sensitivity_mode(wanted[0]), wanted[1])
        dense = self._point(LayoutGroup((), self.dense), (), None)
        groups = self._groups(sensitivities)
        notes = [
            f"{other.where} is the layout of {group.choices[0].where} too, so it is measured once"
            for group in groups
            for other in group.choices[1:]
        ]
        settings = [self._for_these(setting, groups) for setting in self.spec.bench]
        benches = [self._bench(setting, groups, usable) for setting in settings]
        of_all = (stage for setting, stage in zip(settings, benches, strict=True) if not setting.layouts)
        judge = Judge(self.root, dense, next(of_all, None), lost)
        ways = [self._way(self._for_these(choice, groups), groups, judge) for choice in self.spec.adapt]
        notes += [note for way in ways for note in way.notes]
        controls = [way.control for way in ways if way.control is not None]
        points = [dense, *self._points(groups, ways, dense.evaluating), *controls]
        kept = {point.same: point for point in reversed(points)}
        points = [point for point in points if point in kept.values()]  # of two ways alike the first
        known = not any(point.is_open and not set(point.group.awaits) & set(lost) for point in points)
        return SweepPlan(named_apart(points), list(sensitivities.values()), benches, notes, known)

    @staticmethod
    def _for_these(choice: Choice, groups: Sequence[LayoutGroup]) -> Choice:
        """With the names of the layouts that it is for one by one. Raises UserError for one that is none."""
        known = {name for group in groups for name in group.names}
        choice = for_known(choice, known)
        if unknown := [name for name in choice.layouts if name not in known]:
            raise UserError(
                f"{choice.where}: layouts names {unknown[0]!r}, but no layout has this name; known are"
                f" {'; '.join(group.label for group in groups)}"
            )
        return choice

    def to_come(self, point: PlannedPoint) -> list[Stage]:
        """Stages like those that a point will have whose layout is not known yet."""
        stages = [self.builder.adaptation(asked, None, point.name) for asked in point.asked]
        if self.spec.evaluation is not None:
            stages.append(self.builder.evaluation(self.builder.model, point.name, None, None))
        return stages

    def _sensitivities(self) -> list[tuple[str, int | None]]:
        """Those that a layout is chosen by; where none is, those of all kinds of layers that the grid has."""
        if self.spec.sensitivity is None:
            return []
        wanted = [choice.sensitivity_of(kind) for choice in self.spec.layouts for kind in choice.auto]
        if not wanted:
            kinds = [(choice, kind) for choice in self.spec.layouts for kind in (SPD, LADDER)]
            wanted = [
                choice.sensitivity_of(kind) for choice, kind in kinds if (choice.spd if kind == SPD else choice.ladder)
            ]
        return list(dict.fromkeys(wanted))

    def _groups(self, sensitivities: Mapping[tuple[str, int | None], Stage]) -> list[LayoutGroup]:
        """The entries of the file, those together that come to the same layout."""
        groups: dict[Any, LayoutGroup] = {}
        for choice in self.spec.layouts:
            layout = problem = None
            try:
                layout = self._layout(choice, sensitivities)
            except LadderizeError as error:
                problem = f"{choice.where}: {error}"
            same = replace(choice, where="", name=None) if layout is None else (layout, choice.head_map)
            needs = tuple(sensitivities[choice.sensitivity_of(kind)].key for kind in choice.auto)
            group = groups.get(same, LayoutGroup((), layout, problem, needs))
            groups[same] = replace(group, choices=(*group.choices, choice))
        shared: Counter[str | None] = Counter(name for group in groups.values() for name in group.names)
        return [self._labelled(group, shared[group.choices[0].name]) for group in groups.values()]

    def _labelled(self, group: LayoutGroup, alike: int) -> LayoutGroup:
        """With its name, and the stage that makes it. alike: groups whose entries have its name."""
        name, text = group.choices[0].name, group.text
        tells_all = group.layout is not None and alike == 1
        label = text if name is None else name if tells_all else f"{name}: {text}"
        if group.layout is None:
            return replace(group, label=label)
        recipe = replace(Recipe.from_layout(group.layout), head_map=group.choices[0].head_map)
        return replace(group, label=label, converting=self.builder.conversion(recipe, text))

    def _layout(self, choice: LayoutChoice, sensitivities: Mapping[tuple[str, int | None], Stage]) -> Layout | None:
        """The layout of an entry; None while a sensitivity that it is chosen by is missing. Raises UserError where that
        chooses nothing."""
        chosen = {}
        for kind in choice.auto:
            stage = sensitivities[choice.sensitivity_of(kind)]
            if finished_stage(stage, self.root) is None:
                return None
            _, selection = choice.selecting(kind, str(self.root / stage.output / SENSITIVITY_JSON)).resolve(self.dense)
            assert selection is not None
            chosen[kind] = format_ranges(selection.layers)
        return choice.recipe(chosen).layout(self.dense)

    def _way(self, choice: AdaptChoice, groups: Sequence[LayoutGroup], judge: Judge) -> "Way":
        """A way of adapting, with all that is decided so far."""
        stops: dict[int, Stop | None] = {
            number: None
            for number, group in enumerate(groups)
            if not choice.layouts or any(name in choice.layouts for name in group.names)
        }
        own = [groups[number] for number in stops]
        for count, stage in enumerate(choice.stages):
            left = [number for number, stop in stops.items() if stop is None]
            if stage.promote is not None and left:
                before = [self._point(groups[number], choice.stages[:count], judge.dense.evaluating) for number in left]
                held = judge.held(before, stage.promote)
                stops |= {number: (count, why) for number, why in zip(left, held, strict=True) if why is not None}
        return Way(choice, stops, self._control(choice, own, judge) if choice.control else None)

    def _points(
        self, groups: Sequence[LayoutGroup], ways: "Sequence[Way]", reference: Stage | None
    ) -> Iterator[PlannedPoint]:
        """Of each layout one for every way of adapting it, and those that decide whether it is promoted."""
        for number, group in enumerate(groups):
            for way in [way for way in ways if number in way.stops] or [Way(AdaptChoice("adapt"), {number: None})]:
                stop, stages = way.stops[number], way.choice.stages
                for count, stage in enumerate(stages):
                    if stage.promote is not None and (stop is None or count <= stop[0]):
                        yield self._point(group, stages[:count], reference)
                point = self._point(group, stages, reference, stop)
                yield replace(point, control=way.control.model) if way.control is not None else point

    def _point(
        self, group: LayoutGroup, stages: tuple[AdaptStage, ...], reference: Stage | None, stop: Stop | None = None
    ) -> PlannedPoint:
        """A layout adapted in one way; where the layout is not known, its stages are not either. reference: the dense
        model's evaluation. stop: before which stage it is held, and why."""
        point = PlannedPoint(point_name(group.label, stages), group, stages)
        if group.layout is None:
            return point
        made = [group.converting]
        for count, asked in enumerate(stages[: stop[0]] if stop is not None else stages, 1):
            made.append(self.builder.adaptation(asked, made[-1], point_name(group.label, stages[:count])))
        timed, model = (f"{one.output}/{MODEL_FOLDER}" if one else self.builder.model for one in (made[0], made[-1]))
        point = replace(point, adapting=tuple(stage for stage in made[1:] if stage is not None), timed=timed)
        if stop is not None:
            return replace(point, held=stop[1])
        evaluating = None
        if self.spec.evaluation is not None:
            evaluating = self.builder.evaluation(model, point.name, made[-1], reference)
        return replace(point, evaluating=evaluating, model=model)

    def _control(self, choice: AdaptChoice, groups: Sequence[LayoutGroup], judge: Judge) -> PlannedPoint | None:
        """The dense model, trained in the same way; where a layout trains its converted layers, those that any of
        ``groups`` converts. None: no layout can be made."""
        stages = control_stages(choice.stages, [group.layout for group in groups if group.layout is not None])
        dense, stop = judge.dense, None
        if open_ones := [group for group in groups if group.layout is None and group.problem is None]:
            is_lost = any(set(group.awaits) & set(judge.lost) for group in open_ones)
            held = Held("skipped", "the sensitivity that tells what it trains failed") if is_lost else WAITING
            stop = (0, held)
        elif all(group.layout is None for group in groups):
            return None
        return self._point(dense.group, stages, dense.evaluating, stop)

    def _bench(self, setting: BenchChoice, groups: Sequence[LayoutGroup], usable: set[str] | None) -> Stage:
        """One model of each layout that the setting times, the dense one first."""
        timed = [one.converting for one in groups if one.converting is not None and setting.times(one.names)]
        return self.builder.benchmark(setting, [stage for stage in timed if usable is None or stage.key in usable])


@dataclass(frozen=True)
class Way:
    """One way of adapting. stops: of the layouts that it is for, by their places in the plan, where each is held; None:
    it gets all stages. control: the dense model, adapted in the same way."""

    choice: AdaptChoice
    stops: Mapping[int, Stop | None]
    control: PlannedPoint | None = None

    @property
    def notes(self) -> Iterator[str]:
        """What is still to be decided."""
        for count, stage in enumerate(self.choice.stages):
            at = [stop[1].status for stop in self.stops.values() if stop is not None and stop[0] == count]
            if waiting := at.count("waiting"):
                yield f"{stage.where}: the best {stage.promote} of {waiting} layouts are promoted when all are measured"


def control_stages(stages: Sequence[AdaptStage], layouts: Sequence[Layout]) -> tuple[AdaptStage, ...]:
    """The same for the dense model: without what changes nothing in it, and with the layers that any of ``layouts``
    converts instead of its own converted ones."""
    layers = format_ranges({layer for layout in layouts for layer in layout.converted_layers})
    made = []
    for stage in stages:
        given = {key: value for key, value in stage.given.items() if key not in OF_CONVERTED}
        if given.get("train", CONVERTED) == CONVERTED:
            given["train"] = layers
        made += [replace(stage, given=given, promote=None)] if stage.method != ALIGN else []
    return tuple(made)
