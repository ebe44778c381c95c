"""Converted checkpoints in the hands of others: plain transformers, save_pretrained, device maps, transformers' own
TP."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ladderize import convert_checkpoint, load
from ladderize.convert.recipe import Recipe
from tests import warm
from tests.helpers import LAYOUTS, edit_json, listing, make_layout, make_model, random_ids, save_llama
from tests.oracle import Oracle

BOTH = Recipe(ladder="1:", spd="2:", sync_tp_size=4)
TIGHT = {"rtol": 1e-4, "atol": 2e-5}

STRANGER = """
import json, sys
sys.modules["ladderize"] = None
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModel, AutoConfig
torch.set_grad_enabled(False)
path, ids = sys.argv[1], torch.tensor(json.loads(sys.argv[2]))
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
logits = model(ids).logits
base = AutoModel.from_pretrained(path, trust_remote_code=True)
assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
assert "LadderizedLlama" in type(model).__name__
for task in ("SequenceClassification", "TokenClassification", "QuestionAnswering"):
    other = getattr(transformers, f"AutoModelFor{task}").from_pretrained(path, trust_remote_code=True)
    assert type(other).__name__ == f"LadderizedLlamaFor{task}"
    assert torch.equal(other.model(ids).last_hidden_state, base(ids).last_hidden_state)
if len(sys.argv) > 3:
    model.save_pretrained(sys.argv[3])
print(json.dumps(logits.tolist()))
"""


def as_a_stranger(path, ids, cache, save_to=None):
    command = [sys.executable, "-c", STRANGER, path, json.dumps(ids.tolist()), *([save_to] if save_to else [])]
    environment = {**os.environ, "HF_MODULES_CACHE": str(cache)}
    result = warm.run(command, env=environment, cwd=cache.parent)
    assert result.returncode == 0, result.stderr
    return torch.tensor(json.loads(result.stdout))


@pytest.fixture
def converted(llama, tmp_path) -> Path:
    convert_checkpoint(llama, tmp_path / "out", BOTH, verify=False)
    return tmp_path / "out"


def test_without_ladderize_and_saved_again(converted, tmp_path):
    ids = random_ids(2, 7)
    model = load(converted)
    expected, _ = Oracle(model.state_dict(), model.config)(ids)
    found = as_a_stranger(converted, ids, tmp_path / "modules", tmp_path / "saved")
    torch.testing.assert_close(found, expected, **TIGHT)
    assert {"configuration_ladderized.py", "modeling_ladderized.py"} <= set(listing(tmp_path / "saved"))
    torch.testing.assert_close(as_a_stranger(tmp_path / "saved", ids, tmp_path / "modules2"), expected, **TIGHT)


def test_a_strangers_code_is_never_run_unasked(converted):
    """And never where the model is one of ours."""
    (converted / "modeling_ladderized.py").write_text("raise SystemExit('a stranger ran')\n")
    for trust in (False, True):
        model = load(converted, trust_remote_code=trust)
        assert type(model).__module__ == "ladderize.convert.remote_code.modeling_ladderized"
    (converted / "evil.py").write_text("raise SystemExit('a stranger ran')\n")
    auto_map = {"AutoConfig": "evil.A", "AutoModelForCausalLM": "evil.B"}
    edit_json(converted / "config.json", model_type="evil", auto_map=auto_map)
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(converted)


@pytest.mark.parametrize("name", ["spd with biases", "same layer", "delayed with biases"])
def test_disk_and_cpu_offload(name, tmp_path):
    """Offloaded weights are on the meta device between calls: slicing them would give NaN."""
    source = save_llama(tmp_path / "src", **LAYOUTS[name][3])
    convert_checkpoint(source, tmp_path / "out", make_layout(name), verify=False)
    ids = random_ids(2, 6)
    model = load(tmp_path / "out")
    expected, _ = Oracle(model.state_dict(), model.config)(ids)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
    offloaded = load(tmp_path / "out", device_map=places, offload_folder=str(tmp_path / "offload"))
    assert offloaded.model.layers[1].mlp.up_proj.weight.is_meta
    with torch.no_grad():
        torch.testing.assert_close(offloaded(ids).logits, expected, **TIGHT)


TENSOR_PARALLEL = """
import os, sys, torch, torch.distributed as dist
from transformers.distributed import DistributedConfig
from ladderize import load
path, reference = sys.argv[1:]
model = load(path, distributed_config=DistributedConfig(tp_plan="auto", tp_size=2))
ids = torch.arange(3, 14)[None]
with torch.no_grad():
    logits = model(ids).logits
expected = torch.load(reference, weights_only=True)
torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)
shape = tuple(model.model.layers[0].mlp.up_proj.weight.to_local().shape)
assert shape == (24, 32), shape
if dist.get_rank() == 0:
    print("equal", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_transformers_tensor_parallelism_runs_ladder_layouts(tmp_path):
    source = save_llama(tmp_path / "src", vocab_size=96)  # transformers 5.16 shards only an even vocabulary
    convert_checkpoint(source, tmp_path / "out", Recipe(ladder="1:"), verify=False)
    model = load(tmp_path / "out")
    logits, _ = Oracle(model.state_dict(), model.config)(torch.arange(3, 14)[None])
    torch.save(logits, tmp_path / "logits.pt")
    (tmp_path / "tp.py").write_text(TENSOR_PARALLEL)
    result = warm.run_group([sys.executable, tmp_path / "tp.py", tmp_path / "out", tmp_path / "logits.pt"])
    assert result.returncode == 0, result.stderr[-3000:]
    assert "equal" in result.stdout.split()  # older gloo says hello on stdout


def test_transformers_tensor_parallelism_refuses_dropped_layouts(converted, tmp_path):
    (tmp_path / "tp.py").write_text(TENSOR_PARALLEL)
    result = warm.run_group([sys.executable, tmp_path / "tp.py", converted, tmp_path / "nothing.pt"])
    assert result.returncode != 0
    assert "drops sync points for 4 virtual ranks, and transformers' tensor parallelism cannot run it" in result.stderr


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_other_engines_are_refused_before_they_replace_the_layers(engine):
    """They register an attention of their own, name it in the config, and build the model on the meta device."""
    ALL_ATTENTION_FUNCTIONS.register(engine, lambda *_, **__: None)
    sentence = f"drops sync points for 4 virtual ranks, and {engine} cannot run it: use vLLM with ladderize's plugin"
    with pytest.raises(ValueError, match=sentence):
        make_model("spd all 4", attn_implementation=engine)
    with torch.device("meta"):
        assert make_model("ladder all", attn_implementation=engine, seed=0).config._attn_implementation == engine
