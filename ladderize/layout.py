"""Layouts: the mode of each sync point of a tensor-parallel decoder. Imports no torch.

A layer has two sync points, after attention and after the MLP, where the partial outputs of all ranks are summed:

* ``blocking``: all-reduce, wait, go on (the dense model);
* ``overlapped``: the next sub-module computes while the all-reduce runs (Ladder Residual, arXiv 2501.06589);
* ``delayed``: the same, but each rank's next sub-module reads the rank's own partial at once;
* ``dropped``: no all-reduce; each rank carries its partial into the next sync point (Sync-Point Drop, arXiv
  2502.20727).

A layout is the list of these modes, plus the number of virtual ranks that delayed and dropped ones were made for.
"""

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from ladderize.errors import LadderizeError
from ladderize.families.registry import is_authors, is_ladderized, known_family

BLOCKING, OVERLAPPED, DELAYED, DROPPED = "blocking", "overlapped", "delayed", "dropped"


@dataclass(frozen=True)
class Mode:
    """A mode, as other files ask for it.

    layers: the name of layers with it, and their option.
    of_mlp: an MLP's sync point may have it.
    sends: an all-reduce sums the partials.
    hides: the next sub-module computes while the all-reduce runs.
    apart: each rank's next sub-module reads the rank's own partial.
    explained: in a model card, behind the mode's name.
    tag: of model cards.
    """

    layers: str
    of_mlp: bool = True
    sends: bool = True
    hides: bool = False
    apart: bool = False
    explained: str = ""
    tag: str | None = None


MODES = {
    BLOCKING: Mode("dense"),
    OVERLAPPED: Mode("ladder", hides=True, explained="\n(Ladder Residual, arXiv 2501.06589)", tag="ladder-residual"),
    DELAYED: Mode(
        "delayed",
        hides=True,
        apart=True,
        explained=" (the same, but each rank reads its own\npart at once)",
        tag="delayed-tensor-parallelism",
    ),
    DROPPED: Mode(
        "spd",
        of_mlp=False,
        sends=False,
        apart=True,
        explained=" (Sync-Point Drop, arXiv 2502.20727)",
        tag="sync-point-drop",
    ),
}
ATTENTION_MODES = tuple(MODES)
MLP_MODES = tuple(name for name, mode in MODES.items() if mode.of_mlp)
HIDING = tuple(name for name, mode in MODES.items() if mode.hides)
APART = tuple(name for name, mode in MODES.items() if mode.apart)
# The names of layers -> the mode of their attention sync, and of the MLP sync entering them.
LAYER_KINDS = {MODES[mode].layers: (mode, mode) for mode in MLP_MODES} | {
    MODES[mode].layers + ("" if entering == BLOCKING else f"+{MODES[entering].layers}"): (mode, entering)
    for mode in ATTENTION_MODES
    for entering in MLP_MODES
    if not MODES[mode].of_mlp
}
CONFIG_KEYS = ("attention_sync", "mlp_sync", "sync_tp_size")
DEFAULT_RANKS = 8  # the GPUs of the usual machine
RANGE = re.compile(r"all|(?P<layer>-?\d+)|(?P<start>-?\d+)?:(?P<stop>-?\d+)?", re.ASCII)


class LayoutError(LadderizeError, ValueError):
    """An error for a layout, or a range of layers, that makes no sense."""


class RangeSyntaxError(LayoutError):
    """An error for a range that is wrong for every model."""


def parse_ranges(text: str, num_layers: int, *, option: str = "layers") -> list[int]:
    """Return the sorted layers of ``16:32``, ``:8``, ``-16:``, ``5``, ``all`` or several of them with commas.

    Ranges are half-open as in Python, but not clipped: one that lies outside, or is empty, raises LayoutError.
    """

    def index(text: str) -> int:
        return int(text) + num_layers if text.startswith("-") else int(text)

    layers: set[int] = set()
    for span in str(text).replace(" ", "").split(","):
        match = RANGE.fullmatch(span)
        if match is None:
            raise RangeSyntaxError(
                f"{option}: {span!r} is not a range of layers, half-open and without steps; write for example 16:32,"
                " :8, -16:, 5 or all"
            )
        start = index(match["layer"] or match["start"] or "0")
        stop = index(match["stop"]) if match["stop"] else num_layers
        if match["layer"]:
            stop = start + 1
        if not 0 <= start < stop <= num_layers:
            raise LayoutError(
                f"{option}: {span} is empty or out of range for a model of {num_layers} layers (0 to {num_layers - 1})"
            )
        layers.update(range(start, stop))
    return sorted(layers)


