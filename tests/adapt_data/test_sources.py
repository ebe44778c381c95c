"""Where rows come from: what --data may name, files of all kinds, and what is wrong with them."""

import json

import datasets
import numpy as np
import pytest

from ladderize.adapt.data.sources import TextRows, open_rows, row_of_ids
from ladderize.adapt.data.stream import Stream, fixed_rows
from ladderize.adapt.data_specs import parse_specs
from ladderize.errors import UsageError, UserError
from tests.adapt_data.rows import (
    PLAIN,
    QWEN3,
    TURNS,
    VOCAB,
    one,
    options,
    origins,
    scored_text,
    stream,
    text_of,
    texts,
    write_jsonl,
)


def test_specs():
    spec, weighted, other = parse_specs(["a/b.jsonl=2", "hub:o/n:cfg:train=0.5", "x.npz:ids=1e3"])
    assert (spec.text, spec.weight, spec.hub) == ("a/b.jsonl", 2.0, None)
    assert (weighted.text, weighted.weight, weighted.hub) == ("hub:o/n:cfg:train", 0.5, ("o/n", "cfg", "train"))
    assert (other.text, other.weight) == ("x.npz:ids", 1000.0)
    assert parse_specs(["date=2024/b.jsonl"])[0].text == "date=2024/b.jsonl"
    assert parse_specs(["date=2024/*.txt"])[0].weight is None
    assert parse_specs(["hub:o/n:train"])[0].hub == ("o/n", None, "train")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a.csv"], "--data a.csv: neither a file that ends in"),
        (["a.jsonl=x"], "not a positive number: 'x'"),
        (["a.jsonl=0"], "not a positive"),
        (["a.jsonl=-1", "b.jsonl=1"], "not a positive"),
        (["a.jsonl=inf"], "not a positive"),
        (["a.jsonl=2"], "has no effect on a single source"),
        (["a.jsonl=2", "b.jsonl"], "--data b.jsonl has no weight, but others"),
        (["a.jsonl", "hub:o/n:train"], "n:train is streamed.*weight"),
        (["hub:n:train"], "is written hub:OWNER/NAME"),
        (["hub:o/n"], "is written"),
        (["hub:o/n:"], "is written"),
        (["hub:o/n:train[:1%]"], "a slice of a split cannot be streamed"),
    ],
)
def test_bad_specs(given, message):
    with pytest.raises(UsageError, match=message):
        parse_specs(given)


def test_globs(tmp_path, tokenizer):
    texts(tmp_path / "b.jsonl", 2, start=10)
    texts(tmp_path / "a.jsonl", 3)
    (tmp_path / "c.txt").write_text("x")
    (spec,) = parse_specs([f"{tmp_path}/*.jsonl"])
    rows = open_rows(spec)
    assert [rows.read(number).origin.rpartition("/")[2] for number in range(len(rows))] == [
        "a.jsonl, line 1",
        "a.jsonl, line 2",
        "a.jsonl, line 3",
        "b.jsonl, line 1",
        "b.jsonl, line 2",
    ]
    for given, message in (("*.parquet", "no file matches"), ("*", "end in .jsonl, .txt; give one")):
        with pytest.raises(UserError, match=message):
            open_rows(*parse_specs([f"{tmp_path}/{given}"]))
    with pytest.raises(UserError, match="does not exist"):
        open_rows(*parse_specs([f"{tmp_path}/none.jsonl"]))


def test_bad_lines_are_named_or_skipped_and_counted(tmp_path, tokenizer):
    good = json.dumps({"text": text_of(1)})
    lines = [good, "", "{", good, '{"other": 1}', '{"text": ""}', good, '"x"', good]
    (tmp_path / "a.jsonl").write_bytes("\r\n".join(lines).encode() + b'\n{"text": "\xff"}\n')
    name = str(tmp_path / "a.jsonl")
    with pytest.raises(
        UserError, match=r"a\.jsonl, line 3: is not JSON \(.*\); repair it, or skip such rows with --skip-bad-rows"
    ):
        stream(name, tokenizer)
    # the empty text of line 6 is seen only when it is tokenised
    with Stream(parse_specs([name]), Encodes(tokenizer), options(heldout=0, skip_bad_rows=True)) as opened:
        rows = opened.take(8)
        counts = opened.counts
    assert {where.rpartition(" ")[2] for where in origins(rows)} == {"1", "4", "7", "9"}
    assert counts.skipped_rows == 5
    assert len(counts.skipped_first) == 5
    assert "line 10: is not JSON (it is not UTF-8" in counts.skipped_first[3]
    assert "line 6: gives 0 tokens" in counts.skipped_first[4]
    fixed = fixed_rows(parse_specs([name]), Encodes(tokenizer), options(skip_bad_rows=True))
    assert len(origins(fixed)) == 4
    write_jsonl(tmp_path / "b.jsonl", [{"input_ids": [3]}] * 3)
    with stream(str(tmp_path / "b.jsonl"), None, heldout=0, skip_bad_rows=True) as opened:
        with pytest.raises(
            UserError, match="gives no example to train on .3 bad rows; .*b.jsonl, line [123]: gives 1 tokens"
        ):
            next(opened)
    with pytest.raises(UserError, match=r"b\.jsonl, line [123]: gives 1 tokens, .*; repair it, or skip"):
        stream(str(tmp_path / "b.jsonl"), None)


