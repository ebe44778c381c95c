"""Where rows come from: what --data may name, files of all kinds, and what is wrong with them."""

import codecs
import json
import shutil
from unittest import mock

import datasets
import numpy as np
import pytest

from ladderize.adapt.training_data import open_rows
from ladderize.data import files
from ladderize.data.files import check_sources, hub_dataset, source_identity, split_weight
from ladderize.data.rows import file_rows
from ladderize.data.windows import cut_windows, default_seq_len, read_documents
from ladderize.errors import UsageError, UserError
from tests.adapt_data.rows import write_jsonl

TEXTS = [{"text": f"row {number}"} for number in range(5)]


def texts_of(name):
    return [row["text"] for row in open_rows(str(name))]


def test_names_and_weights(tmp_path):
    for text, expected in (
        ("a/b.jsonl=2", ("a/b.jsonl", 2)),
        (f"{tmp_path}=1.5", (str(tmp_path), 1.5)),
        ("date=2024/b.json", ("date=2024/b.json", None)),
    ):
        assert split_weight(text) == expected
    (tmp_path / "date=2024").mkdir()
    assert split_weight(f"{tmp_path}/date=2024") == (f"{tmp_path}/date=2024", None)
    assert hub_dataset("hub:o/n:train") == ("o/n", None, "train")
    assert hub_dataset("hub:o/n:cfg:train") == ("o/n", "cfg", "train")
    check_sources(["hub:o/n:train=2", "a.jsonl=0.5"])
    for given in (["a=2"], ["a=2", "b"], ["a=1", "b=0"], ["a", "hub:o/n:train"]):
        with pytest.raises(UsageError, match="give each of several sources a weight above 0"):
            check_sources(given)
    for name in ("hub:n:train", "hub:o/n:train[:1%]", "hub:o/n"):
        with pytest.raises(UsageError, match="write hub:OWNER/NAME:SPLIT"):
            check_sources([name])


def test_files_of_every_kind(tmp_path, capfd):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "a.json").write_text(json.dumps(TEXTS, indent=1))
    datasets.Dataset.from_list(TEXTS).to_parquet(tmp_path / "a[1].parquet")
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    every = datasets.Dataset.from_list([{"text": "no"}, *TEXTS])
    every.select(range(1, 6)).save_to_disk(tmp_path / "disk")
    capfd.readouterr()
    for name in ("a.jsonl", "a.json", "a[1].parquet", "disk"):
        assert texts_of(tmp_path / name) == [row["text"] for row in TEXTS]
    assert texts_of(tmp_path / "a.txt") == ["one\n\ntwo\n"]
    ids = np.arange(12, dtype=np.uint16).reshape(3, 4)
    np.savez(tmp_path / "a.npz", rows=ids, flat=np.arange(3))
    assert np.array_equal(open_rows(f"{tmp_path}/a.npz:rows")["input_ids"][:], ids)
    assert open_rows(f"{tmp_path}/a.npz:flat")[0]["input_ids"].tolist() == [0, 1, 2]
    assert capfd.readouterr() == ("", "")


