"""Unfinished work: the same run goes on with it, and no other run touches it."""

from contextlib import suppress

import pytest

from ladderize.errors import UserError
from ladderize.files.unfinished import Unfinished, work_folder
from tests.helpers import listing

IDENTITY = {"samples": 3, "model": "a", "sizes": (1, 2)}


def begin(folder):
    with suppress(KeyError), Unfinished(folder, "adapt", IDENTITY):
        (folder / "piece").touch()
        raise KeyError


def test_the_same_run_goes_on_and_removes_it(tmp_path):
    folder = work_folder(tmp_path / "out")
    begin(folder)
    assert listing(folder) == ["piece", "run.json"]
    with Unfinished(folder, "adapt", IDENTITY) as work:
        assert work.has_pieces()
        with pytest.raises(UserError, match="another run is using"):
            Unfinished(folder, "adapt", IDENTITY)
        with Unfinished(folder, "adapt", {}, main=False):  # another rank of the same run
            pass
        assert (folder / "piece").exists()
    assert listing(tmp_path) == []


def test_another_run_is_told_what_differs(tmp_path):
    begin(tmp_path / "w")
    with pytest.raises(UserError, match=r"another model and samples \(3, now 4\); give the old value again, delete it"):
        Unfinished(tmp_path / "w", "adapt", {**IDENTITY, "samples": 4, "model": "b"})
    with pytest.raises(UserError, match=r"another command \(adapt\)"):
        Unfinished(tmp_path / "w", "spd", IDENTITY)
    begin(tmp_path / "w")  # it was not touched, and is not locked


def test_another_run_begins_anew_where_nothing_would_be_missed(tmp_path):
    folder = tmp_path / "w"
    begin(folder)
    with Unfinished(folder, "adapt", {"samples": 4}, pieces="step-*"):
        pass
    with pytest.raises(KeyError), Unfinished(folder, "adapt", IDENTITY):
        raise KeyError
    assert listing(tmp_path) == []


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(UserError, match="not a folder of unfinished work"):
        Unfinished(tmp_path, "adapt", IDENTITY)
    assert listing(tmp_path) == ["mine.txt"]
