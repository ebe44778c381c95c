"""The weight files of an output: taken over, or written with another dtype, other shards, head order or values.

They are written in chunks, so a whole tensor is never in memory.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import NamedTuple

from ladderize.checkpoint.reading import (
    DTYPE_BYTES,
    FLOAT_DTYPES,
    STORED_NAMES,
    WEIGHTS,
    Checkpoint,
    TensorInfo,
    torch_dtype,
)
from ladderize.checkpoint.tensors import TensorReader, encode_header
from ladderize.errors import UsageError, UserError

MOVED_AT_ONCE = 4 << 20  # bytes read at a time; a multiple of every element size
ROUNDED_AT_ONCE = 128 << 10  # for casts by numpy: malloc reuses pieces this small; fresh pages cost more than the cast
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Move(NamedTuple):
    """A permutation of equal blocks of a tensor's rows (axis 0) or columns (axis 1).

    order: the block at position p was at ``order[p]``.
    """

    order: tuple[int, ...]
    axis: int


@dataclass(frozen=True)
class Entry:
    """One tensor of a file to write.

    name: in the file.
    dtype: the safetensors dtype to store.
    source: the present place of its values.
    move: the permutation of its rows or columns.
    """

    name: str
    dtype: str
    source: TensorInfo
    move: Move | None = None

    @property
    def nbytes(self) -> int:
        return self.source.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Shard:
    """A safetensors file of the output, with its tensors in the order of the file.

    rewritten: False where it is the source's own file.
    """

    file: str
    entries: tuple[Entry, ...]
    rewritten: bool

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    @property
    def read_bytes(self) -> int:
        return sum(entry.source.nbytes for entry in self.entries)


def parse_size(text: str, *, option: str = "--max-shard-size") -> int:
    """Return the bytes of ``5GB``, ``500MB``, ``2GiB`` or a plain number; raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(text).strip())
    if not match or match[2].upper() not in UNITS or float(match[1]) <= 0:
        raise UsageError(f"{option}: {text!r} is not a size; write for example 5GB or 500MB")
    return max(1, int(float(match[1]) * UNITS[match[2].upper()]))


def plan_shards(
    checkpoint: Checkpoint,
    *,
    dtype: str | None = None,
    max_bytes: int | None = None,
    moves: Mapping[str, Move] | None = None,
    replace: Mapping[str, TensorInfo] | None = None,
) -> list[Shard]:
    """Return the weight files of an output. Without ``max_bytes`` every tensor stays in its file.

    dtype: store all as float32, float16 or bfloat16.
    moves: permutations, by tensor.
    replace: tensors with values from elsewhere, which do not move; they are stored in the dtype of those that they
    replace.
    Raises UserError if one does not fit.
    """
    moves, replace = moves or {}, replace or {}
    check_replacements(checkpoint, replace)
    entries: dict[str, Entry] = {}
    for name, old in checkpoint.tensors.items():
        move = moves.get(name) if name not in replace else None
        entries[name] = Entry(name, STORED_NAMES[dtype] if dtype else old.dtype, replace.get(name, old), move)
    if max_bytes is None:
        kept = {old.name: Entry(old.name, old.dtype, old) for old in checkpoint.tensors.values() if old.is_stored}
        changed = {name for name, entry in entries.items() if entry != kept.get(name)}
        by_file = {
            file: [name for name, old in checkpoint.tensors.items() if old.file == file]
            for file in checkpoint.weight_files
        }
        return [
            Shard(file, _aligned([entries[name] for name in names]), not changed.isdisjoint(names))
            for file, names in by_file.items()
        ]
    groups: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries.values():
        if groups[-1] and filled + entry.nbytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += entry.nbytes
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    return [
        Shard(name, _aligned(group), True)
        for name, group in zip([WEIGHTS] if len(groups) == 1 else names, groups, strict=True)
    ]


def check_replacements(checkpoint: Checkpoint, replace: Mapping[str, TensorInfo]) -> None:
    """Raise UserError unless each replacement is a float tensor with the shape of one of the checkpoint's."""
    for name, new in replace.items():
        if name not in checkpoint.tensors:
            raise UserError(f"{new.file} is to replace {name}, but {checkpoint.folder} has no such tensor")
        if new.shape != checkpoint.tensors[name].shape:
            wanted = list(checkpoint.tensors[name].shape)
            raise UserError(f"{new.file} is to replace {name}, but has shape {list(new.shape)} instead of {wanted}")
        if new.dtype not in FLOAT_DTYPES:
            raise UserError(f"{new.file} is to replace {name}, but is stored as {new.dtype}, which is not a float type")


