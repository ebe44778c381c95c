"""Files are replaced whole or not at all, also where the disk is full; locks work where the file system has none."""

import errno
import os
from unittest import mock

import pytest

from ladderize.files.documents import write_json
from ladderize.files.output import atomic_folder, clean_up, replacement, scratch_folder
from tests.helpers import listing


def test_an_error_while_writing_leaves_the_old_file(tmp_path):
    target = tmp_path / "s.json"
    target.write_text("old")
    with pytest.raises(UnicodeEncodeError), replacement(target) as file:
        file.write("new \ud800")
    assert listing(tmp_path) == ["s.json"]
    assert target.read_text() == "old"


def test_a_file_system_without_locks_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("ladderize.files.output.fcntl.flock", mock.Mock(side_effect=OSError("no locks here")))
    with scratch_folder(tmp_path / "out") as mine:
        clean_up(tmp_path / "out")
        assert mine.is_dir()
    assert listing(tmp_path) == []


def test_another_runs_cleaning_does_not_undo_a_swap(tmp_path, monkeypatch):
    out, rename = tmp_path / "out", os.rename
    out.mkdir()
    (out / "old").touch()

    def rename_and_clean(source, target):
        rename(source, target)
        clean_up(out)

    monkeypatch.setattr(os, "rename", rename_and_clean)
    with atomic_folder(out, overwrite=True) as folder:
        (folder / "new").touch()
    assert listing(out) == ["new"]
    assert listing(tmp_path) == ["out"]


def test_a_failure_leaves_no_empty_folders(tmp_path):
    with pytest.raises(KeyError), atomic_folder(tmp_path / "a" / "b" / "out"):
        raise KeyError
    assert listing(tmp_path) == []


def test_a_full_disk_is_named_with_the_file(tmp_path, monkeypatch):
    (tmp_path / "s.json").write_text("old")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("ladderize.files.output.os.fsync", mock.Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left on device: '.*/s.json'"):
        write_json(tmp_path / "s.json", {"a": 1})
    assert listing(tmp_path) == ["s.json"]
    assert (tmp_path / "s.json").read_text() == "old"
