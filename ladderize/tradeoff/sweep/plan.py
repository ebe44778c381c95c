"""From a sweep.yaml to its points and their stages: every layout that does not fit is refused before anything runs."""

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladderize.adapt.methods import BLOCKS, LORA
from ladderize.checkpoint.model_check import check_model
from ladderize.checkpoint.reading import read_config
from ladderize.convert.recipe import Recipe
from ladderize.convert.sensitivity_file import LADDER, SPD
from ladderize.errors import LadderizeError
from ladderize.layout import Layout, format_ranges
from ladderize.tradeoff.sweep.builder import StageBuilder
from ladderize.tradeoff.sweep.fit import check_fit, times
from ladderize.tradeoff.sweep.spec import NONE, AdaptChoice, BenchChoice, LayoutChoice, SweepSpec
from ladderize.tradeoff.sweep.stages import (
    ADAPTER_FOLDER,
    MODEL_FOLDER,
    RESULTS,
    SENSITIVITY_JSON,
    Stage,
    finished_stage,
)
from ladderize.workflows.sweep_document import Adapted

DENSE = "dense"


@dataclass(frozen=True)
class PlannedPoint:
    """layout: None where it is chosen by a sensitivity (``awaits``, keys) that is not there yet; text then says how.
    problem: why that chooses none. entries: the names of its entries of the file. tokens: to train on, where that is
    known."""

    name: str
    text: str
    layout: Layout | None
    entries: tuple[str, ...]
    adapted: Adapted = NONE
    tokens: int | None = None
    converting: Stage | None = None
    adapting: Stage | None = None
    evaluating: Stage | None = None
    model: str | None = None
    timed: str | None = None
    problem: str | None = None
    awaits: tuple[str, ...] = ()

    @property
    def stages(self) -> list[Stage]:
        return [stage for stage in (self.converting, self.adapting, self.evaluating) if stage is not None]

    @property
    def results(self) -> str | None:
        return f"{self.evaluating.output}/{RESULTS}" if self.evaluating is not None else None

    @property
    def adaptation(self) -> str | None:
        """The folder with the curves of its training."""
        if self.adapting is None:
            return None
        return f"{self.adapting.output}/{ADAPTER_FOLDER if self.adapted == LORA else MODEL_FOLDER}"


