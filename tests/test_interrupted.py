"""A run that is killed after its output appeared: the same command finds the output, tidies up, and exits 0."""

import json
import signal
import sys

import pytest

from tests import warm
from tests.helpers import invoke, invoke_well, listing, one_sentence, training_command
from tests.test_convert import fingerprint

# Runs ladderize, and is killed before it removes its unfinished work.
KILLED = """
import os, signal
from ladderize.cli import main
from ladderize.files.unfinished import Unfinished
def kill(work, remove=Unfinished.remove):  # spd's sensitivity has unfinished work of its own, within that of OUT
    remove(work) if "sensitivity" in work.folder.name else os.kill(os.getpid(), signal.SIGKILL)
Unfinished.remove = kill
main()
"""


@pytest.mark.parametrize("name", ["lora", "align", "spd"])
def test_killed_after_the_output_appeared(place, tmp_path, name):
    warm.warm_python().preload("accelerate", "datasets", "peft")
    out = tmp_path / "out"
    arguments = training_command(name, place, out)
    process = warm.WarmProcess([sys.executable, "-c", KILLED, *arguments])
    _, stderr = process.communicate()
    assert process.returncode == -signal.SIGKILL, stderr
    assert listing(tmp_path) == ["out", "out.ladderize-work"]
    before = fingerprint(out)
    for more in ([], ["--json"]):  # with the work, and without
        outcome = invoke_well(*arguments, *more)
        assert "is complete: this command wrote it in an earlier run" in outcome.stderr
        assert fingerprint(out) == before
        assert listing(tmp_path) == ["out"]
    assert json.loads(outcome.stdout)["out"] == str(out)
    assert "is not empty" in one_sentence(invoke(*arguments, "--seq-len", 8))  # another command


def test_documents_that_were_carried_on_are_of_another_output(place, tmp_path):
    invoke_well(*training_command("align", place, tmp_path / "first"))
    invoke_well("convert", tmp_path / "first", tmp_path / "out", "--dense", "all", "--no-verify")
    assert (tmp_path / "out" / "alignment.json").is_file()
    assert "is not empty" in one_sentence(invoke(*training_command("align", place, tmp_path / "out")))