def test_conversations_that_do_not_show_a_turn_are_skipped_and_the_others_counted_by_their_turns(tmp_path, chat):
    """Qwen3's template has a place for a thought in the last turn only: of two answers without one, the first is
    another text in the prompt of the second than in the whole."""
    tokenizer = chat(QWEN3)
    thought = {"role": "assistant", "content": "<think>\nno\n</think>\n\nyes"}
    chats = [[*TURNS[:2], thought, TURNS[3], thought], [*TURNS[:2], thought], [*TURNS[:3], TURNS[4]]]
    name = write_jsonl(tmp_path / "a.jsonl", [{"messages": turns} for turns in chats])
    wrong = r"a\.jsonl, line 3: turn 4: the chat template does not begin it with the prompt for it, .*; repair it, or"
    with pytest.raises(UserError, match=wrong), stream(name, tokenizer, heldout=0, seq_len=900) as opened:
        next(opened)
    with stream(name, tokenizer, heldout=0, seq_len=900, skip_bad_rows=True) as opened:
        taken, counts = opened.take(1), opened.counts
    short, long = (len(tokenizer.apply_chat_template(turns, return_dict=False)) for turns in (chats[1], chats[0]))
    assert (counts.examples, counts.rows, counts.skipped_rows) == (3, 1, 1)
    assert counts.tokens == len(taken[0]) == 2 * short + long
    answer = tokenizer(thought["content"] + "<|im_end|>\n", add_special_tokens=False)["input_ids"]
    assert taken[0].scored_tokens == 3 * len(answer)


def test_why_no_row_can_be_scored(tmp_path, tokenizer):
    long = {"prompt": "once upon a time " * 99, "completion": "the end"}
    name = write_jsonl(tmp_path / "a.jsonl", [long, long, {"input_ids": [3]}])
    why = "of 2 nothing that counts is within --seq-len 64; bad rows: 1"
    skipping = options(skip_bad_rows=True)
    with pytest.raises(UserError, match=rf"gives no example that can be scored \({why}\)"):
        fixed_rows(parse_specs([name]), tokenizer, skipping)
    write_jsonl(tmp_path / "a.jsonl", [long] * 20)
    with pytest.raises(UserError, match=r"no held-out row can be scored \(of 2 nothing .* or raise --seq-len"):
        stream(name, tokenizer)


def test_rows_of_ids_are_as_long_as_they_are(tmp_path):
    for name, shape in {"a": (5, 24), "b": (9, 24), "c": (3, 12), "d": (60,)}.items():
        np.save(tmp_path / f"{name}.npy", np.full(shape, 7))
    np.savez(tmp_path / "e.npz", ids=np.full((2, 24), 7))
    length = {"a": 24, "a b": 24, "a c": None, "d": None, "a d": None}
    for names, expected in length.items():
        assert row_of_ids(parse_specs([str(tmp_path / f"{name}.npy") for name in names.split()])) == expected
    assert row_of_ids(parse_specs([str(tmp_path / "a.npy"), str(tmp_path / "e.npz:ids")])) == 24
    assert row_of_ids(parse_specs(["hub:a/b:train"])) is None


def test_files_without_rows(tmp_path, tokenizer):
    for name in ("a.jsonl", "a.txt"):
        (tmp_path / name).touch()
    np.save(tmp_path / "a.npy", np.zeros(0, dtype=int))
    datasets.Dataset.from_dict({"text": []}).to_parquet(tmp_path / "a.parquet")
    for suffix in ("jsonl", "txt", "npy", "parquet"):
        with pytest.raises(UserError, match=f"a.{suffix} holds no rows"):
            stream(str(tmp_path / f"a.{suffix}"), tokenizer)
    (tmp_path / "b.jsonl").write_text("x\n")
    with pytest.raises(UserError, match="holds no rows besides 1 bad ones, first .*line 1: is not JSON"):
        stream(str(tmp_path / "b.jsonl"), tokenizer, skip_bad_rows=True)