def _aligned(entries: list[Entry]) -> tuple[Entry, ...]:
    """Return the entries with wide elements first, so that every tensor begins at a multiple of its element size."""
    return tuple(sorted(entries, key=lambda entry: -DTYPE_BYTES[entry.dtype]))


def write_shard(checkpoint: Checkpoint, shard: Shard, path: Path, advance: Callable[[int], None]) -> None:
    """Stream the tensors of one shard from their places into ``path``."""
    header = encode_header((entry.name, entry.dtype, entry.source.shape) for entry in shard.entries)
    with TensorReader(checkpoint.folder) as reader, path.open("xb") as writer:
        writer.write(header)
        for entry in shard.entries:
            _stream(entry, reader, writer, advance)


def _stream(entry: Entry, reader: TensorReader, writer: BufferedIOBase, advance: Callable[[int], None]) -> None:
    """Copy one tensor.

    The kernel copies it where nothing changes. Otherwise it is read in chunks: whole rows where columns move, one block
    of rows after the other where rows move.
    """
    source, move = entry.source, entry.move
    if not source.is_stored:
        writer.write(bytes(entry.nbytes))
        return
    step = ROUNDED_AT_ONCE if _is_rounded(entry) else MOVED_AT_ONCE
    if move is None and entry.dtype == source.dtype:
        reader.copy(source, writer, advance)
        return
    spans = [(source.start, source.stop)]
    if move is not None and move.axis == 0:
        size = source.nbytes // len(move.order)
        spans = [(source.start + block * size, source.start + (block + 1) * size) for block in move.order]
    elif move is not None:
        row = source.nbytes // source.shape[0]
        step = max(1, step // row) * row
    for chunk in reader.chunks(source, spans, step):
        values = chunk
        if move is not None and move.axis:
            values = _move_columns(chunk, move.order, source.nbytes // source.shape[0])
        writer.write(values if entry.dtype == source.dtype else _cast(values, entry))
        advance(len(chunk))


def _move_columns(chunk: memoryview, order: tuple[int, ...], row: int) -> memoryview:
    """Return whole rows of ``row`` bytes each with their blocks in ``order``. Works on bytes of any dtype."""
    import numpy as np

    return (
        np.take(np.frombuffer(chunk, np.uint8).reshape(-1, len(order), row // len(order)), order, axis=1)
        .reshape(-1)
        .data
    )


def _is_rounded(entry: Entry) -> bool:
    return (entry.source.dtype, entry.dtype) == ("F32", "BF16")


def _cast(chunk: memoryview, entry: Entry) -> memoryview:
    """Return the values in the entry's dtype; raises UserError where a finite one would become infinite."""
    cast, overflows = _round(chunk) if _is_rounded(entry) else _cast_by_torch(chunk, entry)
    if overflows:
        raise UserError(
            f"{entry.name} has values too large for {FLOAT_DTYPES[entry.dtype]}; take --dtype bfloat16 or float32"
        )
    return cast


def _round(chunk: memoryview) -> tuple[memoryview, bool]:
    """Return float32 values as the bits of the nearest (even) bfloat16, and whether a finite one became infinite.

    The bits are torch's, but without importing torch, which takes as long as copying 2 GB.
    """
    import numpy as np

    values = np.frombuffer(chunk, np.float32)
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    cast = rounded.astype(np.uint16)
    cast[np.isnan(values)] = 0xFFFF
    return cast.view(np.uint8).data, bool(np.isfinite(values[cast & 0x7FFF == 0x7F80]).any())


def _cast_by_torch(chunk: memoryview, entry: Entry) -> tuple[memoryview, bool]:
    """Return the values in the entry's dtype, and whether a finite one became infinite.

    One thread casts: a chunk takes 0.4 ms, and on busy cores waiting for a second thread takes longer.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        values = torch.frombuffer(chunk, dtype=torch_dtype(entry.source.dtype))
        cast = values.to(torch_dtype(entry.dtype))
        # testing the largest takes a fortieth of the time of testing each
        overflows = not torch.isfinite(cast.abs().max()) and bool(torch.isfinite(values[torch.isinf(cast)]).any())
    finally:
        torch.set_num_threads(threads)
    return cast.view(torch.uint8).numpy().data, overflows


def index_for(shards: list[Shard]) -> Mapping[str, object]:
    """Return the content of model.safetensors.index.json."""
    weight_map = {entry.name: shard.file for shard in shards for entry in shard.entries}
    return {
        "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
        "weight_map": dict(sorted(weight_map.items())),
    }
