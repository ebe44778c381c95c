import json

import numpy as np
import pytest

from ladderize.data.windows import cut_windows, default_seq_len, read_documents
from ladderize.errors import UserError


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
