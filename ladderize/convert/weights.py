"""Writing safetensors anew, for another dtype or other shards: one tensor at a time, never a whole shard in memory."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ladderize.console import UsageError, UserError
from ladderize.convert.checkpoint import DTYPE_BYTES, FLOAT_DTYPES, WEIGHTS, Checkpoint, TensorInfo

if TYPE_CHECKING:
    import torch

CHUNK = 4 << 20  # bytes read at a time; a multiple of every element size
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Shard:
    """A safetensors file to write: its tensors in the order in which they lie, and the dtype they are to have."""

    file: str
    tensors: tuple[TensorInfo, ...]
    dtype: str | None  # a safetensors dtype, or None: each tensor keeps its own

    def stored_dtype(self, tensor: TensorInfo) -> str:
        return self.dtype or tensor.dtype

    def nbytes_of(self, tensor: TensorInfo) -> int:
        return tensor.numel * DTYPE_BYTES[self.stored_dtype(tensor)]

    @property
    def nbytes(self) -> int:
        return sum(map(self.nbytes_of, self.tensors))


def parse_size(text: str) -> int:
    """``5GB``, ``500MB``, ``2GiB`` or plain bytes; raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(text).strip())
    if not match or match[2].upper() not in UNITS or float(match[1]) <= 0:
        raise UsageError(f"--max-shard-size: {text!r} is no size; write for example 5GB or 500MB")
    return max(1, int(float(match[1]) * UNITS[match[2].upper()]))


def plan_shards(checkpoint: Checkpoint, dtype: str | None, max_bytes: int | None) -> list[Shard]:
    """The files to write. Without ``max_bytes`` every tensor stays in the file it is in."""
    stored = DTYPES[dtype] if dtype else None
    groups: list[list[TensorInfo]] = [[]]
    if max_bytes is None:
        by_file = {name: [t for t in checkpoint.tensors.values() if t.file == name] for name in checkpoint.weight_files}
        return [Shard(name, _aligned(tensors, stored), stored) for name, tensors in by_file.items()]
    filled = 0
    for tensor in checkpoint.tensors.values():
        size = tensor.numel * DTYPE_BYTES[stored or tensor.dtype]
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    if len(groups) == 1:
        return [Shard(WEIGHTS, _aligned(groups[0], stored), stored)]
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    return [Shard(name, _aligned(group, stored), stored) for name, group in zip(names, groups, strict=True)]


def _aligned(tensors: list[TensorInfo], dtype: str | None) -> tuple[TensorInfo, ...]:
    """Wide elements first, so that every tensor begins at a multiple of its element size."""
    return tuple(sorted(tensors, key=lambda tensor: -DTYPE_BYTES[dtype or tensor.dtype]))


def write_shard(checkpoint: Checkpoint, shard: Shard, path: Path, advance: Callable[[int], None]) -> None:
    """Stream the tensors of one shard from the source into ``path``."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in shard.tensors:
        begin, end = end, end + shard.nbytes_of(tensor)
        header[tensor.name] = {"dtype": shard.stored_dtype(tensor), "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    sources: dict[str, BufferedReader] = {}
    try:
        with path.open("xb") as writer:
            writer.write(len(encoded).to_bytes(8, "little") + encoded)
            for tensor in shard.tensors:
                if tensor.file not in sources:
                    sources[tensor.file] = (checkpoint.folder / tensor.file).open("rb")
                _stream(tensor, shard.stored_dtype(tensor), sources[tensor.file], writer, advance)
    finally:
        for file in sources.values():
            file.close()


def _stream(tensor: TensorInfo, dtype: str, reader: BufferedReader, writer: BinaryIO, advance: Callable[[int], None]) -> None:
    reader.seek(tensor.start)
    left = tensor.nbytes
    buffer = memoryview(bytearray(min(CHUNK, left)))  # one for all chunks: fresh memory costs more than the copy
    while left:
        chunk = buffer[: min(CHUNK, left)]
        if reader.readinto(chunk) != len(chunk):
            raise UserError(f"{tensor.file} became shorter while it was being read; nothing was written")
        left -= len(chunk)
        writer.write(chunk if dtype == tensor.dtype else _cast(chunk, tensor, dtype))
        advance(len(chunk))


def _cast(chunk: memoryview, tensor: TensorInfo, dtype: str) -> memoryview:
    import torch

    values = torch.frombuffer(chunk, dtype=torch_dtype(tensor.dtype))
    cast = values.to(torch_dtype(dtype))
    if not torch.isfinite(cast).all() and torch.isfinite(values).all():
        raise UserError(f"{tensor.name} has values too large for {FLOAT_DTYPES[dtype]}; take --dtype bfloat16 or float32")
    return cast.view(torch.uint8).numpy().data


def torch_dtype(name: str) -> "torch.dtype":
    import torch

    return getattr(torch, FLOAT_DTYPES[name])


def index_for(shards: list[Shard]) -> Mapping[str, object] | None:
    """The content of model.safetensors.index.json, or None for a single file."""
    if [shard.file for shard in shards] == [WEIGHTS]:
        return None
    weight_map = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    return {"metadata": {"total_size": sum(shard.nbytes for shard in shards)}, "weight_map": dict(sorted(weight_map.items()))}
