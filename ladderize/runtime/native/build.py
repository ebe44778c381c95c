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
import signal
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


def library() -> ctypes.CDLL:
    """The compiled kernels. Raises NotCompiledError where there is no compiler, or it cannot compile them here."""
    found = found_library()
    if isinstance(found, str):
        raise NotCompiledError(found)
    return found


@functools.cache
def found_library() -> ctypes.CDLL | str:
    """The same, or why there is none: what took long to fail is not tried again."""
    try:
        compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
        if compiler is None:
            return f"no C++ compiler was found ({', '.join(COMPILERS)})"
        made_of = (SOURCE.read_text(encoding="utf-8"), compiler, *FLAGS, _cpu())
        name = f"kernels-{hashlib.sha256(chr(0).join(made_of).encode()).hexdigest()[:24]}.so"
        folder = _cache_folder()
        if folder is None:
            with tempfile.TemporaryDirectory(prefix="ladderize-kernels-") as own:
                return ctypes.CDLL(str(_compile(compiler, Path(own) / name)))
        if (folder / name).exists():
            try:
                return ctypes.CDLL(str(folder / name))
            except OSError:
                pass  # damaged: it is made anew
        return ctypes.CDLL(str(_compile(compiler, folder / name)))
    except NotCompiledError as error:
        return str(error)
    except OSError as error:
        return f"the kernels for this CPU cannot be compiled: {error}"


def _compile(compiler: str, path: Path) -> Path:
    """Whole or not at all, also where several ranks do it at once."""
    descriptor, made = tempfile.mkstemp(prefix=".kernels-", suffix=".so", dir=path.parent)
    os.close(descriptor)
    try:
        with subprocess.Popen(
            [*compiler.split(), *FLAGS, str(SOURCE), "-o", made],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        ) as process:
            try:
                _, said = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # a compiler is several processes
                raise NotCompiledError(f"{compiler} did not end within {SECONDS} s") from None
        if process.returncode:
            first = next((line for line in said.splitlines() if "error" in line), f"exit code {process.returncode}")
            raise NotCompiledError(f"{compiler} cannot compile kernels.cpp: {first.strip()}")
        os.replace(made, path)
    finally:
        Path(made).unlink(missing_ok=True)
    return path


def _cache_folder() -> Path | None:
    """A folder of this user that nobody else can write to; None where there is none."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(given) if os.path.isabs(given) else Path("~/.cache").expanduser()) / "ladderize"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
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
