"""Commands that find no room, or no permission, and then are given again without the obstacle. Needs root."""

import contextlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ladderize.console import printable
from scripts.campaign.places import COMMANDS, difference, digest, start
from tests import warm

PERMISSIONS = ("unreadable weights", "unreadable file", "unwritable folder", "read-only file system", "read-only model")
# root without what lets it pass by permissions, also in what it starts (securebits: exec gives nothing back)
BOUND = """
import ctypes, runpy, sys
libc = ctypes.CDLL(None)
assert libc.prctl(28, 3, 0, 0, 0) == 0
assert libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0
sys.argv = ["ladderize", *sys.argv[1:]]
runpy.run_module("ladderize", run_name="__main__")
"""


def no_room(draw: random.Random, name: str, place: Path, folder: Path) -> str:
    """A full disk under the output, or under TMPDIR; then room."""
    command = COMMANDS[name]
    disk, other = folder / "disk", folder / "other"
    other.mkdir()
    out = other / "right" / f"out{command.suffix}"
    out.parent.mkdir()
    process = start(command.arguments(place, out), cwd=other, TMPDIR=str(other))
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    right, needed = digest(out, command), sum(path.stat().st_size for path in [out, *out.rglob("*")] if path.is_file())
    kind = draw.choice(["output", "output", "output", "TMPDIR"])
    kib = draw.randrange(4, max(8, int(needed * 1.2) >> 10)) if kind == "output" else 4
    with mounted(disk, kib):
        out = (disk if kind == "output" else other) / f"out{command.suffix}"
        if kind == "TMPDIR":
            (disk / "full").write_bytes(b"x" * 4096)
        temporary = other if kind == "output" else disk
        process = start(command.arguments(place, out), cwd=other, TMPDIR=str(temporary))
        _, errors = process.communicate()
        if wrong := _wrong(process.returncode, errors, full=True):
            return f"full {kind} of {kib} KiB: {wrong}"
        found = digest(out, command)
        if process.returncode == 0 and found != right:
            return f"full {kind} of {kib} KiB: ended with 0 and another result"
        kept = "eval" in name or name == "sweep" or name.startswith("bench")  # what was complete
        if process.returncode and not kept and any(path.exists() for path in (out, out.with_suffix(".yaml"))):
            return f"full {kind} of {kib} KiB: left {sorted(found)}: {errors[-300:]}"
        if not kept:
            left = [path.name for path in out.parent.iterdir() if path.name.startswith(".out")]
            if left:
                return f"full {kind} of {kib} KiB: left {left}"
        if process.returncode == 0:
            return "equal"
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        (disk / "full").unlink(missing_ok=True)
        process = start(command.arguments(place, out), cwd=other, TMPDIR=str(temporary))
        _, errors = process.communicate()
        if process.returncode:
            return f"full {kind} of {kib} KiB, then room: exit code {process.returncode}: {errors[-400:]}"
        if (found := digest(out, command)) != right:
            return f"full {kind} of {kib} KiB, then room: another result in {difference(found, right)}"
    return "equal"


def no_permission(draw: random.Random, name: str, place: Path, folder: Path) -> str:
    """As a user who may not read the input or write the output; or who may read all and write elsewhere."""
    command, kind = COMMANDS[name], draw.choice(PERMISSIONS)
    shutil.copytree(place, folder / "place")
    for path in (folder / "place").rglob("*"):
        if path.suffix in (".yaml", ".json") and path.parent.name != "found":
            path.write_text(path.read_text().replace(str(place), str(folder / "place")))
    place, out = folder / "place", folder / "made" / f"out{command.suffix}"
    (folder / "made").mkdir()
    (folder / "tmp").mkdir()
    reads_no_weights = name in ("report", "compare", "calibrate")
    may = kind == "read-only model" or (kind == "unreadable weights" and reads_no_weights)
    if kind == "unreadable weights":
        for path in [
            *place.glob("dense/*.safetensors"),
            *place.glob("spd/*.safetensors"),
            *place.glob("lora/*.safetensors"),
        ]:
            path.chmod(0)
    elif kind == "unreadable file":
        for path in (
            *place.glob("*.npy"),
            *place.glob("found/*.json"),
            *place.glob("shape*"),
            place / "dense/config.json",
        ):
            path.chmod(0)
    elif kind == "unwritable folder":
        (folder / "made").chmod(0o555)
    with contextlib.ExitStack() as stack:
        if kind.startswith("read-only"):
            stack.enter_context(read_only(folder / "made" if kind == "read-only file system" else place))
        arguments = [sys.executable, "-c", BOUND, *map(str, command.arguments(place, out))]
        path = os.pathsep.join([str(warm.ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": path}
        process = warm.WarmProcess(arguments, cwd=folder / "tmp", env=environment)
        _, errors = process.communicate()
    if wrong := _wrong(process.returncode, errors, full=False):
        return f"{kind}: {wrong}"
    if may != (process.returncode == 0):
        return f"{kind}: exit code {process.returncode}: {errors[-400:]}"
    if process.returncode and "eval" not in name and name != "sweep" and any((folder / "made").iterdir()):
        return f"{kind}: left {list((folder / 'made').iterdir())}: {errors[-300:]}"
    return "equal"


def _wrong(code: int | None, errors: str, *, full: bool) -> str | None:
    if "Traceback" in errors or "unexpected error" in errors or "Exception ignored" in errors:
        return f"a traceback: {errors[-2500:]}"
    sentences = [line for line in errors.splitlines() if line.startswith("Error: ")]
    if code == 0:
        return None
    if code != 1 or len(sentences) != 1 or printable(errors) != errors:
        return f"exit code {code}: {errors[-500:]}"
    if full and not any(
        words in sentences[0].lower() for words in ("no space left", "full", "are free", "no usable temporary")
    ):
        return f"other words: {sentences[0][-500:]}"
    return None


@contextlib.contextmanager
def mounted(folder: Path, kib: int) -> Iterator[None]:
    """A disk of so many KiB."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
