"""Two models that have frozen weights in common, a teacher and its student, hold them once."""

from typing import Any

import torch
from torch import Tensor, nn

from ladderize.runtime.layers import AttentionWeights, MlpWeights


def share_layer(other: Any, index: int, attention: AttentionWeights, mlp: MlpWeights) -> None:
    """Let the large weights of a layer that was just read lie where the frozen and equal ones of ``other`` do, a
    ``TrainedWeights`` or None: so no more than a layer of both models is ever in memory twice."""
    if other is None:
        return
    theirs = [other.attentions[index].qkv, *other.attentions[index].o, *other.mlps[index].gate_up]
    own = [attention.qkv, *attention.o, *mlp.gate_up]
    if len(own) == len(theirs):  # as many virtual ranks are computed apart
        for linear, same in zip([*own, mlp.down], [*theirs, other.mlps[index].down], strict=True):
            if _can_share(linear.weight, same.weight):
                linear.weight = same.weight.detach()


def share_frozen(weights: nn.Module, other: nn.Module) -> None:
    """Let the parameters of ``weights`` be those of ``other`` that are frozen and equal: both ``TrainedWeights``."""
    theirs = dict(other.named_parameters(remove_duplicate=False))
    for name, parameter in list(weights.named_parameters(remove_duplicate=False)):
        same = theirs.get(name)
        if same is not None and _can_share(parameter, same):
            owner, _, leaf = name.rpartition(".")
            setattr(weights.get_submodule(owner), leaf, same)


def _can_share(own: Tensor, other: Tensor) -> bool:
    return not other.requires_grad and own.shape == other.shape and torch.equal(own, other)
