"""The choice of a rank's operations, with a note where they are slower than they could be."""

import torch

from ladderize.ranks.group import Ranks
from ladderize.runtime.cpu_operations import CpuOperations
from ladderize.runtime.native.library import TYPES, agreed_kernels, why_no_triton
from ladderize.runtime.operations import Operations


def choose_operations(group: Ranks, dtype: torch.dtype) -> Operations:
    """Return the operations of a rank: by our own kernels where all ranks have them, else by PyTorch, with a note.

    All ranks call it.
    """
    if group.device.type == "cuda":
        problem = next(filter(None, group.gather(why_no_triton())), None)
        if problem is not None:
            return Operations(f"slower than it could be: {problem}")
        from ladderize.runtime.gpu_operations import GpuOperations

        return GpuOperations.for_device(group.device)
    if group.device.type != "cpu" or dtype not in TYPES:
        return Operations()
    kernels = agreed_kernels(group)
    return Operations(f"slower than it could be: {kernels}") if isinstance(kernels, str) else CpuOperations(kernels)
