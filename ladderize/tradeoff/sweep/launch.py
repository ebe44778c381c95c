"""On how many processes a stage's command runs, and how it is started on them: as torchrun does."""

import os
import runpy
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladderize.adapt.methods import FULL, LORA
from ladderize.boundary import INTERRUPTED
from ladderize.errors import UserError
from ladderize.files.records import Record, read_value
from ladderize.ranks.environment import MASTER_ADDR, MASTER_PORT, Place, environment_with
from ladderize.ranks.threads import cores, set_threads
from ladderize.runtime.launch import Send, run_processes

PROCESSES, FSDP = "processes", "fsdp"
# of the sections whose commands can share their work
LAUNCH_KEYS = {"sensitivity": (PROCESSES,), "adapt": (PROCESSES, FSDP), "eval": (PROCESSES,)}
SHARDS = (FULL, LORA)  # methods whose models FSDP2 shards, and whose batch is shared
OF_ALL_GPUS = (*SHARDS, "sensitivity")  # what takes all GPUs of the machine
TAKE_ALL_CORES = ("sensitivity",)  # unless --threads says otherwise, whatever OMP_NUM_THREADS does; so does adapt
LOOPBACK = "127.0.0.1"

Words = tuple[str, ...]  # of a command line, without the program
Given = Mapping[str, Any]  # option -> value, as a file has them


@dataclass(frozen=True)
class HostPart(Record):
    """One host's part of a command that several run together. host: its number among them. address, port: where all
    find each other."""

    host: int
    address: str
    port: int


@dataclass(frozen=True)
class StageLaunch(Record):
    """processes: that share the work. fsdp: they shard weights, gradients and the optimizer (FSDP2). gpus: that they
    take on each host, where it has any. hosts: on which they are, as many on each."""

    processes: int = 1
    fsdp: bool = False
    gpus: int = 0
    hosts: int = 1

    @classmethod
    def of(cls, given: Given, method: str, gpus: int, hosts: int = 1) -> "StageLaunch":
        """What a section asks for; where it says nothing of ``processes``, what is ``OF_ALL_GPUS`` gets as many of the
        machine's ``gpus`` as its batch is divisible by, and what shards its model those of all ``hosts``. method: of
        adapt, or the name of another section's command."""
        tp_size, batch = int(given.get("tp_size", 1)), given.get("batch_size") if method in SHARDS else None
        on_cpu = given.get("device") == "cpu"
        own = 1 if on_cpu else max(1, gpus)

        def spread(processes: int) -> int:
            """The fewest hosts that have as many devices; where there are not so many, it is one's."""
            able = (n for n in range(1, hosts + 1) if processes % (n * tp_size) == 0 and processes <= n * own)
            return next(able, 1)

        shared = given.get(PROCESSES, 1)
        if PROCESSES not in given and method in OF_ALL_GPUS and tp_size == 1 and gpus > 1 and not on_cpu:
            fitting = [n for n in range(1, gpus * hosts + 1) if batch is None or int(batch) % n == 0]
            shared = max(n for n in fitting if n <= gpus or (method in SHARDS and n <= gpus * spread(n)))
        sharded = given.get(FSDP, method in SHARDS and shared > tp_size)
        return cls(shared, sharded, 0 if on_cpu else max(shared // spread(shared), tp_size), spread(shared))

    def words(self, gpus: int) -> str:
        """Where it runs, on machines that have ``gpus``."""
        count, unit = (self.gpus * self.hosts, "GPU") if gpus else (self.processes, "process")
        many = f"{count} {unit}{'s' if unit == 'GPU' else 'es'}" if count != 1 else f"1 {unit}"
        spread = f" of {self.hosts} hosts" if self.hosts > 1 else ""
        return (many + spread if count > 1 or self.gpus * gpus else "") + (", sharded" if self.fsdp else "")

    @property
    def variables(self) -> dict[str, str]:
        """Of accelerate launch, which asks for FSDP2 in this way."""
        wrapped = {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}  # else the whole model is gathered at once
        return {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **wrapped} if self.fsdp else {}

    def command(self, words: Words) -> str:
        """As a user types it."""
        if self.processes == 1:
            return shlex.join(["ladderize", *words])
        meeting = ["--standalone"]
        if self.hosts > 1:  # on each of them
            meeting = ["--nnodes", str(self.hosts), "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"]
        own = str(self.processes // self.hosts)
        torchrun = ["torchrun", *meeting, "--nproc-per-node", own, "-m", "ladderize"]
        return shlex.join([*(f"{name}={value}" for name, value in self.variables.items()), *torchrun, *words])

    def run(self, words: Words, threads: int | None, part: HostPart | None = None) -> None:
        """Run a command of ladderize, in this process or on several. threads: of each; None shares the cores out. part:
        this host's, where several run it. Raises what it does, and KeyboardInterrupt."""
        own = self.processes // self.hosts
        threads = min(threads, max(1, len(cores()) // own)) if threads is not None else None
        if threads is not None and words[0] in TAKE_ALL_CORES and "--threads" not in words:
            words = (*words, "--threads", str(threads))
        print(f"$ {self.command(words)}", flush=True)
        if self.processes == 1:
            set_threads(threads, 1)
            run_command(words)
            return
        from torch.distributed import TCPStore

        if part is None:
            store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
            part = HostPart(0, LOOPBACK, store.port)
        found = {MASTER_ADDR: part.address, MASTER_PORT: str(part.port), "TORCHELASTIC_USE_AGENT_STORE": str(True)}
        places = [Place(part.host * own + number, self.processes, number, own) for number in range(own)]
        with environment_with({**found, **self.variables}):
            run_processes(_rank, (words, Path.cwd(), threads), places, stoppable=True)


IN_ONE = StageLaunch()


def check_launch(given: Given, where: str, method: str) -> None:
    """Raise UserError for ``processes`` and ``fsdp`` that are no values, have no effect, or do not go with the other
    options, which are sound. method: as of ``StageLaunch.of``."""
    processes = read_value(int | None, given.get(PROCESSES), f"{where}: {PROCESSES}")
    fsdp = read_value(bool | None, given.get(FSDP), f"{where}: {FSDP}")
    tp_size, batch = int(given.get("tp_size", 1)), given.get("batch_size")
    if fsdp is not None and method not in SHARDS:
        raise UserError(f"{where}: {FSDP} has no effect on {method}; only {' and '.join(SHARDS)} shard a model")
    if processes is None:
        return
    if processes < 1 or processes % tp_size:
        least = "at least 1" if tp_size == 1 else f"a multiple of tp_size, which is {tp_size}"
        raise UserError(f"{where}: {PROCESSES} is {processes}, but must be {least}")
    if fsdp and processes == tp_size:
        raise UserError(f"{where}: {FSDP} has no effect: {processes} processes leave nothing to shard; leave it out")
    if method in SHARDS and batch is not None and int(batch) % (processes // tp_size):
        raise UserError(
            f"{where}: batch_size {batch} must be divisible by the {processes // tp_size} processes that share it"
        )


def _rank(place: Place, send: Send, words: Words, folder: Path, threads: int | None) -> None:
    os.chdir(folder)
    set_threads(threads, place.local_size)
    run_command(words)


def run_command(words: Words) -> None:
    """``python -m ladderize WORDS`` in this process. Raises what the command does, and KeyboardInterrupt."""
    sys.argv = ["ladderize", "--debug", *words]  # --debug: errors come as they are, not as a sentence
    try:
        runpy.run_module("ladderize", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            raise KeyboardInterrupt from None
        if end.code:
            raise UserError(f"it ended with exit code {end.code}") from None
