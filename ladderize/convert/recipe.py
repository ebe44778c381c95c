"""The recipe: the options that decide what a conversion computes, and the layers that ``auto`` chooses."""

import difflib
import math
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Literal, get_type_hints

from ladderize.choices import MOST_INCREASE, check_options, flag, option, ppl_increase
from ladderize.convert.sensitivity_file import (
    INSENSITIVE,
    LADDER,
    SPD,
    AlignmentWindows,
    CalibrationData,
    SensitivityDocument,
    read_sensitivity,
)
from ladderize.errors import UsageError, UserError
from ladderize.files.parsing import read_yaml
from ladderize.files.records import Record, read_value
from ladderize.layout import Layout, LayoutError, format_ranges, parse_ranges

AUTO = "auto"  # of spd or ladder: the layers are chosen by their measured sensitivity
CHOOSING = ("sensitivity", "spd_fraction", "ladder_fraction", "max_ppl_increase")
TEXT_KEYS = ("ladder", "spd")  # may be numbers in YAML
PATHS = ("head_map", "sensitivity")  # in a recipe file relative to its folder
RANGES = "half-open, comma-separated: 16:32, :8, -16:, 4,8:12 or all"


@dataclass(frozen=True)
class SensitivitySource(Record):
    """The sensitivity.json that a selection is based on."""

    LEFT_OUT: ClassVar = ("aligned",)

    file: str
    model: str
    fingerprint: str
    data: CalibrationData
    aligned: AlignmentWindows | None = None


@dataclass(frozen=True)
class SelectedBlock(Record):
    """The cost of one layer, and if it is selected."""

    KEYS: ClassVar = {"sensitivity_class": "class"}

    block: int
    sensitivity: float
    sensitivity_class: str
    selected: bool


@dataclass(frozen=True)
class Selection(Record):
    """The layers to convert: the key ``selection`` of ladderize.yaml and ``--json``.

    estimated_ppl_increase: the sum of the selected blocks' sensitivities.
    blocks: one for each layer.
    """

    rule: str
    estimated_ppl_increase: float
    sensitivity: SensitivitySource
    blocks: list[SelectedBlock]

    @property
    def layers(self) -> list[int]:
        """The selected layers, ascending."""
        return [entry.block for entry in self.blocks if entry.selected]


def select(
    sensitivity: SensitivityDocument,
    path: Path,
    kind: str,
    fraction: float | None = None,
    max_increase: float | str | None = None,
) -> Selection:
    """Return the blocks that become ``kind`` (``spd`` or ``ladder``): the least sensitive, of equal ones the lower.

    Without ``fraction`` and ``max_increase`` all of class insensitive are selected.

    path: of the sensitivity file.
    fraction: the share of all blocks, in (0, 1]; at least one block.
    max_increase: the limit of their summed sensitivities (those below 0 count as 0), in perplexity or per cent of the
    dense one.
    Raises UserError where nothing is selected, or the kind was not measured.
    """
    costs = sensitivity.of_kind(kind)
    if not costs:
        raise UserError(
            f"{path} has costs of {' and '.join(sensitivity.kinds)} layers, none of {kind}; measure them with"
            f" `ladderize sensitivity{' --sync-tp-size N' if kind == SPD else ' --mode layers'}`"
        )
    values = [cost.sensitivity for cost in costs]
    ascending = sorted(range(len(values)), key=lambda block: (values[block], block))
    if fraction is not None:
        count = max(1, round(fraction * len(values)))
        rule = f"the {count} least sensitive of {len(values)} blocks ({kind}_fraction {fraction:g})"
    elif max_increase is not None:
        most = ppl_increase(max_increase, sensitivity.dense_perplexity)
        count = sum(total <= most for total in accumulate(max(values[block], 0.0) for block in ascending))
        rule = f"the least sensitive blocks while their sum is at most {most:.4g} (max_ppl_increase {max_increase})"
    else:
        count = sum(value <= sensitivity.tau1 for value in values)
        rule = f"every block of class {INSENSITIVE} (at most tau1 = {sensitivity.tau1:g})"
    if not count:
        raise UserError(
            f"--{kind} auto selects no block of {path}: the smallest sensitivity is {values[ascending[0]]:.4g} (block"
            f" {ascending[0]}); give --{kind}-fraction, or a larger --max-ppl-increase"
        )
    chosen = set(ascending[:count])
    made_of = ("model", "fingerprint", "data", "aligned")
    return Selection(
        rule=rule,
        estimated_ppl_increase=math.fsum(values[block] for block in chosen),
        sensitivity=SensitivitySource(str(path), **{name: getattr(sensitivity, name) for name in made_of}),
        blocks=[
            SelectedBlock(block, cost.sensitivity, cost.sensitivity_class, block in chosen)
            for block, cost in enumerate(costs)
        ],
    )


