"""CUDA graphs, which start many kernels at once that the host would start one by one."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Output = TypeVar("_Output")


def capture(
    run: Callable[[], _Output], device: torch.device, *, pool: Any = None, warm_ups: int = 2
) -> tuple[Any, _Output]:
    """Return a graph of ``run`` and its output, which each replay fills anew.

    pool: memory that graphs share; each one's output is then read before the next is replayed.
    """
    side = torch.cuda.Stream(device)  # for the warm-up, as capturing asks for
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog thread may look at events meanwhile
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = run()
    return graph, output
