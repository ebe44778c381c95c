"""Models for training: read tensor by tensor, so that a rank never holds more than its part and one layer.

Trained parameters are fp32 (the optimizer adds steps that bfloat16 would round away); frozen ones have the dtype that
is computed in.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ladderize.adapt.retrain.losses import ScoredLogits, TrainedModel
from ladderize.adapt.retrain.sharding import shard
from ladderize.blocks import Blocks
from ladderize.checkpoint.llama import HEAD
from ladderize.checkpoint.reading import Checkpoint
from ladderize.convert.remote_code.modeling_ladderized_llama import LadderizedLlamaDecoderLayer, base_linear
from ladderize.layout import Layout
from ladderize.runtime.training.outputs import SubModuleOutputs


class CollectingLayer(LadderizedLlamaDecoderLayer):
    """The same layer, which also hands on what its sub-modules add to the stream.

    They leave ``forward`` as its results: so they are kept once where a layer is computed again for its backward pass
    (activation checkpointing), and FSDP2 knows that gradients come through them.
    """

    def __call__(self, *args: Any, sub_module_outputs: SubModuleOutputs | None = None, **kwargs: Any) -> Any:
        state, attention, mlp = super().__call__(*args, **kwargs)
        own = None if sub_module_outputs is None else sub_module_outputs.of(self.self_attn.layer_idx)
        if own is not None:
            own.attention(attention)
            own.mlp(mlp)
        return state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state, attention, mlp = self.with_outputs(*args, **kwargs)
        if self.attention_sync == "dropped" and (bias := base_linear(self.self_attn.o_proj).bias) is not None:
            attention = attention + bias
        return state, attention, mlp


LORA_A, LORA_B = ".lora_A.default.", ".lora_B.default."


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


def trained_tensors(
    names: Iterable[str], layers: Sequence[int], everything: bool, *, tied: bool = False
) -> frozenset[str]:
    """Which tensors of a checkpoint full retraining changes: those of ``layers``, or really all. tied: the LM head is
    the embedding, also where the file has it once more."""
    names = [name for name in names if not (tied and name == HEAD)]
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

    student = TrainedModel(model, temperature)
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

    teacher = ScoredLogits(model)
    _materialise(teacher, model, parameter, setup)
    return teacher.eval()


def initial_adapter(name: str, shape: torch.Size, seed: int) -> Tensor:
    """LoRA's start (arXiv 2106.09685): A random, B zero. The draw depends on name and seed, not on the ranks or the
    order."""
    if LORA_B in name:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ seed)
    bound = 1 / math.sqrt(shape[-1])  # PEFT's kaiming_uniform_ with a = sqrt(5)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _meta_model(checkpoint: Checkpoint, layout: Layout, setup: ModelSetup) -> Any:
    from ladderize.convert.remote_code.modeling_ladderized_llama import LadderizedLlamaForCausalLM

    config = Blocks(checkpoint, setup.compute, setup.device).model_config(layout)
    config._attn_implementation = setup.attention
    with torch.device("meta"):
        model = LadderizedLlamaForCausalLM(config)
        if setup.collecting:
            model.model.layers = nn.ModuleList(
                CollectingLayer(config, layer) for layer in range(len(model.model.layers))
            )
        return model


def _materialise(
    whole: nn.Module, model: Any, parameter: Callable[[str, torch.Size], nn.Parameter], setup: ModelSetup
) -> None:
    """Put real parameters in place of meta ones, and shard them: layer by layer, then what surrounds the layers."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    model.model.rotary_emb = LlamaRotaryEmbedding(model.config).to(setup.device)
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
        shard(whole, setup.mesh, compute=setup.compute, reshard=setup.reshard)


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
            yield (f"base_model.model.{name.replace('.default.', '.')}" if is_adapter else name), parameter
