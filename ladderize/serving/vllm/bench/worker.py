"""vLLM's CPU worker, told which ranks share memory."""

import os

from vllm.v1.worker.cpu_worker import CPUWorker

IDENTITY = "LADDERIZE_VLLM_HOST"


class IdentifiedWorker(CPUWorker):
    """Ranks that others start get one name for their shared memory from vLLM, wherever they are; it then sums over
    memory that they may not share, or over memory where they are to use a link. With a name for each host and network
    namespace, vLLM's own check finds out, and takes gloo.
    """

    def init_device(self) -> None:
        """vLLM makes the name from the end of this address. The ranks have met before, so it is not used otherwise."""
        self.distributed_init_method = f"env:{os.environ[IDENTITY]}"
        super().init_device()
