"""What a sweep.yaml asks for: layouts, ways of adapting them, an evaluation, benchmarks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ladderize.adapt.methods import Method
from ladderize.convert.recipe import AUTO, Recipe
from ladderize.convert.sensitivity_file import LADDER, SPD
from ladderize.eval.options import EvalOptions
from ladderize.runtime.bench.options import BenchOptions
from ladderize.tradeoff.sweep.settings import eval_settings


@dataclass(frozen=True)
class LayoutChoice:
    """One layout of the grid, with options of ``ladderize convert``. where: in the file. ladder, spd: ranges, or
    "auto": chosen by their sensitivity. auto: the kinds of layers that are."""

    where: str
    name: str | None
    ladder: str | None
    spd: str | None
    sync_tp_size: int | None
    ladder_fraction: float | None
    spd_fraction: float | None
    max_ppl_increase: float | None
    head_map: str | None

    @property
    def auto(self) -> tuple[str, ...]:
        return tuple(kind for kind, layers in ((SPD, self.spd), (LADDER, self.ladder)) if layers == AUTO)

    def selecting(self, kind: str, sensitivity: str) -> Recipe:
        """The recipe that selects the layers of one kind by a sensitivity.json."""
        if kind == LADDER:
            recipe = Recipe(ladder=AUTO, sensitivity=sensitivity, ladder_fraction=self.ladder_fraction)
        else:
            recipe = Recipe(
                spd=AUTO, sensitivity=sensitivity, spd_fraction=self.spd_fraction, sync_tp_size=self.sync_tp_size
            )
        return replace(recipe, max_ppl_increase=self.max_ppl_increase)

    def recipe(self, chosen: Mapping[str, str]) -> Recipe:
        """The whole recipe, with the layers ``chosen`` for each kind that is auto."""
        layers = {LADDER: self.ladder, SPD: self.spd, **chosen}
        return Recipe(ladder=layers[LADDER], spd=layers[SPD], sync_tp_size=self.sync_tp_size, head_map=self.head_map)

    def sensitivity_of(self, kind: str) -> tuple[str, int | None]:
        """Which sensitivity selects its layers of a kind: the kind and, of spd, the virtual ranks."""
        return kind, self.sync_tp_size if kind == SPD else None


@dataclass(frozen=True)
class AdaptStage:
    """One run of ``ladderize adapt``, with its options. where: in the file. promote: only so many layouts get it, the
    best of those that come to it; None: all."""

    where: str
    method: Method
    given: Mapping[str, Any]
    promote: int | None = None


@dataclass(frozen=True)
class AdaptChoice:
    """One way of adapting: its stages, each of which reads what the one before wrote; none: as converted. layouts: the
    entries that it is for, by their names; empty: all. control: the dense model is trained in this way, too."""

    where: str
    stages: tuple[AdaptStage, ...] = ()
    layouts: tuple[str, ...] = ()
    control: bool = False


@dataclass(frozen=True)
class BenchChoice:
    """One benchmark, with the options of ``ladderize bench``. layouts: as of a way of adapting."""

    where: str
    options: BenchOptions
    link: str | None
    given: Mapping[str, Any]
    layouts: tuple[str, ...] = ()


@dataclass(frozen=True)
class SweepSpec:
    """A sweep.yaml. sensitivity: options of ``ladderize sensitivity``, eval_given: of ``ladderize eval``, None where
    there is no such section. margin: of accuracy that may be lost, in points. text: the file as it was read.

    Paths are absolute.
    """

    model: str
    revision: str | None
    out: str | None
    sensitivity: Mapping[str, Any] | None
    layouts: tuple[LayoutChoice, ...]
    adapt: tuple[AdaptChoice, ...]
    eval_given: Mapping[str, Any] | None
    bench: tuple[BenchChoice, ...]
    margin: float
    verify: bool
    text: str

    def eval_options(self) -> EvalOptions:
        return eval_settings(self.eval_given or {}, self.revision, "eval")

    def sensitivity_mode(self, kind: str) -> str:
        """The mode that measures layers of a kind: the paper's sweep, or each block alone."""
        each = str((self.sensitivity or {}).get("mode", "")).startswith("each")
        return {SPD: "each" if each else "spd", LADDER: "each-ladder" if each else "ladder"}[kind]
