"""The points of a sweep before they are measured: which model each is, which stages make it, and its name."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ladderize.adapt.methods import ALIGN, BLOCKS, FULL, LORA
from ladderize.convert.sensitivity_file import LADDER, SPD
from ladderize.layout import Layout
from ladderize.tradeoff.sweep.stages import ADAPTER_FOLDER, MODEL_FOLDER, RESULTS, Stage
from ladderize.tradeoff.sweep.sweep_file import AdaptStage, LayoutChoice
from ladderize.workflows.sweep_document import AS_CONVERTED, THEN, Status

DENSE = "dense"
Amount = TypeVar("Amount", int, float)


def summed(amounts: Iterable[Amount | None]) -> Amount | None:
    """None where one is not known, and of none."""
    known: list[Any] = list(amounts)
    return sum(known) if known and None not in known else None


@dataclass(frozen=True)
class Held:
    """Why a point has got no further than the stages that it has. status: waiting for what decides that, not promoted,
    or skipped since what decides it failed. message: the same in words."""

    status: Status
    message: str | None = None


@dataclass(frozen=True)
class LayoutGroup:
    """Entries of the file that come to one layout; none: the dense model. layout: None while it is not known, or if
    there is none because of ``problem``. awaits: keys of the sensitivities that it is chosen by. label: its name.
    converting: the stage that makes it."""

    choices: tuple[LayoutChoice, ...]
    layout: Layout | None
    problem: str | None = None
    awaits: tuple[str, ...] = ()
    label: str = DENSE
    converting: Stage | None = None

    @property
    def names(self) -> set[str]:
        """What ``layouts`` of the file may call it: an entry's name, and all that is printed of it, now or before it
        was chosen."""
        texts = {self.text, *map(layout_to_come, self.choices)}
        given = {choice.name for choice in self.choices if choice.name is not None}
        return given | texts | {f"{name}: {text}" for name in given for text in texts}

    @property
    def text(self) -> str:
        """The layout in words, or how it is chosen."""
        return layout_to_come(self.choices[0]) if self.layout is None else str(self.layout).partition(" layers: ")[2]


@dataclass(frozen=True)
class PlannedPoint:
    """A layout, adapted in one way. asked: its stages of adaptation in the file, adapting: as they run, as far as it
    may go (``held``). control: the model that the dense one becomes in the same way."""

    name: str
    group: LayoutGroup
    asked: tuple[AdaptStage, ...] = ()
    adapting: tuple[Stage, ...] = ()
    evaluating: Stage | None = None
    model: str | None = None
    timed: str | None = None
    held: Held | None = None
    control: str | None = None

    @property
    def layout(self) -> Layout | None:
        return self.group.layout

    @property
    def converting(self) -> Stage | None:
        return self.group.converting

    @property
    def same(self) -> object:
        """What two points that are one have in common."""
        is_whole = self.layout is not None and self.held is None
        return tuple(stage.key for stage in self.stages) if is_whole and self.stages else self.name

    @property
    def is_open(self) -> bool:
        """Whether something has to be measured before all of its stages are known."""
        if self.layout is None:
            return self.group.problem is None
        return self.held is not None and self.held.status == "waiting"

    @property
    def stages(self) -> list[Stage]:
        return [stage for stage in (self.converting, *self.adapting, self.evaluating) if stage is not None]

    @property
    def tokens(self) -> int | None:
        """That its stages read, where that is known."""
        return summed(stage.tokens for stage in self.asked)

    @property
    def adapted(self) -> str:
        """As sweep.json says it."""
        return THEN.join(stage.method for stage in self.asked) or AS_CONVERTED

    @property
    def results(self) -> str | None:
        return f"{self.evaluating.output}/{RESULTS}" if self.evaluating is not None else None

    @property
    def adaptation(self) -> str | None:
        """The folder of the last stage that retrained, or of the last."""
        folders = [
            (asked.method, f"{stage.output}/{ADAPTER_FOLDER if asked.method == LORA else MODEL_FOLDER}")
            for asked, stage in zip(self.asked, self.adapting, strict=False)
        ]
        curved = [folder for method, folder in folders if method in (FULL, LORA)]
        return next(iter(reversed(curved or [folder for _, folder in folders])), None)


@dataclass(frozen=True)
class SweepPlan:
    """points: dense first. benches: of the models that are timed, if all are there. notes: what the user should know.
    complete: whether every stage is known."""

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


def names_one_by_one(layouts: Sequence[str], known: Collection[str]) -> tuple[str, ...]:
    """The names in a key ``layouts``. One may hold commas; where none is so, they are between several."""
    return tuple(
        name.strip() for text in layouts for name in ([text] if text in known else text.split(",")) if name.strip()
    )


def layout_to_come(choice: LayoutChoice) -> str:
    """A layout that is not known yet, in words."""
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
    ranks = f" (sync_tp_size {choice.sync_tp_size})" if choice.sync_tp_size is not None else ""
    return ", ".join(parts) + ranks


def point_name(label: str, stages: Sequence[AdaptStage]) -> str:
    """``ladder 4:8, align + full 60k tokens``."""
    words = []
    for stage in stages:
        key, unit = ("samples", "windows") if stage.method in (ALIGN, BLOCKS) else ("max_tokens", "tokens")
        words.append(f"{stage.method} {stage.given[key]} {unit}" if key in stage.given else stage.method)
    return f"{label}, {THEN.join(words)}" if words else label


def named_apart(points: list[PlannedPoint]) -> list[PlannedPoint]:
    """The same, where two have one name with numbers behind."""
    counts: dict[str, int] = {}
    named = []
    for point in points:
        counts[point.name] = count = counts.get(point.name, 0) + 1
        named.append(point if count == 1 else replace(point, name=f"{point.name} #{count}"))
    return named
