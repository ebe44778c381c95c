"""How formats store a quantised projection: which tensors, and their shapes. The one place that says so."""

import math
from collections.abc import Callable
from dataclasses import dataclass

Shapes = tuple[tuple[int, ...], ...]  # any of them is right


@dataclass(frozen=True)
class Scheme:
    """How one projection [out, in] is quantised.

    stored_as: a row of FORMATS. rows, columns: the part of the weight that one scale is for; None is all of them.
    activations: none, static (scales that were measured beforehand) or dynamic. marks: asymmetric, outputs (static
    scales of outputs too).
    """

    stored_as: str
    bits: int
    kind: str  # int or float
    rows: int | None
    columns: int | None
    activations: str
    marks: frozenset[str] = frozenset()

    @property
    def is_fp8(self) -> bool:
        """Whether 8-bit floats are multiplied: weights, and activations too."""
        return self.kind == "float" and self.bits == 8 and self.activations != "none"

    @property
    def words(self) -> str:
        """``FP8 weights, one scale per channel; dynamic activations``."""
        parts = {(True, True): "per tensor", (False, True): "per channel"}
        several = f"per {self.rows} x {self.columns} block" if self.rows not in (None, 1) else f"per {self.columns}"
        scale = parts.get((self.rows is None, self.columns is None), several)
        name = f"FP{self.bits}" if self.kind == "float" else f"int{self.bits}"
        read = "activations not quantised" if self.activations == "none" else f"{self.activations} activations"
        return f"{name} weights, one scale {scale}; {read}"

    def steps(self) -> tuple[int, int]:
        """What rows and columns of the weight of one rank must be multiples of, so that the rank has whole scales and
        whole packed words."""
        stored = FORMATS[self.stored_as]
        word = 32 // math.gcd(self.bits, 32)
        packs_rows = stored.packs_rows or (stored.packs_columns and "asymmetric" in self.marks)
        rows = math.lcm(self.rows or 1, word if packs_rows else 1)
        return rows, math.lcm(self.columns or 1, word if stored.packs_columns else 1)


@dataclass(frozen=True)
class Companion:
    """A tensor of a quantised projection. needed: always, never, or under the ``Scheme.activations`` or mark of this
    name; what is not needed is refused, unless it is ``optional``. also: another name that it is known by."""

    dtypes: tuple[str, ...]
    shapes: Callable[[Scheme, int, int], Shapes]
    needed: str = "always"
    optional: bool = False
    also: str | None = None


@dataclass(frozen=True)
class Format:
    """The tensors of a quantised projection; along which dimension of the weight several numbers share a word.

    package: what transformers needs to run it: nothing more is "", and None is a format that it does not run.
    """

    tensors: dict[str, Companion]
    package: str | None
    packs_rows: bool = False
    packs_columns: bool = False


def _words(count: int, bits: int) -> int:
    return math.ceil(count * bits / 32)


def _parts(scheme: Scheme, rows: int, columns: int) -> tuple[int, int]:
    return math.ceil(rows / (scheme.rows or rows)), math.ceil(columns / (scheme.columns or columns))


def _whole(scheme: Scheme, rows: int, columns: int) -> Shapes:
    return ((rows, columns),)


def _scales(scheme: Scheme, rows: int, columns: int) -> Shapes:
    grid = _parts(scheme, rows, columns)
    if scheme.columns is not None:
        return (grid,)
    return (grid, (grid[0],)) if scheme.rows is not None else (grid, (1,), ())


def _one(scheme: Scheme, rows: int, columns: int) -> Shapes:
    return ((1,), ())


def _two(scheme: Scheme, rows: int, columns: int) -> Shapes:
    return ((2,),)


def _columns(scheme: Scheme, rows: int, columns: int) -> Shapes:
    return ((columns,),)


def _rows(scheme: Scheme, rows: int, columns: int) -> Shapes:
    return ((rows,),)


def _packed_columns(scheme: Scheme, rows: int, columns: int) -> Shapes:
    return ((rows, _words(columns, scheme.bits)),)


