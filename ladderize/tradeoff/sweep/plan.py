"""From a sweep.yaml to its points and their stages: every layout that does not fit is refused before anything runs."""

from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladderize.adapt.methods import ALIGN, CONVERTED
from ladderize.checkpoint.llama import check_model
from ladderize.checkpoint.reading import read_config
from ladderize.convert.recipe import Recipe
from ladderize.convert.sensitivity_file import LADDER, SPD
from ladderize.errors import LadderizeError, UserError
from ladderize.layout import Layout, check_split, format_ranges
from ladderize.runtime.bench.options import ModelChoice
from ladderize.runtime.bench.plan import plan_bench
from ladderize.runtime.shards import check_runnable
from ladderize.tradeoff.sweep.builder import StageBuilder, summed
from ladderize.tradeoff.sweep.points import DENSE, Held, LayoutGroup, PlannedPoint, SweepPlan, named_apart, point_name
from ladderize.tradeoff.sweep.promotion import WAITING, Judge
from ladderize.tradeoff.sweep.stage_commands import MODEL_FOLDER, SENSITIVITY_JSON, errors_begin_with
from ladderize.tradeoff.sweep.stages import Stage, finished_stage
from ladderize.tradeoff.sweep.sweep_file import AdaptChoice, AdaptStage, BenchChoice, LayoutChoice, SweepSpec


def check_fit(spec: SweepSpec, model: str, config: Mapping[str, Any]) -> None:
    """Raise UserError, which names the entry, for a layout or a benchmark that this model cannot have.

    model: the dense one, as stages name it. Layers that are yet to be chosen are taken as all of them.
    """
    dense = Layout.from_config(config)
    if not dense.is_dense:
        raise UserError(f"{spec.model} is not dense ({dense}); a sweep converts the dense model")
    layouts = []
    for choice in spec.layouts:
        with errors_begin_with(choice.where):
            layouts.append((choice, _layout(choice, config)))
    if spec.evaluation is not None:
        ranks = spec.evaluation.tp_size
        for choice, layout in layouts:
            with errors_begin_with(choice.where):
                check_runnable(config, layout, ranks, name="eval with --tp-size")
    for setting in spec.bench:
        with errors_begin_with(setting.where):
            timed = ModelChoice(models=(model,), dtype=setting.given.get("dtype", "auto"))
            plan_bench(timed, setting.options, setting.link)
        for choice, layout in layouts:
            if is_timed(setting, choice.name):
                _check_runs(setting, choice, layout, config)


def is_timed(setting: BenchChoice, *entries: str | None) -> bool:
    """Whether a benchmark is for a layout whose entries have these names."""
    return not setting.layouts or any(name in setting.layouts for name in entries)


def _layout(choice: LayoutChoice, config: Mapping[str, Any]) -> Layout:
    if choice.sync_tp_size is not None:
        check_split(config, choice.sync_tp_size, name="sync_tp_size")
    layout = choice.recipe().layout(Layout.from_config(config))
    layout.check_model(config)
    return layout


def _check_runs(setting: BenchChoice, choice: LayoutChoice, layout: Layout, config: Mapping[str, Any]) -> None:
    try:
        check_runnable(config, layout, setting.options.ranks, name=setting.options.ranks_option)
    except LadderizeError as error:
        place = choice.where.rpartition(": ")[2]
        raise UserError(
            f"{setting.where} cannot time {place}: {error} (a benchmark's key layouts names those that it times)"
        ) from None


