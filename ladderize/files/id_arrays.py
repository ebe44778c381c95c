"""Arrays of token ids in ``.npy`` and ``.npz`` files. What they would take is read from their headers first."""

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ladderize.errors import UserError
from ladderize.files.regular import check_regular, open_regular

ID_BYTES = 8  # of an id in memory: int64
NUMPY_SUFFIX = ".npy"  # of an array's name in an archive


def open_ids(path: Path, key: str | None = None) -> np.ndarray:
    """The array of token ids in a ``.npy`` file, not read but mapped, or in a ``.npz`` archive: integers in one or two
    dimensions, each from 0 to 2**31 - 1. Raises UserError for what is none, and for what memory cannot hold."""
    if path.suffix == ".npz":
        key = pick_array(path, key)
        with _archive(path) as archive, archive.open(key + NUMPY_SUFFIX) as member:
            array = np.lib.format.read_array(member, allow_pickle=False)
    else:
        array = _mapped(path)
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < 2**31:
        raise UserError(f"{path} holds a negative or an impossibly large token id")
    return array


def shape_of_ids(path: Path, key: str | None = None) -> tuple[int, ...]:
    """The shape of ``open_ids``, from the header alone."""
    if path.suffix == ".npz":
        key = pick_array(path, key)
        with _archive(path) as archive, archive.open(key + NUMPY_SUFFIX) as member:
            return _read_header(member)[0]
    return _mapped(path).shape


def _mapped(path: Path) -> np.ndarray:
    check_regular(path)
    with _numpy_errors(path):
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    _check_ids(path, array.shape, array.dtype)
    return array


def read_id_rows(path: Path, key: str | None = None) -> list[np.ndarray]:
    """The rows of ``open_ids`` in memory, int64; an array of one dimension is one row."""
    array = open_ids(path, key)
    _check_memory(path, array.size * ID_BYTES)
    return list(np.atleast_2d(array).astype(np.int64))


def pick_array(path: Path, key: str | None) -> str:
    """The name of the array meant by ``key`` (None: the only one), checked by its header; raises UserError."""
    with _archive(path) as archive:
        names = [name.removesuffix(NUMPY_SUFFIX) for name in archive.namelist() if name.endswith(NUMPY_SUFFIX)]
    if not names:
        raise UserError(f"{path} is an empty archive")
    if key is None and len(names) == 1:
        key = names[0]
    if key is None or key not in names:
        shown = ", ".join(names[:20])
        raise UserError(f"{path} holds the arrays {shown}; name one of them, for example {path}:{names[0]}")
    with _archive(path) as archive, archive.open(key + NUMPY_SUFFIX) as member:
        shape, dtype = _read_header(member)
    _check_ids(path, shape, dtype)
    _check_memory(path, math.prod(shape) * dtype.itemsize)
    return key


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    with open_regular(path) as file, _numpy_errors(path), zipfile.ZipFile(file) as archive:
        yield archive


@contextmanager
def _numpy_errors(path: Path) -> Iterator[None]:
    """numpy's readers, zipfile and zlib raise a dozen kinds of exceptions for broken files."""
    try:
        yield
    except UserError:
        raise
    except Exception:
        what = "an archive of NumPy arrays" if path.suffix == ".npz" else "a NumPy array of numbers"
        raise UserError(f"{path} is not {what} (arrays of Python objects are never unpickled)") from None


def _read_header(member: "zipfile.ZipExtFile | object") -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(member)  # type: ignore[arg-type]
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(member)  # type: ignore[arg-type]
    return shape, dtype


def _check_ids(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if dtype.hasobject:
        raise UserError(f"{path} is not a NumPy array of numbers (arrays of Python objects are never unpickled)")
    if dtype.kind not in "iu" or len(shape) not in (1, 2):
        raise UserError(
            f"{path}: expected token ids, that is integers in one or two dimensions, not {dtype} in {len(shape)}"
        )


def _check_memory(path: Path, nbytes: int) -> None:
    if nbytes < 1 << 28:
        return  # what anybody has; asking imports torch
    import torch

    from ladderize.memory import check_room

    check_room(nbytes, torch.device("cpu"), str(path), "give fewer ids")
