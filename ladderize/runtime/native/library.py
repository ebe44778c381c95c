"""The kernels in C++ for Python, compiled for this CPU at first use, and kept: a compiler that knows it writes
faster code than a package that must run on all of them can hold."""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from ladderize.console import sentence
from ladderize.errors import UserError
from ladderize.files.output import replacement, temporary_folder
from ladderize.ranks.group import Ranks

TYPES = {torch.float32: 0, torch.bfloat16: 1}


class Cache(Structure):
    """One layer's keys and values; see between.h."""

    _fields_ = (
        *(("keys", c_void_p), ("values", c_void_p), ("row", c_int64), ("head", c_int64)),
        *(("column", c_int64), ("all_rows", c_int64), ("all_columns", c_int64)),
    )


class Heads(Structure):
    _fields_ = tuple((name, c_int64) for name in ("batch", "tokens", "heads", "kv_heads", "dim"))


class Packed(Structure):
    """A weight in blocks; see products.h."""

    _fields_ = (("numbers", c_void_p), ("outputs", c_int64), ("depth", c_int64))


SIGNATURES = {
    "rms_norm": (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int),
    "gated": (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int),
    "rotate": (
        *(c_int, POINTER(Heads), c_void_p, c_void_p, c_float, c_void_p, c_int64, c_void_p, POINTER(Cache), c_int),
    ),
    "attend": (
        *(c_int, POINTER(Heads), c_void_p, POINTER(Cache), c_void_p, c_int64, c_int64, c_float, c_void_p, c_int),
    ),
    "attend_prompt": (c_int, POINTER(Heads), c_void_p, POINTER(Cache), c_float, c_void_p, c_int),
    "width": (),
    "product": (c_int, c_void_p, c_int64, POINTER(Packed), c_void_p, c_int, c_void_p, c_int),
    "sum": (c_int, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int),
}


def agreed_kernels(group: Ranks) -> ctypes.CDLL | str:
    """Return ``kernels``, or the reason of the first rank that has none. All ranks call it. One rank without them would
    add in another order, and get other bits."""
    mine = kernels()
    problems = group.gather(mine if isinstance(mine, str) else None)
    return next(filter(None, problems), mine)


def why_no_triton() -> str | None:
    """Return why Triton's kernels cannot run on the current GPU; None if they can. It starts one, that does nothing."""
    try:
        from ladderize.runtime.native.triton_kernels import idle

        idle(0)
    except ImportError:
        return "Triton is not installed"
    except Exception as error:  # it compiles in several steps with several tools, each with errors of its own
        return f"Triton cannot compile: {sentence(error)}"
    return None


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's numbers; None, a null pointer, for None."""
    return None if tensor is None else tensor.data_ptr()


SOURCE = Path(__file__).with_name("kernels.cpp")
COMPILERS = ("g++", "clang++")
# No -ffast-math: NaN and infinities must not get lost. -fopenmp takes the library that PyTorch has loaded.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"),
    *("-shared", "-fPIC"),
)
SECONDS = 120


@functools.cache
def kernels() -> ctypes.CDLL | str:
    """Return the compiled kernels, or the reason why there are none. A failure is cached, too, since it may take long.
    Their functions are named as in kernels.cpp. Those that access a KV cache return 1 if it does not fit."""
    try:
        compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
        if compiler is None:
            return f"no C++ compiler was found ({', '.join(COMPILERS)})"
        sources = [path.read_text(encoding="utf-8") for path in sorted(SOURCE.parent.glob("*.h"))]
        made_of = (SOURCE.read_text(encoding="utf-8"), *sources, compiler, *FLAGS, _cpu())
        name = f"kernels-{hashlib.sha256(chr(0).join(made_of).encode()).hexdigest()[:24]}.so"
        with temporary_folder("kernels") as temporary:
            path = (_cache_folder() or temporary) / name
            if path.exists():
                with contextlib.suppress(OSError):  # damaged: it is made anew
                    return _loaded(path)
            _compile(compiler, path)
            return _loaded(path)
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"the kernels for this CPU cannot be compiled: {error}"


def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        function = getattr(library, f"ladderize_{name}")
        function.argtypes = arguments
        function.restype = c_int if name in ("rotate", "attend", "attend_prompt", "product", "width") else None
    return library


def _compile(compiler: str, path: Path) -> None:
    """Compile the kernels to ``path``, whole or not at all, also where several ranks do it at once."""
    with replacement(path) as made:
        try:
            done = subprocess.run(
                [*compiler.split(), *FLAGS, str(SOURCE), "-o", made.name],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                env={**os.environ, "LC_ALL": "C"},
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"{compiler} did not end within {SECONDS} s") from None
        if done.returncode:
            lines = done.stderr.splitlines()
            first = next((line for line in lines if "error" in line), f"exit code {done.returncode}")
            raise UserError(f"{compiler} cannot compile kernels.cpp: {first.strip()}")


def _cache_folder() -> Path | None:
    """Return a cache folder that only this user can write to; None where there is none."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(cache) if os.path.isabs(cache) else Path("~/.cache").expanduser()) / "ladderize"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        return None
    safe = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if safe and os.access(folder, os.W_OK) else None


def _cpu() -> str:
    """Return the facts that -march=native depends on: several machines may share a home folder."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    facts = [line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))]
    return "\n".join([platform.machine(), *facts[:2]])
