"""FSDP2: what the launcher asks for, and tensors of which every rank holds a part."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn


def shard(module: nn.Module, mesh: Any, *, compute: torch.dtype, reshard: bool | None) -> None:
    """Let FSDP2 share a module's parameters out over ``mesh``. reshard: whether they are given up between forward and
    backward."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    narrow = compute if compute != torch.float32 else None
    # a ladder layer hands on the stream that it was given; nothing writes into it
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded, gathered on every rank; all ranks must ask for it."""
    full = getattr(tensor, "full_tensor", None)
    return (full() if full is not None else tensor).detach()


@torch.no_grad()
def assign(tensor: Tensor, value: Tensor) -> None:
    """Copy a whole value into a tensor that may be sharded."""
    mesh = getattr(tensor, "device_mesh", None)
    value = value.to(tensor.device, tensor.dtype)
    if mesh is not None:
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value, mesh, tensor.placements, src_data_rank=None)  # type: ignore[attr-defined]
    tensor.copy_(value)
