"""Student, teacher and optimizer, as the loop uses them: here the Hugging Face model, which Accelerate prepares as its
launcher was told (plain, DDP, FSDP2 or DeepSpeed); in ``tensor_parallel`` the runtime's.

Trained parameters are fp32, since the optimizer's steps are lost in bfloat16's rounding; frozen ones have the compute
dtype. The two losses, the cross-entropy on the text and the divergence from the dense teacher's predictions (Hinton et
al., arXiv 1503.02531), are sums over scored tokens; the loop divides by their number in the whole step on all ranks.
"""

import contextlib
import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from ladderize.adapt.lora import PEFT_PREFIX, add_adapters
from ladderize.blocks import Blocks
from ladderize.checkpoint.reading import Checkpoint
from ladderize.families.registry import decoder_of
from ladderize.layout import Layout
from ladderize.modeling import ladderized_class
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.training.batch import Batch
from ladderize.runtime.training.vocab_losses import LossModule, vocab_parallel_losses

# transformers' sdpa under a name for which it makes no mask, and so never waits for the device to see if texts are
# packed.
SDPA_AS_TOLD = "sdpa_as_told"


class ScoredLogits(nn.Module):
    """A causal language model that computes logits only where a target is scored. Accelerate wraps this module, so
    everything that reads parameters is within its ``forward``."""

    def __init__(self, model: Any, compute: torch.dtype) -> None:
        super().__init__()
        self.model, self.compute, self.config = model, compute, model.config
        self.vocabulary = Collectives(), 0, int(model.config.vocab_size)
        self.scale = decoder_of(model.config.to_dict()).logits_scale
        # what Accelerate asks of a transformers model in order to shard it
        self._no_split_modules = [type(model.model.layers[0]).__name__]
        self.get_input_embeddings, self.get_output_embeddings = model.get_input_embeddings, model.get_output_embeddings
        self.tie_weights = model.tie_weights

    def scored_logits(self, batch: Batch) -> Tensor:
        """Return the logits [scored tokens, vocab]."""
        # ``use_cache=False`` and no mask: only so does transformers see from the positions where a packed text begins.
        # It looks by waiting for the device, so it is told where that is possible.
        rows: dict[str, Any] = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
        if self.model.config._attn_implementation == SDPA_AS_TOLD:
            rows["attention_mask"] = batch.additive_mask(self.compute)
        hidden = self.model.model(**rows, use_cache=False).last_hidden_state
        logits = self.model.lm_head(batch.scored_states(hidden))
        return logits if self.scale == 1 else logits * self.scale

    def forward(self, batch: Batch) -> Tensor:
        return self.scored_logits(batch)


class Student(LossModule, ScoredLogits):  # type: ignore[misc]
    """The model in training, whose pass returns its losses."""


# ---- the models ----


def open_model(checkpoint: Checkpoint, layout: Layout, device: Any, dtype: torch.dtype) -> Any:
    """Return the model of a checkpoint, of our own class even where it is dense. device: None leaves the weights to
    Accelerate, which shards them."""
    blocks = Blocks(checkpoint, torch.float32, torch.device("cpu"))
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = ladderized_class(blocks.family, "ForCausalLM").from_pretrained(
            checkpoint.folder,
            config=blocks.model_config(layout),
            dtype=dtype,
            use_safetensors=True,
            attn_implementation="sdpa",
            device_map=None if device is None else {"": device},
        )
    finally:
        if had_bars:
            logging.enable_progress_bar()
    if not any(blocks.decoder.windows):  # masks of windows are left to transformers
        ALL_ATTENTION_FUNCTIONS.register(SDPA_AS_TOLD, ALL_ATTENTION_FUNCTIONS["sdpa"])
        model.config._attn_implementation = SDPA_AS_TOLD
    return model


def trained_tensors(names: Iterable[str], layers: Sequence[int], everything: bool) -> frozenset[str]:
    """Return the names of the tensors that full retraining changes: those of ``layers``, or with ``everything`` all."""
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    return frozenset(name for name in names if everything or name.startswith(prefixes))


