"""vLLM's worker of a CPU rank, named by its path alone (``worker_cls``).

vLLM's module of it replaces torch.cuda's Event, Stream and more for the whole process where it is imported.
"""

import os

from vllm.v1.worker.cpu_worker import CPUWorker

from ladderize.vllm.bench.groups import IDENTITY


class IdentifiedWorker(CPUWorker):
    """A worker that shares memory only with ranks that it can share it with.

    Ranks that others start get one name for their shared memory from vLLM, wherever they are; it then sums over memory
    that they may not share, or over memory where they are to use a link. With a name for each host and network
    namespace, vLLM's own check finds out, and takes gloo.
    """

    def init_device(self) -> None:
        # vLLM makes the name from the end of this address. The ranks have met before, so it is not used otherwise
        self.distributed_init_method = f"env:{os.environ[IDENTITY]}"
        super().init_device()
