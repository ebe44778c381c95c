"""All-reduces that may run under compute: one small interface and its backends.

=========== ==============================================================================================
backend     for
=========== ==============================================================================================
``nccl``    GPUs: on a stream of its own, capturable in CUDA graphs
``symm_mem`` GPUs that see each other's memory: one kernel for small messages, NCCL for large ones
``gloo``    CPUs, also on several hosts
``shm``     CPUs of one host: shared memory, no sockets (shm.py)
``emulated`` one rank of a group that is not there: a delay instead of each collective (emulated.py)
``none``    nothing is summed: the no-communication upper bound, for timing only
``single``  a group of one
=========== ==============================================================================================
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ladderize.console import UsageError, UserError, sentence
from ladderize.runtime.launch import Group, cores, host_id

BACKENDS = ("auto", "nccl", "symm_mem", "gloo", "shm", "none")
# Up to here one kernel in which every rank reads all peers beats NCCL's ring (vLLM's and TensorRT-LLM's custom all-reduces switch
# at sizes between 256 KiB and 8 MiB).
ONE_SHOT_BYTES = 512 * 1024


class Handle:
    """An all-reduce in flight. ``wait()`` returns the sum, once: a second call raises RuntimeError."""

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish: Callable[[], Tensor] | None = finish

    def wait(self) -> Tensor:
        finish, self._finish = self._finish, None
        if finish is None:
            raise RuntimeError("this all-reduce has been waited for already")
        return finish()


class Collectives:
    """What a tensor-parallel forward needs of its group. As it stands: a group of one, where every sum is complete.

    Messages given to ``all_reduce`` and ``all_reduce_async`` belong to the backend from then on: they may be reduced in place.
    All ranks issue the same collectives in the same order; handles are waited in that order too.
    """

    name = "single"

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks

    def all_reduce_async(self, x: Tensor) -> Handle:
        """Start to sum ``x`` over the ranks."""
        return Handle(lambda: x)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``."""
        return self.all_reduce_async(x).wait()

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's ``x`` [..., n] side by side: [..., ranks * n]."""
        return x

    def close(self) -> None:
        """Free what the backend holds."""


def side_by_side(x: Tensor, ranks: int) -> Tensor:
    """Stands for an all-gather of a group that is not there: ``x`` [..., n] ``ranks`` times, [..., ranks * n]."""
    return x.repeat(*[1] * (x.ndim - 1), ranks)


class NoCommunication(Collectives):
    """Every collective takes no time and does nothing: the upper bound for any overlap. Its results are wrong by design."""

    name = "none"

    def all_gather(self, x: Tensor) -> Tensor:
        return side_by_side(x, self.ranks)


