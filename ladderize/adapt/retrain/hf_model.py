"""Training on the Hugging Face model: its losses, the model read tensor by tensor, so that a rank never holds more than
its part and one layer, and its engine.

Trained parameters are fp32 (the optimizer adds steps that bfloat16 would round away); frozen ones have the dtype that
is computed in. The losses are the cross-entropy on the text, the divergence from the dense teacher's predictions
(Hinton et al., arXiv 1503.02531), and how far sub-modules are from the teacher's. The first two are sums over the
tokens that count, the third over all; the trainer divides by how many those are in the whole step, on all ranks.
"""

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.utils.checkpoint import checkpoint as recomputed
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ladderize.adapt.lora import PEFT_PREFIX, initial_adapter
from ladderize.adapt.methods import FLASH, FLEX
from ladderize.adapt.retrain.engine import Engine, shard, whole
from ladderize.blocks import LOGITS_AT_ONCE, Blocks
from ladderize.checkpoint.reading import Checkpoint
from ladderize.convert.remote_code.modeling_ladderized import base_linear
from ladderize.errors import UserError
from ladderize.families.registry import decoder_of
from ladderize.layout import Layout
from ladderize.modeling import ladderized_class
from ladderize.ranks.group import Ranks
from ladderize.runtime.training.batch import Batch
from ladderize.runtime.training.outputs import SubModuleOutputs, hidden_error
from ladderize.runtime.training.weights import Piece

# transformers' sdpa under a name for which it makes no mask, and so does not ask the device whether texts are packed
SDPA_AS_TOLD = "sdpa_as_told"
LORA_A, LORA_B = ".lora_A.default.", ".lora_B.default."


# ---- the losses ----


