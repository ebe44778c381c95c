"""What the other tests here rest on: an engine of vLLM's own Llama."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers import randomise
from tests.vllm.jobs import Generate
from tests.vllm.models import SHAPE, check, random_prompts


def test_stock_llama_equals_transformers(engines, tmp_path):
    """So a difference that the other tests find is the plugin's; and another model's answers are noticed."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    randomise(model, int(torch.randint(1 << 30, ())))
    model.save_pretrained(tmp_path)
    prompts = random_prompts(1, 20, 50)
    (result,) = engines(1).run(tmp_path, Generate(prompts), enforce_eager=True)
    check(model, prompts, result)
    with torch.no_grad():
        model.model.layers[3].self_attn.o_proj.bias.mul_(1.01)
    with pytest.raises(AssertionError, match=r"^(log-probabilities|token \d+ of)"):  # which comes first is drawn
        check(model, prompts, result)
