"""FSDP2: what the launcher asks for, and tensors of which every rank holds a part."""

import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ladderize.console import UserError


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


def wants_fsdp(ranks: int) -> bool:
    """Whether the launcher asked for FSDP2; raises UserError for what it may ask for that is not here."""

    def said(key: str) -> str:
        return os.environ.get(key, "").lower()

    if said("ACCELERATE_USE_DEEPSPEED") == "true":
        raise UserError(
            "accelerate was told to use DeepSpeed, which adapt does not support; FSDP2 shards the same: --use_fsdp"
            " --fsdp_version 2"
        )
    if said("ACCELERATE_GRADIENT_ACCUMULATION_STEPS") not in ("", "1"):
        raise UserError(
            "accelerate's --gradient_accumulation_steps has no effect on adapt; it follows from --batch-size and"
            " --micro-batch-size"
        )
    if said("ACCELERATE_USE_FSDP") != "true":
        return False
    if ranks == 1:
        raise UserError(
            "accelerate was told to use FSDP with one process, which shards nothing; start several, or leave it out"
        )
    if said("FSDP_VERSION") != "2":
        raise UserError("accelerate was told to use FSDP 1; adapt supports FSDP 2: add --fsdp_version 2")
    for key, option in (
        ("FSDP_OFFLOAD_PARAMS", "--fsdp_offload_params"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "--fsdp_activation_checkpointing"),
    ):
        if said(key) == "true":
            raise UserError(
                f"accelerate's {option} has no effect on adapt; leave it out (adapt has --gradient-checkpointing)"
            )
    return True


def reshards() -> bool | None:
    """What accelerate's --fsdp_reshard_after_forward says; None leaves it to FSDP2, which does so but for the outermost
    module."""
    return False if os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "").lower() == "false" else None
