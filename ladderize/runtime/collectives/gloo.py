"""All-reduces over sockets, for CPUs."""

import secrets
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.base import Collectives, Handle

# The most sizes of messages with a posted receive. Packed rows make many sizes; each has buffers as large as its
# messages.
MOST_SIZES = 8


class Gloo(Collectives):
    """Collectives by torch.distributed's CPU backend. All ranks create them together. Two ranks swap whole messages,
    which is one step where an all-reduce takes two."""

    name = "gloo"

    def __init__(self, group: Ranks) -> None:
        super().__init__(group.size)
        self.group, self.peer = group.group, 1 - group.rank
        self.free: dict[tuple[torch.Size, torch.dtype], deque[_Swap]] = {}
        # tags of its own: receives of an earlier backend that ended in an error must not take these messages
        self.swaps: int = group.broadcast(secrets.randbelow(1 << 30))

    def all_reduce_async(self, x: Tensor) -> Handle:
        if self.ranks == 2:
            return self._swap(x)
        work: Any = dist.all_reduce(x, group=self.group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return x

        return Handle(finish)

    def _swap(self, x: Tensor) -> Handle:
        size = x.shape, x.dtype
        if size not in self.free and len(self.free) >= MOST_SIZES:  # at the same message on both ranks
            self._complete()
        free = self.free.setdefault(size, deque())
        while len(free) < 2:  # so that the one to be used next has been listening for a while
            self.swaps += 1  # ranks swap in the same order, so they count alike
            free.append(_Swap(self.group, self.peer, self.swaps, torch.empty_like(x)))
        swap = free.popleft()
        sending: Any = swap.send(x)

        def finish() -> Tensor:
            swap.receiving.wait()
            sending.wait()  # before x changes: its end may not have left yet
            x.add_(swap.buffer)  # a sum of two is the same bits in either order
            swap.listen()
            self.free.setdefault(size, deque()).append(swap)
            return x

        return Handle(finish)

    def all_gather(self, x: Tensor) -> Tensor:
        messages = [torch.empty_like(x) for _ in range(self.ranks)]
        dist.all_gather(messages, x.contiguous(), group=self.group)
        return torch.cat(messages, -1)

    def settle(self) -> None:
        super().settle()
        self._complete()

    def _complete(self) -> None:
        """Complete the posted receives that no message is on its way to."""
        for swap in [swap for free in self.free.values() for swap in free]:
            sending: Any = swap.send(torch.zeros_like(swap.buffer))
            swap.receiving.wait()
            sending.wait()
        self.free.clear()


class _Swap:
    """A buffer for the peer's next message of one size, whose receive is always posted. A gloo message that no rank has
    posted a receive for is announced first and sent by a thread of its own once the peer has answered. While both ranks
    compute on all cores, that thread gets its turn milliseconds later; a peer that listens is sent to at once."""

    def __init__(self, group: Any, peer: int, tag: int, buffer: Tensor) -> None:
        self.group, self.peer, self.tag, self.buffer = group, peer, tag, buffer
        self.listen()

    def listen(self) -> None:
        self.receiving: Any = dist.irecv(self.buffer, group=self.group, group_src=self.peer, tag=self.tag)

    def send(self, x: Tensor) -> Any:
        return dist.isend(x, group=self.group, group_dst=self.peer, tag=self.tag)
