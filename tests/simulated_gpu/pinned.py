"""Pinned memory of the simulated GPU's host: a copy from it is read when the device comes to it, and not before."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.simulated_gpu.device import SimTensor, SimulatedGpu


@contextlib.contextmanager
def pinned_memory() -> Iterator[None]:
    pinned = list[torch.UntypedStorage]()  # which are kept: nobody else gets their addresses
    uploaded, copied_into, empty = SimulatedGpu.uploaded, SimulatedGpu.copied_into, torch.empty

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        pinned.append(copy.untyped_storage())
        return copy

    def make_empty(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = empty(*sizes, **options)
        return pin(made) if pin_memory else made

    def is_pinned(tensor: torch.Tensor) -> bool:
        return any(tensor.untyped_storage().data_ptr() == storage.data_ptr() for storage in pinned)

    def later(gpu: SimulatedGpu, into: SimTensor, values: torch.Tensor) -> SimTensor:
        target = into.backing
        gpu.launch("copy from pinned memory", lambda: target.copy_(values), set(), {into.memory.pointer})
        return into

    def upload(gpu: SimulatedGpu, values: torch.Tensor) -> SimTensor:
        return later(gpu, gpu.new(values), values) if is_pinned(values) else uploaded(gpu, values)

    def copy_into(gpu: SimulatedGpu, into: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if isinstance(into, SimTensor) and not isinstance(values, SimTensor) and is_pinned(values):
            return later(gpu, into, values)
        return copied_into(gpu, into, values)

    with (
        mock.patch.object(torch.Tensor, "pin_memory", pin),
        mock.patch.object(torch, "empty", make_empty),
        mock.patch.multiple(SimulatedGpu, uploaded=upload, copied_into=copy_into),
    ):
        yield
