"""Forward, backward and update on any number of ranks: plain, DDP, or FSDP2, all of them PyTorch's own.

``accelerate launch --use_fsdp --fsdp_version 2`` asks for FSDP2. The sharding itself is done in ``models``, layer by
layer while a model is read, since Accelerate's needs the whole model in every process's memory first, and has no FSDP
on CPUs.
"""

import importlib.util
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ladderize.adapt.methods import FLASH, FLEX
from ladderize.adapt.retrain.engine import MOMENTS, WEIGHT, Engine, adamw
from ladderize.adapt.retrain.losses import ScoredLogits, TrainedModel, token_losses
from ladderize.adapt.retrain.models import trained_parameters
from ladderize.adapt.retrain.sharding import assign, whole
from ladderize.errors import UserError
from ladderize.ranks.group import Ranks


def check_attention(name: str, device: str, compute: torch.dtype) -> None:
    """Raise UserError where this attention cannot run."""
    if name == FLASH and importlib.util.find_spec("flash_attn") is None:
        raise UserError(
            f"--attention {FLASH} needs the package flash-attn, which is not installed; take sdpa, or install it"
        )
    if name == FLASH and compute == torch.float32:
        raise UserError(f"--attention {FLASH} computes in bfloat16 only; pass --dtype bfloat16, or take sdpa")
    if name in (FLASH, FLEX) and device != "cuda":
        raise UserError(f"--attention {name} needs a GPU; take sdpa")


class HFEngine(Engine):
    """Wraps a student and its optimizer. compared: see ``Engine``; where there are such layers, both models are made
    ``collecting``."""

    def __init__(
        self,
        student: TrainedModel,
        ranks: Ranks,
        *,
        compute: torch.dtype,
        sharded: bool,
        weight_decay: float,
        teacher: ScoredLogits | None = None,
        compared: Sequence[int] = (),
    ) -> None:
        self.student: TrainedModel = student
        self.compared = compared
        self.teacher, self.ranks, self.data = teacher, ranks, ranks
        self.compute, self.sharded, self.has_teacher = compute, sharded, teacher is not None
        self.parameters = dict(trained_parameters(student))
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        fused = ranks.device.type == "cuda" or not sharded
        self.optimizer = adamw(self.parameters.values(), weight_decay, fused=fused)
        self.parallel = None
        if ranks.size > 1 and not sharded:
            # without the views it would hold a second copy of all gradients
            own = [ranks.device] if ranks.device.type == "cuda" else None
            self.parallel = DistributedDataParallel(student, device_ids=own, gradient_as_bucket_view=True)

    def to_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.ranks.device, non_blocking=True) for name, tensor in batch.items()}

    def losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        """[3]: summed cross-entropy, divergence and hidden error of one micro-batch (on the device)."""
        scores, outputs = None, self.outputs(batch)
        with self._narrow():
            if self.teacher is not None:
                with torch.no_grad():
                    scores = self.teacher(**batch, outputs=outputs)
            forward = self.student if self.parallel is None else self.parallel
            sums: Tensor = forward(**batch, teacher_logits=scores, teacher_outputs=outputs)
        return sums

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to ``max_norm``; returns their norm before, over all ranks."""
        return whole(nn.utils.clip_grad_norm_(self.parameters.values(), max_norm))

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks."""
        if self.ranks.size > 1:
            torch.distributed.all_reduce(values)
        return values

    def teacher_entropy(self, batch: Mapping[str, Tensor]) -> Tensor:
        assert self.teacher is not None
        targets = batch["targets"][batch["targets"] >= 0]
        with torch.no_grad():
            return token_losses(self.teacher(**batch), targets, None, 1.0)[0]

    def _narrow(self) -> torch.autocast:
        """Products in the dtype that is computed in, unless FSDP2 sees to that."""
        narrow = self.compute != torch.float32 and not self.sharded
        return torch.autocast(self.ranks.device.type, self.compute, enabled=narrow)

    def gather(self, name: str, kept: str) -> Tensor:
        """All ranks get it."""
        parameter = self.parameters[name]
        return whole(parameter if kept == WEIGHT else self.optimizer.state[parameter][kept])

    def has_moments(self, name: str) -> bool:
        return self.parameters[name] in self.optimizer.state

    def assign(self, name: str, value: Tensor) -> None:
        assign(self.parameters[name], value)

    def assign_moments(self, name: str, step: int, moments: Mapping[str, Tensor]) -> None:
        parameter = self.parameters[name]
        device = parameter.device if self.optimizer.defaults["fused"] else "cpu"
        state = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
        for moment, tensor in state.items():
            assign(tensor, moments[moment])
        self.optimizer.state[parameter] = {"step": torch.tensor(float(step), device=device), **state}

    @torch.no_grad()
    def round_weights(self, dtype: torch.dtype) -> None:
        for parameter in self.parameters.values():
            parameter.copy_(parameter.to(dtype))

    def close(self) -> None:
        """Nothing is open between two calls."""