def test_parquet(tmp_path, chat, capfd):
    rows = {"messages": [TURNS, TURNS[:3], [{"role": "user", "content": None}]], "text": ["a", "b", "c"]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "a.parquet")
    capfd.readouterr()
    opened = open_rows(*parse_specs([str(tmp_path / "a.parquet")]))
    assert capfd.readouterr() == ("", "")
    assert [opened.read(number).values["text"] for number in (2, 0)] == ["c", "a"]
    datasets.Dataset.from_dict({"text": ["this one"]}).to_parquet(tmp_path / "x[1].parquet")
    datasets.Dataset.from_dict({"text": ["another"]}).to_parquet(tmp_path / "x1.parquet")
    assert open_rows(*parse_specs([str(tmp_path / "x[1].parquet")])).read(0).values["text"] == "this one"
    assert scored_text(chat(PLAIN), one(chat(PLAIN), opened.read(0).values)) == ["hi there </s>", "bye</s>"]
    with pytest.raises(UserError, match="a.parquet, row 3: turn 1 of its messages"):
        fixed_rows(parse_specs([str(tmp_path / "a.parquet")]), chat(PLAIN), options())
    datasets.Dataset.from_dict({"title": ["x"]}).to_parquet(tmp_path / "b.parquet")
    capfd.readouterr()
    with pytest.raises(UserError, match="b.parquet has the columns title; rows need input_ids"):
        open_rows(*parse_specs([str(tmp_path / "b.parquet")]))
    content = (tmp_path / "a.parquet").read_bytes()
    # the end is lost; or the pages in the middle are damaged
    for broken in (content[:-20], content[:4] + bytes(len(content) // 2) + content[4 + len(content) // 2 :]):
        (tmp_path / "c.parquet").write_bytes(broken)
        with pytest.raises(UserError, match="c.parquet cannot be read as parquet"):
            fixed_rows(parse_specs([str(tmp_path / "c.parquet")]), chat(PLAIN), options())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("ends", ["\n", " ", ""], ids=["lines", "words", "nothing"])
def test_a_text_in_passages(tmp_path, ends):
    text = "".join(f"é{number}ж{ends}" for number in range(9000))
    (tmp_path / "a.txt").write_text(text)
    rows = TextRows(tmp_path / "a.txt")
    passages = [rows.read(number).values["text"] for number in range(len(rows))]
    assert "".join(passages) == text
    assert len(passages) > 3
    assert all(3276 < len(passage.encode()) <= 20480 for passage in passages)
    assert all(passage.endswith(ends) for passage in passages)
    assert rows.read(1).origin.endswith(
        f"a.txt, bytes {len(passages[0].encode())} to {len((passages[0] + passages[1]).encode()) - 1}"
    )
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        TextRows(tmp_path / "a.txt")


def test_arrays(tmp_path):
    np.save(tmp_path / "rows.npy", np.arange(12, dtype=np.uint16).reshape(3, 4))
    rows = fixed_rows(parse_specs([str(tmp_path / "rows.npy")]), None, options(packing=False))
    assert [(row.ids.tolist(), row.origins[0].rpartition("/")[2]) for row in rows][1] == (
        [4, 5, 6, 7],
        "rows.npy, row 2",
    )
    np.savez(tmp_path / "a.npz", train=np.arange(40_000) % VOCAB, other=np.arange(3))
    opened = open_rows(*parse_specs([f"{tmp_path}/a.npz:train"]))
    assert [len(opened.read(number).values["input_ids"]) for number in range(len(opened))] == [16384, 40_000 - 16384]
    assert opened.read(1).origin.endswith("a.npz:train, ids 16384 to 39999")
    with pytest.raises(UserError, match="holds the arrays train, other"):
        open_rows(*parse_specs([f"{tmp_path}/a.npz"]))


def test_a_file_that_changes_under_way(tmp_path):
    rows = open_rows(*parse_specs([texts(tmp_path / "a.jsonl", 3)]))
    (tmp_path / "a.jsonl").write_text("other\n" * 100)
    with pytest.raises(UserError, match="changed while it was in use"):
        rows.read(2)


class Encodes:
    """A tokenizer without BOS and EOS."""

    eos_token_id = None

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, text, **given):
        return self.tokenizer(text, add_special_tokens=False, **given)
