"""Tensors of safetensors files, read and written one at a time: a whole file is never in memory."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ladderize.checkpoint.reading import (
    DTYPE_BYTES,
    Checkpoint,
    TensorInfo,
    read_header,
    stored_dtype_name,
    torch_dtype,
)
from ladderize.console import sentence
from ladderize.errors import UserError
from ladderize.families.base import Decoder, everywhere
from ladderize.families.registry import known_family
from ladderize.files.output import copy_span
from ladderize.files.regular import open_regular

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class TensorReader:
    """Reads the values of a checkpoint's tensors, whole or in part, as tensors or as bytes. Used as a context.

    folder: the folder that the files of ``TensorInfo`` are relative to.
    Raises UserError for a file that became shorter since its header was read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._files: dict[str, BufferedReader] = {}

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    def read(
        self,
        info: TensorInfo,
        *,
        dim: int | None = None,
        start: int = 0,
        stop: int = 0,
        dtype: "torch.dtype | None" = None,
        device: "torch.device | str" = "cpu",
    ) -> "Tensor":
        """Return a tensor, or the indices ``start`` to ``stop`` of its dimension ``dim`` (0 or 1).

        It has its own memory: the file is mapped only while it is read, since mapped pages count as the process's.

        dtype: None keeps the stored one.
        """
        import torch
        from safetensors import SafetensorError, safe_open

        dtype = dtype or torch_dtype(info.dtype)
        if not info.is_stored:
            shape = [stop - start if axis == dim else size for axis, size in enumerate(info.shape)]
            return torch.zeros(shape, dtype=dtype, device=device)
        try:
            with safe_open(self.folder / info.file, framework="pt") as file:
                if dim is None:
                    values = file.get_tensor(info.name)
                else:
                    values = file.get_slice(info.name)[(slice(None),) * dim + (slice(start, stop),)]
                copied: Tensor = values.to(device, dtype, copy=True, memory_format=torch.contiguous_format)
        except SafetensorError:  # its header was sound when the checkpoint was opened
            raise _shorter(self.folder / info.file) from None
        return copied

    def chunks(self, info: TensorInfo, spans: Sequence[tuple[int, int]], step: int) -> Iterator[memoryview]:
        """Yield the bytes of a file from each span's start to its stop, at most ``step`` at a time.

        A chunk is valid until the next one is asked for: they share one buffer, since fresh memory costs more than the
        copy.
        """
        reader = self._open(info.file)
        buffer = memoryview(bytearray(min(step, max(stop - start for start, stop in spans))))
        for begin, end in spans:
            reader.seek(begin)
            for at in range(begin, end, step):
                chunk = buffer[: min(step, end - at)]
                if reader.readinto(chunk) != len(chunk):
                    raise _shorter(self.folder / info.file)
                yield chunk

    def copy(self, info: TensorInfo, writer: BufferedIOBase, advance: Callable[[int], None]) -> None:
        """Append a tensor's stored bytes to a file.

        advance: is called with the number of bytes of each step.
        """
        if copy_span(self._open(info.file), writer, info.start, info.stop, advance) != info.nbytes:
            raise _shorter(self.folder / info.file)

    def middle(self, info: TensorInfo, count: int) -> bytes:
        """Return the ``count`` bytes in the middle of a tensor, or all there are."""
        if not info.is_stored:
            return bytes(min(count, info.numel * DTYPE_BYTES[info.dtype]))
        count = min(count, info.nbytes)
        reader = self._open(info.file)
        reader.seek(info.start + (info.nbytes - count) // 2)
        return reader.read(count)

    def _open(self, name: str) -> BufferedReader:
        if name not in self._files:
            self._files[name] = self._stack.enter_context(open_regular(self.folder / name))
        return self._files[name]


def _shorter(path: Path) -> UserError:
    return UserError(f"{path} became shorter while it was read; nothing was written, read it again")


def encode_header(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> bytes:
    """Return the beginning of a safetensors file: the length of its header, and the header.

    tensors: (name, safetensors dtype, shape), in the order in which their values follow.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def write_tensors(
    path: Path,
    infos: "Mapping[str, tuple[torch.dtype, Sequence[int]]]",
    produce: "Callable[[str], Tensor]",
    *,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write the file ``path`` with the tensors that ``produce(name)`` returns one after the other, and fsync it.

    safetensors' own save_file wants all tensors in memory at once. On any error no file is left.

    infos: name -> (dtype, shape) of each: floats and integers of any shape, 0-d too.
    produce: may return a tensor on any device, not contiguous.
    Raises UserError where the system cannot write, for example on a full disk; ValueError for a tensor that is not as
    announced.
    """
    import torch

    # wide elements first, so that each tensor is aligned
    ordered = sorted(infos, key=lambda name: -infos[name][0].itemsize)
    header = encode_header((name, stored_dtype_name(infos[name][0]), infos[name][1]) for name in ordered)
    try:
        with path.open("wb") as file:
            file.write(header)
            for name in ordered:
                dtype, shape = infos[name]
                tensor = produce(name).detach()
                if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
                    raise ValueError(
                        f"{name} was declared as {dtype} {list(shape)}, but is {tensor.dtype} {list(tensor.shape)}"
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


def locate_tensors(path: Path) -> dict[str, TensorInfo]:
    """Return the places of a file's tensors, with its absolute path, as ``Changes.replace`` takes them; raises
    UserError for a broken file."""
    path = path.resolve()
    return {name: replace(info, file=str(path)) for name, info in read_header(path.parent, path.name).items()}


FINGERPRINT_BYTES = 4096  # of each tensor


def dense_function(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a config that decides the model's dense function, with defaults filled in.

    Keys that only some families have count where their values differ from a plain Llama's.
    """
    family = known_family(config)
    full, decoder = family.complete(config), family.describe(config)
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope = {"rope_type": rope.pop("type", "default"), "rope_theta": full["rope_theta"], **rope}
    plain = Decoder(**everywhere(full), qkv_bias=decoder.qkv_bias, o_bias=decoder.o_bias, mlp_bias=decoder.mlp_bias)
    return {
        "heads": [full["num_attention_heads"], full["num_key_value_heads"], full["head_dim"]],
        "rope": {**rope, "rope_theta": float(rope["rope_theta"])},
        "norm": float(full["rms_norm_eps"]),
        "activation": full["hidden_act"],
        "tied": bool(full["tie_word_embeddings"]),
    } | {name: value for name, value in vars(decoder).items() if value != getattr(plain, name)}


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a sha256 of names, dtypes, shapes and a few values of every tensor, independent of the shards.

    The values are those in the middle of each tensor, which distinguish two fine-tunes without reading gigabytes. Of
    the config the dense function counts; the layout does not.
    """
    digest = hashlib.sha256(json.dumps(dense_function(checkpoint.config), sort_keys=True).encode())
    with TensorReader(checkpoint.folder) as reader:
        for name, tensor in sorted(checkpoint.tensors.items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(reader.middle(tensor, FINGERPRINT_BYTES))
    return digest.hexdigest()