@dataclass(frozen=True)
class SweepPlan:
    """points: dense first. benches: of the models that are timed, if all are there. notes: what the user should know.
    complete: whether every layout is known."""

    points: list[PlannedPoint]
    sensitivities: list[Stage]
    benches: list[Stage]
    notes: list[str]
    complete: bool

    @property
    def stages(self) -> list[Stage]:
        """In the order in which they run: sensitivities and the dense model first, timings last."""
        dense, *others = self.points
        listed = [*dense.stages, *self.sensitivities, *(stage for point in others for stage in point.stages)]
        return list({stage.key: stage for stage in (*listed, *self.benches)}.values())


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

    def plan(self, usable: set[str] | None = None) -> SweepPlan:
        """usable: keys of the conversions to time; None: all."""
        sensitivities: dict[tuple[str, int | None], Stage] = {}
        for wanted in self._sensitivities():
            sensitivities[wanted] = self.builder.sensitivity(self.spec.sensitivity_mode(wanted[0]), wanted[1])
        name = self.builder.model
        evaluating = self.builder.evaluation(name, DENSE, None, None) if self._evaluates else None
        points = [PlannedPoint(DENSE, DENSE, self.dense, (), evaluating=evaluating, model=name, timed=name)]
        notes: list[str] = []
        groups = self._groups(sensitivities)
        shared = Counter(name for group in groups for name in group.names)
        for group in groups:
            first, *rest = group.choices
            notes += [f"{other.where} is the layout of {first.where} too, so it is measured once" for other in rest]
            points += self._points(group, evaluating, {name for name, count in shared.items() if count == 1})
        kept = {tuple(stage.key for stage in point.stages) or point.name: point for point in reversed(points)}
        points = [point for point in points if point in kept.values()]  # of two retrainings alike the first
        benches = [self._bench(setting, points, usable) for setting in self.spec.bench]
        known = all(point.layout is not None or point.problem is not None for point in points)
        return SweepPlan(_named_apart(points), list(sensitivities.values()), benches, notes, known)

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

    def _groups(self, sensitivities: Mapping[tuple[str, int | None], Stage]) -> "list[LayoutGroup]":
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
        return list(groups.values())

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

    def _points(
        self, group: "LayoutGroup", reference: Stage | None, telling: Container[str | None]
    ) -> list[PlannedPoint]:
        """One for each way of retraining; where the layout is not known, its stages are not either. telling: names of
        entries that stand for one layout, which is not said beside them."""
        first, layout = group.choices[0], group.layout
        text = _short(layout) if layout is not None else _chosen(first)
        alone = layout is not None and first.name in telling
        label = text if first.name is None else first.name if alone else f"{first.name}: {text}"
        converting = None
        if layout is not None:
            recipe = replace(Recipe.from_layout(layout), head_map=first.head_map)
            converting = self.builder.conversion(recipe, text)
        wanted = [
            adapt
            for adapt in self.spec.adapt
            if not adapt.layouts or any(choice.name in adapt.layouts for choice in group.choices)
        ]
        points = []
        for adapt in wanted or [AdaptChoice("adapt", NONE)]:
            point = PlannedPoint(
                name=_name(label, adapt),
                text=text,
                layout=layout,
                entries=group.names,
                adapted=adapt.method,
                tokens=self.builder.tokens(adapt),
                converting=converting,
                problem=group.problem,
                awaits=group.needs,
            )
            points.append(self._measured(point, adapt, reference) if converting is not None else point)
        return points

    def _measured(self, point: PlannedPoint, adapt: AdaptChoice, reference: Stage | None) -> PlannedPoint:
        assert point.converting is not None
        converted = f"{point.converting.output}/{MODEL_FOLDER}"
        last, adapting = point.converting, None
        if adapt.method != NONE:
            last = adapting = self.builder.adaptation(adapt, point.converting, point.name)
        model = f"{last.output}/{MODEL_FOLDER}"
        evaluating = self.builder.evaluation(model, point.name, last, reference) if self._evaluates else None
        return replace(point, adapting=adapting, evaluating=evaluating, model=model, timed=converted)

    def _bench(self, setting: BenchChoice, points: list[PlannedPoint], usable: set[str] | None) -> Stage:
        """One model of each layout that the setting times, the dense one first."""
        stages = {
            point.converting.key: point.converting
            for point in points
            if point.converting is not None and times(setting, *point.entries)
        }
        converted = [stage for key, stage in stages.items() if usable is None or key in usable]
        return self.builder.benchmark(setting, converted)


@dataclass(frozen=True)
class LayoutGroup:
    """Entries of the file that come to one layout. layout: None while it is not known, or if there is none because of
    ``problem``. needs: keys of the sensitivities that it is chosen by."""

    choices: tuple[LayoutChoice, ...]
    layout: Layout | None
    problem: str | None
    needs: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(choice.name for choice in self.choices if choice.name is not None))


def _short(layout: Layout) -> str:
    return str(layout).partition(" layers: ")[2]


def _chosen(choice: LayoutChoice) -> str:
    """A layout that is not known yet, in words."""
    parts = []
    for kind, layers, fraction in (
        (LADDER, choice.ladder, choice.ladder_fraction),
        (SPD, choice.spd, choice.spd_fraction),
    ):
        if kind in choice.auto:
            rule = f"{fraction:g} of the layers" if fraction is not None else "insensitive layers"
            if fraction is None and choice.max_ppl_increase is not None:
                rule = f"layers up to {choice.max_ppl_increase:g} perplexity"
            parts.append(f"{kind} {rule} by sensitivity")
        elif layers is not None:
            parts.append(f"{kind} {layers}")
    ranks = f" (sync_tp_size {choice.sync_tp_size})" if choice.sync_tp_size is not None else ""
    return ", ".join(parts) + ranks


def _name(name: str, adapt: AdaptChoice) -> str:
    if adapt.method == NONE:
        return name
    amount = adapt.given.get("max_tokens") if adapt.method != BLOCKS else adapt.given.get("samples")
    unit = " windows" if adapt.method == BLOCKS else " tokens"
    return f"{name}, {adapt.method}{f' {amount}{unit}' if amount is not None else ''}"


def _named_apart(points: list[PlannedPoint]) -> list[PlannedPoint]:
    """The same, where two have one name with numbers behind."""
    counts: dict[str, int] = {}
    named = []
    for point in points:
        counts[point.name] = count = counts.get(point.name, 0) + 1
        named.append(point if count == 1 else replace(point, name=f"{point.name} #{count}"))
    return named
