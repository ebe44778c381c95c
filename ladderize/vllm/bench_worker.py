"""vLLM's worker of a CPU rank. Others name it by its path (``worker_cls``), and do not import it.

The import of vLLM's module replaces torch.cuda's Event, Stream and more for the whole process.
"""

import os

from vllm.v1.worker.cpu_worker import CPUWorker

from ladderize.vllm.bench_engine import IDENTITY


class IdentifiedWorker(CPUWorker):
    """A worker that shares memory only with ranks of its host and network namespace.

    vLLM gives ranks that others start one name for their shared memory, wherever they are. Then it sums over memory
    that they do not share, or in place of a link. With a name for each host and network namespace, vLLM's own check
    finds this, and takes gloo.
    """

    def init_device(self) -> None:
        # vLLM makes the name from the end of this address. The ranks have met before, so it is not used otherwise
        self.distributed_init_method = f"env:{os.environ[IDENTITY]}"
        super().init_device()
