"""All-reduces between GPUs."""

import torch
import torch.distributed as dist
from torch import Tensor

from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.base import Collectives, Handle

# Up to here one kernel in which every rank reads all peers beats NCCL's ring (vLLM's and TensorRT-LLM's custom
# all-reduces switch at sizes between 256 KiB and 8 MiB).
ONE_SHOT_BYTES = 512 * 1024


class Nccl(Collectives):
    """NCCL on a stream of its own. ``wait`` orders streams and never blocks the host, so CUDA graphs can capture it."""

    name = "nccl"

    def __init__(self, group: Ranks) -> None:
        super().__init__(group.size)
        self.group = group.group
        self.stream = torch.cuda.Stream(group.device)

    def reduce(self, x: Tensor) -> Tensor:
        """Sum on the current stream."""
        dist.all_reduce(x, group=self.group)
        return x

    def all_reduce_async(self, x: Tensor) -> Handle:
        compute = torch.cuda.current_stream()
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            total = self.reduce(x)
            through = self.stream.record_event()
        x.record_stream(self.stream)

        def finish() -> Tensor:
            waiting = torch.cuda.current_stream()
            waiting.wait_event(through)  # for this message, and not for those that were sent after it
            total.record_stream(waiting)
            return total

        return Handle(finish)

    def all_gather(self, x: Tensor) -> Tensor:
        parts = torch.empty(self.ranks, *x.shape, dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(parts, x.contiguous(), group=self.group)
        return torch.cat(parts.unbind(0), -1)


class SymmetricMemory(Nccl):
    """PyTorch's symmetric memory: small messages by one kernel that reads all peers (or the switch's multicast), large
    ones by NCCL."""

    name = "symm_mem"

    def __init__(self, group: Ranks) -> None:
        super().__init__(group)
        import torch.distributed._symmetric_memory as symm_mem

        own = group.group if group.group is not None else dist.group.WORLD
        assert own is not None
        self.group_name = own.group_name
        self.buffer = symm_mem.empty(ONE_SHOT_BYTES, dtype=torch.uint8, device=group.device)
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
