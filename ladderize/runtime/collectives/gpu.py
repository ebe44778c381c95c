"""All-reduces between GPUs."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ladderize.ranks.device import known_gpu
from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.base import Collectives, Handle
from ladderize.runtime.collectives.links import UNKNOWN_WIRES, one_shot_limit

# The longest message of one kernel, which is where torch itself stops to take it (kOneShotThreshBytes in its
# intra_node_comm.cpp). Kernels of vLLM, which links.csv has, beat NCCL over NVLink far beyond; torch's own was slower
# than NCCL from 240 KB on with 8 ranks (yifuwang/symm-mem-recipes, pull request 3).
ONE_SHOT_BYTES = 256 << 10
# The dtypes of torch's kernels (AT_DISPATCH_FLOAT_AND_BFLOAT16 in its CUDASymmetricMemoryOps.cu). float16 is asked for
# in pytorch/pytorch#169035, and is NCCL's until then.
ONE_SHOT_DTYPES = (torch.bfloat16, torch.float32)
# The exchange of handles of symmetric memory takes no longer, unless it has failed on another rank.
RENDEZVOUS_TIMEOUT = timedelta(minutes=1)
# The priority of communication streams: of the blocks that wait for a free multiprocessor, theirs go first. A message
# that queues behind all of the compute that should hide it is not hidden.
HIGH = -1


class OnStream(Collectives):
    """Collectives on a stream of their own. ``wait`` orders streams and never blocks the host, so CUDA graphs can
    capture it. A sum that nothing hides takes the computing stream: so a dense model's graph is one chain of kernels,
    as in other engines. Of two messages the first has been waited for when the second is blocking, so these keep their
    order.

    A message and its sum are memory of the computing stream, and held until ``wait``. Later work of that stream comes
    after the sum, so the allocator may give the memory to it again. ``record_stream`` would prevent that as long as the
    host is ahead, and in a capture altogether.
    """

    def __init__(self, ranks: int, device: torch.device) -> None:
        super().__init__(ranks)
        self.stream = torch.cuda.Stream(device, priority=HIGH)

    def reduce(self, x: Tensor, total: Tensor) -> None:
        """Write the sum of ``x`` into ``total``, on the current stream."""
        raise NotImplementedError

    def output_for(self, x: Tensor) -> Tensor:
        """Return the memory of the sum of ``x``."""
        return x

    def all_reduce_async(self, x: Tensor) -> Handle:
        return self.send(x, self.output_for(x))

    def all_reduce_blocking(self, x: Tensor) -> Handle:
        total = self.output_for(x)
        self.reduce(x, total)
        return Handle(lambda: total)

    def send(self, x: Tensor, total: Tensor) -> Handle:
        """Start to write the sum of ``x`` over the ranks into ``total``, and return the handle of the sum."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.reduce(x, total)
            through = self.stream.record_event()

        def finish(message: Tensor = x) -> Tensor:  # which is held until here
            torch.cuda.current_stream().wait_event(through)  # and for none that was sent behind it
            return total

        return Handle(finish)


class Nccl(OnStream):
    name = "nccl"

    def __init__(self, group: Ranks) -> None:
        super().__init__(group.size, group.device)
        self.group = group.group

    def reduce(self, x: Tensor, total: Tensor) -> None:
        dist.all_reduce(x, group=self.group)

    def all_gather(self, x: Tensor) -> Tensor:
        messages = torch.empty(self.ranks, *x.shape, dtype=x.dtype, device=x.device)
        # torch 2.13 warns of the older name
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(messages, x.contiguous(), group=self.group)
        return torch.cat(messages.unbind(0), -1)


class SymmetricMemory(Nccl):
    """PyTorch's symmetric memory: small messages by one kernel that reads all peers (or the switch's multicast),
    large ones by NCCL. All ranks create it together.

    limit: the bytes of the longest small message, by the number of ranks and the GPUs' wires.
    """

    name = "symm_mem"

    def __init__(self, group: Ranks) -> None:
        super().__init__(group)
        import torch.distributed._symmetric_memory as symm_mem

        torch_group = group.group if group.group is not None else dist.group.WORLD
        assert torch_group is not None
        self.group_name = torch_group.group_name
        # all ranks' names, since all must agree on the limit; asked for before one rank can fail
        gpus = group.gather(torch.cuda.get_device_name(group.device))
        # ranks meet over the group's store, whose usual limit is as long as a collective may take
        store: Any = dist.distributed_c10d._get_process_group_store(torch_group)
        before = store.timeout
        store.set_timeout(RENDEZVOUS_TIMEOUT)
        try:
            self.buffer = symm_mem.empty(ONE_SHOT_BYTES, dtype=torch.uint8, device=group.device)
            handle = symm_mem.rendezvous(self.buffer, self.group_name)
        finally:
            store.set_timeout(before)
        self.multicast = bool(getattr(handle, "multicast_ptr", 0))
        gpu = known_gpu(gpus[0]) if len(set(gpus)) == 1 else {}
        wires = (gpu["medium"], gpu["wire_gb_s"]) if gpu else UNKNOWN_WIRES
        # a switch that sums is NVLink's
        self.limit = ONE_SHOT_BYTES if self.multicast else int(min(ONE_SHOT_BYTES, one_shot_limit(self.ranks, *wires)))

    def by_one_kernel(self, x: Tensor) -> bool:
        return x.nbytes <= self.limit and x.nbytes % 16 == 0 and x.dtype in ONE_SHOT_DTYPES

    def output_for(self, x: Tensor) -> Tensor:
        return torch.empty_like(x) if self.by_one_kernel(x) else x

    def reduce(self, x: Tensor, total: Tensor) -> None:
        if not self.by_one_kernel(x):
            super().reduce(x, total)
            return
        # one buffer is enough: no two sums run side by side, and each kernel ends with a barrier of all ranks
        message, operators = self.buffer[: x.nbytes].view(x.dtype).view(x.shape), torch.ops.symm_mem
        if self.multicast:
            message.copy_(x)  # the product before could write there (torch.mm(out=)), if it knew of the buffer
            operators.multimem_one_shot_all_reduce_out(message, "sum", self.group_name, total)
        else:
            operators.one_shot_all_reduce_copy_out(message, x, "sum", self.group_name, total)