def token_losses(
    logits: Tensor, targets: Tensor, teacher_logits: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy and KL(teacher || student) in nats, computed in fp32: two scalars (the second 0 without a
    teacher).

    logits, teacher_logits: [tokens, vocab] of any float dtype; targets: [tokens]. Many tokens are taken part by part,
    and their fp32 copies made anew for the backward pass instead of kept: with a vocabulary of 128k they would be most
    of the memory.
    """
    at_once = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    if len(logits) <= at_once:
        return _losses(logits, targets, teacher_logits, temperature)
    teachers = teacher_logits.split(at_once) if teacher_logits is not None else [None] * -(-len(logits) // at_once)
    parts = [
        recomputed(_losses, part, target, teacher, temperature, use_reentrant=False)
        for part, target, teacher in zip(logits.split(at_once), targets.split(at_once), teachers, strict=True)
    ]
    return torch.stack([part[0] for part in parts]).sum(), torch.stack([part[1] for part in parts]).sum()


def _losses(
    logits: Tensor, targets: Tensor, teacher_logits: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    entropy = cross_entropy(logits, targets, reduction="sum")
    if teacher_logits is None:
        return entropy, entropy.new_zeros(())
    student, teacher = (log_softmax(scores.float() / temperature, -1) for scores in (logits, teacher_logits))
    return entropy, kl_div(student, teacher, reduction="sum", log_target=True)


class ScoredLogits(nn.Module):
    """A causal language model whose logits are computed only where a target counts.

    The trainer wraps (DDP, FSDP2, autocast) this module, so everything that reads parameters lies within its
    ``forward``.
    """

    def __init__(self, model: Any, compute: torch.dtype) -> None:
        super().__init__()
        self.model, self.compute = model, compute
        self.scale = decoder_of(model.config.to_dict()).logits_scale

    def forward(self, batch: Batch, outputs: SubModuleOutputs | None = None) -> Tensor:
        """Logits [tokens that count, vocab]. outputs: is given what the sub-modules add to the stream, by layers that
        are ``CollectingLayer``.

        ``use_cache=False`` and no mask: only so does transformers see from the positions where a packed text begins.
        It looks by waiting for the device, with FlashAttention in every layer; so we say it where that is possible.
        """
        rows: dict[str, Any] = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
        attention = self.model.config._attn_implementation
        if attention == FLASH:  # which keeps packed texts apart in a single row only
            rows = {name: tensor.reshape(1, -1) for name, tensor in rows.items()}
            for side in ("q", "k"):
                rows |= {f"cu_seq_lens_{side}": batch.starts, f"max_length_{side}": batch.longest}
        elif attention == SDPA_AS_TOLD:
            rows["attention_mask"] = batch.additive_mask(self.compute)
        more = {} if outputs is None else {"sub_module_outputs": outputs}
        hidden = self.model.model(**rows, use_cache=False, **more).last_hidden_state
        logits: Tensor = self.model.lm_head(batch.scored_states(hidden))
        return logits if self.scale == 1 else logits * self.scale


class TrainedModel(nn.Module):
    """The model in training with its losses: what is wrapped, so that gradients and parameters are in one place."""

    def __init__(self, model: Any, compute: torch.dtype, temperature: float = 1.0) -> None:
        super().__init__()
        self.scored = ScoredLogits(model, compute)
        self.temperature = temperature

    @property
    def model(self) -> Any:
        return self.scored.model

    def forward(
        self,
        batch: Batch,
        teacher_logits: Tensor | None = None,
        teacher_outputs: SubModuleOutputs | None = None,
    ) -> Tensor:
        """teacher_logits [tokens that count, vocab] -> the sums of cross-entropy, divergence and hidden error: [3],
        fp32."""
        outputs = None if teacher_outputs is None else teacher_outputs.again()
        logits = self.scored(batch, outputs)
        sums = token_losses(logits, batch.scored_targets, teacher_logits, self.temperature)
        apart = sums[0].new_zeros(())
        if outputs is not None and teacher_outputs is not None:
            apart = hidden_error(outputs, teacher_outputs)
        return torch.stack((*sums, apart))


# ---- the model ----


class CollectingLayer:
    """Before a layer's class among the bases of another: the same layer, which also hands on what its sub-modules add
    to the stream.

    They leave ``forward`` as its results: so they are kept once where a layer is computed again for its backward pass
    (activation checkpointing), and FSDP2 knows that gradients come through them.
    """

    self_attn: Any
    attention_sync: str
    with_outputs: Callable[..., tuple[Any, Tensor, Tensor]]
    scaled: Callable[[Tensor], Tensor]

    def __call__(self, *args: Any, sub_module_outputs: SubModuleOutputs | None = None, **kwargs: Any) -> Any:
        layer: Any = super()
        state, attention, mlp = layer.__call__(*args, **kwargs)
        own = None if sub_module_outputs is None else sub_module_outputs.of(self.self_attn.layer_idx)
        if own is not None:
            own.attention(attention)
            own.mlp(mlp)
        return state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state, attention, mlp = self.with_outputs(*args, **kwargs)
        if self.attention_sync == "dropped" and (bias := base_linear(self.self_attn.o_proj).bias) is not None:
            attention = attention + self.scaled(bias)
        return state, attention, mlp


@dataclass(frozen=True)
class ModelSetup:
    """How a model is made. compute: what products are computed in. mesh: FSDP2's, None where every rank holds
    everything; reshard: whether a layer's parameters are given up between forward and backward (None: as FSDP2 thinks
    best). collecting: whether layers can tell what their sub-modules add to the stream."""

    device: torch.device
    compute: torch.dtype = torch.float32
    attention: str = "sdpa"
    gradient_checkpointing: bool = False
    mesh: Any = None
    reshard: bool | None = None
    collecting: bool = False


def trained_tensors(names: Iterable[str], layers: Sequence[int], everything: bool) -> frozenset[str]:
    """Which tensors of a checkpoint full retraining changes: those of ``layers``, or really all."""
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    return frozenset(name for name in names if everything or name.startswith(prefixes))


def build_student(
    checkpoint: Checkpoint,
    layout: Layout,
    setup: ModelSetup,
    *,
    trained: frozenset[str] = frozenset(),
    lora: Any = None,
    seed: int = 0,
    temperature: float = 1.0,
) -> TrainedModel:
    """The model in training. trained: tensors that change. lora: a ``peft.LoraConfig`` instead, whose adapters
    change."""
    model = _meta_model(checkpoint, layout, setup)
    if lora is not None:
        from peft import inject_adapter_in_model

        inject_adapter_in_model(lora, model, low_cpu_mem_usage=True)
    blocks = Blocks(checkpoint, torch.float32, setup.device)

    def parameter(name: str, shape: torch.Size) -> nn.Parameter:
        if LORA_A in name or LORA_B in name:
            return nn.Parameter(initial_adapter(name, shape, seed).to(setup.device))
        name = name.replace(".base_layer.", ".")
        value = next(iter(blocks.read([name])))
        return nn.Parameter(value if name in trained else value.to(setup.compute), requires_grad=name in trained)

    student = TrainedModel(model, setup.compute, temperature)
    _materialise(student, student.model, parameter, setup)
    if setup.gradient_checkpointing:
        # transformers renamed it, and will drop the old name in version 6
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return student.train()


def build_teacher(checkpoint: Checkpoint, setup: ModelSetup, student: TrainedModel) -> ScoredLogits:
    """The dense model, frozen. What it has in common with the student's frozen parameters is held once (unless both are
    sharded)."""
    layout = Layout.dense(checkpoint.config["num_hidden_layers"])
    model = _meta_model(checkpoint, layout, setup)
    blocks = Blocks(checkpoint, setup.compute, setup.device)
    own = {
        name.replace(".base_layer.", "."): value
        for name, value in student.model.named_parameters()
        if not value.requires_grad
    }

    def parameter(name: str, shape: torch.Size) -> nn.Parameter:
        value, other = next(iter(blocks.read([name]))), own.get(name)
        if setup.mesh is None and other is not None and torch.equal(value, other):
            assert isinstance(other, nn.Parameter)
            return other
        return nn.Parameter(value, requires_grad=False)

    teacher = ScoredLogits(model, setup.compute)
    _materialise(teacher, model, parameter, setup)
    return teacher.eval()


def _meta_model(checkpoint: Checkpoint, layout: Layout, setup: ModelSetup) -> Any:
    blocks = Blocks(checkpoint, setup.compute, setup.device)
    config, family = blocks.model_config(layout), blocks.family
    config._attn_implementation = setup.attention
    if setup.attention == "sdpa" and not any(blocks.decoder.windows):  # masks of windows are left to transformers
        ALL_ATTENTION_FUNCTIONS.register(SDPA_AS_TOLD, ALL_ATTENTION_FUNCTIONS["sdpa"])
        config._attn_implementation = SDPA_AS_TOLD
    with torch.device("meta"):
        model = ladderized_class(family, "ForCausalLM")(config)
        if setup.collecting:
            own = ladderized_class(family, "DecoderLayer")
            collecting = type(f"Collecting{own.__name__}", (CollectingLayer, own), {})
            for layer in model.model.layers:
                layer.__class__ = collecting
        return model


def _materialise(
    outer: nn.Module, model: Any, parameter: Callable[[str, torch.Size], nn.Parameter], setup: ModelSetup
) -> None:
    """Put real parameters in place of meta ones, and shard them: each layer, the embedding and the LM head by itself,
    so that FSDP2 gathers one while the one before computes, and gives it up after it. Tied ends are one, and stay."""
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb = rotary(model.config).to(setup.device)
    for index, layer in enumerate(model.model.layers):
        _fill(layer, f"model.layers.{index}.", parameter)
        if setup.mesh is not None:
            shard(layer, setup.mesh, compute=setup.compute, reshard=setup.reshard)
    tied = model.config.tie_word_embeddings
    ends = {"model.embed_tokens.": model.model.embed_tokens, "model.norm.": model.model.norm, "lm_head.": model.lm_head}
    for prefix, module in ends.items():
        if not (tied and module is model.lm_head):
            _fill(module, prefix, parameter)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    if setup.mesh is not None:
        if not tied:
            shard(model.model.embed_tokens, setup.mesh, compute=setup.compute, reshard=setup.reshard)
            # backward begins with it
            shard(model.lm_head, setup.mesh, compute=setup.compute, reshard=False)
        shard(outer, setup.mesh, compute=setup.compute, reshard=setup.reshard)


def _fill(module: nn.Module, prefix: str, parameter: Callable[[str, torch.Size], nn.Parameter]) -> None:
    for name, empty in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, parameter(prefix + name, empty.shape))


def trained_parameters(student: TrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """What changes in training, under the name that a file gives it: a checkpoint's tensor, or PEFT's for an
    adapter."""
    for name, parameter in student.model.named_parameters():
        if parameter.requires_grad:
            is_adapter = LORA_A in name or LORA_B in name
            yield (f"{PEFT_PREFIX}{name.replace('.default.', '.')}" if is_adapter else name), parameter


# ---- the engine ----


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
    """compared: see ``Engine``; where there are such layers, both models are made ``collecting``."""

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
        parameters = dict(trained_parameters(student))
        super().__init__(
            student,
            teacher,
            {name: Piece(tuple(own.shape), ((own, slice(None)),)) for name, own in parameters.items()},
            ranks=ranks,
            tensor=replace(ranks, rank=0, size=1),
            data=ranks,
            sharded=sharded,
            weight_decay=weight_decay,
            compared=compared,
        )
        self.compute = compute

    def clip(self, max_norm: float) -> Tensor:
        return whole(nn.utils.clip_grad_norm_(self.parameters, max_norm))

    def entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return token_losses(logits, targets, None, 1.0)[0]

    def narrow(self) -> torch.autocast:
        enabled = self.compute != torch.float32 and not self.sharded  # FSDP2 sees to that itself
        return torch.autocast(self.ranks.device.type, self.compute, enabled=enabled)
