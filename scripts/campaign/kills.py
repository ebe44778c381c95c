"""Commands that are killed at a random moment and given again."""

import contextlib
import os
import random
import re
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from scripts.campaign.places import COMMANDS, difference, digest, processes_in, start
from tests import warm

END_S = 60.0  # within which a command ends after a signal, on a busy machine
WAYS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGINT", "SIGINT twice", "Ctrl-C")  # the last: to all in the foreground
WAYS_OF_RANKS = (*WAYS, "SIGKILL to a rank", "SIGKILL to a rank", "SIGTERM to a rank", "SIGINT to a rank")
EARLY = "ended before it was killed"
LEFT = ("torchinductor_",)  # torch's own folder


@dataclass
class Killer:
    """Kills commands on what is in ``place``; they work in folders of ``root``. known: of each command, how long it
    takes and what it makes."""

    root: Path
    place: Path
    draw: random.Random
    known: dict[str, tuple[float, dict[str, str]]] = field(default_factory=dict)

    def kill_one(self, name: str) -> str:
        """What came of a command that was killed once and given again: "equal", or what was wrong. One that ended
        before is begun anew, and killed earlier."""
        share = 1.0
        while (result := self._kill_one(name, share)) == EARLY and share > 0.1:
            share /= 2
        return result

    def _kill_one(self, name: str, share: float) -> str:
        command = COMMANDS[name]
        if name not in self.known:
            with self._folder() as folder:
                out = folder / f"out{command.suffix}"
                begin, process = time.monotonic(), self._start(name, folder)
                _, errors = process.communicate()
                assert process.returncode == 0, errors
                self.known[name] = (time.monotonic() - begin, digest(out, command))
        seconds, right = self.known[name]
        has_ranks = any(word in name for word in ("ranks", "sweep"))
        way = self.draw.choice(WAYS_OF_RANKS if has_ranks else WAYS)
        with self._folder() as folder:
            out = folder / f"out{command.suffix}"
            process = self._start(name, folder)
            if "SIGKILL" not in way:  # before that Python itself answers Ctrl-C
                while not process.has_ended() and not _listens(process.pid):
                    time.sleep(0.01)
            time.sleep(self.draw.uniform(0, share * seconds))
            if process.has_ended():
                return EARLY
            _send(process, way, folder)
            try:
                _, errors = process.communicate(timeout=END_S)
            except Exception:
                _end(folder)
                return f"{way}: did not end within {END_S:g} s"
            was_complete = digest(out, command) == right
            if wrong := _wrong_words(way, process.returncode, errors, was_complete):
                return wrong
            if left := _still_there(folder):
                _end(folder)
                return f"{way}: processes left {left}"
            first = process.returncode
            process = self._start(name, folder)
            _, errors = process.communicate()
            if process.returncode and was_complete and first in (0, -signal.SIGTERM, -signal.SIGINT):
                return "equal"  # the whole command ended; some refuse to write it again
            if process.returncode:
                return f"{way}: again: exit code {process.returncode}: {errors[-400:]}"
            if (found := digest(out, command)) != right:
                return f"{way}: another result in {difference(found, right)}"
            own = {"tmp", out.name, out.with_suffix(".yaml").name, f"{out.name}.run.json"}
            rest = sorted(path.name for path in folder.iterdir() if path.name not in own)
            rest += sorted(path.name for path in (folder / "tmp").iterdir() if not path.name.startswith(LEFT))
            return f"{way}: left {rest}" if rest else "equal"

    @contextlib.contextmanager
    def _folder(self):
        folder = self.root / f"kill-{self.draw.randrange(10**9)}"
        (folder / "tmp").mkdir(parents=True)
        yield folder
        shutil.rmtree(folder)

    def _start(self, name: str, folder: Path) -> warm.WarmProcess:
        command = COMMANDS[name]
        arguments = command.arguments(self.place, folder / f"out{command.suffix}")
        return start(arguments, cwd=folder, TMPDIR=str(folder / "tmp"))


def _send(process: warm.WarmProcess, way: str, folder: Path) -> None:
    name, _, more = way.partition(" ")
    number = signal.SIGINT if way == "Ctrl-C" else signal.Signals[name]
    targets = [process.pid]
    if more == "to a rank":
        targets = [random.choice(ranks)] if (ranks := _ranks(process.pid, folder)) else targets
    elif way == "Ctrl-C":
        targets = [one for one in processes_in(folder) if _group(one) == _group(process.pid)]
    for target in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, number)
    if more == "twice":
        time.sleep(random.uniform(0.05, 1.0))
        if not process.has_ended():
            os.kill(process.pid, number)


def _listens(process: int) -> bool:
    """Whether it catches SIGTERM."""
    with contextlib.suppress(OSError):
        (caught,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{process}/status").read_text())
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)
    return False


def _ranks(leader: int, folder: Path) -> list[int]:
    """Those that its server has forked."""
    return [one for one in processes_in(folder) if _parent(one) not in (leader, os.getpid()) and one != leader]


def _parent(process: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _group(process: int) -> int:
    with contextlib.suppress(OSError):
        return os.getpgid(process)
    return 0


def _still_there(folder: Path) -> list[str]:
    """What runs in the folder a minute after the command has ended."""
    deadline = time.monotonic() + END_S
    while (left := processes_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    words = []
    for one in left:
        with contextlib.suppress(OSError):
            words.append(Path(f"/proc/{one}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:100])
    return words


def _end(folder: Path) -> None:
    for one in processes_in(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def _wrong_words(way: str, code: int | None, errors: str, was_complete: bool) -> str | None:
    """What is wrong with the words and the exit code after a signal; None if nothing is."""
    if any(words in errors for words in ("Traceback", "resource_tracker", "Exception ignored", "unexpected error")):
        return f"{way}: a traceback: {errors[:3000]}"
    lines = errors.splitlines()
    ends = [line for line in lines if line.startswith(("Error: ", "Stopped by", "Interrupted"))]
    if code == 0 or (way == "SIGKILL" and code == -signal.SIGKILL):
        return f"{way}: ended with 0, and {ends}" if ends else None
    if was_complete and not ends and code in (-signal.SIGTERM, -signal.SIGINT):
        return None  # while Python and its libraries tidied up
    allowed = (1, 130) if "INT" in way or way == "Ctrl-C" else (1, 143)
    if way.endswith("to a rank"):
        allowed = (1, 130, 143, -signal.Signals[way.split()[0]])  # of the command itself where it had none
    if way == "SIGINT twice":
        allowed = (1, 130, -signal.SIGINT)
    if code not in allowed or (code > 0 and len(ends) != 1) or (len(ends) == 1 and not errors.endswith(ends[0] + "\n")):
        return f"{way}: exit code {code}: {errors[-400:]}"
    return None
