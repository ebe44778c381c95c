"""The output appears whole or not at all, whatever interrupts the run; and once it is there, the same command ends."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from ladderize import convert_checkpoint, load
from ladderize.checkpoint import writing
from ladderize.convert import pipeline
from ladderize.convert.recipe import Recipe
from ladderize.errors import UserError
from ladderize.files import output
from ladderize.files.output import temporary_folder
from tests import warm
from tests.helpers import invoke, invoke_well, listing, one_sentence, save_llama, training_command
from tests.test_convert import fingerprint

LADDER = Recipe(ladder="2:")

# Runs a conversion and stops for ever at the moment that argv names, after creating a file that says so.
STOPPER = """
import os, sys, tempfile, time
from pathlib import Path
from types import SimpleNamespace
from ladderize.convert import pipeline, verify
from ladderize.files import output
from ladderize.convert.recipe import Recipe
source, out, moment, flag = sys.argv[1:]
def stop(*args, **kwargs):
    Path(flag).touch()
    time.sleep(3600)
if moment == "between the renames":
    rename, calls = os.rename, []
    def stop_between(a, b):  # the first rename finds OUT full, the second moves it aside, the third fills the gap
        calls.append(a)
        stop() if len(calls) == 3 else rename(a, b)
    os.rename = stop_between
elif moment == "verifying":
    tempfile.tempdir = os.path.dirname(flag)
    verify.subprocess = SimpleNamespace(run=stop)
else:
    module, name = moment.split(".")
    setattr({"output": output, "pipeline": pipeline}[module], name, stop)
pipeline.convert_checkpoint(source, out, Recipe(ladder="2:"), overwrite=True, verify=moment == "verifying", copy=True)
"""


def kill_at(moment: str, source: Path, out: Path, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    child = warm.WarmProcess([sys.executable, "-c", STOPPER, source, out, moment, flag])
    try:
        warm.wait_until(flag.exists, child)
    finally:
        child.kill()
        child.communicate()
    flag.unlink()


@pytest.mark.parametrize("moment", ["pipeline.write_weights", "output._take_place"])
def test_killed_before_there_was_anything(llama, tmp_path, moment):
    before = fingerprint(llama)
    kill_at(moment, llama, tmp_path / "out", tmp_path)
    assert "out" not in listing(tmp_path)
    assert len(listing(tmp_path)) == 2  # the temporary is there, until the next run
    convert_checkpoint(llama, tmp_path / "out", LADDER, verify=False)
    assert listing(tmp_path) == ["out", "src"]
    load(tmp_path / "out")
    assert fingerprint(llama) == before


def test_killed_while_verifying(llama, tmp_path, monkeypatch):
    """The next run removes the code of the model that is among the system's temporaries, too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kill_at("verifying", llama, tmp_path / "out", tmp_path)
    assert len(listing(tmp_path)) == 3
    with temporary_folder("verify") as in_use:
        convert_checkpoint(llama, tmp_path / "out", LADDER)
        assert listing(tmp_path) == sorted([in_use.name, "out", "src"])
    assert listing(tmp_path) == ["out", "src"]


@pytest.mark.parametrize(
    ("moment", "made_meanwhile"),
    [("output._take_place", False), ("between the renames", False), ("between the renames", True)],
)
def test_killed_while_overwriting(llama, tmp_path, moment, made_meanwhile):
    """Also where a script has made an empty OUT before the next run, which fails."""
    out = tmp_path / "out"
    convert_checkpoint(llama, out, Recipe(ladder="all"), verify=False)
    old = fingerprint(out)
    kill_at(moment, llama, out, tmp_path)
    assert out.exists() == (moment == "output._take_place")
    if made_meanwhile:
        out.mkdir()
    outcome = invoke("convert", llama, out, "--ladder", "3:")  # whatever the next run is, it begins with this
    assert "is not empty" in one_sentence(outcome)
    output.clean_up(out)
    assert listing(tmp_path) == ["out", "src"]
    assert fingerprint(out) == old