def test_folders_and_globs(tmp_path):
    (tmp_path / "parquet").mkdir()
    for number in (1, 0):
        datasets.Dataset.from_list(TEXTS[number::2]).to_parquet(tmp_path / "parquet" / f"{number}.parquet")
    (tmp_path / "parquet" / "README.md").write_text("about")
    expected = [row["text"] for row in TEXTS[::2] + TEXTS[1::2]]
    assert texts_of(tmp_path / "parquet") == texts_of(tmp_path / "parquet" / "*.parquet") == expected
    snapshot = tmp_path / "snapshot"  # as the hub's client makes it
    (snapshot / "data").mkdir(parents=True)
    (snapshot / ".cache").mkdir()
    (tmp_path / "empty").mkdir()
    write_jsonl(snapshot / ".cache" / "a.json", [{}])
    write_jsonl(snapshot / "dataset_infos.json", [{}])
    shutil.copy(tmp_path / "parquet" / "0.parquet", snapshot / "data" / "train-00000-of-00001.parquet")
    assert texts_of(snapshot) == [row["text"] for row in TEXTS[::2]]
    shutil.copy(tmp_path / "parquet" / "1.parquet", snapshot / "data" / "test-00000-of-00001.parquet")
    assert texts_of(snapshot / "data" / "train*") == [row["text"] for row in TEXTS[::2]]
    write_jsonl(tmp_path / "parquet" / "a.jsonl", TEXTS)
    for given, message in (
        ("snapshot", "holds several splits .*test-00000.*, .*train-00000.*; name those of one"),
        ("parquet", "names files that end in .jsonl, .parquet; give"),
        ("*.json", "names nothing"),
        ("empty", "names a folder without rows"),
        ("none.jsonl", "names nothing that exists"),
    ):
        with pytest.raises(UserError, match=message):
            open_rows(f"{tmp_path}/{given}")


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_file_of_another_system_is_read_alike_everywhere(tmp_path, tokenizer, suffix):
    """A BOM and CRLF are no text: in training, in scoring, and in prompts."""
    rows = ["the cat", "", "sat"]
    lines = rows if suffix == ".txt" else [json.dumps({"text": row}) for row in rows if row]
    read = []
    for name, begin, end in (("plain", b"", b"\n"), ("other", codecs.BOM_UTF8, b"\r\n")):
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(begin + b"".join(line.encode() + end for line in lines))
        documents = [ids.tolist() for ids in read_documents(str(path), tokenizer)]
        read.append((texts_of(path), documents, [row.values["text"] for row in file_rows(str(path))]))
    assert read[0] == read[1]
    assert read[0][0] == read[0][2] == (["the cat\n\nsat\n"] if suffix == ".txt" else ["the cat", "sat"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text"\n', "a.jsonl cannot be read .JSON parse error.* row 1"),
        ("a.jsonl", '{"title": "x"}\n', "has the columns title; rows need input_ids, messages"),
        ("a.txt", b"abc\xff", "a.txt cannot be read .*utf-8"),
        ("a.parquet", "PAR1", "a.parquet cannot be read .*is it there, and complete"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, capfd, name, content, message):
    """The wrong file is named, alone and among others."""
    path = tmp_path / "x" / name
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as raised:
        open_rows(str(path))
    assert "\n" not in str(raised.value)
    if name == "a.jsonl" and "cannot" in message:
        write_jsonl(path.parent / "0.jsonl", TEXTS)
        with pytest.raises(UserError, match=message):
            open_rows(str(path.parent))
    assert capfd.readouterr() == ("", "")


def test_the_hub(monkeypatch):
    lost = ConnectionError("Couldn't reach 'o/n' on the Hub")
    monkeypatch.setattr(datasets, "load_dataset", mock.Mock(side_effect=lost))
    with pytest.raises(UserError, match="--data hub:o/n:cfg:train cannot be read .Couldn't reach"):
        open_rows("hub:o/n:cfg:train")
    with pytest.raises(UserError, match="--eval-data hub:o/n:train is a stream"):
        open_rows("hub:o/n:train", "--eval-data")
    load = mock.Mock(return_value=datasets.Dataset.from_dict({"body": ["x"]}).to_iterable_dataset())
    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match="has the columns body; rows need"):
        open_rows("hub:o/n:cfg:train")
    load.assert_called_once_with("o/n", "cfg", split="train", streaming=True)  # and nobody's code is trusted


def test_identity(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "END_BYTES", 8)
    path = tmp_path / "a.txt"
    seen = []
    for content in ("a" * 40, "a" * 41, "b" + "a" * 39, "a" * 39 + "b"):
        path.write_text(content)
        seen.append(source_identity(str(path)))
        assert seen[-1] == source_identity(str(path)) == json.loads(json.dumps(seen[-1]))
    assert len({json.dumps(one) for one in seen}) == 4
    assert seen[0]["files"][str(path)][0] == 40
    assert source_identity(f"{path}=2") != seen[-1]


class Letters:
    """A tokenizer for the tests: BOS, then one id for each character."""

    def __call__(self, texts, **_):
        return {"input_ids": [[1, *map(ord, text)] for text in texts]}


def lists(arrays):
    return [array.tolist() for array in arrays]


def test_text_is_one_document_with_one_bos(tmp_path):
    (tmp_path / "a.txt").write_text("ab\n\ncd")
    assert lists(read_documents(str(tmp_path / "a.txt"), Letters())) == [[1, 97, 98, 10, 10, 99, 100]]


def test_every_jsonl_line_is_a_document_and_they_are_joined(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n\n{"text": "c"}\n')
    documents = read_documents(str(tmp_path / "a.jsonl"), Letters())
    assert lists(documents) == [[1, 97, 98], [1, 99]]
    assert lists(cut_windows(documents, 2)) == [[1, 97], [98, 1]]  # the lone 99 cannot be scored
    assert lists(cut_windows(documents, 3)) == [[1, 97, 98], [1, 99]]  # the partial window is kept
    assert lists(cut_windows(documents, 100)) == [[1, 97, 98, 1, 99]]


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, np.int32])
def test_ids_are_taken_as_they_are(tmp_path, dtype):
    rows = np.arange(12, dtype=dtype).reshape(3, 4)
    np.save(tmp_path / "a.npy", rows)
    np.savez(tmp_path / "one.npz", only=rows)
    np.savez(tmp_path / "two.npz", train=rows[:1], heldout=rows[1:])
    for name in ("a.npy", "one.npz", "one.npz:only"):
        documents = read_documents(str(tmp_path / name), None)
        assert lists(documents) == rows.tolist()
        assert [default_seq_len([str(tmp_path / name)], most) for most in (100, 3)] == [4, 3]
    assert lists(read_documents(str(tmp_path / "two.npz:heldout"), None)) == rows[1:].tolist()
    np.save(tmp_path / "flat.npy", np.arange(5))
    np.save(tmp_path / "column.npy", np.arange(5)[:, None])
    flat = read_documents(str(tmp_path / "flat.npy"), None)
    for name in ("flat.npy", "column.npy"):
        assert default_seq_len([str(tmp_path / name)], 4096) == 2048
    assert lists(cut_windows(flat, 3)) == [[0, 1, 2], [3, 4]]