def format_ranges(layers: Iterable[int]) -> str:
    """Return the shortest text that ``parse_ranges`` reads back: ``[4, 8, 9, 10]`` -> ``4,8:11``; ``none`` for []."""
    spans: list[list[int]] = []
    for layer in sorted(layers):
        if spans and spans[-1][1] == layer:
            spans[-1][1] = layer + 1
        else:
            spans.append([layer, layer + 1])
    return ",".join(str(a) if b == a + 1 else f"{a}:{b}" for a, b in spans) or "none"


@dataclass(frozen=True)
class Layout:
    """The modes of all sync points, one attention and one MLP sync for each layer; LayoutError for inconsistent ones.

    sync_tp_size: virtual ranks, iff something is delayed or dropped.
    """

    attention_sync: tuple[str, ...]
    mlp_sync: tuple[str, ...]
    sync_tp_size: int | None = None

    def __post_init__(self) -> None:
        if len(self.attention_sync) != len(self.mlp_sync) or not self.mlp_sync:
            raise LayoutError(
                f"attention_sync has {len(self.attention_sync)} entries and mlp_sync {len(self.mlp_sync)}; both need"
                " one per layer"
            )
        for key, modes, allowed in (
            ("attention_sync", self.attention_sync, ATTENTION_MODES),
            ("mlp_sync", self.mlp_sync, MLP_MODES),
        ):
            for layer, mode in enumerate(modes):
                if mode not in allowed:
                    reason = "; q, k, v and the caches would differ by rank" if mode == DROPPED else ""
                    raise LayoutError(f"{key}[{layer}] is {mode!r}, but must be one of {', '.join(allowed)}{reason}")
        if self.mlp_sync[-1] != BLOCKING:
            raise LayoutError(
                "the last layer's MLP sync point must be blocking: no sub-module follows that could hide it"
            )
        if self.sync_tp_size is not None and (type(self.sync_tp_size) is not int or self.sync_tp_size < 1):
            raise LayoutError(f"sync_tp_size is {self.sync_tp_size!r}, but must be a positive integer")
        apart = any(mode in APART for mode in self.attention_sync + self.mlp_sync)
        if apart and self.sync_tp_size is None:
            raise LayoutError(
                "delayed and dropped sync points need sync_tp_size, the number of virtual ranks (--sync-tp-size N)"
            )
        if self.sync_tp_size is not None and not apart:
            raise LayoutError(
                "sync_tp_size (--sync-tp-size) has no effect where no sync point is delayed or dropped; leave it out"
            )

    @classmethod
    def dense(cls, num_layers: int) -> "Layout":
        return cls((BLOCKING,) * num_layers, (BLOCKING,) * num_layers)

    @classmethod
    def from_layers(
        cls,
        num_layers: int,
        *,
        ladder: Iterable[int] = (),
        delayed: Iterable[int] = (),
        spd: Iterable[int] = (),
        sync_tp_size: int | None = None,
    ) -> "Layout":
        """Return the layout of named layers.

        A ladder layer overlaps its own attention sync and the MLP sync entering it (the previous layer's); a delayed
        layer delays them; an spd layer drops its attention sync, and if it is ladder or delayed, too, overlaps or
        delays the entering MLP sync. Raises LayoutError for layers that do not go together.
        """
        named = {"ladder": set(ladder), "delayed": set(delayed), "spd": set(spd)}
        for name, layers in named.items():
            if outside := layers.difference(range(num_layers)):
                raise LayoutError(
                    f"{name}: {format_ranges(outside)} is out of range for a model of {num_layers} layers"
                    f" (0 to {num_layers - 1})"
                )
        if both := named["ladder"] & named["delayed"]:
            raise LayoutError(f"ladder and delayed exclude each other, and both name {format_ranges(both)}")
        hiding = dict.fromkeys(named["ladder"], OVERLAPPED) | dict.fromkeys(named["delayed"], DELAYED)
        attention = (DROPPED if i in named["spd"] else hiding.get(i, BLOCKING) for i in range(num_layers))
        mlp = (hiding.get(i + 1, BLOCKING) for i in range(num_layers))
        return cls(tuple(attention), tuple(mlp), sync_tp_size)

    def with_layers(self, layers: Set[int], other: "Layout") -> "Layout":
        """Return this layout with some layers of another one: their attention syncs and the MLP syncs entering them."""
        apart = [i for i, mode in enumerate(self.attention_sync) if mode in APART or self.entering(i) in APART]
        staying = [i for i in apart if i not in layers]
        if staying and other.sync_tp_size not in (None, self.sync_tp_size):
            raise LayoutError(
                f"--sync-tp-size {other.sync_tp_size} is not the source's, {self.sync_tp_size}, for which layers"
                f" {format_ranges(staying)} were delayed or dropped; name them, too, or clear them with --dense"
                f" {format_ranges(staying)}"
            )
        attention = tuple(
            other.attention_sync[i] if i in layers else mode for i, mode in enumerate(self.attention_sync)
        )
        mlp = tuple(other.mlp_sync[i] if i + 1 in layers else mode for i, mode in enumerate(self.mlp_sync))
        return Layout(attention, mlp, self.sync_tp_size if staying else other.sync_tp_size)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Layout":
        """Return the layout of a config.json: ladderized, the authors' ``llamaLadder``, or dense where it has none."""
        num_layers = config["num_hidden_layers"]
        if is_authors(config):
            return cls.from_layers(num_layers, ladder=_authors_ladder_layers(config.get("ladder_layers"), num_layers))
        if not is_ladderized(config):
            return cls.dense(num_layers)
        lists = []
        for key in ("attention_sync", "mlp_sync"):
            modes = config.get(key)
            if not isinstance(modes, list) or len(modes) != num_layers:
                raise LayoutError(f"config.json: {key} must be a list of {num_layers} modes, one for each layer")
            lists.append(tuple(modes))
        return cls(lists[0], lists[1], config.get("sync_tp_size"))

    @property
    def num_layers(self) -> int:
        return len(self.attention_sync)

    @property
    def kinds(self) -> dict[str, list[int]]:
        """The layers that are not dense, by each of their names; ``spd+ladder`` counts as both."""
        layers: dict[str, list[int]] = {mode.layers: [] for mode in MODES.values()}
        for index in range(self.num_layers):
            for name in self.layer_name(index).split("+"):
                layers.setdefault(name, []).append(index)
        del layers[MODES[BLOCKING].layers]
        return {name: indices for name, indices in layers.items() if indices}

    @property
    def modes(self) -> list[str]:
        """The modes of all sync points, in the order in which a pass comes to them."""
        return [mode for layer in zip(self.attention_sync, self.mlp_sync, strict=True) for mode in layer]

    @property
    def hides(self) -> bool:
        """True if a sub-module computes while an all-reduce runs."""
        return any(mode in HIDING for mode in self.modes)

    @property
    def is_dense(self) -> bool:
        return set(self.attention_sync + self.mlp_sync) == {BLOCKING}

    @property
    def converted_layers(self) -> list[int]:
        """The layers that compute something else than the dense model's, or read another stream."""
        return [layer for layer in range(self.num_layers) if self.layer_name(layer) != MODES[BLOCKING].layers]

    def entering(self, layer: int) -> str:
        """Return the mode of the MLP sync point that enters ``layer``; blocking for the first."""
        return self.mlp_sync[layer - 1] if layer else BLOCKING

    def layer_name(self, layer: int) -> str:
        """Return one of ``LAYER_KINDS``, or a layer's modes, such as ``attention overlapped``."""
        attention, entering = self.attention_sync[layer], self.entering(layer)
        if layer == 0 and attention in MLP_MODES:
            return MODES[attention].layers
        for name, modes in LAYER_KINDS.items():
            if modes == (attention, entering):
                return name
        of_both = ("attention", attention), ("entering MLP", entering)
        return ", ".join(f"{name} {mode}" for name, mode in of_both if mode != BLOCKING)

    def count(self, mode: str) -> int:
        """Return the number of sync points with this mode, of 2 per layer."""
        return (self.attention_sync + self.mlp_sync).count(mode)

    def to_config(self) -> dict[str, Any]:
        """Return the layout's keys of config.json; ``from_config`` reads them back."""
        values = list(self.attention_sync), list(self.mlp_sync), self.sync_tp_size
        return dict(zip(CONFIG_KEYS, values, strict=True))

    def check_layers(self, num_layers: int) -> None:
        """Raise LayoutError unless the model has as many layers as this layout."""
        if self.num_layers != num_layers:
            raise LayoutError(f"the layout is of {self.num_layers} layers, but the model has {num_layers}")

    def check_model(self, config: Mapping[str, Any]) -> None:
        """Raise LayoutError unless the model can be split into ``sync_tp_size`` virtual ranks, which read apart."""
        if self.sync_tp_size is not None:
            check_split(config, self.sync_tp_size, name="sync-tp-size")
            family = known_family(config)
            if family.describe(config).norms_sums:
                raise LayoutError(
                    f"{family.class_prefix} has a norm behind each sum, which needs the complete sum: its sync points"
                    " can be overlapped (--ladder), but not delayed or dropped"
                )

    @property
    def words(self) -> str:
        """The layout without the number of layers, such as ``ladder 16:32`` or ``dense``."""
        kinds = ", ".join(f"{name} {format_ranges(layers)}" for name, layers in self.kinds.items())
        ranks = "" if self.sync_tp_size is None else f" (sync_tp_size {self.sync_tp_size})"
        return (kinds or MODES[BLOCKING].layers) + ranks

    def __str__(self) -> str:
        """Return the layout in one line, such as ``32 layers: ladder 16:32``."""
        return f"{self.num_layers} layers: {self.words}"

    def table(self) -> list[dict[str, Any]]:
        """Return one row for each layer: its name and its two sync points."""
        modes = zip(self.attention_sync, self.mlp_sync, strict=True)
        return [
            {"layer": layer, "kind": self.layer_name(layer), "attention_sync": attention, "mlp_sync": mlp}
            for layer, (attention, mlp) in enumerate(modes)
        ]


