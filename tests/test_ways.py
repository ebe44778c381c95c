"""CONTRIBUTING.md names the files of a command, in the order of its work: no other file of its rooms does any."""

import inspect
import re
import sys
import threading

import numpy as np

from ladderize.demo.inputs import MODEL
from tests.helpers import ROOT, invoke, invoke_well
from tests.sweeps import spec, write

PACKAGE = str(ROOT / "ladderize") + "/"


def files_on_the_way(command):
    """As CONTRIBUTING.md lists them."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.split(f"### `ladderize {command}`\n")[1].split("\n#")[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)


def files_at_work(*arguments):
    """The files of the package in which a function runs while the command does."""
    found = set()

    def note(frame, event, _):
        code = frame.f_code  # without CO_OPTIMIZED: the body of a module or a class, which an import runs
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(PACKAGE):
            found.add(code.co_filename.removeprefix(PACKAGE))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        outcome = invoke(*arguments)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert outcome.code == 0, outcome.stderr
    return found


def test_the_way_through_convert(llama, tmp_path):
    way = files_on_the_way("convert")
    ran = files_at_work("convert", llama, tmp_path / "out", "--ladder", "2:", "--spd", "0", "--sync-tp-size", 2)
    rooms = {name for name in ran if name == "commands/convert.py" or name.startswith("convert/")}
    assert sorted(way) == sorted(name for name in rooms if "remote_code" not in name)
    assert len(way) <= 10


def test_the_way_through_bench():
    way = files_on_the_way("bench")
    quick = ("--prompt-len", 4, "--output-len", 3, "--repeat", 1, "--warmup", 1)
    ran = files_at_work("bench", MODEL, *quick)
    assert sorted(way) == sorted(
        name for name in ran if name == "commands/bench.py" or name.startswith("runtime/bench/")
    )
    assert len(way) <= 9


def test_the_way_through_adapt(llama, tmp_path):
    invoke_well("convert", llama, tmp_path / "ladder", "--ladder", "2:", "--no-verify")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 97, (24, 16)))
    data = ("--data", tmp_path / "ids.npy", "--distill-from", llama, "--no-verify", "--write", "last")
    sizes = ("--max-steps", 2, "--batch-size", 2, "--seq-len", 16, "--device", "cpu")
    ran = files_at_work("adapt", tmp_path / "ladder", tmp_path / "out", *data, *sizes)
    rooms = ("commands/adapt.py", "adapt/train/", "adapt/data/")
    way = files_on_the_way("adapt")
    assert sorted(way) == sorted(name for name in ran if name.startswith(rooms))
    assert len(way) <= 15


def test_the_way_through_sweep(place, tmp_path):
    content = spec(place, adapt=None, bench=None, layouts=[{"ladder": "all"}])
    ran = files_at_work("sweep", write(tmp_path / "s.yaml", content), "--out", tmp_path / "out")
    way = files_on_the_way("sweep")
    assert sorted(way) == sorted(name for name in ran if name.startswith("sweep/"))
    assert len(way) <= 8
