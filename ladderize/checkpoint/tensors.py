"""Tensors of safetensors files, read and written one at a time: a whole file is never in memory."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladderize.checkpoint.reading import DTYPE_BYTES, STORED_NAMES, Checkpoint, TensorInfo, read_header, torch_dtype
from ladderize.console import sentence
from ladderize.errors import UserError
from ladderize.families.base import Decoder, everywhere
from ladderize.families.registry import known_family
from ladderize.files.output import fsync
from ladderize.files.regular import open_regular

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def read_tensor(
    folder: Path,
    info: TensorInfo,
    *,
    dim: int | None = None,
    start: int = 0,
    stop: int = 0,
    dtype: "torch.dtype | None" = None,
    device: "torch.device | str" = "cpu",
) -> "Tensor":
    """Return a tensor, or the indices ``start`` to ``stop`` of its dimension ``dim`` (0 or 1), in its own memory: the
    file is mapped only while it is read, since mapped pages count as the process's."""
    import torch
    from safetensors import SafetensorError, safe_open

    dtype = dtype or torch_dtype(info.dtype)
    if not info.is_stored:
        shape = [stop - start if axis == dim else size for axis, size in enumerate(info.shape)]
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        with safe_open(folder / info.file, framework="pt") as file:
            if dim is None:
                values = file.get_tensor(info.name)
            else:
                values = file.get_slice(info.name)[(slice(None),) * dim + (slice(start, stop),)]
            copied: Tensor = values.to(device, dtype, copy=True, memory_format=torch.contiguous_format)
    except SafetensorError:  # its header was sound when the checkpoint was opened
        raise shorter(folder / info.file) from None
    return copied


def shorter(path: Path) -> UserError:
    """Return the error for a file that became shorter since its header was read."""
    return UserError(f"{path} became shorter while it was read; nothing was written, read it again")


def write_file(
    path: Path,
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    chunks: "Callable[[str], Iterable[Tensor]]",
    advance: Callable[[int], object] = lambda count: None,
) -> None:
    """Write a safetensors file: of each tensor name, safetensors dtype and shape (wide dtypes first, so that each is
    aligned), and its values in ``chunks``, on any device."""
    import torch

    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in [*header][1:]:
            for chunk in chunks(name):
                advance(file.write(chunk.cpu().reshape(-1).view(torch.uint8).numpy().data))


def write_tensors(
    path: Path, infos: "Mapping[str, tuple[torch.dtype, Sequence[int]]]", produce: "Callable[[str], Tensor]"
) -> None:
    """Write the file ``path`` with the tensors that ``produce(name)`` returns one after the other, and fsync it;
    save_file of safetensors wants all in memory at once. On any error no file is left. infos: dtype, shape."""

    def announced(name: str) -> "Iterator[Tensor]":
        tensor = produce(name).detach()
        dtype, shape = infos[name]
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, tuple(shape)):
            actual = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{name} was declared as {dtype} {list(shape)}, but is {actual}")
        yield tensor

    ordered = sorted(infos.items(), key=lambda item: -item[1][0].itemsize)
    stored = [(name, STORED_NAMES[str(dtype).removeprefix("torch.")], shape) for name, (dtype, shape) in ordered]
    try:
        write_file(path, stored, announced)
        fsync(path)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UserError(f"{path} cannot be written ({sentence(error)}); nothing was left there") from error
        raise


def locate_tensors(path: Path) -> dict[str, TensorInfo]:
    """Return the places of a file's tensors, with its absolute path, as ``Changes.replace`` takes them."""
    path = path.resolve()
    return {name: replace(info, file=str(path)) for name, info in read_header(path.parent, path.name).items()}


FINGERPRINT_BYTES = 4096  # of each tensor


def dense_function(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides a model's dense function; what only some families have where it is not a plain Llama's."""
    family = known_family(config)
    full, decoder = family.complete(config), family.describe(config)
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope = {"rope_type": rope.pop("type", "default"), "rope_theta": full["rope_theta"], **rope}
    plain = Decoder(**everywhere(full), qkv_bias=decoder.qkv_bias, o_bias=decoder.o_bias, mlp_bias=decoder.mlp_bias)
    plain = replace(plain, activation=decoder.activation)
    return {
        "heads": [full["num_attention_heads"], full["num_key_value_heads"], full["head_dim"]],
        "rope": {**rope, "rope_theta": float(rope["rope_theta"])},
        "norm": float(full["rms_norm_eps"]),
        "activation": decoder.activation,
        "tied": bool(full["tie_word_embeddings"]),
    } | {name: value for name, value in asdict(decoder).items() if value != getattr(plain, name)}


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a sha256 of names, dtypes, shapes and a few values in the middle of every tensor, independent of the
    shards. The config's dense function counts; its layout does not."""
    digest = hashlib.sha256(json.dumps(dense_function(checkpoint.config), sort_keys=True).encode())
    with ExitStack() as stack:
        files = {name: stack.enter_context(open_regular(checkpoint.folder / name)) for name in checkpoint.weight_files}
        for name, tensor in sorted(checkpoint.tensors.items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            count = min(FINGERPRINT_BYTES, tensor.numel * DTYPE_BYTES[tensor.dtype])
            files[tensor.file].seek(tensor.start + (tensor.nbytes - count) // 2)
            digest.update(files[tensor.file].read(count) if tensor.is_stored else bytes(count))
    return digest.hexdigest()