def test_a_temporary_in_use_is_left_alone(llama, tmp_path):
    with output.atomic_folder(tmp_path / "out") as mine:
        (mine / "weights").write_text("half")
        convert_checkpoint(llama, tmp_path / "out", LADDER, verify=False)
        assert (mine / "weights").exists()
        shutil.rmtree(tmp_path / "out")
    assert (tmp_path / "out" / "weights").exists()


def test_a_target_filled_meanwhile_is_not_replaced(llama, tmp_path):
    with (
        pytest.raises(UserError, match="written to by another program meanwhile"),
        output.atomic_folder(tmp_path / "out"),
    ):
        convert_checkpoint(llama, tmp_path / "out", LADDER, verify=False)
    assert listing(tmp_path) == ["out", "src"]
    load(tmp_path / "out")


def test_somebody_elses_files_are_not_cleaned(llama, tmp_path):
    for name in (".out.ladderize-notes", "out.ladderize-1234", ".outer.ladderize-1234"):
        (tmp_path / name).mkdir() if "outer" in name else (tmp_path / name).write_text("mine")
    convert_checkpoint(llama, tmp_path / "out", LADDER, verify=False)
    assert {".out.ladderize-notes", "out.ladderize-1234", ".outer.ladderize-1234"} <= set(listing(tmp_path))


def test_a_swap_that_fails_half_way_puts_the_old_one_back(llama, tmp_path, monkeypatch):
    convert_checkpoint(llama, tmp_path / "out", Recipe(ladder="all"), verify=False)
    old, rename = fingerprint(tmp_path / "out"), os.rename

    def fails_once_out_is_free(a, b):
        if Path(b) == tmp_path / "out" and not Path(b).exists() and not str(a).endswith("-old"):
            raise OSError(errno.EIO, "input/output error")
        rename(a, b)

    monkeypatch.setattr(os, "rename", fails_once_out_is_free)
    with pytest.raises(UserError, match="input/output error"):
        convert_checkpoint(llama, tmp_path / "out", LADDER, overwrite=True, verify=False)
    assert listing(tmp_path) == ["out", "src"]
    assert fingerprint(tmp_path / "out") == old


@pytest.mark.parametrize(("error", "code"), [(UserError("it does not load"), 1), (KeyboardInterrupt(), 130)])
def test_a_verification_that_fails_or_is_interrupted_leaves_nothing(llama, tmp_path, monkeypatch, error, code):
    monkeypatch.setattr(pipeline, "verify_output", mock.Mock(side_effect=error))
    assert invoke("convert", llama, tmp_path / "out", "--ladder", "2:").code == code
    assert listing(tmp_path) == ["src"]


@pytest.mark.own_process
def test_verification_finds_code_that_does_not_work(llama, tmp_path, monkeypatch):
    broken = tmp_path / "code"
    shutil.copytree(pipeline.REMOTE_CODE, broken)
    path = broken / "modeling_ladderized.py"
    path.write_text(path.read_text() + "\nimport ladderize\n")
    monkeypatch.setattr(pipeline, "REMOTE_CODE", broken)
    with pytest.raises(UserError, match="does not load in plain transformers, so nothing was written.*ladderize"):
        convert_checkpoint(llama, tmp_path / "out", LADDER)
    assert listing(tmp_path) == ["code", "src"]


def test_a_full_disk(tmp_path):
    """A real one: a tmpfs of 300 kB, which a copy of the weights does not fit."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        source = save_llama(tmp_path / "src", intermediate_size=1024)
        outcome = invoke("convert", source, disk / "out", "--ladder", "2:", "--no-verify")
        assert re.search(f"{disk}/\\S*: no space left on device", one_sentence(outcome))
        assert listing(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fails_meanwhile(llama, tmp_path, monkeypatch):
    """While the next file is written: the error is told by that fsync alone."""
    monkeypatch.setattr(writing, "fsync", mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    outcome = invoke("convert", llama, tmp_path / "out", "--ladder", "2:", "--no-verify")
    assert "input/output error); nothing was left there" in one_sentence(outcome)
    assert listing(tmp_path) == ["src"]


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
