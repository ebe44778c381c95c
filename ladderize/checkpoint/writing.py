"""Writes a checkpoint's weights: a file that does not change is linked or copied, others are written some rows of a
tensor at a time, with another dtype, order of heads and neurons, or values."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ladderize.checkpoint.config import EMBEDDING
from ladderize.checkpoint.reading import (
    DTYPE_BYTES,
    FLOAT_DTYPES,
    INDEX,
    STORED_NAMES,
    WEIGHTS,
    Checkpoint,
    TensorInfo,
    torch_dtype,
)
from ladderize.checkpoint.tensors import read_tensor, shorter, write_file
from ladderize.errors import UserError
from ladderize.files import output
from ladderize.files.documents import read_json
from ladderize.files.output import fsync
from ladderize.files.regular import open_regular

if TYPE_CHECKING:
    from torch import Tensor

READ_AT_ONCE = 1 << 20  # bytes; malloc reuses pieces of this size


class Move(NamedTuple):
    """A permutation of equal blocks of a tensor's rows (axis 0) or columns: block p was at ``order[p]``."""

    order: tuple[int, ...]
    axis: int


@dataclass(frozen=True)
class Entry:
    """One tensor of a file to write, in the safetensors ``dtype``; its values are in ``source`` now."""

    name: str
    dtype: str
    source: TensorInfo
    move: Move | None = None

    @property
    def nbytes(self) -> int:
        return self.source.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Shard:
    """A safetensors file of the output, with its tensors in their order; if not rewritten, the source's own."""

    file: str
    entries: tuple[Entry, ...]
    rewritten: bool

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def plan_shards(
    checkpoint: Checkpoint, dtype: str | None, moves: Mapping[str, Move], replace: Mapping[str, TensorInfo]
) -> list[Shard]:
    """Return the weight files of an output, with every tensor in the file that it was in.

    dtype: store all as float32, float16 or bfloat16; None: as they are.
    replace: tensors with values from elsewhere, which do not move; they are stored in the dtype of those that they
    replace. An LM head that the checkpoint lacks goes beside the embedding, as it is.
    """
    files: dict[str, list[Entry]] = {name: [] for name in checkpoint.weight_files}
    changed = set()
    for name, old in checkpoint.tensors.items():
        move = moves.get(name) if name not in replace else None
        entry = Entry(name, STORED_NAMES[dtype] if dtype else old.dtype, replace.get(name, old), move)
        if not old.is_stored or entry != Entry(old.name, old.dtype, old):
            changed.add(old.file)
        files[old.file].append(entry)
    for name in replace.keys() - checkpoint.tensors.keys():
        file = checkpoint.tensors[EMBEDDING].file
        files[file].append(Entry(name, STORED_NAMES[dtype] if dtype else replace[name].dtype, replace[name]))
        changed.add(file)
    return [  # wide elements first, so that every tensor begins at a multiple of its element size
        Shard(file, tuple(sorted(entries, key=lambda entry: -DTYPE_BYTES[entry.dtype])), file in changed)
        for file, entries in files.items()
    ]


def write_weights(
    source: Path, shards: Sequence[Shard], folder: Path, *, copy: bool, advance: Callable[[int], None]
) -> Counter[str]:
    """Write the weight files and their index; return how many were linked, copied and rewritten."""
    ways = Counter[str]()
    with ThreadPoolExecutor(1) as behind:
        on_disk = []
        for shard in shards:
            if shard.rewritten:
                entries = {entry.name: entry for entry in shard.entries}
                tensors = [(entry.name, entry.dtype, entry.source.shape) for entry in shard.entries]
                write_file(folder / shard.file, tensors, lambda name: _values(entries[name], source), advance)  # noqa: B023
                ways["rewritten"] += 1
            else:
                ways[output.transfer(source / shard.file, folder / shard.file, copy=copy, advance=advance)] += 1
            on_disk.append(behind.submit(fsync, folder / shard.file))  # syncs while the next file is written
        for done in on_disk:
            done.result()  # Linux reports a disk error only once: the fsync at the end would not see it
    if [shard.file for shard in shards] != [WEIGHTS]:
        weight_map = {entry.name: shard.file for shard in shards for entry in shard.entries}
        if "rewritten" not in ways and read_json(source / INDEX).get("weight_map") == weight_map:
            shutil.copyfile(source / INDEX, folder / INDEX)
        else:
            total = sum(shard.nbytes for shard in shards)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return ways


def _values(entry: Entry, folder: Path) -> "Iterator[Tensor]":
    """Yield a tensor's values as they are stored, some rows at a time, each valid until the next one: they share a
    buffer, since fresh memory costs more than the copy."""
    import torch

    info, move = entry.source, entry.move
    if not info.nbytes:
        yield _cast(read_tensor(folder, info), entry)
        return
    shape = info.shape or (1,)
    blocks = move.order if move is not None and move.axis == 0 else (0,)
    rows, width = shape[0] // len(blocks), info.nbytes // shape[0]
    step = max(1, READ_AT_ONCE // width)
    columns = torch.tensor(move.order) if move is not None and move.axis == 1 else None
    buffer = bytearray(min(step, rows) * width)
    with open_regular(folder / info.file) as file:
        for block in blocks:
            file.seek(info.start + block * rows * width)
            for start in range(0, rows, step):
                count = min(step, rows - start)
                if file.readinto(memoryview(buffer)[: count * width]) != count * width:
                    raise shorter(folder / info.file)
                values = torch.frombuffer(buffer, dtype=torch_dtype(info.dtype))
                chunk = values[: count * values.numel() * width // len(buffer)].view(count, *shape[1:])
                if columns is not None:
                    chunk = chunk.unflatten(1, (len(columns), -1))[:, columns].flatten(1)
                yield _cast(chunk, entry)


def _cast(values: "Tensor", entry: Entry) -> "Tensor":
    """Return the values in the entry's dtype; raises UserError where a finite one would become infinite."""
    if entry.dtype == entry.source.dtype:
        return values
    cast = values.to(torch_dtype(entry.dtype))
    if cast.numel() and not cast.abs().max().isfinite() and values[cast.isinf()].isfinite().any():
        raise UserError(
            f"{entry.name} has values too large for {FLOAT_DTYPES[entry.dtype]}; take --dtype bfloat16 or float32"
        )
    return cast
