"""Proof that a merged checkpoint computes what its base does under PEFT's own LoRA, with one layer in memory at a time.

Rounding the merged weights to the dtype that they are stored in changes the logits, by how much depends on the model.
So no bound is put on that difference: the merged weights themselves have to be the exact ones within rounding, all
others have to be the base's, and the exact ones, before rounding, have to give PEFT's logits.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ladderize.adapt.lora.config import ADAPTER_TENSORS
from ladderize.adapt.lora.read import Adapter
from ladderize.blocks import Blocks, State, complete, open_checkpoint
from ladderize.checkpoint.config import most_positions
from ladderize.checkpoint.reading import Checkpoint, torch_dtype
from ladderize.checkpoint.tensors import TensorReader
from ladderize.console import Console, sentence
from ladderize.errors import UserError
from ladderize.files.records import Record

CHECK_WINDOWS, CHECK_TOKENS = 4, 32  # random ids: what they mean does not matter here
LOGIT_TOLERANCE = 1e-4  # of the largest logit: two orders of summation in float32


@dataclass(frozen=True)
class ComparedLogits(Record):
    """max_abs_logit: of PEFT's. The differences: to what is stored, of PEFT's logits and of those of the exact sums."""

    max_abs_logit: float
    max_abs_logit_difference: float
    max_abs_logit_difference_of_rounding: float
    compared_tokens: int


def add_product(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """weight [out, in] + scaling * b [out, rank] @ a [rank, in], in float32, or float64 where the weight is stored
    so."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(dtype, copy=True).addmm_(b.to(dtype), a.to(dtype), alpha=scaling)


def check_merged(adapter: Adapter, base: Checkpoint, folder: Path, console: Console) -> ComparedLogits:
    """Compare logits on random ids: PEFT's, of the base's weights and the adapter; of the exact sums; of the checkpoint
    in ``folder``.

    All compute in float32. Raises UserError where the merged checkpoint is not what it should be.
    """
    merged, device = open_checkpoint(str(folder)), torch.device("cpu")
    own, theirs = Blocks(base, torch.float32, device), Blocks(merged, torch.float32, device)
    if own.layout != theirs.layout or own.ends_differ(theirs):
        raise mismatch(adapter, "its layout, embedding, final norm or LM head is not the base's")
    ids = random_ids(base.config)
    with torch.no_grad(), console.progress("comparing logits", own.num_layers) as advance:
        peft: State = own.embed(ids)
        exact, stored = peft, peft
        for index in range(own.num_layers):
            matrices = read_matrices(adapter, index)
            weights = own.weights(index)
            peft = own.run(with_peft(adapter, own.layer(index, own.layout, weights), index, matrices), peft)
            for name, (a, b) in matrices.items():
                scaling = adapter.scaling(full_name(index, name))
                weights[f"{name}.weight"] = add_product(weights[f"{name}.weight"], a, b, scaling)
            exact = own.run(own.layer(index, own.layout, weights), exact)
            found = theirs.weights(index)
            for name, weight in weights.items():
                whole = full_name(index, name)
                changed = name.removesuffix(".weight") in matrices
                dtype = torch_dtype(merged.tensors[whole].dtype) if changed else None
                if not is_rounded(found[name], weight, dtype):
                    raise mismatch(adapter, f"{whole} is not what it should be")
            stored = theirs.run(theirs.layer(index, theirs.layout, found), stored)
            advance(1)
        logits, sums, rounded = (own.logits(complete(state)) for state in (peft, exact, stored))
    largest = float(logits.abs().max())
    apart = float((logits - sums).abs().max())
    if not apart <= LOGIT_TOLERANCE * largest:  # so that NaN does not pass
        raise mismatch(
            adapter, f"PEFT's logits differ by up to {apart:.3g} from its own, which are up to {largest:.3g}"
        )
    return ComparedLogits(
        max_abs_logit=largest,
        max_abs_logit_difference=float((logits - rounded).abs().max()),
        max_abs_logit_difference_of_rounding=float((sums - rounded).abs().max()),
        compared_tokens=ids.numel(),
    )


def mismatch(adapter: Adapter, what: str) -> UserError:
    return UserError(
        f"the merged checkpoint does not compute what {adapter.folder} does with its base, so nothing was written:"
        f" {what}"
    )


def random_ids(config: Mapping[str, Any]) -> Tensor:
    """[windows, tokens], the same for every run."""
    tokens = min(CHECK_TOKENS, most_positions(config))
    return torch.randint(config["vocab_size"], (CHECK_WINDOWS, tokens), generator=torch.Generator().manual_seed(0))


def full_name(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}"


def read_matrices(adapter: Adapter, layer: int) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of one layer by the names of its projections, such as ``mlp.up_proj``; float32."""
    prefix, reader = full_name(layer, ""), TensorReader(adapter.folder)
    return {
        name.removeprefix(prefix): (reader.read(a, dtype=torch.float32), reader.read(b, dtype=torch.float32))
        for name, (a, b) in adapter.modules.items()
        if name.startswith(prefix)
    }


def with_peft(
    adapter: Adapter, layer: nn.Module, index: int, matrices: Mapping[str, tuple[Tensor, Tensor]]
) -> nn.Module:
    """The layer with PEFT's LoRA in it, made from the adapter's own config as PEFT reads it."""
    if not matrices:
        return layer
    from peft import PeftConfig, inject_adapter_in_model, set_peft_model_state_dict

    # the names of the whole model, which the config's targets, layers and patterns are about
    root, root.model = nn.Module(), nn.Module()
    root.model.layers = nn.ModuleDict({str(index): layer})
    tensors = {
        f"{full_name(index, name)}.lora_{side}.weight": tensor
        for name, pair in matrices.items()
        for side, tensor in zip("AB", pair, strict=True)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of patterns and layers that this one layer does not have
        try:
            inject_adapter_in_model(
                PeftConfig.from_peft_type(
                    **{k: v for k, v in adapter.config.items() if k != "runtime_config" and v is not None}
                ),
                root,
            )
            result = set_peft_model_state_dict(root, tensors)
        except (ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"PEFT cannot apply {adapter.folder} to layer {index}: {sentence(error)}") from error
    made = {name.replace(".default", "") for name in root.state_dict() if ".lora_" in name}
    if different := sorted(made ^ set(tensors)) or result.unexpected_keys:
        asks = "asks for" if different[0] in made else "does not ask for"
        raise UserError(
            f"{adapter.folder}: adapter_config.json {asks} {different[0]}, which {ADAPTER_TENSORS}"
            f" {'lacks' if different[0] in made else 'holds'}"
        )
    return layer.eval()


def is_rounded(stored: Tensor, exact: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether ``stored`` is ``exact`` rounded to ``dtype``; None: whether it is the same."""
    if dtype is None:
        return torch.equal(stored, exact)
    about = torch.finfo(dtype)
    # half a unit in the last place; more, since the sum itself, in float32, depends on its order
    allowed = exact.abs().mul_(about.eps).add_(float(exact.abs().max()) * 1e-6 + about.smallest_normal * about.eps)
    return bool(((stored - exact).abs() <= allowed).all())
