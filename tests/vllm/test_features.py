"""What vLLM does beside plain reading and decoding: prompts in pieces and from its cache, adapters, what it compiled
before, int8; and what the plugin refuses.

Every answer is compared with transformers, which does nothing of this, or with the oracle.
"""

import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ladderize import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.families.registry import family_of
from ladderize.layout import HIDING
from ladderize.modeling import ladderized_class
from tests.helpers import randomise
from tests.oracle import Oracle
from tests.quantised import dequantised, save_quantised
from tests.vllm.jobs import IN_PIECES, Counts, Generate, Refused
from tests.vllm.models import SHAPE, check, make, random_prompts

SMALLER = {"num_hidden_layers": 2, "intermediate_size": 160}  # a shape of its own: its cache is empty at first


def test_prompts_in_pieces_and_prefixes_from_the_cache(engines, tmp_path):
    """Chunked prefill: at most 20 tokens in a step, pieces of prompts and decoded tokens of others side by side. Then a
    prompt that was read already, and one that begins like it."""
    model = make("spd 4", tmp_path)
    prompts = random_prompts(90, 5, 41, 60)
    again = [prompts[0], prompts[0][:64] + random_prompts(9)[0][1:]]
    before, after = engines(2).run(
        *(tmp_path, Generate(prompts), Generate(again)),
        max_num_batched_tokens=20,
        enable_prefix_caching=True,
        enforce_eager=True,
    )
    check(model, prompts, before)
    assert before["steps"] >= sum(map(len, prompts)) // 20
    check(model, again, after)
    assert [completion["cached"] for completion in after["completions"]] == [64, 64]


@pytest.mark.parametrize("name", ["spd below ladder", "fused, delayed and spd"])
def test_adapters(engines, tmp_path, name):
    """Two LoRA adapters and none, side by side in one batch, on all linear layers."""
    prompts = random_prompts(12, 30, 7)
    model = make(name, tmp_path / "model")
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config, adapter_name="first")
    adapted.add_adapter("second", config)
    randomise(torch.nn.ModuleList(module for key, module in adapted.named_modules() if key.endswith("lora_B")), 1)
    adapted.save_pretrained(tmp_path)
    folders = [str(tmp_path / "first"), None, str(tmp_path / "second")]
    (result,) = engines(2).run(
        tmp_path / "model",
        Generate(prompts, adapters=folders),
        enable_lora=True,
        max_lora_rank=8,
        max_loras=3,  # vLLM's kernels for CPUs give requests without adapter the last slot: an empty one
        enforce_eager=True,
    )
    for place, adapter in enumerate(("first", None, "second")):
        one = {"completions": [result["completions"][place]]}
        if adapter is None:
            with adapted.disable_adapter():
                check(adapted, [prompts[place]], one)
        else:
            adapted.set_adapter(adapter)
            check(adapted, [prompts[place]], one)
    adapted.set_adapter("second")
    with pytest.raises(AssertionError):  # the adapters matter
        check(adapted, prompts[:1], {"completions": result["completions"][:1]})


def test_without_windows(engines, tmp_path):
    """Layers that have a window rotate as they do with it, and texts are no longer than it."""
    model = make("ladder with two rotations", tmp_path, sliding_window=64)
    prompts = random_prompts(3, 40)
    how = {"disable_sliding_window": True, "max_model_len": 64}
    (result,) = engines(1).run(tmp_path, Generate(prompts), enforce_eager=True, **how)
    check(model, prompts, result)


def test_layouts_have_compiled_models_of_their_own(engines, tmp_path):
    """One after the other in one folder, as converted anew, with the same cache: models of one shape that differ in
    their layout must not be taken for each other."""
    group = engines(1)
    compiled = []
    for name in ("spd 2", "ladder all"):
        model = make(name, tmp_path, **SMALLER)
        prompts = random_prompts(3, 40)
        (result,) = group.run(tmp_path, Generate(prompts))
        check(model, prompts, result)
        kept = (group.folder / "cache").glob("torch_compile_cache/torch_aot_compile/*")
        compiled.append({path.name for path in kept})
    first, second = compiled
    assert first < second


@pytest.mark.parametrize("name", ["drawn", "ladder with two rotations"])
def test_pieces_are_cuda_graphs(engines, tmp_path, name):
    """On GPUs the compiled model is cut, and each piece is a CUDA graph (tests/vllm/pieces.py)."""
    model = make(name, tmp_path)
    prompts = random_prompts(2, 9, 33)
    how = {"compilation_config": IN_PIECES}
    alone, together, counts = engines(2).run(tmp_path, Generate(prompts[:1]), Generate(prompts), Counts(), **how)
    check(model, prompts[:1], alone)
    check(model, prompts, together)
    config = model.config
    sends = [mode in HIDING for both in zip(config.attention_sync, config.mlp_sync, strict=True) for mode in both]
    messages = sum(sends)
    assert (counts["ladderize::start"], counts["ladderize::wait_in_place"]) == (messages, messages)
    # one at attention, and one where a message is waited for, another is sent, or both
    syncs = sum(before or sent for before, sent in itertools.pairwise([False, *sends, False]))
    assert counts["cuts"] == config.num_hidden_layers + syncs
    assert counts["replays"] > counts["pieces"]


