"""The runtime on a GPU against the oracle; skipped where there is none (benchmarks/gpu.sh runs it)."""

import pytest
import torch

from ladderize.ranks.group import Ranks
from ladderize.runtime.decode import Sampling
from ladderize.runtime.operations import Operations
from tests.groups import ALONE, generated, make_generator
from tests.helpers import FAMILIES, LAYOUTS, make_model, random_ids
from tests.oracle import Oracle, assert_likeliest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def gpu_group():
    return Ranks(0, 1, torch.device("cuda", 0))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_runtime_equals_the_oracle(tmp_path, name, graphs):
    """Prefill, and decoding step by step, eager and through CUDA graphs, of a padded batch."""
    model = make_model(name, max_position_embeddings=128)
    model.save_pretrained(tmp_path / "m")
    ids = random_ids(2, 12)
    exact, _ = Oracle(model.state_dict(), model.config)(ids)
    generator = make_generator(tmp_path / "m", 2, 40, gpu_group())
    generator.graphs = graphs
    with torch.inference_mode():
        logits = generator.model.logits(generator.read(ids.cuda())).cpu()
        torch.testing.assert_close(logits, exact, rtol=1e-3, atol=1e-3)
        generator.read(ids[:, :5].cuda())
        for position in range(5, 12):
            step = generator.decode_one_token(ids[:, position].cuda()).cpu()
            torch.testing.assert_close(step, exact[:, position], rtol=1e-3, atol=1e-3)
        prompts = [ids[0].tolist(), ids[1, :7].tolist()]
        rows = generated(generator, prompts, 20, Sampling())
        for _ in range(2):  # through a graph of the prompts, too
            assert generated(generator, prompts, 20, Sampling()) == rows
        assert len(generator._prefills) == graphs
    for prompt, tokens in zip(prompts, rows, strict=True):
        assert len(tokens) == 20
        with torch.no_grad():
            assert_likeliest(lambda ids: model(torch.tensor([ids])).logits[0], prompt, tokens, tolerance=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_own_kernels_are_as_good_as_pytorchs(tmp_path, family, dtype):
    """Prompts of different lengths, and steps after them: no further from float32 on the CPU than PyTorch's kernels."""
    make_model("mixed", model_type=family, head_dim=64, max_position_embeddings=512).save_pretrained(tmp_path)
    prompts, ids, found = [random_ids(300).tolist(), random_ids(20).tolist()], random_ids(2, 6), {}
    with torch.inference_mode():
        for name in ("exact", "own", "torch"):
            group, kind = (ALONE, "float32") if name == "exact" else (gpu_group(), dtype)
            generator = make_generator(tmp_path, 2, 400, group, dtype=kind)
            if name == "torch":
                generator.model.operations = Operations()
            elif name == "own":
                assert generator.model.operations.name == "triton"
            steps = [generator.prefill(prompts), *(generator.decode_one_token(one.to(group.device)) for one in ids.T)]
            found[name] = torch.stack(steps).float().cpu()
    size = found["exact"].std()
    own, theirs = ((found[name] - found["exact"]).std() / size for name in ("own", "torch"))
    assert own <= 1.2 * theirs + 1e-5
