"""The all-reduce between processes of one host through shared memory: no system call while all are on time.

Every rank writes its message into a slot of its own and then raises its counter; a peer that sees the counter may read
the slot. A writer's stores to its slot must become visible before its store to the counter, and a reader must not load
the slot before the counter. x86 guarantees both; the C library ends its non-temporal copies with a fence; and each
access below is a separate call into compiled code, which no compiler moves. Counters are aligned 8-byte words, each on
a cache line of its own and written by one rank only. Other architectures need fences, which Python cannot issue."""

import functools
import mmap
import multiprocessing
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from ladderize.console import human_bytes
from ladderize.errors import UserError
from ladderize.ranks.group import SAME_WORK_TIMEOUT, Ranks
from ladderize.runtime.collectives.base import Collectives, Handle
from ladderize.runtime.native.library import TYPES, address, agreed_kernels

FOLDER = Path("/dev/shm")  # noqa: S108 - a memory file system is the point
ORDERED = ("x86_64", "AMD64")
# Messages that may be in flight, at least: the oldest slot is free again when every rank has read it, so a few more
# than are waited for let an early rank go on.
LEAST_SLOTS = 4
LINE = 128  # bytes between counters: two cache lines, which adjacent-line prefetch pairs
MOST_VIEWS = 64  # shapes of messages whose views are kept
SPINS, YIELD_SECONDS = 2000, 1.0
WRITTEN, READ = 0, 1  # kinds of counters


