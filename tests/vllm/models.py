"""Small random models that vLLM's attention takes on a CPU, and what transformers answers."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ladderize.families.registry import family_of
from ladderize.layout import ATTENTION_MODES, BLOCKING, DROPPED, MLP_MODES, OVERLAPPED, Layout, parse_ranges
from ladderize.modeling import ladderized_class
from tests.helpers import FAMILIES, randomise

# biases, GQA, heads of 32 and a hidden size that is not heads x 32, so that no slice fits in another's place
SHAPE = {
    "vocab_size": 384, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 256, "attention_bias": True,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Named layers, and what differs from SHAPE. drawn: the mode of every sync point is drawn instead. family: one of
    tests.helpers.FAMILIES, with windows shorter than most prompts, ..."""

    ladder: str = ""
    spd: str = ""
    delayed: str = ""
    sync_tp_size: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    drawn: bool = False
    family: str = "llama"


FACTORS = [1 + pair / 8 for pair in range(8)]  # of the frequencies of 16 numbers of a head
LONGROPE = {
    "hidden_size": 256, "original_max_position_embeddings": 192,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        "short_factor": FACTORS, "long_factor": [2 * factor for factor in FACTORS],
    },
}  # fmt: skip

CASES = {
    "dense": Case(),
    "dense with norms of heads": Case(family="qwen3"),
    "ladder all": Case(ladder="all"),
    "ladder upper half": Case(ladder="2:", family="qwen3"),
    "spd 2": Case(spd="all", sync_tp_size=2, family="granite"),
    "spd 4": Case(spd="all", sync_tp_size=4, config={"mlp_bias": True, "num_key_value_heads": 2}, family="seed_oss"),
    "spd and ladder": Case(ladder="all", spd="all", sync_tp_size=4, family="qwen2"),
    "spd below ladder": Case(ladder="1:", spd="0:2", sync_tp_size=2, family="mistral"),
    "mixed": Case(ladder="1,3", spd="0:2", sync_tp_size=2, config={"mlp_bias": True, "tie_word_embeddings": True}),
    "delayed 2": Case(delayed="all", sync_tp_size=2, config={"mlp_bias": True}, family="granite"),
    "delayed and spd": Case(delayed="1:", spd="0,3", sync_tp_size=4, family="ministral"),
    # a blocking sync point behind an overlapped one has no name
    "drawn": Case(sync_tp_size=2, drawn=True, config={"mlp_bias": True, "tie_word_embeddings": True}, family="cwm"),
    "fused, delayed and spd": Case(delayed="1:", spd="0,3", sync_tp_size=2, config=LONGROPE, family="phi3"),
    "ladder with two rotations": Case(ladder="1:", family="gemma3_text"),
    "ladder with norms behind sums": Case(ladder="all", family="exaone4"),
    "dense with norms behind sums": Case(family="gemma3_text"),
    "neighbours rotate, delayed and spd": Case(delayed="1:", spd="0", sync_tp_size=2, family="glm"),
    "neighbours rotate, ladder": Case(ladder="1,3", family="glm4"),
    "fewer KV heads than ranks": Case(
        ladder="2:", spd="0", sync_tp_size=2, config={"num_key_value_heads": 1}, family="smollm3"
    ),
}


def make(name: str, folder: Path, **extra: object) -> PreTrainedModel:
    """A fresh random model with one of CASES, written to ``folder``; the model of remote_code itself is the oracle."""
    case = CASES[name]
    shape = {**FAMILIES.get(case.family, {}), **SHAPE, **case.config, **extra}
    family = family_of({"model_type": case.family})
    depth = shape["num_hidden_layers"]
    if case.drawn:
        layout = drawn_layout(depth, case.sync_tp_size)
    else:
        ranges = {"ladder": case.ladder, "spd": case.spd, "delayed": case.delayed}
        named = {key: parse_ranges(text, depth) for key, text in ranges.items() if text}
        layout = Layout.from_layers(depth, **named, sync_tp_size=case.sync_tp_size)
    config = ladderized_class(family, "Config")(**shape, **layout.to_config())
    model = ladderized_class(family, "ForCausalLM")(config).eval()
    randomise(model, int(torch.randint(1 << 30, ())))
    model.save_pretrained(folder)
    return model


def drawn_layout(layers: int, sync_tp_size: int | None) -> Layout:
    """A mode for every sync point; one blocks behind an overlapped one, and one attention is dropped, in any case."""
    attention = [ATTENTION_MODES[i] for i in torch.randint(len(ATTENTION_MODES), (layers,)).tolist()]
    mlp = [MLP_MODES[i] for i in torch.randint(len(MLP_MODES), (layers,)).tolist()]
    mlp[0], attention[1], attention[2], mlp[-1] = OVERLAPPED, BLOCKING, DROPPED, BLOCKING
    return Layout(tuple(attention), tuple(mlp), sync_tp_size)


def random_prompts(*lengths: int) -> list[list[int]]:
    return [[1, *torch.randint(2, SHAPE["vocab_size"], (length - 1,)).tolist()] for length in lengths]


def check(model: Any, prompts: list[list[int]], result: dict[str, Any], tolerance: float = 2e-4) -> None:
    """What vLLM generated is what ``model`` of transformers says: the likeliest token at every place, and the
    log-probabilities of all that vLLM reports there, each within ``tolerance``. One forward pass for each prompt,
    without a cache."""
    assert len(result["completions"]) == len(prompts)
    for prompt, completion in zip(prompts, result["completions"], strict=True):
        tokens = completion["tokens"]
        assert tokens
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        reported = completion["logprobs"]
        assert len(reported) == len(tokens)
        for place, (token, values) in enumerate(zip(tokens, reported, strict=True)):
            best = float(expected[place].max())
            assert float(expected[place, token]) >= best - tolerance, f"token {place} of {tokens} after {prompt}"
            assert str(token) in values
            wrong = {t: (value, float(expected[place, int(t)])) for t, value in values.items()}
            far = {t: pair for t, pair in wrong.items() if abs(pair[0] - pair[1]) > tolerance}
            assert not far, f"log-probabilities (vLLM, transformers) at {place} of {tokens} after {prompt}: {far}"
