"""bench --engine vllm, as far as it goes without vLLM: where the weights come from."""

import json

from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.spec import checkpoint_spec
from ladderize.vllm.served import served_models
from tests.helpers import save_llama


def test_a_checkpoint_is_linked_to_and_not_copied(tmp_path):
    source = save_llama(tmp_path / "dense")
    (tmp_path / "work").mkdir()
    spec = checkpoint_spec(str(source), tp_size=1)
    first, plugin = served_models([spec], BenchOptions(baselines=("plugin",)), tmp_path / "work")
    for row in (first, plugin):
        assert row.spec.folder == spec.folder
        weights = row.folder / "model.safetensors"
        assert weights.is_symlink()
        assert weights.resolve() == (source / "model.safetensors").resolve()
        assert not (row.folder / "config.json").is_symlink()
    assert json.loads((source / "config.json").read_text())["model_type"] == "llama"