class SharedMemory(Collectives):
    """Collectives through shared memory, with messages of at most ``max_bytes``, and at most ``slots`` in flight: with
    one more, every rank would wait for the others to read."""

    name = "shm"
    copies = True

    def __init__(self, group: Ranks, *, max_bytes: int, slots: int = LEAST_SLOTS) -> None:
        super().__init__(group.size)
        self.slots = slots
        self.rank = group.rank
        self.slot_bytes = _round_up(max_bytes)
        self.sent, self.received = 0, 0
        self.pids = group.gather(os.getpid())
        header = _round_up(2 * group.size * LINE)
        size = header + slots * group.size * self.slot_bytes
        memory = self._attach(group, size)
        # of each rank, the messages that it has put into its slots (WRITTEN), and those that it is done with (READ)
        self.counters = memoryview(memory)[: 2 * group.size * LINE].cast("q", (2, group.size, LINE // 8))
        messages = torch.frombuffer(memory, dtype=torch.uint8)[header:].view(slots, group.size, self.slot_bytes)
        self.peers = [r for r in range(group.size) if r != group.rank]
        kernels = agreed_kernels(group)
        self.kernels = None if isinstance(kernels, str) else kernels
        self.threads = torch.get_num_threads()

        def views(shape: torch.Size, dtype: torch.dtype) -> list[list[Tensor]]:
            size = shape.numel() * dtype.itemsize
            return [[*slot[:, :size].view(dtype).view(group.size, *shape)] for slot in messages]

        # of each slot the messages, one for each rank: a view costs as much as copying a small message
        self.views = functools.lru_cache(MOST_VIEWS)(views)

    @staticmethod
    def problem(
        *, hosts: list[str], cores: int, max_bytes: int, slots: int = LEAST_SLOTS, others: int = 0
    ) -> str | None:
        """Return the reason why shared memory cannot serve this group, which computes beside so many ``others``."""
        if len(set(hosts)) > 1:
            return "the ranks are on several hosts"
        if platform.machine() not in ORDERED:
            return f"it relies on the memory ordering of x86, and this is {platform.machine()}"
        if (busy := len(hosts) + others) > cores:
            return f"{busy} ranks would busy-wait on {cores} cores"
        if not FOLDER.is_dir():
            return f"there is no {FOLDER}"
        need, free = slots * len(hosts) * _round_up(max_bytes) + mmap.PAGESIZE, shutil.disk_usage(FOLDER).free
        if need > free:
            return f"it needs {human_bytes(need)} in {FOLDER}, where {human_bytes(free)} are free"
        return None

    @staticmethod
    def _attach(group: Ranks, size: int) -> mmap.mmap:
        """Return a file in memory that every rank has mapped. Its name is deleted before, so nothing stays behind.
        Raises UserError where there is no room. multiprocessing's SharedMemory does not do: before Python 3.13 its
        resource tracker unlinks the segment when any process that attached ends."""
        path = None
        if group.is_main:
            # the process that started this rank deletes leftovers; the rank is forked from a server, not from it
            parent = multiprocessing.parent_process()
            starter = os.getppid() if parent is None else parent.pid
            descriptor, path = tempfile.mkstemp(prefix=f"ladderize-{starter}-", dir=FOLDER)
            try:
                os.posix_fallocate(descriptor, 0, size)  # now, in words, rather than later by SIGBUS
            except OSError as error:
                os.unlink(path)
                path = f"cannot reserve {human_bytes(size)} in {FOLDER}: {error.strerror}"
            os.close(descriptor)
        path = group.broadcast(path)
        if not path.startswith("/"):
            raise UserError(f"{path}; use --backend gloo")
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), size)
        group.barrier()
        if group.is_main:
            os.unlink(path)
        return memory

    def _post(self, x: Tensor) -> tuple[list[Tensor], int]:
        """Put ``x`` into the next slot; return that slot's messages, one for each rank, and the message's number."""
        if x.nbytes > self.slot_bytes:
            raise RuntimeError(f"a message of {x.nbytes} bytes is over the {self.slot_bytes} that were announced")
        number, slots = self.sent + 1, self.slots
        if number > slots:
            if self.received < number - slots:
                raise RuntimeError(f"more than {slots} messages are in flight")
            self._await(READ, number - slots)
        messages = self.views(x.shape, x.dtype)[number % slots]
        messages[self.rank].copy_(x)
        self.counters[WRITTEN, self.rank, 0] = self.sent = number
        return messages, number

    def _take(self, number: int) -> None:
        """Wait until every peer's message ``number`` is there."""
        if number != self.received + 1:
            raise RuntimeError(f"message {number} was waited for before message {self.received + 1}")
        self._await(WRITTEN, number)

    def _done(self, number: int) -> None:
        self.counters[READ, self.rank, 0] = self.received = number

    def all_reduce_async(self, x: Tensor) -> Handle:
        messages, number = self._post(x)

        def finish(residual: Tensor | None = None) -> Tensor:
            self._take(number)
            total = self._sum(messages, residual)
            self._done(number)
            return total

        return Handle(finish, adds=True)  # to the stream, while the sum is taken

    def _sum(self, messages: list[Tensor], residual: Tensor | None) -> Tensor:
        """Sum in rank order on every rank, so that all hold the same bits; round once."""
        first = messages[0]
        fits = residual is None or (residual.is_contiguous() and residual.dtype == first.dtype)
        if self.kernels is None or first.dtype not in TYPES or not fits:
            total = torch.add(*messages) if self.ranks == 2 else torch.stack(messages).sum(0)
            return total if residual is None else residual + total
        out = torch.empty_like(first)
        self.kernels.ladderize_sum(
            *(TYPES[out.dtype], first.data_ptr(), self.slot_bytes, self.ranks, address(residual)),
            *(out.data_ptr(), out.numel(), self.threads),
        )
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        messages, number = self._post(x)
        self._take(number)
        gathered = torch.cat(messages, -1)
        self._done(number)
        return gathered

    def _await(self, kind: int, number: int) -> None:
        """Wait until every peer's counter of ``kind`` reaches ``number``: first spin, then yield the core."""
        for peer in self.peers:
            spins = 0
            while spins < SPINS and self.counters[kind, peer, 0] < number:
                spins += 1
            # counted, not read off the clock: a whole group that Ctrl-Z stopped must not time out
            checks, check_at = 0, time.monotonic() + YIELD_SECONDS
            while self.counters[kind, peer, 0] < number:
                os.sched_yield()
                if time.monotonic() > check_at:
                    checks, check_at = checks + 1, time.monotonic() + YIELD_SECONDS
                    self._check(peer, checks * YIELD_SECONDS)

    def _check(self, peer: int, waited_s: float) -> None:
        """Raise UserError if a rank that is waited for has died, or does nothing for too long."""
        rank, limit_s = f"rank {peer} (process {self.pids[peer]})", int(SAME_WORK_TIMEOUT.total_seconds())
        try:
            state = Path(f"/proc/{self.pids[peer]}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            state = "X"
        if state in ("X", "Z"):
            raise UserError(f"{rank} has died; this rank stops too")
        if waited_s >= limit_s:
            raise UserError(
                f"{rank} lives but has sent nothing for {limit_s} s, so this rank stops too; see whether something has"
                " stopped it (SIGSTOP, a debugger)"
            )


def remove_segments(starter: int) -> None:
    """Delete the segments of process ``starter``'s ranks that were stopped while they attached."""
    for left in FOLDER.glob(f"ladderize-{starter}-*"):
        left.unlink(missing_ok=True)


def _round_up(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
