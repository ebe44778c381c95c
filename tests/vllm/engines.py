"""Groups of ranks that run vLLM's engines for the tests (tests/vllm/rank.py), each started once for all tests."""

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.helpers import ROOT
from tests.vllm.jobs import ANSWER, SEGMENTS, Carrier, Generate, Job, Refused, Streams
from tests.warm import PATIENCE, free_port

SEGMENT_FOLDER = Path("/dev/shm")  # where shared memory has its names
# an engine of a few layers; several short requests fit into a step
SMALL = {
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 192,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 32 << 20,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "seed": 0,
}


def ladderize(*words: object, **variables: str) -> str:
    """A command in a process of its own, as a user runs it: its stdout."""
    result = subprocess.run(
        [sys.executable, "-m", "ladderize", *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


class Rank:
    """One process, and the lines that it answers."""

    def __init__(self, rank: int, ranks: int, folder: Path, segments: str) -> None:
        self.log = folder / f"rank-{rank}-of-{ranks}.log"
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        cores = sorted(os.sched_getaffinity(0))
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cores[(worker + i) % len(cores)]) for i in range(ranks)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            SEGMENTS: segments,
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.rank"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # so that all that it starts can be ended with it
            )
        self.unread = b""

    def send(self, job: Job) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(job.to_json().encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, deadline: float) -> dict[str, Any]:
        """The next answer. Raises AssertionError with the end of the log if there is none in time."""
        assert self.process.stdout is not None
        while True:
            *lines, self.unread = self.unread.split(b"\n")
            for line in lines:
                if line.startswith(ANSWER.encode()):
                    return json.loads(line[len(ANSWER) :])
            with selectors.DefaultSelector() as selector:
                selector.register(self.process.stdout, selectors.EVENT_READ)
                ready = selector.select(max(0.0, deadline - time.monotonic()))
            more = os.read(self.process.stdout.fileno(), 1 << 20) if ready else b""
            if not more:
                raise AssertionError(f"{'a rank ended' if ready else 'no answer in time'}:\n{self.last_words()}")
            self.unread += more

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Engines:
    """``ranks`` processes that run the same jobs together. A failed job ends them; the next one starts new ones."""

    def __init__(self, ranks: int, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.members: list[Rank] = []

    def start(self) -> None:
        """Begin with the imports; does not wait for them."""
        if not self.members:
            self.segments = f"ladderize-tests-{secrets.token_hex(8)}"
            self.members = [Rank(rank, self.ranks, self.folder, self.segments) for rank in range(self.ranks)]
            self.ready = False

    def run(
        self,
        model: Path,
        *steps: Generate | Streams | Refused | Carrier,
        timeout: float = PATIENCE,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> list[Any]:
        """Build an LLM of ``model`` with these options of vLLM, do the steps, take it down; the steps' results.

        Raises AssertionError if a rank failed, or if ranks answered differently.
        """
        together = {"tensor_parallel_size": self.ranks}
        executor = {"distributed_executor_backend": "external_launcher" if self.ranks > 1 else "uni"}
        engine = {**SMALL, **together, **executor, "model": str(model), **options}
        job = Job(engine, list(steps), free_port(), environment or {})
        self.start()
        try:
            if not self.ready:
                for rank in self.members:
                    rank.answer(time.monotonic() + PATIENCE)
                self.ready = True
            for rank in self.members:
                rank.send(job)
            deadline = time.monotonic() + timeout
            answers = [rank.answer(deadline) for rank in self.members]
            for answer, rank in zip(answers, self.members, strict=True):
                assert "error" not in answer, f"{answer['error']}\n{rank.last_words()}"
        except BaseException:
            self.end()
            raise
        first, *others = [answer["result"] for answer in answers]
        assert all(tokens_of(other) == tokens_of(first) for other in others), "ranks answer differently"
        return first

    def end(self) -> None:
        if not self.members:
            return
        for rank in self.members:
            rank.end()
        for left in SEGMENT_FOLDER.glob(f"*{self.segments}*"):  # a killed process leaves them
            left.unlink(missing_ok=True)
        self.members = []


def tokens_of(results: list[Any]) -> list[Any]:
    return [
        [completion["tokens"] for completion in result["completions"]]
        for result in results
        if isinstance(result, dict) and "completions" in result
    ]
