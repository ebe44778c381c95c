"""What the training loop asks of whoever computes: losses, gradients, updates, and the trained tensors by name.

``hf_engine`` computes with the Hugging Face model on every rank (plain, DDP or FSDP2); ``tensor_parallel`` with the
runtime's model, whose ranks share every layer. The loop, its states and its outputs know neither.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ladderize.adapt.data.packing import PADDING_TARGET
from ladderize.adapt.retrain.sharding import forget_gathered
from ladderize.ranks.group import Ranks
from ladderize.runtime.training.outputs import SubModuleOutputs

BETAS, EPSILON = (0.9, 0.95), 1e-8
WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")  # what is kept of a trained tensor


class Engine(ABC):
    """A model in training and its optimizer. All ranks call the same methods in the same order.

    ranks: all of them. data: this rank among those that share the rows of a step: ranks that work on the same rows have
    the same number there. shapes: of every trained tensor, whole, by the name that a file gives it: a checkpoint's
    tensor, or PEFT's for an adapter. has_teacher: whether ``losses`` compares with a dense model. compared: layers of
    which it compares what each sub-module adds to the stream, too. student: what is trained, which ``parallel`` wraps
    where gradients are averaged by DDP.
    """

    student: nn.Module
    parallel: DistributedDataParallel | None
    optimizer: torch.optim.AdamW
    ranks: Ranks
    data: Ranks
    shapes: Mapping[str, tuple[int, ...]]
    has_teacher: bool
    compared: Sequence[int]

    # ---- a step ----

    @abstractmethod
    def to_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """input_ids, position_ids and targets, [rows, tokens] each."""

    @abstractmethod
    def losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        """[3]: cross-entropy and divergence, summed over the tokens that count, and hidden error, summed over all
        tokens, of one micro-batch (on the device); equal on ranks of the same rows."""

    def outputs(self, batch: Mapping[str, Tensor]) -> SubModuleOutputs | None:
        """Takes what the teacher's sub-modules add to the stream, where they are compared."""
        return SubModuleOutputs(self.compared, batch["targets"] != PADDING_TARGET) if self.compared else None

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
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """The sum of the data ranks' ``values``, on every rank; float64. Where ranks of the same rows differ, all of
        them count in part, so that none is lost."""

    # ---- scoring ----

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around losses that are not trained on: no dropout, no gradients."""
        self.student.eval()
        with torch.no_grad():
            yield
        forget_gathered(self.student)
        self.student.train()

    @abstractmethod
    def teacher_entropy(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The summed cross-entropy of a micro-batch under the teacher: a scalar."""

    # ---- what is trained, whole and by name ----

    @abstractmethod
    def gather(self, name: str, kept: str) -> Tensor:
        """A trained tensor's weight or moment, whole and fp32: valid on the main rank; all ranks must ask for it.

        kept: ``WEIGHT`` or one of ``MOMENTS``.
        """

    @abstractmethod
    def has_moments(self, name: str) -> bool:
        """Whether the optimizer has updated this tensor; the same on all ranks."""

    @abstractmethod
    def assign(self, name: str, value: Tensor) -> None:
        """Put a whole weight in place of the one that is there."""

    @abstractmethod
    def assign_moments(self, name: str, step: int, moments: Mapping[str, Tensor]) -> None:
        """Put whole moments, and the number of updates that made them, in place of the optimizer's."""

    @abstractmethod
    def round_weights(self, dtype: torch.dtype) -> None:
        """Round what is trained to ``dtype``, as a file will hold it."""

    @abstractmethod
    def close(self) -> None:
        """Finish all communication: after the last use, by all ranks; not after an error, when others may be gone."""


def adamw(parameters: Iterable[Tensor], weight_decay: float, *, fused: bool) -> torch.optim.AdamW:
    """The optimizer of every engine. Norms and biases do not decay."""
    own = list(parameters)
    decayed, others = ([p for p in own if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS, eps=EPSILON, fused=fused)
