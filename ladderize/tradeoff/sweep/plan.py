"""From a sweep.yaml to its points and their stages: every layout that does not fit is refused before anything runs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladderize.adapt.methods import BLOCKS, LORA
from ladderize.checkpoint.model_check import check_model
from ladderize.checkpoint.reading import read_config
from ladderize.convert.recipe import Recipe
from ladderize.convert.sensitivity_file import LADDER, SPD
from ladderize.errors import LadderizeError, UserError
from ladderize.layout import Layout, check_split, format_ranges
from ladderize.runtime.collectives.links import parse_link
from ladderize.runtime.shards import check_runnable
from ladderize.tradeoff.sweep.builder import StageBuilder
from ladderize.tradeoff.sweep.document import Adapted
from ladderize.tradeoff.sweep.spec import NONE, AdaptChoice, BenchChoice, LayoutChoice, SweepSpec
from ladderize.tradeoff.sweep.stages import (
    ADAPTER_FOLDER,
    MODEL_FOLDER,
    RESULTS,
    SENSITIVITY_JSON,
    Stage,
    finished_stage,
)

DENSE = "dense"


@dataclass(frozen=True)
class PlannedPoint:
    """layout: None where it is chosen by a sensitivity that is not there yet; text then says how. entry: the name of
    the entry of the file, if it has one. tokens: to train on, where that is known. adapting: its stage adapt, with the
    document of its training."""

    name: str
    text: str
    layout: Layout | None
    entry: str | None
    adapted: Adapted = NONE
    tokens: int | None = None
    converting: Stage | None = None
    adapting: Stage | None = None
    evaluating: Stage | None = None
    model: str | None = None
    timed: str | None = None

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
        layout = Layout.from_config(config)
        if not layout.is_dense:
            raise UserError(f"{spec.model} is not dense ({layout}); a sweep converts the dense model")
        planner = cls(spec, builder, config, root)
        for choice in spec.layouts:
            planner._check(choice)
        for setting in spec.bench:
            _at(setting.where, lambda setting=setting: check_split(config, setting.options.ranks, name="tp_size"))
            _at(setting.where, lambda setting=setting: planner._check_bench(setting))
        return planner

    @property
    def dense(self) -> Layout:
        return Layout.from_config(self.config)

    def plan(self, usable: set[str] | None = None) -> SweepPlan:
        """usable: keys of the conversions to time; None: all."""
        sensitivities: dict[tuple[str, int | None], Stage] = {}
        for wanted in self._sensitivities():
            sensitivities[wanted] = self.builder.sensitivity(self.spec.sensitivity_mode(wanted[0]), wanted[1])
        evaluating = self.builder.evaluation(self.spec.model, DENSE, None, None) if self._evaluates else None
        points = [PlannedPoint(DENSE, DENSE, self.dense, None, evaluating=evaluating)]
        points[0] = replace(points[0], model=self.spec.model, timed=self.spec.model)
        notes: list[str] = []
        seen: dict[Any, str] = {}
        for choice in self.spec.layouts:
            found = self._layout(choice, sensitivities)
            text = _short(found) if found is not None else _chosen(choice)
            same = (found, choice.head_map) if found is not None else replace(choice, where="", name=None)
            if same in seen:
                notes.append(f"{choice.where} ({text}) is the same layout as {seen[same]}, so it is measured once")
                continue
            seen[same] = choice.where
            points += self._points(choice, found, text, sensitivities, evaluating)
        benches = [stage for setting in self.spec.bench if (stage := self._bench(setting, points, usable)) is not None]
        known = all(point.layout is not None for point in points)
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

    def _check(self, choice: LayoutChoice) -> None:
        ranks = choice.sync_tp_size
        if ranks is not None:
            _at(choice.where, lambda: check_split(self.config, ranks, name="sync_tp_size"))
        recipe = choice.recipe(dict.fromkeys(choice.auto, "all"))
        layout = _at(choice.where, lambda: recipe.layout(self.dense))
        _at(choice.where, lambda: layout.check_model(self.config))

    def _check_bench(self, setting: BenchChoice) -> None:
        """That every layout which it times can be run by so many ranks, and that its link is known."""
        positions = int(self.config.get("max_position_embeddings") or 2048)
        tokens = setting.options.prompt_len + setting.options.output_len
        if tokens > positions:
            raise UserError(f"prompt_len and output_len make {tokens} tokens, over the model's {positions} positions")
        if setting.link is not None:
            parse_link(setting.link, setting.options.ranks)
        for choice in self._timed(setting):
            layout = choice.recipe(dict.fromkeys(choice.auto, "all")).layout(self.dense)
            try:
                check_runnable(self.config, layout, setting.options.ranks, name=setting.options.ranks_option)
            except LadderizeError as error:
                place = choice.where.rpartition(": ")[2]
                raise UserError(
                    f"{place} does not run there: {error} (a benchmark's key layouts names those that it times)"
                ) from None

    def _timed(self, setting: BenchChoice) -> list[LayoutChoice]:
        return [choice for choice in self.spec.layouts if not setting.layouts or choice.name in setting.layouts]

    def _layout(self, choice: LayoutChoice, sensitivities: Mapping[tuple[str, int | None], Stage]) -> Layout | None:
        """The layout of an entry; None while a sensitivity that it is chosen by is missing."""
        chosen = {}
        for kind in choice.auto:
            stage = sensitivities[choice.sensitivity_of(kind)]
            if finished_stage(stage, self.root) is None:
                return None
            path = self.root / stage.output / SENSITIVITY_JSON
            _, selection = _at(
                choice.where, lambda kind=kind, path=path: choice.selecting(kind, str(path)).resolve(self.dense)
            )
            chosen[kind] = format_ranges(selection.layers)
        return choice.recipe(chosen).layout(self.dense)

    def _points(
        self,
        choice: LayoutChoice,
        layout: Layout | None,
        text: str,
        sensitivities: Mapping[tuple[str, int | None], Stage],
        reference: Stage | None,
    ) -> list[PlannedPoint]:
        """One for each way of retraining; where the layout is not known, its stages are not either."""
        converting = None
        if layout is not None:
            recipe = replace(Recipe.from_layout(layout), head_map=choice.head_map)
            converting = self.builder.conversion(recipe, text)
        points = []
        for adapt in self.spec.adapt:
            if adapt.layouts and choice.name not in adapt.layouts:
                continue
            point = PlannedPoint(
                name=_name(choice, text, adapt),
                text=text,
                layout=layout,
                entry=choice.name,
                adapted=adapt.method,
                tokens=self.builder.tokens(adapt),
                converting=converting,
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

    def _bench(self, setting: BenchChoice, points: list[PlannedPoint], usable: set[str] | None) -> Stage | None:
        """One model of each layout that the setting times, the dense one first."""
        stages = {
            point.converting.key: point.converting
            for point in points
            if point.converting is not None and (not setting.layouts or point.entry in setting.layouts)
        }
        converted = [stage for key, stage in stages.items() if usable is None or key in usable]
        return self.builder.benchmark(setting, converted)


def _at(where: str, check: Any) -> Any:
    """The result of a check; its error with the place in the file in front."""
    try:
        return check()
    except LadderizeError as error:
        raise UserError(f"{where}: {error}") from None


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


def _name(choice: LayoutChoice, text: str, adapt: AdaptChoice) -> str:
    name = f"{choice.name}: {text}" if choice.name is not None else text
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
