"""Compiles kernels.cpp for the CPU that it runs on, the first time that it is wanted there, and keeps the result.

PyTorch and Triton do the same with what torch.compile generates: a compiler that knows the CPU writes faster code than
a package that must run on all of them can hold.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
COMPILERS = ("g++", "clang++")
# No -ffast-math: NaN and infinities must reach who looks for them. -fopenmp takes the library that PyTorch has loaded.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"),
    *("-shared", "-fPIC"),
)
SECONDS = 120


class NotCompiledError(Exception):
    """Why there is no library, in a few words."""


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels. Raises NotCompiledError where there is no compiler, or it cannot compile them here."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NotCompiledError(f"no C++ compiler was found ({', '.join(COMPILERS)})")
    key = hashlib.sha256("\0".join((SOURCE.read_text(encoding="utf-8"), compiler, *FLAGS, _cpu())).encode())
    folder = _cache_folder()
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="ladderize-kernels-") as own:
            return _load(_compile(compiler, Path(own) / "kernels.so"))
    path = folder / f"kernels-{key.hexdigest()[:24]}.so"
    return _load(path if path.exists() else _compile(compiler, path))


def _compile(compiler: str, path: Path) -> Path:
    """Whole or not at all, also where several ranks do it at once."""
    descriptor, made = tempfile.mkstemp(prefix=".kernels-", suffix=".so", dir=path.parent)
    os.close(descriptor)
    try:
        done = subprocess.run(
            [*compiler.split(), *FLAGS, str(SOURCE), "-o", made], capture_output=True, text=True, timeout=SECONDS
        )
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
            raise NotCompiledError(f"{compiler} cannot compile kernels.cpp: {first.strip()}")
        os.replace(made, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiledError(f"{compiler} cannot be run: {error}") from error
    finally:
        Path(made).unlink(missing_ok=True)
    return path


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotCompiledError(f"the compiled kernels cannot be loaded: {error}") from error


def _cache_folder() -> Path | None:
    """A folder of this user that nobody else can write to; None where there is none."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ladderize"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):
        return None
    safe = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if safe and os.access(folder, os.W_OK) else None


def _cpu() -> str:
    """What -march=native depends on: a home folder may be that of several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    known = [line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))]
    return "\n".join([platform.machine(), *known[:2]])
