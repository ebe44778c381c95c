"""vLLM keeps what it compiled: models of one shape that differ in their layout must not be taken for each other."""

from tests.vllm.jobs import Generate
from tests.vllm.models import check, make, random_prompts

SMALLER = {"num_hidden_layers": 2, "intermediate_size": 160}  # a shape of its own: its cache is empty at first


def test_layouts_have_compiled_models_of_their_own(engines, tmp_path):
    """One after the other in one folder, as converted anew, with the same cache; the first layout again, with other
    weights, finds its own there."""
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