def check_split(config: Mapping[str, Any], ranks: int, *, name: str) -> None:
    """Raise LayoutError unless ``ranks`` divides the query heads and the intermediate size and fits the KV heads."""
    problem = _split_problem(config, ranks)
    if problem:
        raise LayoutError(f"{name} {ranks} {problem}; this model takes {', '.join(map(str, fitting_ranks(config)))}")


def fitting_ranks(config: Mapping[str, Any]) -> list[int]:
    """Return every number of ranks that a model can be split into, ascending; 1 is always among them."""
    return [ranks for ranks in range(1, config["num_attention_heads"] + 1) if not _split_problem(config, ranks)]


def runnable_sizes(config: Mapping[str, Any], layout: Layout) -> list[int]:
    """Return every number of processes that can run this layout, none of which share a virtual rank; ascending."""
    return [ranks for ranks in fitting_ranks(config) if (layout.sync_tp_size or 0) % ranks == 0]


def usual_ranks(config: Mapping[str, Any], layout: Layout) -> int:
    """Return the number of ranks that this layout is made for: its sync_tp_size, else as many as fit, up to 8."""
    return layout.sync_tp_size or max(ranks for ranks in fitting_ranks(config) if ranks <= DEFAULT_RANKS)


def _split_problem(config: Mapping[str, Any], ranks: int) -> str | None:
    heads, kv_heads = config["num_attention_heads"], known_family(config).kv_heads(config)
    if ranks < 1:
        return "must be at least 1"
    if heads % ranks:
        return f"does not divide the {heads} attention heads"
    if config["intermediate_size"] % ranks:
        return f"does not divide the intermediate size {config['intermediate_size']}"
    if kv_heads % ranks and ranks % kv_heads:
        return f"neither divides nor is a multiple of the {kv_heads} key-value heads"
    return None


def _authors_ladder_layers(value: object, num_layers: int) -> list[int]:
    """Return the layers of ``ladder_layers`` in a published checkpoint: the last N for an integer N, or a list."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= num_layers:
        return list(range(num_layers - value, num_layers))
    if isinstance(value, list) and all(isinstance(i, int) and 0 <= i < num_layers for i in value):
        return sorted(set(value))
    raise LayoutError(f"config.json: ladder_layers is {value!r}, neither a number of layers nor a list of them")
