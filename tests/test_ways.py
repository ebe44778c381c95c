"""CONTRIBUTING.md names the files of a command, in the order of its work: no other file of its rooms does any."""

import inspect
import re
import sys
import threading

from ladderize.demo.inputs import MODEL
from tests.helpers import ROOT, invoke_well
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
        invoke_well(*arguments)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def check_the_way(command, *arguments, rooms, most):
    way, ran = files_on_the_way(command), files_at_work(command, *arguments)
    assert sorted(way) == sorted(name for name in ran if name.startswith(rooms) and "remote_code" not in name)
    assert len(way) <= most


def test_the_way_through_convert(llama, tmp_path):
    words = (llama, tmp_path / "out", "--ladder", "2:", "--spd", "0", "--sync-tp-size", 2)
    check_the_way("convert", *words, rooms=("commands/convert.py", "convert/"), most=10)


def test_the_way_through_bench():
    quick = ("--prompt-len", 4, "--output-len", 3, "--repeat", 1, "--warmup", 1)
    check_the_way("bench", MODEL, *quick, rooms=("commands/bench.py", "runtime/bench/"), most=9)


def test_the_way_through_adapt(place, tmp_path):
    data = ("--data", place / "ids.npy", "--distill-from", place / "dense", "--no-verify", "--write", "last")
    sizes = ("--max-steps", 2, "--batch-size", 2, "--seq-len", 16, "--device", "cpu")
    rooms = ("commands/adapt.py", "adapt/train/", "adapt/data/")
    check_the_way("adapt", place / "spd", tmp_path / "out", *data, *sizes, rooms=rooms, most=15)


def test_the_way_through_sweep(place, tmp_path):
    content = spec(place, adapt=None, bench=None, layouts=[{"ladder": "all"}])
    check_the_way("sweep", write(tmp_path / "s.yaml", content), "--out", tmp_path / "out", rooms=("sweep/",), most=8)
