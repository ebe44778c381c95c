"""A model in training and its optimizer, as the training loop and its states use them: losses, gradients, updates, and
the trained tensors whole and by name.

``hf_model`` computes with the Hugging Face model on every rank (plain, DDP or FSDP2), ``tensor_parallel`` with the
runtime's model, whose ranks share every layer. The loop, its states and its outputs know neither. All of DDP and FSDP2
is PyTorch's own; ``accelerate launch --use_fsdp --fsdp_version 2`` asks for FSDP2. The sharding itself is done while a
model is read, since Accelerate's needs the whole model in every process's memory first, and has no FSDP on CPUs.
"""

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ladderize.adapt.data.packing import PADDING_TARGET
from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.training.outputs import SubModuleOutputs
from ladderize.runtime.training.weights import Piece

BETAS, EPSILON = (0.9, 0.95), 1e-8
WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")  # what is kept of a trained tensor


class Engine(ABC):
    """All ranks call the same methods in the same order.

    student: what is trained; gives the losses of a micro-batch. teacher: gives the dense model's logits where targets
    count, None without one. pieces: of every trained tensor, by the name that a file gives it (a checkpoint's tensor,
    or PEFT's for an adapter), where it is; shapes: of each, whole. ranks: all of them. tensor: those that share one
    copy of the model. data: this rank among those that share the rows of a step: ranks that work on the same rows have
    the same number there. sharded: whether FSDP2 shares the parameters out over the data ranks; else each has them all,
    and DDP averages gradients. compared: layers of which ``losses`` compares what each sub-module adds to the stream,
    too.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: Callable[..., Tensor] | None,
        pieces: Mapping[str, Piece],
        *,
        ranks: Ranks,
        tensor: Ranks,
        data: Ranks,
        sharded: bool,
        weight_decay: float,
        compared: Sequence[int],
        collectives: Collectives | None = None,
    ) -> None:
        self.student, self.teacher, self.pieces, self.compared = student, teacher, pieces, compared
        self.ranks, self.tensor, self.data, self.sharded = ranks, tensor, data, sharded
        self.collectives = collectives
        self.shapes = {name: tuple(piece.shape) for name, piece in pieces.items()}
        parameters = [parameter for piece in pieces.values() for parameter in piece.parameters]
        self.parameters = list(dict.fromkeys(parameters))  # under tensor parallelism q, k and v are pieces of one
        matrices, others = ([p for p in self.parameters if (p.ndim > 1) == wide] for wide in (True, False))
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        on_gpu = ranks.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], betas=BETAS, eps=EPSILON, fused=on_gpu or not sharded
        )
        self.parallel: DistributedDataParallel | None = None
        if data.size > 1 and not sharded:
            with warnings.catch_warnings():
                # newer versions of torch have another name for broadcast_buffers, and say so
                warnings.simplefilter("ignore", FutureWarning)
                self.parallel = DistributedDataParallel(
                    student,
                    device_ids=[ranks.device] if on_gpu else None,
                    process_group=data.group,
                    gradient_as_bucket_view=True,  # else it would hold a second copy of all gradients
                    broadcast_buffers=False,  # every rank reads the same files
                    init_sync=False,
                )

    @property
    def has_teacher(self) -> bool:
        return self.teacher is not None

    # ---- a step ----

    def to_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """input_ids, position_ids and targets, [rows, tokens] each."""
        return {name: tensor.to(self.ranks.device, non_blocking=True) for name, tensor in batch.items()}

    def losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        """[3]: cross-entropy and divergence, summed over the tokens that count, and hidden error, summed over all
        tokens, of one micro-batch (on the device); equal on ranks of the same rows."""
        scores = None
        outputs = SubModuleOutputs(self.compared, batch["targets"] != PADDING_TARGET) if self.compared else None
        with self.narrow():
            if self.teacher is not None:
                with torch.no_grad():
                    scores = self.teacher(**batch, outputs=outputs)
            forward = self.student if self.parallel is None else self.parallel
            sums: Tensor = forward(**batch, teacher_logits=scores, teacher_outputs=outputs)
        return sums

    def narrow(self) -> contextlib.AbstractContextManager[Any]:
        """Around forward passes: products in the dtype that is computed in, where the model does not see to it."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch. After the ``last`` of a step every gradient is the mean over
        the data ranks.

        Where FSDP2 shares the parameters out, ranks average in each: gradients of which no rank has a part yet would be
        whole ones, on every rank.
        """
        with contextlib.nullcontext() if last or self.parallel is None else self.parallel.no_sync():
            yield

    @abstractmethod
    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to ``max_norm``; returns their norm before, over all of the model: one number, equal
        on all ranks. Called once, after a step's last micro-batch."""

    def step(self, rate: float) -> None:
        """Update the weights with this learning rate, and forget the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget the gradients. DDP's stay where they are, in its buckets: others beside them would be made anew."""
        self.optimizer.zero_grad(set_to_none=self.parallel is None)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of the data ranks' ``values``, on every rank; float64. Where ranks of the same rows differ, all of
        them count in part, so that none is lost."""
        return self.ranks.sum(values).div_(self.tensor.size)

    # ---- scoring ----

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around losses that are not trained on: no dropout, no gradients."""
        self.student.eval()
        with torch.no_grad():
            yield
        for part in self.student.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # it keeps what it gathered for a backward pass, and would compute with it once more
        self.student.train()

    @torch.no_grad()
    def teacher_entropy(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The summed cross-entropy of a micro-batch under the teacher: a scalar."""
        assert self.teacher is not None
        return self.entropy(self.teacher(**batch), batch["targets"][batch["targets"] >= 0])

    @abstractmethod
    def entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The summed cross-entropy of what the teacher gives: a scalar."""

    # ---- what is trained, whole and by name ----

    def gather(self, name: str, kept: str) -> Tensor:
        """A trained tensor's weight or moment, whole and fp32, on all ranks, which must all ask for it.

        kept: ``WEIGHT`` or one of ``MOMENTS``.
        """
        return self.pieces[name].whole(lambda parameter: whole(self._kept(parameter, kept)), self.tensor).detach()

    def has_moments(self, name: str) -> bool:
        """Whether the optimizer has updated this tensor; the same on all ranks."""
        return all(parameter in self.optimizer.state for parameter in self.pieces[name].parameters)

    def assign(self, name: str, value: Tensor) -> None:
        """Put a whole weight in place of the one that is there."""
        self._assign(self.pieces[name], WEIGHT, value)

    def assign_moments(self, name: str, step: int, moments: Mapping[str, Tensor]) -> None:
        """Put whole moments, and the number of updates that made them, in place of the optimizer's."""
        piece = self.pieces[name]
        for parameter in piece.parameters:
            state = self.optimizer.state[parameter]
            if not state:  # no other piece of this parameter came before
                device = parameter.device if self.optimizer.defaults["fused"] else "cpu"
                state["step"] = torch.tensor(float(step), device=device)
                state.update({moment: torch.zeros_like(parameter) for moment in MOMENTS})
        for moment in MOMENTS:
            self._assign(piece, moment, moments[moment])

    @torch.no_grad()
    def round_weights(self, dtype: torch.dtype) -> None:
        """Round what is trained to ``dtype``, as a file will hold it."""
        for parameter in self.parameters:
            parameter.copy_(parameter.to(dtype))

    def close(self) -> None:
        """Finish all communication: after the last use, by all ranks; not after an error, when others may be gone."""
        if self.collectives is not None:
            self.collectives.close()

    def _kept(self, parameter: Tensor, kept: str) -> Tensor:
        tensor: Tensor = parameter if kept == WEIGHT else self.optimizer.state[parameter][kept]
        return tensor

    @torch.no_grad()
    def _assign(self, piece: Piece, kept: str, value: Tensor) -> None:
        """Put this rank's part of a whole value where it lies."""
        value = value.to(self.ranks.device, torch.float32)
        own = {parameter: self._kept(parameter, kept) for parameter in piece.parameters}
        if not self.sharded:
            piece.assign(own.__getitem__, value)
            return
        gathered = {parameter: whole(tensor).clone() for parameter, tensor in own.items()}
        piece.assign(gathered.__getitem__, value)
        for parameter, tensor in own.items():
            tensor.copy_(distributed_like(tensor, gathered[parameter]))


# ---- FSDP2 ----


def shard(module: nn.Module, mesh: Any, *, compute: torch.dtype, reshard: bool | None) -> None:
    """Let FSDP2 share a module's parameters out over ``mesh``. reshard: whether they are given up between forward and
    backward."""
    narrow = compute if compute != torch.float32 else None
    # a ladder layer hands on the stream that it was given; nothing writes into it
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded, gathered on every rank; all ranks must ask for it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def distributed_like(tensor: Tensor, value: Tensor) -> Tensor:
    """A whole value, known on every rank, shared out as a tensor that may be sharded is."""
    if not isinstance(tensor, DTensor):
        return value
    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
