"""Files that are not what they should be, documents, unfinished work, and files that appear whole or not at all."""

import errno
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from ladderize.checkpoint.tensors import locate_tensors, write_tensors
from ladderize.data.windows import read_documents
from ladderize.errors import UserError
from ladderize.files import regular
from ladderize.files.documents import check_writable, parse_json, read_json, read_own, read_yaml, write_json
from ladderize.files.output import atomic_folder, clean_up, replacement, scratch_folder
from ladderize.files.records import Record
from ladderize.files.unfinished import Unfinished, work_folder
from tests.helpers import invoke, listing, one_sentence, save_llama

DEEP = "[" * 100_000 + "]" * 100_000


def test_documents_that_nobody_can_read(tmp_path):
    for content, message in (
        (DEEP.encode(), "nested too deeply"),
        (b"[NaN]", "holds NaN, which is not a number"),
        (b"\xff", "not UTF-8 text .byte 0."),
    ):
        with pytest.raises(ValueError, match=message):
            parse_json(content)
    for text, message in ((f"a: {DEEP}", "nested too deeply"), ("a: 1\na: 2", "the key 'a' stands twice")):
        (tmp_path / "a.yaml").write_text(text)
        with pytest.raises(UserError, match=f"a.yaml is not valid YAML: .*{message}"):
            read_yaml(tmp_path / "a.yaml")


def test_no_regular_file_is_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("a.json", "a.yaml", "a.txt", "a.npy", "a.npz"):
        (tmp_path / name).symlink_to("pipe")
        read = {"a.json": read_json, "a.yaml": read_yaml}.get(name, lambda path: read_documents(str(path), None))
        with pytest.raises(UserError, match="is not a regular file"):
            read(tmp_path / name)
    with pytest.raises(UserError, match="is not a regular file"):
        regular.read_bytes(regular.Path("/dev/zero"))
    with pytest.raises(UserError, match="is not a regular file"):
        read_json(tmp_path)
    assert read_own(tmp_path / "a.json") == {}


def test_more_than_is_read(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"12345")
    assert regular.read_bytes(tmp_path / "a", 5) == b"12345"
    with pytest.raises(UserError, match="larger than the 4 B that are read"):
        regular.read_bytes(tmp_path / "a", 4)
    (tmp_path / "a").write_bytes(b"1\n12345\n")
    assert list(regular.read_lines(tmp_path / "a", 6)) == [b"1\n", b"12345\n"]
    with pytest.raises(UserError, match="line 2 is longer than 5 B"):
        list(regular.read_lines(tmp_path / "a", 5))


@pytest.mark.parametrize("way", ["as it is", "through a link", "with an array's name", "in a folder"])
def test_nothing_that_is_read_is_replaced(tmp_path, way):
    path = tmp_path / "ids.npz"
    path.write_bytes(b"x")
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "a").mkdir()
    given = {"with an array's name": f"{path}:train", "in a folder": tmp_path / "a" / ".." / "ids.npz"}.get(way, path)
    with pytest.raises(UserError, match=r"--out .*ids.npz is a file that the command reads"):
        check_writable(tmp_path / "link" if way == "through a link" else path, inputs=[None, "h100-sxm", given])
    check_writable(tmp_path / "other.json", inputs=[None, "h100-sxm", given])


@pytest.mark.parametrize(
    "command",
    [
        "eval MODEL --perplexity FILE --out FILE",
        "sensitivity MODEL --data FILE --mode sweep --sync-tp-size 2 --overwrite --out FILE",
        "calibrate --hardware FILE --out FILE",
        "plan --shape FILE --hardware h100-sxm --tp-size 2 --out FILE",
        "bench --random-weights FILE --out FILE",
    ],
)
def test_a_command_that_would_replace_what_it_reads(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "results.json"
    file.write_text("{}")
    model = save_llama(tmp_path / "model") if "MODEL" in command else None
    words = [{"FILE": file, "MODEL": model}.get(word, word) for word in command.split()]
    assert "results.json is a file that the command reads" in one_sentence(invoke(*words))
    assert file.read_text() == "{}"


@dataclass(frozen=True)
class Inner(Record):
    LEFT_OUT: ClassVar = ("note",)

    kind: str
    share: float | None = None
    note: str | None = None


@dataclass(frozen=True)
class Outer(Record):
    name: str
    count: int
    path: Path
    inner: Inner
    rows: list[Inner] = field(default_factory=list)
    pair: tuple[int, float] = (1, 2.0)
    by_layer: dict[int, tuple[int, ...]] = field(default_factory=dict)
    by_name: dict[str, float] = field(default_factory=dict)


DOCUMENT = {
    "name": "a", "count": 3, "path": "x/y", "inner": {"kind": "spd", "share": None},
    "rows": [{"kind": "b", "share": 0.5}],
    "pair": [4, 5.0], "by_layer": {"7": [1, 2]}, "by_name": {"x": 1.0},
}  # fmt: skip


def test_there_and_back():
    outer = Outer.from_dict(DOCUMENT | {"from a later version": 1}, "file.json")
    assert outer == Outer("a", 3, Path("x/y"), Inner("spd"), [Inner("b", 0.5)], (4, 5.0), {7: (1, 2)}, {"x": 1.0})
    assert outer.to_dict() == DOCUMENT
    assert Inner("spd", note="n").to_dict() == {"kind": "spd", "share": None, "note": "n"}
    assert Outer.from_dict({**DOCUMENT, "pair": [4, 5]}, "f").pair == (4, 5.0)  # JSON writes 5.0 as 5 where it likes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "file.json: name is 3, but must be of type str"),
        ({"count": True}, "file.json: count is True, but must be of type int"),
        ({"inner": {}}, "file.json: inner has no kind"),
        ({"rows": [{"kind": "b", "share": "much"}]}, "file.json: rows[0]: share is 'much', but must be of type float"),
        ({"pair": [1]}, "file.json: pair has 1 entries, but must have 2"),
        ({"pair": [1, 10**400]}, f"file.json: pair[1] is 1{'0' * 59}..., which is out of the range of a float"),
        ({"by_layer": {"1": ["x"]}}, "file.json: by_layer.1[0] is 'x', but must be of type int"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(UserError) as error:
        Outer.from_dict(DOCUMENT | change, "file.json")
    assert str(error.value) == message


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


def test_an_error_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    (tmp_path / "s.json").write_text("old")
    with pytest.raises(UnicodeEncodeError), replacement(tmp_path / "s.json") as file:
        file.write("new \ud800")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("ladderize.files.output.os.fsync", mock.Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left on device: '.*/s.json'"):
        write_json(tmp_path / "s.json", {"a": 1})
    assert listing(tmp_path) == ["s.json"]
    assert (tmp_path / "s.json").read_text() == "old"


def test_tensors_of_every_kind_are_written(tmp_path):
    tensors = {
        "step": torch.tensor(7), "odd": torch.arange(5, dtype=torch.uint8),
        "moments": torch.randn(3, 4, 5).transpose(0, 2), "half": torch.randn(6, 2).bfloat16()[::2],
        "parameter": torch.nn.Parameter(torch.randn(3)), "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]), "wide": torch.randn(2, dtype=torch.float64),
        "scalar": torch.tensor(2.5, dtype=torch.float16),
    }  # fmt: skip
    path = tmp_path / "x.safetensors"
    declared = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_tensors(path, declared, tensors.__getitem__)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor.data, rtol=0, atol=0)
    assert all(info.start % tensors[name].dtype.itemsize == 0 for name, info in locate_tensors(path).items())