def test_unusable_files(tmp_path):
    for name, content, message in (
        ("a.txt", b"", "no tokens at all"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.jsonl", b"{}\n", "line 1: has nothing; a row needs input_ids or text"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\\ud83d"}', "line 2: holds half of a surrogate pair"),
        ("a.npy", b"junk", "not a NumPy array"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_documents(str(tmp_path / name), Letters())
    cases = [
        (np.zeros(3), "expected token ids"),
        (np.array([-1, 2]), "negative"),
        (np.array([2**63], dtype=np.uint64), "impossibly large"),
        (np.array([{}], dtype=object), "never unpickled"),
        (np.array([5, 9]), "token id 9.*ends at 8"),
    ]
    for array, message in cases:
        np.save(tmp_path / "a.npy", array, allow_pickle=True)
        with pytest.raises(UserError, match=message):
            read_documents(str(tmp_path / "a.npy"), None, vocab_size=9)
    np.savez(tmp_path / "two.npz", a=np.arange(3), b=np.arange(3))
    for name, message in (("two.npz:c", "holds the arrays a, b"), ("none.txt", "does not exist")):
        with pytest.raises(UserError, match=message):
            read_documents(str(tmp_path / name), None)
    with pytest.raises(UserError, match="no window of two tokens"):
        cut_windows([np.array([1])], 8)


def test_ids_of_a_line_are_preferred_to_its_text(tmp_path):
    """What generate wrote: the ids that the model gave, and a text that would be tokenised otherwise."""
    rows = [{"text": "ab", "input_ids": [5, 6, 7]}, {"text": "c"}, {"input_ids": []}, {"input_ids": None, "text": "d"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert lists(read_documents(str(tmp_path / "a.jsonl"), Letters())) == [[5, 6, 7], [1, 99], [], [1, 100]]
    with pytest.raises(UserError, match="line 2 is text, but the model has no tokenizer"):
        read_documents(str(tmp_path / "a.jsonl"), None)
    (tmp_path / "ids.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert lists(read_documents(str(tmp_path / "ids.jsonl"), None)) == [[5, 6, 7]]
    with pytest.raises(UserError, match="token id 7.*ends at 6"):
        read_documents(str(tmp_path / "ids.jsonl"), None, vocab_size=7)
