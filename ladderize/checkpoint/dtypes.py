"""The dtypes that safetensors knows, by its names, and what torch calls them: the one table of them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# safetensors' name -> bytes of an element, torch's name (None: nothing here computes with it)
KNOWN_DTYPES: dict[str, tuple[int, str | None]] = {
    "F64": (8, "float64"),
    "F32": (4, "float32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "I64": (8, "int64"),
    "I32": (4, "int32"),
    "I16": (2, "int16"),
    "I8": (1, "int8"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
    "U64": (8, None),
    "U32": (4, None),
    "U16": (2, None),
    "F8_E4M3": (1, None),
    "F8_E5M2": (1, None),
    "F8_E8M0": (1, None),
    "C64": (8, None),
}
DTYPE_BYTES = {stored: width for stored, (width, _) in KNOWN_DTYPES.items()}
FLOAT_DTYPES = {stored: KNOWN_DTYPES[stored][1] or "" for stored in ("F64", "F32", "F16", "BF16")}
STORED_NAMES = {name: stored for stored, (_, name) in KNOWN_DTYPES.items() if name is not None}
CAST_DTYPES = ("float32", "float16", "bfloat16")  # what weights may be stored as anew, and be run in


def torch_dtype(stored: str) -> "torch.dtype":
    """Torch's dtype for one that safetensors stores; KeyError for one that has none here."""
    import torch

    names = {stored: name for name, stored in STORED_NAMES.items()}
    dtype: torch.dtype = getattr(torch, names[stored])
    return dtype


def stored_dtype_name(dtype: "torch.dtype") -> str:
    """How safetensors calls a dtype; raises ValueError for one that is not written here."""
    name = str(dtype).removeprefix("torch.")
    if name not in STORED_NAMES:
        raise ValueError(f"tensors of {name} are not written; there are {', '.join(STORED_NAMES)}")
    return STORED_NAMES[name]