Stop = tuple[int, Held]  # before which stage of adaptation a layout is held, and why
OF_CONVERTED = ("hidden_weight",)  # options of training that compare converted layers


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
        config = read_config(check_model(spec.model, spec.revision))
        check_fit(spec, builder.model, config)
        return cls(spec, builder, config, root)

    @property
    def dense(self) -> Layout:
        return Layout.from_config(self.config)

    def plan(self, usable: set[str] | None = None, lost: Collection[str] = ()) -> SweepPlan:
        """usable: keys of the conversions to time; None: all. lost: keys of stages that failed or were skipped."""
        sensitivities: dict[tuple[str, int | None], Stage] = {}
        for wanted in self._sensitivities():
            sensitivities[wanted] = self.builder.sensitivity(self.spec.sensitivity_mode(wanted[0]), wanted[1])
        name = self.builder.model
        evaluating = self.builder.evaluation(name, DENSE, None, None) if self._evaluates else None
        dense = PlannedPoint(DENSE, DENSE, self.dense, (), evaluating=evaluating, model=name, timed=name)
        groups = self._groups(sensitivities)
        notes = [
            f"{other.where} is the layout of {group.choices[0].where} too, so it is measured once"
            for group in groups
            for other in group.choices[1:]
        ]
        benches = [self._bench(setting, groups, usable) for setting in self.spec.bench]
        judge = Judge(self.root, dense, self._deciding(benches), lost)
        ways = [self._way(choice, groups, judge) for choice in self.spec.adapt]
        notes += [note for way in ways for note in way.notes]
        controls = [way.control for way in ways if way.control is not None]
        points = [dense, *self._points(groups, ways, dense), *controls]
        kept = {point.same: point for point in reversed(points)}
        points = [point for point in points if point in kept.values()]  # of two ways alike the first
        known = not any(point.is_open and not set(point.awaits) & set(lost) for point in points)
        return SweepPlan(named_apart(points), list(sensitivities.values()), benches, notes, known)

    @property
    def _evaluates(self) -> bool:
        return self.spec.eval_given is not None

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
        shared = Counter(name for group in groups.values() for name in group.names)
        telling = {name for name, count in shared.items() if count == 1}  # of one layout, not said beside them
        return [self._labelled(group, telling) for group in groups.values()]

    def _labelled(self, group: LayoutGroup, telling: Container[str | None]) -> LayoutGroup:
        """With its name, and the stage that makes it."""
        name, text = group.choices[0].name, group.text
        alone = group.layout is not None and name in telling
        label = text if name is None else name if alone else f"{name}: {text}"
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
                before = [self._point(groups[number], choice.stages[:count], judge.dense) for number in left]
                held = judge.held(before, stage.promote)
                stops |= {number: (count, why) for number, why in zip(left, held, strict=True) if why is not None}
        return Way(choice, stops, self._control(choice, own, judge) if choice.control else None)

    def _points(
        self, groups: Sequence[LayoutGroup], ways: "Sequence[Way]", dense: PlannedPoint
    ) -> Iterator[PlannedPoint]:
        """Of each layout one for every way of adapting it, and those that decide whether it is promoted."""
        for number, group in enumerate(groups):
            for way in [way for way in ways if number in way.stops] or [Way(AdaptChoice("adapt"), {number: None})]:
                stop, stages = way.stops[number], way.choice.stages
                for count, stage in enumerate(stages):
                    if stage.promote is not None and (stop is None or count <= stop[0]):
                        yield self._point(group, stages[:count], dense)
                point = self._point(group, stages, dense, stop)
                yield replace(point, control=way.control.model) if way.control is not None else point

    def _point(
        self, group: LayoutGroup, stages: tuple[AdaptStage, ...], dense: PlannedPoint, stop: Stop | None = None
    ) -> PlannedPoint:
        """A layout adapted in one way; where the layout is not known, its stages are not either. dense: what it is
        compared with. stop: before which stage it is held, and why."""
        point = PlannedPoint(
            name=point_name(group.label, stages),
            text=group.text,
            layout=group.layout,
            entries=group.names,
            asked=stages,
            tokens=summed(stage.tokens for stage in stages),
            converting=group.converting,
            problem=group.problem,
            awaits=group.needs,
        )
        return self._measured(point, group.label, dense, stop) if group.layout is not None else point

    def _measured(self, point: PlannedPoint, label: str, dense: PlannedPoint, stop: Stop | None = None) -> PlannedPoint:
        """A point with its stages. label: the layout's name."""
        made = [point.converting]
        for count, asked in enumerate(point.asked[: stop[0]] if stop is not None else point.asked, 1):
            made.append(self.builder.adaptation(asked, made[-1], point_name(label, point.asked[:count])))
        timed = f"{made[0].output}/{MODEL_FOLDER}" if made[0] is not None else dense.timed
        point = replace(point, adapting=tuple(stage for stage in made[1:] if stage is not None), timed=timed)
        if stop is not None:
            return replace(point, held=stop[1])
        assert made[-1] is not None
        model = f"{made[-1].output}/{MODEL_FOLDER}"
        evaluating = None
        if self._evaluates:
            evaluating = self.builder.evaluation(model, point.name, made[-1], dense.evaluating)
        return replace(point, evaluating=evaluating, model=model)

    def _control(self, choice: AdaptChoice, groups: Sequence[LayoutGroup], judge: Judge) -> PlannedPoint | None:
        """The dense model, trained in the same way; where a layout trains its converted layers, those that any of
        ``groups`` converts. None: no layout can be made."""
        stages = control_stages(choice.stages, [group.layout for group in groups if group.layout is not None])
        tokens = summed(stage.tokens for stage in stages)
        point = PlannedPoint(point_name(DENSE, stages), DENSE, self.dense, (), stages, tokens)
        open_ones = [group for group in groups if group.layout is None and group.problem is None]
        if not open_ones:
            return None if all(group.layout is None for group in groups) else self._measured(point, DENSE, judge.dense)
        is_lost = any(set(group.needs) & set(judge.lost) for group in open_ones)
        held = Held("skipped", "the sensitivity that tells what it trains failed") if is_lost else WAITING
        return self._measured(point, DENSE, judge.dense, (0, held))

    def _bench(self, setting: BenchChoice, groups: Sequence[LayoutGroup], usable: set[str] | None) -> Stage:
        """One model of each layout that the setting times, the dense one first."""
        timed = [one.converting for one in groups if one.converting is not None and is_timed(setting, *one.names)]
        return self.builder.benchmark(setting, [stage for stage in timed if usable is None or stage.key in usable])

    def _deciding(self, benches: Sequence[Stage]) -> Stage | None:
        """The benchmark that promotions go by: the first of all layouts."""
        of_all = [stage for setting, stage in zip(self.spec.bench, benches, strict=True) if not setting.layouts]
        return next(iter(of_all), None)


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
