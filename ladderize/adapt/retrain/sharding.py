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


def forget_gathered(module: nn.Module) -> None:
    """Give up the parameters that FSDP2 has gathered for a forward pass and keeps for its backward pass: without one,
    it would compute with them once more after they have changed."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


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


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be sharded."""
    to_local = getattr(tensor, "to_local", None)
    local: Tensor = tensor if to_local is None else to_local()
    return local


def shard_rows(values: Tensor, parameter: Tensor) -> Tensor:
    """Of ``values`` [rows], known on every rank, those of the rows that this rank holds of a parameter."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return values
    from torch.distributed.tensor import distribute_tensor

    placements: Any = parameter.placements  # type: ignore[attr-defined]
    return local_part(distribute_tensor(values, mesh, placements, src_data_rank=None))


def own_rows(tensor: Tensor, rows: slice) -> Tensor:
    """Of ``rows`` of a tensor that may be sharded those that this rank holds: a view, outside of autograd."""
    begin, end, _ = rows.indices(len(tensor))
    held = shard_rows(torch.arange(len(tensor), device=tensor.device), tensor)
    first, last = (int((held < edge).sum()) for edge in (begin, end))
    return local_part(tensor)[first:last]