def make_student(
    model: Any,
    compute: torch.dtype,
    *,
    trained: frozenset[str] = frozenset(),
    lora: Any = None,
    seed: int = 0,
    gradient_checkpointing: bool = False,
) -> Student:
    """Return the model in training. trained: tensors that change; with ``lora`` (a ``LoraConfig``) adapters do."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
        parameter.data = parameter.data.to(torch.float32 if name in trained else compute)
    if lora is not None:
        add_adapters(model, lora, seed)  # in place
    if gradient_checkpointing:
        # transformers renamed it, and will drop the old name in version 6
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return Student(model, compute).train()


def make_teacher(model: Any, compute: torch.dtype, student: Student | None) -> ScoredLogits:
    """Return the dense model, frozen, which shares the student's frozen parameters where both have equal ones."""
    frozen = {}
    if student is not None:
        named = student.model.named_parameters()
        frozen = {name.replace(".base_layer.", "."): value for name, value in named if not value.requires_grad}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        other, value = frozen.get(name), parameter.data.to(compute)
        # A copy: while one tensor lies in the mapped file, everything read from the file stays in memory.
        parameter.data = other.data if other is not None and torch.equal(value, other) else value.clone()
    return ScoredLogits(model, compute).eval()


BETAS, EPSILON = (0.9, 0.95), 1e-8


class TrainingModel(ABC):
    """The interface of a model in training. All ranks call the same methods in the same order.

    teacher: returns the dense model's logits where targets are scored; None where the batches have its answers, too.
    data_rank, data_size: this rank among those that share the rows of a step; tp_size ranks have the same rows.
    shapes, holders: of every trained tensor, by its name in a file; the parameters that this rank has of it.
    stored: the dtypes in which OUT holds them; others are float32.
    vocabulary: the ranks that share it, and this one's part, as ``vocab_parallel_losses`` takes them.
    """

    vocabulary: tuple[Collectives, int, int]
    optimizer: Any
    shapes: Mapping[str, tuple[int, ...]]
    holders: Mapping[str, Sequence[Tensor]]

    def __init__(
        self,
        accelerator: Accelerator,
        student: Any,
        teacher: Callable[[Batch], Tensor] | None,
        stored: Mapping[str, torch.dtype],
        tp_size: int = 1,
    ) -> None:
        self.accelerator, self.student, self.teacher, self.tp_size = accelerator, student, teacher, tp_size
        self.stored = stored
        self.data_rank, self.data_size = accelerator.process_index // tp_size, accelerator.num_processes // tp_size

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.student.parameters() if parameter.requires_grad]

    def losses(self, batch: Batch) -> Tensor:
        """Return cross-entropy and divergence of one micro-batch, summed over scored tokens: [2], on the device."""
        scores = None
        if self.teacher is not None:
            with torch.no_grad():
                scores = self.teacher(batch)
        return self.student(batch, teacher_logits=scores)

    @torch.no_grad()
    def teacher_losses(self, batch: Batch) -> Tensor:
        """Return the same of the teacher itself."""
        entropy = torch.zeros((), device=batch.targets.device)
        if batch.answers is not None:
            entropy = -batch.answers[:, -1].float().sum()
        elif self.teacher is not None:  # None: the batches have answers, but this rank has no rows left
            entropy, _ = vocab_parallel_losses(self.teacher(batch), batch.scored_targets, None, *self.vocabulary)
        return torch.stack([entropy, torch.zeros_like(entropy)])

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over the ranks of different rows, on every rank."""
        return self.accelerator.reduce(values, "sum") / self.tp_size

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Prepare for evaluation: no dropout, no gradients, and weights rounded to their ``stored`` dtypes; a parameter
        of several tensors has the widest of theirs."""
        dtypes: dict[Tensor, torch.dtype] = {}
        for name in self.shapes:
            dtype = self.stored.get(name, torch.float32)
            for parameter in self.holders[name]:
                dtypes[parameter] = torch.promote_types(dtypes.get(parameter, dtype), dtype)
        kept: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for parameter, dtype in dtypes.items():
                # ZeRO 3 holds no weights between passes; in mixed precision those it gathers are bfloat16 already.
                if dtype.itemsize < 4 and not hasattr(parameter, "ds_id"):
                    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    kept.append((local, local.clone()))
                    local.copy_(local.to(dtype))
            self.student.eval()
            try:
                yield
            finally:
                for local, value in kept:
                    local.copy_(value)
                for module in self.student.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()  # it keeps what it gathered for a backward pass, and would compute with it
                self.student.train()

    @abstractmethod
    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to ``max_norm``; returns the whole model's norm before, equal on all ranks."""

    @abstractmethod
    def whole(self, name: str) -> Tensor:
        """Return a whole trained tensor on all ranks, all of which must call it."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the state of training; every rank writes its part."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Load what ``save`` wrote."""

    def close(self) -> None:  # noqa: B027 - where Accelerate communicates nothing is to be closed
        """End all communication after the last use, but not after an error, when other ranks may be gone."""


