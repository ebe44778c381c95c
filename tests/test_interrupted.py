"""A run that is killed after its output appeared: the same command finds the output, tidies up, and exits 0."""

import json
import signal
import sys

import pytest

from tests import warm
from tests.helpers import invoke, invoke_well, listing, one_sentence, training_command
from tests.test_convert import fingerprint

# Runs ladderize, and is killed when it calls the function that argv names.
KILLED_AT = """
import importlib, os, signal, sys
module, name = sys.argv[1].split(":")
holder = importlib.import_module(module)
*owners, name = name.split(".")
for owner in owners:
    holder = getattr(holder, owner)
call = getattr(holder, name)
def kill(work):  # spd's sensitivity has unfinished work of its own, within that of OUT
    call(work) if "sensitivity" in work.folder.name else os.kill(os.getpid(), signal.SIGKILL)
setattr(holder, name, kill)
sys.argv[:2] = ["ladderize"]
from ladderize.cli import main
main()
"""
BEFORE_TIDYING = "ladderize.files.unfinished:Unfinished.remove"
COMPLETE = "is complete: this command wrote it in an earlier run"


def kill(moment, *arguments):
    process = warm.WarmProcess([sys.executable, "-c", KILLED_AT, moment, *map(str, arguments)])
    _, stderr = process.communicate()
    assert process.returncode == -signal.SIGKILL, stderr


@pytest.mark.parametrize("name", ["lora", "align", "spd"])
def test_killed_after_the_output_appeared(place, tmp_path, name):
    warm.warm_python().preload("accelerate", "datasets", "peft")
    out = tmp_path / "out"
    arguments = training_command(name, place, out)
    kill(BEFORE_TIDYING, *arguments)
    assert listing(tmp_path) == ["out", "out.ladderize-work"]
    before = fingerprint(out)
    for more in ([], ["--json"]):  # with the work, and without
        outcome = invoke_well(*arguments, *more)
        assert COMPLETE in outcome.stderr
        assert fingerprint(out) == before
        assert listing(tmp_path) == ["out"]
    assert json.loads(outcome.stdout)["out"] == str(out)
    assert "is not empty" in one_sentence(invoke(*arguments, "--seed", 1))  # another command


def test_documents_that_were_carried_on_are_of_another_output(place, tmp_path):
    invoke_well(*training_command("align", place, tmp_path / "first"))
    invoke_well("convert", tmp_path / "first", tmp_path / "out", "--dense", "all", "--no-verify")
    assert (tmp_path / "out" / "alignment.json").is_file()
    assert "is not empty" in one_sentence(invoke(*training_command("align", place, tmp_path / "out")))