# ---- int8 ----

RECIPES = [(1, Recipe(ladder="all"), "qwen3"), (2, Recipe(ladder="1:", spd="all", sync_tp_size=2), "granite")]
# Without these, x86 has only products of pairs of bytes whose sum saturates at 16 bits: vLLM's int8 products (oneDNN's)
# are then off by a tenth and more, of the dense model, too.
EXACT = ("avx512_vnni", "avx_vnni")


def int8_tokens(x):
    """What vLLM's CPU kernel makes of each token that a projection reads."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / scale) * scale


@pytest.mark.skipif(
    not any(torch.cpu.get_capabilities().get(name) for name in EXACT),
    reason="this processor has no VNNI: the sums in vLLM's int8 products saturate",
)
@pytest.mark.parametrize(("ranks", "recipe", "model_type"), RECIPES)
def test_int8(engines, tmp_path, ranks, recipe, model_type):
    """Tokens are those of the layout, whose ranks quantise what they read, computed slowly."""
    seed = int(torch.randint(1 << 30, ()))
    shape = {**SHAPE, "hidden_size": 136}  # no multiple of 16: vLLM's int8 kernel for AMX refuses this test's float32
    source = save_quantised(tmp_path / "src", "int8", seed=seed, model_type=model_type, **shape)
    convert_checkpoint(source, tmp_path / "out", recipe, verify=False)
    config = ladderized_class(family_of({"model_type": model_type}), "Config").from_pretrained(tmp_path / "out")
    # what is summed is quantised by each virtual rank where sums are dropped, elsewhere by each process
    parts = config.sync_tp_size or ranks
    weights = dequantised(source, "int8")
    oracles = Oracle(weights, config, parts, int8_tokens), Oracle(weights, config, parts)
    # many, and no token begins them all: where one is rounded otherwise, all that comes after it moves
    prompts = [prompt[1:] for prompt in random_prompts(*(3, 8, 32, 34) * 4)]
    (result,) = engines(ranks).run(tmp_path / "out", Generate(prompts, tokens=6), enforce_eager=True)
    errors, others = [], []
    for prompt, completion in zip(prompts, result["completions"], strict=True):
        text = torch.tensor([prompt + completion["tokens"]])
        expected, unquantised = (oracle(text)[0].log_softmax(-1)[0, len(prompt) - 1 : -1] for oracle in oracles)
        for place, (token, values) in enumerate(zip(completion["tokens"], completion["logprobs"], strict=True)):
            assert expected[place, token] >= expected[place].max() - 1.5
            for other, value in values.items():
                errors.append(abs(value - float(expected[place, int(other)])))
                others.append(abs(value - float(unquantised[place, int(other)])))
    # a number between two steps may be rounded to the other one, which moves what comes after it a little
    assert max(errors) < 1.5
    assert sum(errors) < 0.5 * sum(others), (sum(errors) / len(errors), sum(others) / len(others))


# ---- what is refused, in the process that the user started, before workers exist ----


@pytest.fixture
def refused(engines, tmp_path):
    """``refused(name, **options)``: the sentence with which vLLM refuses that model with these options."""

    def configure(name, **options):
        make(name, tmp_path / "model")
        options = {"distributed_executor_backend": "mp", **options}
        (message,) = engines(1).run(tmp_path / "model", Refused(), **options)
        return message

    return configure


def test_tp_size_that_does_not_divide(refused):
    message = refused("spd 4", tensor_parallel_size=8)
    assert "--tensor-parallel-size 8 does not divide the 4 virtual ranks (sync_tp_size)" in message
    assert "this model runs on 1, 2, 4 " in message
    assert "tensor-parallel-size" in refused("dense", tensor_parallel_size=3)


SHARDED = {"enable_lora": True, "fully_sharded_loras": True}


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("dense", {"hf_overrides": {"hidden_act": "gelu"}}, "the activation is 'gelu'; ladderize knows silu"),
        ("ladder with two rotations", {"dtype": "float16"}, "'gemma3_text' does not support float16"),
        ("dense", {"pipeline_parallel_size": 2}, "a ladderized model has no pipeline stages"),
        ("ladder all", {"enable_dbo": True}, "--enable-dbo and --ubatch-size run batches side by side"),
        ("ladder all", {"runner": "pooling"}, "context parallelism and --runner pooling were not tested"),
        ("ladder all", {"compilation_config": {"mode": 1}}, "may change the order of messages"),
        ("ladder all", {"hf_overrides": {"architectures": ["LlamaForCausalLM"]}}, "would compute a dense one"),
        ("ladder all", SHARDED, "--fully-sharded-loras sums inside each projection"),
        ("spd 4", {"enable_lora": True}, "adapters need a process for each virtual rank; use --tensor-parallel-size 4"),
        ("spd 4", {"quantization": "fp8_per_tensor"}, "quantised weights and adapters need a process for each"),
    ],
)
def test_what_was_not_tested(refused, name, options, sentence):
    assert sentence in refused(name, **options)