def make_optimizer(parameters: Sequence[nn.Parameter], weight_decay: float, *, fused: bool) -> torch.optim.AdamW:
    """Return AdamW, which decays matrices only. The loop sets its learning rate at every step."""
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS, eps=EPSILON, fused=fused)


class HFTraining(TrainingModel):
    """The Hugging Face model in training; micro_batch_size and max_grad_norm are DeepSpeed's, which clips by itself."""

    def __init__(
        self,
        accelerator: Accelerator,
        student: Student,
        teacher: ScoredLogits | None,
        stored: Mapping[str, torch.dtype],
        *,
        weight_decay: float = 0.0,
        micro_batch_size: int = 1,
        max_grad_norm: float = 1.0,
    ) -> None:
        self.vocabulary = student.vocabulary
        trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
        plugin = accelerator.state.deepspeed_plugin  # None unless it was asked for
        optimizer = make_optimizer(trained, weight_decay, fused=plugin is None)
        if plugin is not None:
            plugin.deepspeed_config.update(
                train_micro_batch_size_per_gpu=micro_batch_size,
                gradient_accumulation_steps=accelerator.gradient_accumulation_steps,  # it divides the loss by them
                gradient_clipping=max_grad_norm,
            )
        # FSDP2 warns of views: a ladder layer returns the stream that it was given, and nothing writes into it.
        warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
        prepared, self.optimizer = accelerator.prepare(student, optimizer)
        scored = None if teacher is None else place_teacher(teacher, accelerator)
        super().__init__(accelerator, prepared, scored, stored)
        named = accelerator.unwrap_model(prepared).model.named_parameters()
        trainable = {file_name(name): parameter for name, parameter in named if parameter.requires_grad}
        self.holders = {name: [parameter] for name, parameter in trainable.items()}
        # Only DeepSpeed knows the shape of a tensor that ZeRO 3 has sharded.
        self.shapes = {name: tuple(getattr(value, "ds_shape", value.shape)) for name, value in trainable.items()}
        accelerator.register_save_state_pre_hook(self._leave_out_frozen)

    def clip(self, max_norm: float) -> Tensor:
        norm = self.accelerator.clip_grad_norm_(self.parameters, max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)

    def whole(self, name: str) -> Tensor:
        (parameter,) = self.holders[name]
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                return parameter.detach().clone()
        return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        sharded = self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        self.accelerator.load_state(str(folder), **({} if sharded else {"strict": False}))
        # It counts micro-batches, and updates where their number is a multiple of the accumulation. States lie between
        # steps; an old count would shift the end of a step where the micro-batch size has changed.
        self.accelerator.step = 0

    def _leave_out_frozen(self, models: Any, weights: list[dict[str, Tensor]], folder: str) -> None:
        """Remove frozen tensors from a saved state: the checkpoint has them. Accelerate saves sharded models itself."""
        trained = {name for name, parameter in self.student.named_parameters() if parameter.requires_grad}
        for state in weights:
            for name in state.keys() - trained:
                del state[name]


def file_name(name: str) -> str:
    """Return the name of a parameter in a file: a checkpoint's tensor, or PEFT's name for an adapter."""
    name = name.removeprefix("module.")
    return f"{PEFT_PREFIX}{name.replace('.default.', '.')}" if ".lora_" in name else name


def place_teacher(teacher: ScoredLogits, accelerator: Accelerator) -> Callable[[Batch], Tensor]:
    """Return the frozen teacher as a function, sharded as the student is: Accelerate prepares one model only."""
    plugin = accelerator.state.deepspeed_plugin
    if accelerator.is_fsdp2:
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        teacher = fsdp2_prepare_model(accelerator, teacher)
    elif plugin is not None and plugin.zero_stage == 3:
        import deepspeed

        config = copy.deepcopy(plugin.deepspeed_config)
        for key in ("optimizer", "scheduler"):
            config.pop(key, None)
        teacher = deepspeed.initialize(model=teacher, config=config)[0]
        teacher.eval()  # returns nothing
    else:
        teacher.to(accelerator.device)

    def scored(batch: Batch) -> Tensor:
        with accelerator.autocast():
            return teacher(batch)

    return scored
