"""The Hugging Face model in training with its losses, and its dense teacher.

Trained parameters are fp32, since the optimizer's steps are lost in bfloat16's rounding; frozen ones have the compute
dtype. There are two losses: the cross-entropy on the text, and the divergence from the dense teacher's predictions
(Hinton et al., arXiv 1503.02531). Both are sums over scored tokens; the loop divides by their number in the whole step
on all ranks.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from ladderize.adapt.lora import add_adapters
from ladderize.blocks import Blocks
from ladderize.checkpoint.reading import Checkpoint
from ladderize.families.registry import decoder_of
from ladderize.layout import Layout
from ladderize.modeling import ladderized_class
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.training.batch import Batch
from ladderize.runtime.training.vocab_losses import LossModule

# transformers' sdpa under a name for which it makes no mask, and so never waits for the device to see if texts are
# packed.
SDPA_AS_TOLD = "sdpa_as_told"


class ScoredLogits(nn.Module):
    """A causal language model that computes logits only where a target is scored.

    Accelerate wraps this module (DDP, FSDP2, DeepSpeed, autocast), so everything that reads parameters is within its
    ``forward``.
    """

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
        """Return the logits [scored tokens, vocab].

        ``use_cache=False`` and no mask: only so does transformers see from the positions where a packed text begins. It
        looks by waiting for the device, so it is told where that is possible.
        """
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
    """Return the model of a checkpoint with its weights in ``dtype``, of our own class even where it is dense.
    device: None leaves the weights to Accelerate, which shards them."""
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
    """Return the model in training. trained: tensors that change. lora: a ``peft.LoraConfig``, whose adapters
    change instead."""
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
    """Return the dense model, frozen. student: shares its frozen parameters where both have equal ones."""
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
