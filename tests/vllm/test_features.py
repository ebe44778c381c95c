"""What vLLM does beside plain reading and decoding: in pieces, from its cache, with adapters, with what it compiled
before.

Every answer is compared with transformers, which does nothing of this.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.helpers import randomise
from tests.vllm.jobs import Generate
from tests.vllm.models import check, make, random_prompts

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


def test_adapters(engines, tmp_path):
    """Two LoRA adapters and none, side by side in one batch, on all linear layers."""
    prompts = random_prompts(12, 30, 7)
    model = make("spd below ladder", tmp_path / "model")
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


def test_layouts_have_compiled_models_of_their_own(engines, tmp_path):
    """One after the other in one folder, as converted anew, with the same cache: models of one shape that differ in
    their layout must not be taken for each other. The first layout again, with other weights, finds its own there."""
    group = engines(1)
    compiled = []
    for name in ("spd 2", "ladder all", "spd 2"):
        model = make(name, tmp_path, **SMALLER)
        prompts = random_prompts(3, 40)
        (result,) = group.run(tmp_path, Generate(prompts))
        check(model, prompts, result)
        compiled.append(
            {path.name for path in (group.folder / "cache").glob("torch_compile_cache/torch_aot_compile/*")}
        )
    first, second, again = compiled
    assert first < second
    assert again == second