@dataclass(frozen=True)
class Recipe:
    """The options that decide what ``ladderize convert`` computes; None leaves it as in the source.

    With spd or ladder (not both) "auto", layers are selected from the sensitivity file by spd_fraction or
    ladder_fraction, by max_ppl_increase, or by their class; sync_tp_size is then the file's and may be left out.

    attention_sync, mlp_sync: the modes of all layers, for a layout that no names of layers compile to.
    Raises UsageError or LayoutError for options that contradict each other.
    """

    ladder: str | None = option(
        f"Layers whose all-reduces are overlapped (Ladder Residual): {RANGES}; or auto, with --sensitivity.",
        metavar="RANGES",
    )
    spd: str | None = option(
        "Layers whose attention all-reduce is dropped (Sync-Point Drop); or auto, with --sensitivity.", metavar="RANGES"
    )
    sync_tp_size: int | None = option(
        "With --spd: TP size that OUT is made for (virtual ranks). It also runs on TP sizes that divide it.", min=1
    )
    dense: bool = option("Make every sync point blocking again: the family's own plain model.", False)
    dtype: Literal["float32", "float16", "bfloat16"] | None = option(
        "Dtype to store weights in: float32, bfloat16 or float16.", metavar="DTYPE", shown="as in SRC"
    )
    head_map: str | None = option("Reorder attention heads as this head_map.json says.", metavar="FILE")
    sensitivity: str | None = option(
        "For auto: the file that `ladderize sensitivity` wrote. Alone it selects the insensitive layers.",
        metavar="FILE",
    )
    spd_fraction: float | None = option("For --spd auto: fraction of all layers to select (0 to 1).", metavar="F")
    ladder_fraction: float | None = option("For --ladder auto: fraction of all layers to select (0 to 1).", metavar="F")
    max_ppl_increase: str | float | None = option(MOST_INCREASE)
    attention_sync: tuple[str, ...] | None = None
    mlp_sync: tuple[str, ...] | None = None

    @classmethod
    def from_layout(cls, layout: Layout) -> "Recipe":
        """Return the recipe that makes this layout: by names of layers where such names compile to it."""
        if layout.is_dense:
            return cls(dense=True)
        ladder, spd, ranks = layout.ladder_layers, layout.spd_layers, layout.sync_tp_size
        if Layout.from_layers(layout.num_layers, ladder=ladder, spd=spd, sync_tp_size=ranks) != layout:
            return cls(sync_tp_size=ranks, attention_sync=layout.attention_sync, mlp_sync=layout.mlp_sync)
        return cls(
            ladder=format_ranges(ladder) if ladder else None,
            spd=format_ranges(spd) if spd else None,
            sync_tp_size=ranks,
        )

    def __post_init__(self) -> None:
        self._check_layers()
        self._check_auto()
        check_options(self)

    def _check_layers(self) -> None:
        modes = [key for key in (self.attention_sync, self.mlp_sync) if key is not None]
        if self.dense and self.names_layers:
            raise UsageError("--dense makes every sync point blocking; it does not go with --ladder or --spd")
        if modes and (len(modes) == 1 or self.ladder is not None or self.spd is not None):
            raise UsageError("attention_sync and mlp_sync say every mode: they go together, without ladder and spd")
        if self.spd not in (None, AUTO) and self.sync_tp_size is None:
            raise UsageError("--spd needs --sync-tp-size N, the number of ranks that the sync points are dropped for")
        if self.sync_tp_size is not None and self.spd is None and not modes:
            raise UsageError("--sync-tp-size has no effect without --spd; leave it out, or name the layers to drop")
        if self.attention_sync is not None and self.mlp_sync is not None:
            Layout(self.attention_sync, self.mlp_sync, self.sync_tp_size)  # raises LayoutError

    def _check_auto(self) -> None:
        if self.spd == self.ladder == AUTO:
            raise UsageError(
                "--spd auto and --ladder auto cannot be combined: each counts what its layers cost without the other;"
                " name the layers of one of them"
            )
        kind = self.auto
        for key in CHOOSING:
            if getattr(self, key) is not None and (kind is None or key.partition("_")[0] in {SPD, LADDER} - {kind}):
                only = key.removesuffix("_fraction") if key.endswith("_fraction") else None
                needed = f"--{only} auto" if only else "--spd auto or --ladder auto"
                raise UsageError(f"{flag(key)} has no effect without {needed}")
        if kind is None:
            return
        if self.sensitivity is None:
            raise UsageError(f"--{kind} auto needs --sensitivity FILE, as `ladderize sensitivity` writes it")
        share = self.fraction
        if share is not None and self.max_ppl_increase is not None:
            raise UsageError(f"--{kind}-fraction and --max-ppl-increase both say how much to convert; give one of them")
        if self.max_ppl_increase is not None:
            ppl_increase(self.max_ppl_increase, 1.0)
        if share is not None and (type(share) not in (int, float) or not 0 < share <= 1):
            raise UsageError(f"--{kind}-fraction must be a number above 0 and at most 1, not {share!r}")

    @property
    def auto(self) -> str | None:
        """The kind of layers that are chosen by their sensitivity: ``spd``, ``ladder``, or None."""
        return SPD if self.spd == AUTO else LADDER if self.ladder == AUTO else None

    @property
    def fraction(self) -> float | None:
        """The fraction of all layers to choose by sensitivity."""
        return self.spd_fraction if self.auto == SPD else self.ladder_fraction

    @property
    def names_layers(self) -> bool:
        """True if the recipe names layers or modes; ``dense`` alone does not."""
        return not (self.ladder is self.spd is self.attention_sync is None)

    def resolve(self, source: Layout) -> tuple["Recipe", Selection | None]:
        """Return the recipe with the layers that ``auto`` selects for a source, and their selection; without ``auto``
        itself and None.

        Reads the sensitivity file, but does not compare its fingerprint.
        Raises UserError where the file does not fit.
        """
        kind = self.auto
        if kind is None or self.sensitivity is None:
            return self, None
        if not source.is_dense:
            raise UserError(
                f"--{kind} auto selects by sensitivities of the dense model, but the source is not dense ({source})"
            )
        path = Path(self.sensitivity)
        sensitivity = read_sensitivity(path)
        if sensitivity.num_layers != source.num_layers:
            raise UserError(
                f"{path} is of {sensitivity.num_layers} layers, but the model has {source.num_layers}; measure this"
                " model"
            )
        if kind == SPD and self.sync_tp_size not in (None, sensitivity.sync_tp_size):
            raise UserError(
                f"{path} was measured with sync_tp_size {sensitivity.sync_tp_size}, so it does not apply to"
                f" --sync-tp-size {self.sync_tp_size}"
            )
        selection = select(sensitivity, path, kind, self.fraction, self.max_ppl_increase)
        chosen: dict[str, Any] = dict.fromkeys(CHOOSING) | {kind: format_ranges(selection.layers)}
        if kind == SPD:
            chosen["sync_tp_size"] = sensitivity.sync_tp_size
        return replace(self, **chosen), selection

    def layout(self, source: Layout) -> Layout:
        """Return the layout that this recipe makes of a source's layout; raises LayoutError for ranges that do not
        fit."""
        layers = source.num_layers
        if self.dense:
            return Layout.dense(layers)
        if not self.names_layers:
            return source
        if self.attention_sync is not None and self.mlp_sync is not None:
            layout = Layout(self.attention_sync, self.mlp_sync, self.sync_tp_size)
            layout.check_layers(layers)
            return layout
        ladder = parse_ranges(self.ladder, layers, option="--ladder") if self.ladder is not None else []
        spd = parse_ranges(self.spd, layers, option="--spd") if self.spd is not None else []
        return Layout.from_layers(layers, ladder=ladder, spd=spd, sync_tp_size=self.sync_tp_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the options that were given, so the YAML reads like the command line."""
        return {key: value for key, value in asdict(self).items() if value not in (None, False)}


def read_recipe(path: Path) -> Recipe:
    """Return the recipe in a recipe file, or under the key ``recipe`` of a ladderize.yaml; raises UserError for a
    malformed one."""
    document = read_yaml(path, advice=" (a range that ends in a colon needs quotes)")
    if isinstance(document, dict) and "recipe" in document:
        document = document["recipe"]
    if not isinstance(document, dict) or not document:
        raise UserError(f"{path} holds no recipe; write for example 'ladder: 16:32'")
    kinds = get_type_hints(Recipe)
    given: dict[str, Any] = {}
    for key, value in document.items():
        if key not in kinds:
            near = difflib.get_close_matches(str(key), kinds, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(kinds)}"
            raise UserError(f"{path}: unknown key {key!r}; {hint}")
        where = f"{path}: {key}"
        given[key] = _text(value, where) if key in TEXT_KEYS else read_value(kinds[key], value, where)
    given |= {key: str(path.parent / given[key]) for key in PATHS if given.get(key) is not None}
    try:
        return Recipe(**given)
    except (UsageError, LayoutError) as error:
        raise UserError(f"{path}: {error}") from None


def _text(value: Any, where: str) -> str:
    """Return ranges as text; YAML may hold a number or a list. Raises UserError for anything else."""
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int | str) and not isinstance(item, bool) for item in items):
        raise UserError(f"{where} is {value!r}; write ranges such as 16:32, or a list of layers")
    return ",".join(map(str, items))
