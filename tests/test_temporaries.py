"""What killed runs left behind is removed by the next one; what a living one holds is not."""

import errno
import os
import sys
import tempfile
from pathlib import Path

import pytest

from ladderize.files.documents import write_json
from ladderize.files.temporaries import remove_abandoned, replacement, temporary_folder
from tests import warm
from tests.helpers import listing

KEPT = ["flag", "s.json"]
# Holds a temporary of each kind, says so, and waits to be killed.
HOLDER = """
import sys, tempfile, time
from pathlib import Path
from ladderize.files.temporaries import replacement, temporary_folder
place = Path(sys.argv[1])
tempfile.tempdir = str(place)
with temporary_folder("verify") as folder, replacement(place / "s.json") as file:
    (folder / "code.py").touch()
    file.write("half")
    file.flush()
    (place / "flag").touch()
    time.sleep(3600)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of temporaries of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_killed_run_is_cleaned_up_after_and_a_living_one_is_not(tmp_path, monkeypatch):
    place = tmp_path
    child = warm.WarmProcess([sys.executable, "-c", HOLDER, place])
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    try:
        warm.wait_until((place / "flag").exists, child)
        held = listing(place)
        assert len(held) == 3
        with temporary_folder("verify"):
            write_json(place / "s.json", {"a": 1})
        assert listing(place) == sorted([*held, "s.json"])
    finally:
        child.kill()
        child.communicate()
    with temporary_folder("verify") as mine:
        left = [name for name in held if name.startswith(".s.json")]
        assert listing(place) == sorted([*left, mine.name, *KEPT])
    write_json(place / "s.json", {"a": 2})
    assert listing(place) == KEPT


def test_of_other_purposes_and_of_others_nothing_is_removed(place):
    names = ["ladderize-verify-notes", "ladderize-group-0123456789abcdef", ".s.json.backup", ".s.json.0123456789abcdeg"]
    for name in names:
        (place / name).touch()
    (place / "mine").mkdir()
    (place / "ladderize-verify-0123456789abcdef").symlink_to(place / "mine")
    with temporary_folder("verify"):
        write_json(place / "s.json", {})
    assert set(listing(place)) == {*names, "mine", "s.json", "ladderize-verify-0123456789abcdef"}


def test_an_error_while_writing_leaves_the_old_file(place):
    target = Path(place / "s.json")
    target.write_text("old")
    with pytest.raises(UnicodeEncodeError), replacement(target) as file:
        file.write("new \ud800")
    assert listing(place) == ["s.json"]
    assert target.read_text() == "old"


def test_a_file_system_without_locks_loses_nothing(place, monkeypatch):
    def refuse(*args):
        raise OSError("no locks here")

    monkeypatch.setattr("ladderize.files.temporaries.fcntl.flock", refuse)
    with temporary_folder("verify") as mine:
        remove_abandoned(place, "ladderize-verify-")
        assert mine.is_dir()
    assert listing(place) == []


def test_a_full_disk_is_named_with_the_file(place, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (place / "s.json").write_text("old")
    monkeypatch.setattr("ladderize.files.temporaries.os.fsync", refuse)
    with pytest.raises(OSError, match="No space left on device: '.*/s.json'"):
        write_json(place / "s.json", {"a": 1})
    assert listing(place) == ["s.json"]
    assert (place / "s.json").read_text() == "old"
