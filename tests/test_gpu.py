"""The model on a GPU against the oracle; skipped where there is none (benchmarks/gpu.sh runs it)."""

import pytest
import torch

from tests.helpers import LAYOUTS, make_model, random_ids
from tests.oracle import Oracle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("name", LAYOUTS)
def test_float32_equals_the_oracle(name):
    model = make_model(name)
    ids = random_ids(2, 11)
    expected, _ = Oracle(model.state_dict(), model.config)(ids)
    with torch.no_grad():
        logits = model.cuda()(ids.cuda()).logits.cpu()
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["ladder all", "spd all 4", "same layer with biases"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(name, dtype):
    model = make_model(name)
    ids = random_ids(2, 11)
    expected, _ = Oracle(model.state_dict(), model.config)(ids)
    with torch.no_grad():
        logits = model.to("cuda", dtype)(ids.cuda()).logits.float().cpu()
    assert (logits - expected).std() < 0.06 * expected.std()


@pytest.mark.parametrize("name", ["ladder all", "same layer"])
def test_generate_and_compile(name):
    model = make_model(name).cuda()
    ids = random_ids(2, 6).cuda()
    text = model.generate(ids, max_new_tokens=8, do_sample=False)
    static = model.generate(ids, max_new_tokens=8, do_sample=False, cache_implementation="static")
    assert torch.equal(text, static)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True)(ids, use_cache=False).logits
    torch.testing.assert_close(compiled, expected, rtol=1e-3, atol=1e-3)