class Gloo(Collectives):
    """torch.distributed's CPU backend. Two ranks swap whole messages, which is one step where an all-reduce takes two."""

    name = "gloo"

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.free: dict[tuple[torch.Size, torch.dtype], deque[_Swap]] = {}
        self.swaps = 0

    def all_reduce_async(self, x: Tensor) -> Handle:
        if self.ranks == 2:
            return self._swap(x)
        work: Any = dist.all_reduce(x, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return x

        return Handle(finish)

    def _swap(self, x: Tensor) -> Handle:
        free = self.free.setdefault((x.shape, x.dtype), deque())
        while len(free) < 2:  # so that the one to be used next has been listening for a while
            self.swaps += 1  # ranks swap in the same order, so they count alike
            free.append(_Swap(1 - dist.get_rank(), self.swaps, torch.empty_like(x)))
        swap = free.popleft()
        sending: Any = dist.isend(x, swap.peer, tag=swap.tag)

        def finish() -> Tensor:
            theirs = swap.received()
            sending.wait()  # before x changes: its end may not have left yet
            x.add_(theirs)  # a sum of two is the same bits in either order
            swap.listen()
            free.append(swap)
            return x

        return Handle(finish)

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    def close(self) -> None:
        """Answer what still listens; both ranks come here."""
        for swap in [swap for free in self.free.values() for swap in free]:
            sending: Any = dist.isend(torch.zeros_like(swap.buffer), swap.peer, tag=swap.tag)
            swap.received()
            sending.wait()
        self.free.clear()


class _Swap:
    """A place for the peer's next message of one size, always listening.

    A gloo message for which nobody listens yet is announced first and sent by a thread of its own once the peer has answered. While
    both ranks compute on all cores, that thread gets its turn milliseconds later; a peer that listens is sent to at once.
    """

    def __init__(self, peer: int, tag: int, buffer: Tensor) -> None:
        self.peer, self.tag, self.buffer = peer, tag, buffer
        self.listen()

    def listen(self) -> None:
        self.receiving: Any = dist.irecv(self.buffer, self.peer, tag=self.tag)

    def received(self) -> Tensor:
        self.receiving.wait()
        return self.buffer


class Nccl(Collectives):
    """NCCL on a stream of its own. ``wait`` orders streams and never blocks the host, so CUDA graphs can capture it."""

    name = "nccl"

    def __init__(self, ranks: int, device: torch.device) -> None:
        super().__init__(ranks)
        self.stream = torch.cuda.Stream(device)

    def reduce(self, x: Tensor) -> Tensor:
        """Sum on the current stream."""
        dist.all_reduce(x)
        return x

    def all_reduce_async(self, x: Tensor) -> Handle:
        compute = torch.cuda.current_stream()
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            total = self.reduce(x)
        x.record_stream(self.stream)

        def finish() -> Tensor:
            waiting = torch.cuda.current_stream()
            waiting.wait_stream(self.stream)
            total.record_stream(waiting)
            return total

        return Handle(finish)

    def all_gather(self, x: Tensor) -> Tensor:
        parts = torch.empty(self.ranks, *x.shape, dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(parts, x.contiguous())
        return torch.cat(parts.unbind(0), -1)


class SymmetricMemory(Nccl):
    """PyTorch's symmetric memory: small messages by one kernel that reads all peers (or the switch's multicast), large ones by NCCL."""

    name = "symm_mem"

    def __init__(self, ranks: int, device: torch.device) -> None:
        super().__init__(ranks, device)
        import torch.distributed._symmetric_memory as symm_mem

        world = dist.group.WORLD
        assert world is not None
        self.group_name = world.group_name
        self.buffer = symm_mem.empty(ONE_SHOT_BYTES, dtype=torch.uint8, device=device)
        handle = symm_mem.rendezvous(self.buffer, self.group_name)
        self.multicast = bool(getattr(handle, "multicast_ptr", 0))

    def reduce(self, x: Tensor) -> Tensor:
        size = x.nbytes
        if size > ONE_SHOT_BYTES or size % 16 or x.dtype not in (torch.bfloat16, torch.float32):
            return super().reduce(x)
        # one buffer is enough: it is used on one stream only, and each kernel ends with a barrier of all ranks
        message = self.buffer[:size].view(x.dtype)
        message.copy_(x.view(-1))
        if self.multicast:
            return torch.ops.symm_mem.multimem_all_reduce_(message, "sum", self.group_name).clone().view(x.shape)
        return torch.ops.symm_mem.one_shot_all_reduce(message, "sum", self.group_name).view(x.shape)


def check_backend(backend: str, ranks: int, device: str) -> None:
    """Raise UsageError for a backend that is none or takes no effect, UserError for one that is not for this device."""
    if backend not in BACKENDS:
        raise UsageError(f"--backend {backend} is not one of {', '.join(BACKENDS)}")
    if backend != "auto" and ranks == 1:
        raise UsageError(f"--backend {backend} has no effect with one rank; leave it out or raise --tp-size")
    if backend in ("nccl", "symm_mem", "gloo", "shm") and (backend in ("nccl", "symm_mem")) != (device == "cuda"):
        raise UserError(f"--backend {backend} is for {'CPUs' if device == 'cuda' else 'GPUs'}, but the ranks would compute on {device}")


def choose(backend: str, group: Group, *, max_bytes: int) -> tuple[Collectives, str]:
    """The collectives of a group, and one sentence on the choice. Raises UserError where ``backend`` cannot work.

    max_bytes: the largest message that will be sent.
    """
    from ladderize.runtime.collectives.shm import SharedMemory

    check_backend(backend, group.size, group.device.type)
    if group.size == 1:
        return Collectives(), "one rank: no communication"
    if backend == "none":
        return NoCommunication(group.size), "none, as asked for: for timing only, results are wrong"
    if group.device.type == "cuda":
        return _on_gpu(backend, group)
    found = SharedMemory.problem(hosts=group.gather(host_id()), cores=len(set().union(*group.gather(cores()))), max_bytes=max_bytes)
    problem = next(filter(None, group.gather(found)), None)  # one answer for all ranks
    if backend == "shm" or (backend == "auto" and problem is None):
        if problem is not None:
            raise UserError(f"--backend shm cannot be used: {problem}; --backend gloo can")
        why = "as asked for" if backend == "shm" else "all ranks are on this host"
        return SharedMemory(group, max_bytes=max_bytes), f"shm: {why}"
    return Gloo(group.size), f"gloo: {'as asked for' if backend == 'gloo' else problem}"


def _on_gpu(backend: str, group: Group) -> tuple[Collectives, str]:
    problem = None
    if len(set(group.gather(host_id()))) > 1:
        problem = "the ranks are on several hosts"
    elif not all(group.gather(_peers_reachable(group))):
        problem = "not every GPU can read every other's memory"
    if backend == "symm_mem" and problem:
        raise UserError(f"--backend symm_mem cannot be used: {problem}; --backend nccl can")
    if backend == "nccl" or problem:
        return Nccl(group.size, group.device), f"nccl: {problem or 'as asked for'}"
    try:
        chosen, failure = SymmetricMemory(group.size, group.device), None
    except RuntimeError as error:  # a container may not let processes share memory handles
        chosen, failure = None, sentence(error)
    failures = [failure for failure in group.gather(failure) if failure]
    if failures and backend == "symm_mem":
        raise UserError(f"--backend symm_mem cannot be used: {failures[0]}; --backend nccl can")
    if chosen is None or failures:
        return Nccl(group.size, group.device), f"nccl: symmetric memory cannot be had ({failures[0]})"
    kernel = "multicast" if chosen.multicast else "one-shot"
    return chosen, f"symm_mem: {kernel} up to {ONE_SHOT_BYTES // 1024} KiB, nccl above"


def _peers_reachable(group: Group) -> bool:
    own, count = group.device.index, torch.cuda.device_count()
    return all(torch.cuda.can_device_access_peer(own, peer) for peer in range(min(count, group.size)) if peer != own)


class Recording(Collectives):
    """Another backend, with a note of every all-reduce: what it moved and when it was started, waited for and done."""

    def __init__(self, inner: Collectives, clock: Callable[[], float]) -> None:
        super().__init__(inner.ranks)
        self.inner, self.clock, self.name = inner, clock, inner.name
        self.records: list[dict[str, Any]] = []
        self.gathered: list[int] = []

    def all_reduce_async(self, x: Tensor) -> Handle:
        record = {"bytes": x.nbytes, "start": self.clock()}
        self.records.append(record)
        handle = self.inner.all_reduce_async(x)
        record["started"] = self.clock()

        def finish() -> Tensor:
            record["wait"] = self.clock()
            total = handle.wait()
            record["end"] = self.clock()
            return total

        return Handle(finish)

    def all_gather(self, x: Tensor) -> Tensor:
        self.gathered.append(x.nbytes)
        return self.inner.all_gather(x)

    def close(self) -> None:
        self.inner.close()
