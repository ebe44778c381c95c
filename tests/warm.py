"""Python processes that start without the seconds that importing torch and transformers takes.

They are forked from one that has imported both and nothing of ladderize (``warm_server.py``), and otherwise are what
``subprocess`` starts: own environment, folder, streams and exit code. Where the imports themselves are what a test is
about, or a package must be missing, it starts a process of its own.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
# Seconds that a test waits for what must come. A slow machine takes its time, and is no failure; pytest's own timeout
# (pyproject.toml) is longer.
PATIENCE = 600.0


def wait_until(condition: Callable[[], object], process: "WarmProcess | None" = None) -> None:
    """Return when ``condition()`` is true. Fails after PATIENCE, or when the process that shall make it true ends."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if process is not None and process.has_ended():
            assert condition(), process.communicate()
            return
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.005)


@cache
def _ports() -> Iterator[int]:
    """Outside the range (ip_local_port_range) from which other programs are given theirs; each worker of pytest-xdist
    has some that no other tries."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = list(range(20_000 + worker, 32_000, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
    random.SystemRandom().shuffle(own)
    return iter(own)


def free_port() -> int:
    """A port on which nobody listens, and which no other test is given before it is used."""
    for port in _ports():
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


class WarmPython:
    """The server, and how to start processes with it."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.server.stdout is not None
        return self.server.stdout.readline().strip()

    def ask(self, request: Mapping[str, object]) -> int:
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return int(self._line())

    def close(self) -> None:
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait(timeout=PATIENCE)

    def preload(self, *modules: str) -> None:
        """Import more, for tests that start many processes which need them."""
        self.ask({"preload": modules})


@cache
def warm_python() -> WarmPython:
    """One server for all tests of this process; it ends with it."""
    return WarmPython()


class WarmProcess:
    """A started process: what tests use of ``subprocess.Popen``. ``command[0]`` is this Python."""

    def __init__(self, command: Sequence[object], *, env: Mapping[str, str] | None = None, cwd: object = None) -> None:
        python, *argv = map(str, command)
        assert python == sys.executable, python
        self.args = command
        self.returncode: int | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="warm-python-")
        self._streams = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        for stream in self._streams:
            stream.touch()
        self._server = warm_python()
        request = {"argv": argv, "env": dict(env or os.environ), "cwd": str(cwd or Path.cwd())}
        self.pid = self._server.ask({**request, "stdout": str(self._streams[0]), "stderr": str(self._streams[1])})

    def has_ended(self) -> bool:
        """Without waiting for it."""
        if self.returncode is not None:
            return True
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def exit_code(self) -> int:
        """Of a process that has ended."""
        if self.returncode is None:
            self.returncode = self._server.ask({"wait": self.pid})
        return self.returncode

    def communicate(self, timeout: float = PATIENCE) -> tuple[str, str]:
        """Wait for the end; stdout and stderr. Raises TimeoutExpired, after killing it, if it takes longer."""
        deadline = time.monotonic() + timeout
        while not self.has_ended():
            if time.monotonic() > deadline:
                self.kill()
                self.exit_code()
                raise subprocess.TimeoutExpired(list(map(str, self.args)), timeout)
            time.sleep(0.005)
        self.exit_code()
        stdout, stderr = (stream.read_text() for stream in self._streams)
        return stdout, stderr


def run(
    command: Sequence[object],
    *,
    env: Mapping[str, str] | None = None,
    cwd: object = None,
    timeout: float = PATIENCE,
    **same: object,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` of this Python, with the streams captured as text. Raises TimeoutExpired as that does."""
    assert same.items() <= {"capture_output": True, "text": True, "check": False}.items(), same
    process = WarmProcess(command, env=env, cwd=cwd)
    stdout, stderr = process.communicate(timeout)
    return subprocess.CompletedProcess(list(map(str, command)), process.returncode, stdout, stderr)


def run_group(
    command: Sequence[object], *, ranks: int = 2, timeout: float = PATIENCE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A group of this Python's processes, with the variables that torchrun gives them.

    Streams are those of all ranks, rank 0's first; the exit code is the first that is not 0. A rank that fails ends the
    others, as it does under torchrun.
    """
    common = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", **environment}
    started = [
        WarmProcess(command, cwd=ROOT, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + timeout
    while not all(process.has_ended() for process in started) and time.monotonic() < deadline:
        time.sleep(0.02)
        if any(process.has_ended() and process.exit_code() for process in started):
            deadline = min(deadline, time.monotonic() + 60)  # for the others to say what they have to
    late = [rank for rank, process in enumerate(started) if not process.has_ended()]
    for process in started:
        process.kill()
    outputs = [process.communicate() for process in started]
    stdout, stderr = ("".join(output[stream] for output in outputs) for stream in (0, 1))
    failed = [process.returncode for process in started if process.returncode]
    assert not late or len(failed) > len(late), f"ranks {late} did not end within {timeout} s: {stderr[-2000:]}"
    return subprocess.CompletedProcess(list(map(str, command)), failed[0] if failed else 0, stdout, stderr)


# what a module uses of ``subprocess``, where a fixture lets it start warm processes
SUBPROCESS = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
