"""The plugin itself: found by its entry point, registered as often as one likes, and nothing of it where it is not
wanted."""

import importlib.metadata
import subprocess
import sys

from tests.helpers import ROOT
from tests.warm import PATIENCE

SCRIPT = """
import importlib.metadata, os, sys
import torch
from transformers import AutoConfig
import ladderize.cli
assert "vllm" not in sys.modules  # the command line imports none
from vllm import EngineArgs, ModelRegistry
from ladderize.vllm import environment
llama, ours, *versions = sys.argv[1:]
real = importlib.metadata.version
assert environment.missing_names() == []  # in this one, too
for found in versions:
    if os.fork() == 0:  # a process for each, which has imported what it needs
        environment.version = lambda name: found.removesuffix("-lacking") if name == "vllm" else real(name)
        if found.endswith("-lacking"):
            environment.TOUCHED["vllm.config:VllmConfig"] = "model_config no_such_config"
        from ladderize.vllm.plugin import register_plugin
        register_plugin()
        print("== other:", type(AutoConfig.from_pretrained(llama)).__name__)
        try:
            print("ours:", type(AutoConfig.from_pretrained(ours)).__name__, flush=True)
            for _ in range(2):
                EngineArgs(model=ours, skip_tokenizer_init=True, block_size=32).create_engine_config()
        except ValueError as error:
            print(error, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
from ladderize.vllm.plugin import register_plugin
ladderize.register()
register_plugin()
register_plugin()
assert "LadderizedLlamaForCausalLM" in ModelRegistry.get_supported_archs()
assert "ladderize.vllm.model" not in sys.modules
assert not torch.cuda.is_initialized()
"""


def test_found_and_registered(tmp_path):
    """By any version of vLLM: other models load as before. Ours end with a sentence, not an AttributeError, or load
    with one warning. In this version twice, and no GPU is environment."""
    from transformers import LlamaConfig

    from tests.vllm.models import make

    LlamaConfig().save_pretrained(tmp_path / "llama")
    make("ladder all", tmp_path / "ours")
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="ladderize")
    assert entry.load().__module__ == "ladderize.vllm.plugin"
    arguments = (tmp_path / "llama", tmp_path / "ours", "0.31.1", "0.34.0", "0.34.0-lacking")
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr[-3000:]
    _, old, new, lacking = result.stdout.split("== other: ")
    assert all(text.startswith("LlamaConfig\n") for text in (old, new, lacking))
    assert "this is vLLM 0.31.1; pip install" in old
    assert "ours: LadderizedLlamaConfig" in new
    assert new.count("this is vLLM 0.34.0: it has what they touch, but was not tried") == 1
    assert "this is vLLM 0.34.0, which lacks vllm.config:VllmConfig.no_such_config; pip install" in lacking
    assert all("ours:" not in text for text in (old, lacking))
