"""Pipeline parallelism: the second process gets what the first one still waits for."""

import pytest

from tests.vllm.jobs import Generate
from tests.vllm.models import check, make, random_prompts


# compiled: an eager engine of vLLM on a CPU never makes the tensors in which a second stage receives
@pytest.mark.parametrize("name", ["ladder all", "ladder upper half", "spd 2", "spd and ladder"])
def test_two_stages(engines, tmp_path, name):
    model = make(name, tmp_path)
    prompts = random_prompts(3, 40, 70)
    (result,) = engines(2).run(tmp_path, Generate(prompts), pipeline_parallel_size=2)
    check(model, prompts, result)
