"""Writing a safetensors file tensor by tensor: its values need never be in memory together."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ladderize.console import UserError, sentence
from ladderize.convert.checkpoint import FLOAT_DTYPES, TensorInfo, read_header
from ladderize.convert.weights import encode_header

INTEGER_DTYPES = {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
NAMES = {name: stored for stored, name in (FLOAT_DTYPES | INTEGER_DTYPES).items()}


def infos_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """What ``write_tensors`` has to know beforehand of tensors that are in memory."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def write_tensors(
    path: Path,
    infos: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    produce: Callable[[str], Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write ``path`` anew, with the tensors that ``produce(name)`` returns one after the other, and fsync it.

    infos: name -> (dtype, shape) of each, floats and integers of any shape, 0-d too. A produced tensor may lie on any
    device and need not be contiguous; ValueError if it is not as announced. metadata: strings for the header; "format":
    "pt" is always among them. Raises UserError where the system cannot write, for example on a full disk; then, as with
    any error, no file is left.
    """
    ordered = sorted(
        infos, key=lambda name: -infos[name][0].itemsize
    )  # wide elements first, so that each tensor is aligned
    header = encode_header(
        ((name, stored_name(infos[name][0]), infos[name][1]) for name in ordered), {"format": "pt", **(metadata or {})}
    )
    try:
        with path.open("wb") as file:
            file.write(header)
            for name in ordered:
                dtype, shape = infos[name]
                tensor = produce(name).detach()
                if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
                    raise ValueError(
                        f"{name} was announced as {dtype} {list(shape)}, but is {tensor.dtype} {list(tensor.shape)}"
                    )
                values = tensor.cpu().reshape(-1).view(torch.uint8).numpy()
                file.write(values.data)
                advance(values.nbytes)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UserError(f"{path} cannot be written ({sentence(error)}); nothing was left there") from error
        raise


def stored_name(dtype: torch.dtype) -> str:
    """How safetensors calls a dtype; raises ValueError for one that is not written here."""
    name = str(dtype).removeprefix("torch.")
    if name not in NAMES:
        raise ValueError(f"tensors of {name} are not written; there are {', '.join(NAMES)}")
    return NAMES[name]


def locate_tensors(path: Path) -> dict[str, TensorInfo]:
    """Where the tensors of one file lie, with its absolute path: what the converter takes as ``replace``."""
    path = path.resolve()
    return {name: replace(info, file=str(path)) for name, info in read_header(path.parent, path.name).items()}
