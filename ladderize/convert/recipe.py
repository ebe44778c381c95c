"""The recipe: the options that decide what a conversion computes."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

from ladderize.choices import LAYOUT, check_options, option
from ladderize.errors import UsageError, UserError
from ladderize.files.documents import read_yaml
from ladderize.files.records import read_value
from ladderize.layout import APART, MODES, Layout, LayoutError, format_ranges, parse_ranges

RANGE_KEYS = tuple(mode.layers for mode in MODES.values())  # may be numbers in YAML
LAYERS_APART = {MODES[mode].layers for mode in APART}
RANGES = "half-open, comma-separated: 16:32, :8, -16:, 4,8:12 or all"


@dataclass(frozen=True)
class Recipe:
    """The options that decide what ``ladderize convert`` computes; None leaves it as in the source, as layers that none
    names. attention_sync, mlp_sync: the modes of all layers, for a layout that no names of layers compile to."""

    ladder: str | None = option(
        f"Layers whose all-reduces are overlapped (Ladder Residual): {RANGES}.", panel=LAYOUT, metavar="RANGES"
    )
    delayed: str | None = option(
        "The same, but each rank reads its own part of a sum at once, and the others' late.",
        panel=LAYOUT,
        metavar="RANGES",
    )
    spd: str | None = option(
        "Layers whose attention all-reduce is dropped (Sync-Point Drop).", panel=LAYOUT, metavar="RANGES"
    )
    sync_tp_size: int | None = option(
        "With --delayed and --spd: TP size that OUT is made for (virtual ranks). It also runs on TP sizes that divide"
        " it.",
        panel=LAYOUT,
        min=1,
        shown="as in SRC",
    )
    dense: str | None = option(
        "Layers to make blocking again before the others are named; all: the family's own plain model.",
        panel=LAYOUT,
        metavar="RANGES",
    )
    dtype: Literal["float32", "float16", "bfloat16"] | None = option(
        "Dtype to store weights in: float32, bfloat16 or float16.", panel="Weights", metavar="DTYPE", shown="as in SRC"
    )
    assignment: str | None = option(
        "Assign heads and neurons to ranks as this assignment.json says.", panel="Who shares a rank", metavar="FILE"
    )
    attention_sync: tuple[str, ...] | None = None
    mlp_sync: tuple[str, ...] | None = None

    @classmethod
    def from_layout(cls, layout: Layout) -> "Recipe":
        """Return the recipe that makes this layout of any source, by names of layers where they compile to it."""
        named = {name: layers for name, layers in layout.kinds.items() if name in RANGE_KEYS}
        ranks = layout.sync_tp_size if named.keys() & LAYERS_APART else None  # of single sync points no name tells
        if Layout.from_layers(layout.num_layers, **named, sync_tp_size=ranks) != layout:
            return cls(sync_tp_size=layout.sync_tp_size, attention_sync=layout.attention_sync, mlp_sync=layout.mlp_sync)
        ranges: dict[str, Any] = {name: format_ranges(layers) for name, layers in named.items()}
        return cls(dense="all", **ranges, sync_tp_size=ranks)

    def __post_init__(self) -> None:
        check_options(self)
        modes = [key for key in (self.attention_sync, self.mlp_sync) if key is not None]
        if modes and (len(modes) == 1 or self.ranges):
            raise UsageError(
                "attention_sync and mlp_sync say every mode: they go together, without dense, ladder, delayed and spd"
            )
        if self.sync_tp_size is not None and not modes and self.delayed is None and self.spd is None:
            raise UsageError(
                "--sync-tp-size has no effect without --delayed or --spd; leave it out, or name their layers"
            )
        if self.attention_sync is not None and self.mlp_sync is not None:
            Layout(self.attention_sync, self.mlp_sync, self.sync_tp_size)  # raises LayoutError

    @property
    def ranges(self) -> dict[str, str]:
        """The ranges that were given, by option."""
        texts = {name: getattr(self, name) for name in RANGE_KEYS}
        return {name: text for name, text in texts.items() if text is not None}

    @property
    def names_layers(self) -> bool:
        """True if the recipe names layers or modes; ``dense`` alone does not."""
        return bool(self.ranges.keys() - {"dense"}) or self.attention_sync is not None

    def layout(self, source: Layout) -> Layout:
        """Return the layout that this recipe makes of a source's: named layers are replaced, all others stay."""
        layers = source.num_layers
        if self.attention_sync is not None and self.mlp_sync is not None:
            layout = Layout(self.attention_sync, self.mlp_sync, self.sync_tp_size)
            layout.check_layers(layers)
            return layout
        named = {name: parse_ranges(text, layers, option=f"--{name}") for name, text in self.ranges.items()}
        changed = set().union(*named.values())
        named.pop("dense", None)
        ranks = self.sync_tp_size or source.sync_tp_size if named.keys() & LAYERS_APART else None
        return source.with_layers(changed, Layout.from_layers(layers, **named, sync_tp_size=ranks))

    def to_dict(self) -> dict[str, Any]:
        """Return the options that were given, so the YAML reads like the command line."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def read_recipe(path: Path) -> Recipe:
    """Return the recipe in a recipe file, or under the key ``recipe`` of a ladderize.yaml.

    A file describes the whole layout: where it names layers and does not say ``dense``, all others are dense.
    """
    document = read_yaml(path, advice=" (a range that ends in a colon needs quotes)")
    if isinstance(document, dict) and "recipe" in document:
        document = document["recipe"]
    if not isinstance(document, dict) or not document:
        raise UserError(f"{path} holds no recipe; write for example 'ladder: 16:32'")
    kinds = get_type_hints(Recipe)
    values: dict[str, Any] = {}
    for key, value in document.items():
        if key not in kinds:
            raise UserError(f"{path}: unknown key {key!r}; known are {', '.join(kinds)}")
        if key in RANGE_KEYS:
            items = value if isinstance(value, list) else [value]
            if not all(isinstance(item, int | str) and not isinstance(item, bool) for item in items):
                raise UserError(f"{path}: {key} is {value!r}; write ranges such as 16:32, or a list of layers")
            values[key] = ",".join(map(str, items))
        else:
            values[key] = read_value(kinds[key], value, f"{path}: {key}")
    if values.keys() & {*RANGE_KEYS}:
        values.setdefault("dense", "all")
    if values.get("assignment") is not None:
        values["assignment"] = str(path.parent / values["assignment"])  # relative to the recipe's folder
    try:
        return Recipe(**values)
    except (UsageError, LayoutError) as error:
        raise UserError(f"{path}: {error}") from None
