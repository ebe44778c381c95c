"""The compiled kernels as Python calls them: the structures and signatures of kernels.cpp."""

import ctypes
import functools
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from ladderize.ranks.group import Ranks
from ladderize.runtime.native.build import NotCompiledError, found_library, library

TYPES = {torch.float32: 0, torch.bfloat16: 1}
BLOCK, LANES = 64, 16  # of attention: columns whose scores are held at a time, numbers of a vector


class Cache(Structure):
    """See kernels.cpp: one layer's keys and values."""

    _fields_ = (
        *(("keys", c_void_p), ("values", c_void_p), ("row", c_int64), ("head", c_int64)),
        *(("rows", c_void_p), ("columns", c_void_p), ("column", c_int64)),
        *(("all_rows", c_int64), ("all_columns", c_int64)),
    )


class Heads(Structure):
    """The sizes of a pass."""

    _fields_ = tuple((name, c_int64) for name in ("batch", "tokens", "heads", "kv_heads", "dim"))


class Seen(Structure):
    """See kernels.cpp: which columns a token sees."""

    _fields_ = (("bytes", c_void_p), *((name, c_int64) for name in ("row", "token", "causal")))


SIGNATURES = {
    "rms_norm": (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int),
    "gated": (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int),
    "rotate": (
        *(c_int, POINTER(Heads), c_void_p, c_void_p, c_float, c_void_p, c_int64, c_void_p, POINTER(Cache), c_int),
    ),
    "attend": (
        *(c_int, POINTER(Heads), c_void_p, POINTER(Cache), POINTER(Seen), c_int64, c_float, c_void_p, c_void_p),
        c_int,
    ),
    "sum": (c_int, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int),
}


@functools.cache
def kernels() -> ctypes.CDLL:
    """Its functions are named as in kernels.cpp; those that look into a KV cache return whether they did not fit it.
    Raises NotCompiledError."""
    found = library()
    for name, arguments in SIGNATURES.items():
        function = getattr(found, f"ladderize_{name}")
        function.argtypes = arguments
        function.restype = c_int if name in ("rotate", "attend") else None
    return found


def agreed_kernels(group: Ranks) -> ctypes.CDLL:
    """The same, where every rank of the group has them: who adds in another order gets other bits. All ranks call it.
    Raises NotCompiledError on all of them."""
    found = found_library()
    problem = next(filter(None, group.gather(found if isinstance(found, str) else None)), None)
    if problem is not None:
        raise NotCompiledError(problem)
    return kernels()


def address(tensor: Tensor | None) -> int | None:
    """Where its numbers are; a null pointer of None."""
    return None if tensor is None else tensor.data_ptr()