def _packed_zeros(scheme: Scheme, rows: int, columns: int) -> Shapes:
    grid = _parts(scheme, rows, columns)
    return ((_words(grid[0], scheme.bits), grid[1]),)


# AWQ and GPTQ store a weight as [in, out]
def _awq_weight(scheme: Scheme, rows: int, columns: int) -> Shapes:
    return ((columns, _words(rows, scheme.bits)),)


def _gptq_weight(scheme: Scheme, rows: int, columns: int) -> Shapes:
    return ((_words(columns, scheme.bits), rows),)


def _group_zeros(scheme: Scheme, rows: int, columns: int) -> Shapes:
    return ((_parts(scheme, rows, columns)[1], _words(rows, scheme.bits)),)


def _group_scales(scheme: Scheme, rows: int, columns: int) -> Shapes:
    return ((_parts(scheme, rows, columns)[1], rows),)


_FLOATS, _INT32, _FP8 = ("F32", "F16", "BF16"), ("I32",), ("F8_E4M3",)
_SCALE = Companion((*_FLOATS, "F8_E8M0"), _scales)
_MEASURED = Companion(_FLOATS, _one, "static")
_ZERO = ("I8", "U8", "I32", "F8_E4M3", *_FLOATS)
_PACKAGE = "compressed_tensors"
# of activations and outputs, which compressed-tensors keeps beside the weight
_COMPRESSED = {
    "weight_scale": _SCALE,
    "weight_zero_point": Companion(_ZERO, _scales, "asymmetric", optional=True),
    "input_scale": _MEASURED,
    "input_zero_point": Companion(_ZERO, _one, "never", optional=True),
    "output_scale": Companion(_FLOATS, _one, "outputs"),
    "output_zero_point": Companion(_ZERO, _one, "never", optional=True),
}
FORMATS = {
    "compressed-tensors float-quantized": Format({"weight": Companion(_FP8, _whole), **_COMPRESSED}, _PACKAGE),
    "compressed-tensors int-quantized": Format({"weight": Companion(("I8",), _whole), **_COMPRESSED}, _PACKAGE),
    "compressed-tensors naive-quantized": Format({"weight": Companion((*_FP8, "I8"), _whole), **_COMPRESSED}, _PACKAGE),
    "compressed-tensors pack-quantized": Format(
        {
            **_COMPRESSED,
            "weight_packed": Companion(_INT32, _packed_columns),
            "weight_shape": Companion(("I64", "I32"), _two),
            "weight_zero_point": Companion(_INT32, _packed_zeros, "asymmetric"),
            "weight_g_idx": Companion(_INT32, _columns, "never", optional=True),
        },
        _PACKAGE,
        packs_columns=True,
    ),
    "fp8": Format(
        {
            "weight": Companion(_FP8, _whole),
            "weight_scale": Companion((*_FLOATS, "F8_E8M0"), _scales, also="weight_scale_inv"),
            "input_scale": Companion(_FLOATS, _one, "static", also="activation_scale"),
        },
        None,
    ),
    "fp8 with blocks": Format({"weight": Companion(_FP8, _whole), "weight_scale_inv": _SCALE}, ""),
    "modelopt": Format({"weight": Companion(_FP8, _whole), "weight_scale": _SCALE, "input_scale": _MEASURED}, None),
    "awq": Format(
        {
            "qweight": Companion(_INT32, _awq_weight),
            "qzeros": Companion(_INT32, _group_zeros),
            "scales": Companion(_FLOATS, _group_scales),
        },
        "gptqmodel",
        packs_rows=True,
    ),
    "gptq": Format(
        {
            "qweight": Companion(_INT32, _gptq_weight),
            "qzeros": Companion(_INT32, _group_zeros),
            "scales": Companion(_FLOATS, _group_scales),
            "g_idx": Companion(_INT32, _columns, "reordered", optional=True),
            "bias": Companion(_FLOATS, _rows, "never", optional=True),  # old tools wrote one that nothing reads
        },
        "gptqmodel",
        packs_rows=True,
        packs_columns=True,
    ),
}
