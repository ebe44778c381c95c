"""Arrays of token ids in ``.npy`` and ``.npz`` files."""

from pathlib import Path

import numpy as np

from ladderize.errors import UserError
from ladderize.files.regular import check_regular

MOST_IDS = 2**31  # ids are smaller


def open_ids(path: Path, key: str | None = None) -> np.ndarray:
    """Return the token ids of a ``.npy`` file, which is mapped, or of an array in a ``.npz`` archive.

    They are integers in one or two dimensions, each from 0 to 2**31 - 1. Arrays of Python objects are never unpickled.

    key: the name of the array in the archive; None: the only one.
    Raises UserError for anything else.
    """
    check_regular(path)
    is_archive = path.suffix == ".npz"
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if is_archive:
            with array as archive:
                key = archive.files[0] if key is None and len(archive.files) == 1 else key
                if key not in archive.files:
                    shown = ", ".join(archive.files[:20]) or "none"
                    raise UserError(f"{path} holds the arrays {shown}; name one of them, as in {path}:NAME")
                array = np.asarray(archive[key])
    except UserError:
        raise
    except Exception:  # numpy, zipfile and zlib raise a dozen kinds for broken files
        what = "an archive of NumPy arrays" if is_archive else "a NumPy array of numbers"
        raise UserError(f"{path} is not {what} (arrays of Python objects are never unpickled)") from None
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise UserError(
            f"{path}: expected token ids, that is integers in one or two dimensions, not {array.dtype} in {array.ndim}"
        )
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < MOST_IDS:
        raise UserError(f"{path} holds a negative or an impossibly large token id")
    return array


def read_id_rows(path: Path, key: str | None = None) -> list[np.ndarray]:
    """Return the rows of ``open_ids`` in memory, int64 [tokens] each; a one-dimensional array is one row. Raises
    UserError."""
    return list(np.atleast_2d(open_ids(path, key)).astype(np.int64))
