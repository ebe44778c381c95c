"""Files that are not what they should be: no regular file, nested without end, larger than memory."""

import os

import pytest

from ladderize.data.windows import read_documents
from ladderize.errors import UserError
from ladderize.files import regular
from ladderize.files.documents import check_writable, parse_json, read_json, read_own, read_yaml
from tests.helpers import invoke, one_sentence, save_llama

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
