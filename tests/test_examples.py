"""The files of ``examples/`` run as they are, on the files that ``ladderize demo --out demo`` leaves."""

import re
import shutil
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.demo.command import MODEL, write_documents
from tests.helpers import ROOT, invoke_well, save_llama

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
LAUNCHERS = {  # of accelerate launch: how many processes, and how they share the model
    "one_gpu": (1, "NO"),
    "fsdp2_8_gpus": (8, "FSDP"),
    "fsdp2_2_hosts": (16, "FSDP"),
    "zero3_8_gpus": (8, "DEEPSPEED"),
}
# what the command line changes of an example, so that a test takes seconds
SHORTENED = {
    "adapt.yaml": ["--max-tokens", "2048", "--write", "last", "--no-verify"],
    "adapt_blocks.yaml": ["--samples", "16", "--train", "0:2", "--no-verify"],
    "adapt_tp.yaml": ["--max-tokens", "2048", "--write", "last", "--no-verify"],
    "adapt_lora.yaml": ["--max-tokens", "2048", "--write", "last"],
    "bench.yaml": ["--repeat", "1", "--warmup", "1", "--output-len", "4", "--no-check"],
    "bench_emulated.yaml": ["--num-layers", "1", "--repeat", "1", "--warmup", "1", "--output-len", "2"],
    "spd.yaml": ["--samples", "24", "--heldout", "4", "--no-verify"],
    "sensitivity.yaml": ["--samples", "4"],
    "sweep.yaml": ["--dry-run"],  # tests/test_sweep.py runs small ones
}
COMMAND = re.compile(r"^# ladderize (\S+) (?:.*--(?:config|recipe) )?examples/(\S+)$", re.MULTILINE)


def command_of(example: Path) -> str:
    found = COMMAND.search(example.read_text())
    assert found is not None, f"{example.name} does not say how to run it"
    assert found[2] == example.name
    return found[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the demo leaves, as far as the examples read it."""
    folder = tmp_path_factory.mktemp("examples")
    demo = folder / "demo"
    shutil.copytree(MODEL, demo / "dense")
    for name, recipe in (("ladder-all", Recipe(ladder="all")), ("spd-all", Recipe(spd="all", sync_tp_size=2))):
        convert_checkpoint(str(demo / "dense"), demo / name, recipe, verify=False)
    write_documents(demo / "train.jsonl", 700, test=False, seed=11)
    write_documents(demo / "heldout.jsonl", 60, test=True, seed=1)
    return folder


@pytest.mark.parametrize("example", [path for path in EXAMPLES if command_of(path) != "convert"], ids=lambda p: p.name)
def test_an_example_runs_as_it_is(example, folder, monkeypatch):
    monkeypatch.chdir(folder)
    command = command_of(example)
    given = [example] if command == "sweep" else ["--config", example]
    invoke_well(command, *given, *SHORTENED.get(example.name, []))
    written = re.search(r"^out: (\S+)$", example.read_text(), re.MULTILINE)
    assert written is not None
    assert Path(written[1]).exists() or "--dry-run" in SHORTENED[example.name]


@pytest.mark.parametrize("example", [path for path in EXAMPLES if command_of(path) == "convert"], ids=lambda p: p.name)
def test_an_example_recipe_converts(example, tmp_path):
    dense = save_llama(tmp_path / "dense", num_hidden_layers=32, num_key_value_heads=8)
    invoke_well("convert", dense, tmp_path / "out", "--recipe", example, "--no-verify")
    assert (tmp_path / "out" / "ladderize.yaml").exists()


@pytest.mark.parametrize("name", LAUNCHERS)
def test_accelerate_knows_every_key_of_a_launcher(name):
    """Of the file by its own reader, of what is nested in it by the parser of ``accelerate launch``."""
    file = ROOT / "examples" / "accelerate" / f"{name}.yaml"
    config = load_config_from_file(str(file))
    assert (config.num_processes, config.distributed_type.value) == LAUNCHERS[name]
    known = {action.dest for action in launch_command_parser()._actions}
    assert not {*config.fsdp_config, *config.deepspeed_config} - known
    assert f"--config_file examples/accelerate/{file.name} " in file.read_text()
