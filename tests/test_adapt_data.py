"""The training data: what rows become, in which order they come, and that a resumed stream goes on exactly where it
was."""

import json
import threading
from pathlib import Path

import datasets
import numpy as np
import pytest
from tokenizers import pre_tokenizers, processors

from ladderize.adapt.data import chunks, sources
from ladderize.adapt.data.chunks import StreamOptions
from ladderize.adapt.data.examples import Encoder
from ladderize.adapt.data.files import PASSAGE_BYTES, TextRows
from ladderize.adapt.data.formats import BadRow, BadRows, Row
from ladderize.adapt.data.packing import segments
from ladderize.adapt.data.place import StreamPlace
from ladderize.adapt.data.show import batch_document, show_batch
from ladderize.adapt.data.sources import open_rows, parse_specs
from ladderize.adapt.data.stream import Stream, fixed_rows, rank_rows
from ladderize.console import UsageError, UserError
from ladderize.modeling import load_tokenizer
from tests.helpers import ROOT

DEMO = ROOT / "ladderize" / "demo" / "model"
VOCAB = 527
BOS, EOS = 0, 1

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{%"
    " endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
# as Qwen3's does: what an assistant thought stays only in the last turn
REWRITING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and not loop.last %}{{"
    " m.content.split('THOUGHT')[-1] }}{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt"
    " %}<assistant>{% endif %}"
)
TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi there "},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "bye"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO)


@pytest.fixture
def chat(tokenizer):
    """Gives the tokenizer a chat template for one test."""

    def use(template):
        tokenizer.chat_template = template
        return tokenizer

    yield use
    tokenizer.chat_template = None


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 3)


def through_json(place):
    return StreamPlace.from_dict(json.loads(json.dumps(place.to_dict())), "a state")


def text_of(number):
    return f"row {number} " + "the cat sat on a mat. " * (1 + number % 4)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(path, count, start=0):
    return write_jsonl(path, [{"text": text_of(number)} for number in range(start, start + count)])


def options(**changed):
    return StreamOptions(**{"seq_len": 64, "vocab_size": VOCAB, **changed})


def stream(data, tokenizer, **changed):
    return Stream(parse_specs([data] if isinstance(data, str) else data), tokenizer, options(**changed))


def encode(tokenizer, values, *, seq_len=64, vocab_size=VOCAB, is_passage=False):
    return Encoder(tokenizer, seq_len, vocab_size).encode([Row(values, "there", is_passage)])[0]


def one(tokenizer, values, **changed):
    """The one example of a row; checks that nothing is wrong with it."""
    encoded = encode(tokenizer, values, **changed)
    assert encoded.problem is None, encoded.problem
    (example,) = encoded.examples
    return example


def scored_text(tokenizer, example):
    """The runs of scored tokens, decoded."""
    runs, before = [], False
    for token, counts in zip(example.ids, example.scored, strict=True):
        if counts and not before:
            runs.append([])
        if counts:
            runs[-1].append(int(token))
        before = counts
    return [tokenizer.decode(run) for run in runs]


def plain(rows):
    return [(row.ids.tolist(), row.positions.tolist(), row.targets.tolist(), row.origins) for row in rows]


def origins(rows):
    return [where for row in rows for where in row.origins]


# --- what a row becomes ---


def test_ids_are_taken_as_they_are(tokenizer):
    example = one(None, {"input_ids": [5, 6, 7], "text": "never read"})
    assert (example.ids.tolist(), example.scored.tolist()) == ([5, 6, 7], [True] * 3)
    masked = one(None, {"input_ids": [5, 6, 7], "loss_mask": [1, 0, 1]})
    assert masked.scored.tolist() == [True, False, True]


def test_text_gets_bos_and_eos_unless_it_is_a_passage(tokenizer):
    ids = tokenizer("the cat")["input_ids"]
    assert ids[0] == BOS
    assert one(tokenizer, {"text": "the cat"}).ids.tolist() == [*ids, EOS]
    assert one(tokenizer, {"text": "the cat"}).scored.all()
    assert one(tokenizer, {"text": "the cat"}, is_passage=True).ids.tolist() == ids
    assert one(tokenizer, {"text": "the cat</s>"}).ids.tolist() == [*ids, EOS]  # not twice


def test_only_the_completion_is_scored(tokenizer):
    example = one(tokenizer, {"prompt": "the cat", "completion": " sat"})
    assert example.ids.tolist() == [
        *tokenizer("the cat")["input_ids"],
        *tokenizer(" sat", add_special_tokens=False)["input_ids"],
        EOS,
    ]
    assert scored_text(tokenizer, example) == [" sat</s>"]
    # tokens that grow together across the border: the prompt stays what it is when the model is asked
    assert tokenizer(" th" + "e")["input_ids"] != [
        *tokenizer(" th")["input_ids"],
        *tokenizer("e", add_special_tokens=False)["input_ids"],
    ]
    joined = one(tokenizer, {"prompt": " th", "completion": "e"})
    assert joined.ids.tolist() == [
        *tokenizer(" th")["input_ids"],
        *tokenizer("e", add_special_tokens=False)["input_ids"],
        EOS,
    ]
    assert scored_text(tokenizer, joined) == ["e</s>"]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "by markers"])
def test_only_the_assistant_is_scored(chat, template):
    tokenizer = chat(template)
    example = one(tokenizer, {"messages": TURNS})
    whole = "<s><system>be kind<user>hello<assistant>hi there </s><user>and?<assistant>bye</s>"
    assert tokenizer.decode(example.ids) == whole
    assert example.ids.tolist().count(BOS) == 1
    assert scored_text(tokenizer, example) == ["hi there </s>", "bye</s>"]
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    sharegpt = one(
        tokenizer, {"conversations": [{"from": names[turn["role"]], "value": turn["content"]} for turn in TURNS]}
    )
    assert plain_example(sharegpt) == plain_example(example)


def plain_example(example):
    return example.ids.tolist(), example.scored.tolist()


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "by markers"])
def test_offsets_without_spaces(tokenizer, template):
    """Llama 3's tokenizer leaves the spaces out of its offsets: a turn that ends or begins in one is still scored as a
    whole."""
    fresh = load_tokenizer(DEMO)
    fresh.chat_template = template
    backend = fresh.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    turns = [
        *TURNS[:2],
        {"role": "assistant", "content": " hi  "},
        {"role": "user", "content": " x"},
        {"role": "assistant", "content": "y"},
    ]
    assert scored_text(fresh, one(fresh, {"messages": turns})) == [" hi  </s>", "y</s>"]


def test_conversations_that_cannot_be_used(chat, tokenizer):
    with pytest.raises(UserError, match="there: a conversation, but the tokenizer has no chat template"):
        encode(tokenizer, {"messages": TURNS})
    turns = [TURNS[1], {"role": "assistant", "content": "aTHOUGHTb"}, *TURNS[3:]]
    with pytest.raises(UserError, match="turn 2: the chat template rewrites earlier turns.*{% generation %}"):
        encode(chat(REWRITING), {"messages": turns})
    assert scored_text(tokenizer, one(tokenizer, {"messages": turns[:2]})) == [
        "aTHOUGHTb"
    ]  # a single turn shows where it is
    refusing = "{{ raise_exception('roles must alternate') }}"
    assert "refuses the conversation (roles must alternate)" in str(encode(chat(refusing), {"messages": TURNS}).problem)
    assert "no token that the loss could score" in str(encode(chat(PLAIN), {"messages": TURNS[:2]}).problem)


def test_long_rows_are_cut(tokenizer):
    encoded = encode(None, {"input_ids": list(range(2, 11))}, seq_len=4)
    assert [(example.ids.tolist(), example.origin) for example in encoded.examples] == [
        ([2, 3, 4, 5], "there, piece 1"),
        ([6, 7, 8, 9], "there, piece 2"),
    ]  # the 10 alone has nothing to predict
    assert [len(example.ids) for example in encode(None, {"input_ids": list(range(2, 12))}, seq_len=4).examples] == [
        4,
        4,
        2,
    ]
    masked = encode(None, {"input_ids": [2, 3, 4, 5], "loss_mask": [0, 0, 0, 1]}, seq_len=2)
    assert ([example.ids.tolist() for example in masked.examples], masked.dropped) == ([[4, 5]], 1)


def test_long_completions_are_cut_off(chat):
    tokenizer = chat(PLAIN)
    prompt = len(tokenizer("the cat")["input_ids"])
    row = {"prompt": "the cat", "completion": " sat on a mat"}
    encoded = encode(tokenizer, row, seq_len=prompt + 2)
    assert (encoded.truncated, encoded.dropped, len(encoded.examples[0].ids)) == (1, 0, prompt + 2)
    assert encoded.examples[0].scored.tolist() == [False] * prompt + [True] * 2
    encoded = encode(tokenizer, row, seq_len=prompt)
    assert (encoded.truncated, encoded.dropped, encoded.examples, encoded.problem) == (0, 1, (), None)
    whole = one(tokenizer, {"messages": TURNS})
    encoded = encode(tokenizer, {"messages": TURNS}, seq_len=len(whole.ids) - 1)
    assert scored_text(tokenizer, encoded.examples[0])[-1] == "bye"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"other": 1}, "has other; a row needs input_ids, messages"),
        ({"text": None}, "has nothing"),
        ([1], "not an object"),
        ({"text": 5}, "its text is no string"),
        ({"prompt": "a", "completion": 1}, "its completion is no string"),
        ({"prompt": "a"}, "has prompt; a row needs"),
        ({"input_ids": [1, "2"]}, "no list of integers"),
        ({"input_ids": [-1, 2]}, "negative"),
        ({"input_ids": [4]}, "gives 1 tokens"),
        ({"input_ids": []}, "gives 0 tokens"),
        ({"input_ids": [4, 5], "loss_mask": [1]}, "loss_mask is no list of 0 and 1"),
        ({"input_ids": [4, 5], "loss_mask": [1, 2]}, "loss_mask is no list"),
        ({"input_ids": [4, 5], "loss_mask": [1, 0]}, "no token that"),
        ({"messages": []}, "no list of turns"),
        ({"messages": [{"role": "user"}]}, "turn 1 of its messages has no role and content"),
        ({"conversations": [{"from": "bing", "value": "x"}]}, "from 'bing'; known are human"),
    ],
)
def test_bad_rows(values, message):
    problem = encode(None, values).problem
    assert isinstance(problem, BadRow)
    assert str(problem).startswith("there: ")
    assert message in str(problem)


def test_what_no_skipping_mends(tokenizer):
    with pytest.raises(UserError, match="there: holds the token id 9, but the model's vocabulary ends at 8"):
        encode(None, {"input_ids": [3, 9]}, vocab_size=9)
    with pytest.raises(UserError, match="there: text, but the model has no tokenizer"):
        encode(None, {"text": "x"})
    with pytest.raises(UserError, match="--seq-len 1"):
        encode(None, {"input_ids": [3, 9]}, seq_len=1)


# --- sources ---


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
        (["a.jsonl=x"], "no positive number: 'x'"),
        (["a.jsonl=0"], "no positive"),
        (["a.jsonl=-1", "b.jsonl=1"], "no positive"),
        (["a.jsonl=inf"], "no positive"),
        (["a.jsonl=2"], "has no effect on a single source"),
        (["a.jsonl=2", "b.jsonl"], "--data b.jsonl has no weight, but others"),
        (["a.jsonl", "hub:o/n:train"], "n:train is streamed.*weight"),
        (["hub:n:train"], "is written hub:OWNER/NAME"),
        (["hub:o/n"], "is written"),
        (["hub:o/n:"], "is written"),
        (["hub:o/n:train[:1%]"], "a stream cannot be cut"),
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
        UserError, match=r"a\.jsonl, line 3: is no JSON; mend it, or leave such rows out with --skip-bad-rows"
    ):
        stream(name, tokenizer)
    # the empty text of line 6 is seen only when it is tokenised
    with Stream(parse_specs([name]), Encodes(tokenizer), options(heldout=0, skip_bad_rows=True)) as opened:
        rows = opened.take(8)
        counts = opened.counts
    assert {where.rpartition(" ")[2] for where in origins(rows)} == {"1", "4", "7", "9"}
    assert counts.skipped_rows == 5
    assert len(counts.skipped_first) == 5
    assert "line 10: is not UTF-8" in counts.skipped_first[3]
    assert "line 6: gives 0 tokens" in counts.skipped_first[4]
    bad = BadRows()
    fixed = fixed_rows(parse_specs([name]), Encodes(tokenizer), options(skip_bad_rows=True), bad=bad)
    assert (len(origins(fixed)), bad.count) == (4, 5)
    write_jsonl(tmp_path / "b.jsonl", [{"input_ids": [3]}] * 3)
    with stream(str(tmp_path / "b.jsonl"), None, heldout=0, skip_bad_rows=True) as opened:
        with pytest.raises(
            UserError, match="gives no example to train on .3 bad rows, .*b.jsonl, line [123]: gives 1 tokens"
        ):
            next(opened)
    with pytest.raises(UserError, match=r"b\.jsonl, line [123]: gives 1 tokens, .*; mend it, or leave"):
        stream(str(tmp_path / "b.jsonl"), None)


class Encodes:
    """A tokenizer without BOS and EOS."""

    eos_token_id = None

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, text, **given):
        return self.tokenizer(text, add_special_tokens=False, **given)


def test_files_without_rows(tmp_path, tokenizer):
    for name in ("a.jsonl", "a.txt"):
        (tmp_path / name).touch()
    np.save(tmp_path / "a.npy", np.zeros(0, dtype=int))
    datasets.Dataset.from_dict({"text": []}).to_parquet(tmp_path / "a.parquet")
    for suffix in ("jsonl", "txt", "npy", "parquet"):
        with pytest.raises(UserError, match=f"a.{suffix} holds no rows"):
            stream(str(tmp_path / f"a.{suffix}"), tokenizer)
    (tmp_path / "b.jsonl").write_text("x\n")
    with pytest.raises(UserError, match="holds no rows besides 1 bad ones, first .*line 1: is no JSON"):
        stream(str(tmp_path / "b.jsonl"), tokenizer, skip_bad_rows=True)


def test_parquet(tmp_path, chat, capfd):
    rows = {"messages": [TURNS, TURNS[:3], [{"role": "user", "content": None}]], "text": ["a", "b", "c"]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "a.parquet")
    capfd.readouterr()
    opened = open_rows(*parse_specs([str(tmp_path / "a.parquet")]))
    assert capfd.readouterr() == ("", "")
    assert [opened.read(number).values["text"] for number in (2, 0)] == ["c", "a"]
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
    assert all(PASSAGE_BYTES * 0.2 < len(passage.encode()) <= PASSAGE_BYTES * 1.25 for passage in passages)
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


# --- the stream ---


def from_shards(count, shards=4):
    data = datasets.Dataset.from_dict({"text": [text_of(number) for number in range(count)]})
    return lambda *_, **__: data.to_iterable_dataset(num_shards=shards)


def from_generator(count):
    def generate(shards):
        for shard in shards:
            yield from ({"text": text_of(number)} for number in range(shard, count, 3))

    return lambda *_, **__: datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": [0, 1, 2]})


def make_data(kind, folder: Path, monkeypatch):
    """The --data of a kind, of about 25 rows each."""
    if kind == "jsonl":
        return [texts(folder / "a.jsonl", 25)]
    if kind == "parquet":
        datasets.Dataset.from_dict({"text": [text_of(number) for number in range(25)]}).to_parquet(folder / "a.parquet")
        return [str(folder / "a.parquet")]
    if kind == "ids":
        np.save(folder / "a.npy", np.random.default_rng(0).integers(2, VOCAB, (25, 40)))
        return [str(folder / "a.npy")]
    if kind == "txt":
        monkeypatch.setattr("ladderize.adapt.data.files.PASSAGE_BYTES", 200)
        (folder / "a.txt").write_text("\n".join(text_of(number) for number in range(60)))
        return [str(folder / "a.txt")]
    if kind == "several":
        return [texts(folder / "a.jsonl", 17), texts(folder / "b.jsonl", 8, start=100)]
    if kind == "several weighted":
        return [texts(folder / "a.jsonl", 17) + "=1", texts(folder / "b.jsonl", 8, start=100) + "=3"]
    if kind == "streamed parquet":
        for number in range(3):
            part = datasets.Dataset.from_dict({"text": [text_of(number * 9 + row) for row in range(9)]})
            part.to_parquet(folder / f"{number}.parquet")
        original = datasets.load_dataset
        files = [str(folder / f"{number}.parquet") for number in range(3)]
        monkeypatch.setattr(
            datasets, "load_dataset", lambda *_, **given: original("parquet", data_files=files, **given)
        )
        return ["hub:o/n:train"]
    monkeypatch.setattr(datasets, "load_dataset", from_generator(25) if kind == "generated" else from_shards(25))
    if kind == "streamed weighted":
        return ["hub:o/n:train=1", texts(folder / "a.jsonl", 9, start=200) + "=1"]
    return ["hub:o/n:train"]


STREAMED = ["streamed", "generated", "streamed parquet"]
KINDS = ["jsonl", "parquet", "ids", "txt", "several", "several weighted", *STREAMED, "streamed weighted"]


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_at_every_row(kind, tmp_path, tokenizer, monkeypatch, small_chunks):
    """Over chunk and epoch ends, twice in a row, and with a state that went through JSON."""
    data = make_data(kind, tmp_path, monkeypatch)
    given = {"heldout": 3, "seed": 5}
    with stream(data, tokenizer, **given) as whole:
        heldout = plain(whole.heldout_rows)
        states, rows, counts = [whole.place()], [], []
        for _ in range(40):
            rows.append(next(whole))
            states.append(through_json(whole.place()))
            counts.append(whole.counts)
    reference = plain(rows)
    assert counts[-1].epochs >= 1
    assert counts[-1].tokens >= sum(map(len, rows))
    assert max(len(json.dumps(state.to_dict())) for state in states) < 2000
    with stream(data, tokenizer, **given) as other:
        assert plain(other.heldout_rows) == heldout
        for position in range(0, 39, 1 if kind in ("jsonl", "streamed", "streamed weighted") else 3):
            other.go_to(states[position])
            assert other.place() == states[position]
            assert plain([next(other)]) == reference[position : position + 1]
            assert other.counts == counts[position]
            again = through_json(other.place())
            assert (
                STREAMED[0] in kind or kind in STREAMED or again == states[position + 1]
            )  # datasets counts batches differently then
            other.go_to(again)  # resumed again right away
            assert plain([next(other)]) == reference[position + 1 : position + 2]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ladderize-data")]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "ids", "txt", "several", *STREAMED])
def test_every_row_once_an_epoch_and_the_heldout_never(kind, packing, tmp_path, tokenizer, monkeypatch, small_chunks):
    data = make_data(kind, tmp_path, monkeypatch)
    ordered = [[], [], []]
    with stream(data, tokenizer, heldout=3, packing=packing) as opened:
        heldout = set(origins(opened.heldout_rows))
        while (epoch := min(cursor.epoch for cursor in opened.place().before.cursors)) < 3:
            ordered[epoch] += next(opened).origins
    per_epoch = [sorted(seen) for seen in ordered]
    assert per_epoch[0] == per_epoch[1] == per_epoch[2]
    assert len(set(per_epoch[0])) == len(per_epoch[0])
    assert not heldout & set(per_epoch[0])
    assert ordered[0] != ordered[1]
    specs = parse_specs(data)
    if not specs[0].is_streamed:
        everything = origins(fixed_rows(specs, tokenizer, options(packing=packing)))
        assert sorted(everything) == sorted([*heldout, *per_epoch[0]])


def test_sources_are_mixed_in_proportion(tmp_path, tokenizer, small_chunks):
    """60 rows of one and 20 of the other: no stretch of the epoch lacks either, and both end together."""
    data = [texts(tmp_path / "a.jsonl", 60), texts(tmp_path / "b.jsonl", 20)]
    with stream(data, tokenizer, heldout=0, packing=False) as opened:
        while opened.counts.epochs < 1:
            next(opened)
            seen = [source.epochs for source in opened.counts.sources]
            assert abs(seen[0] - seen[1]) <= 1 / 20


@pytest.mark.parametrize("streamed", [False, True])
def test_weights_are_shares_of_tokens(streamed, tmp_path, tokenizer, monkeypatch):
    """Whatever the lengths of the rows."""
    monkeypatch.setattr(datasets, "load_dataset", from_shards(90))
    first = "hub:o/n:train" if streamed else texts(tmp_path / "a.jsonl", 90)
    long = write_jsonl(tmp_path / "b.jsonl", [{"text": text_of(number) * 3} for number in range(40)])
    with stream([first + "=1", long + "=2.5"], tokenizer, seq_len=128) as opened:
        opened.take(200)
        counts = opened.counts
    shares = [source.tokens / counts.tokens for source in counts.sources]
    assert shares == pytest.approx([1 / 3.5, 2.5 / 3.5], abs=0.01)
    assert all(source.epochs > 1 for source in counts.sources)


def test_the_order_does_not_depend_on_the_number_of_ranks(tmp_path, tokenizer, small_chunks):
    """And one may go on with another number: 4 steps on one rank, 4 on two, 4 on three, each rank with a stream of its
    own."""
    data = texts(tmp_path / "a.jsonl", 30)
    with stream(data, tokenizer) as opened:
        steps = [sorted(plain(opened.take(7))) for _ in range(12)]
    state, seen = None, []
    for ranks in (1, 2, 3):
        streams = [stream(data, tokenizer) for _ in range(ranks)]
        for opened in streams:
            if state is not None:
                opened.go_to(state)
        for _ in range(4):
            parts = [rank_rows(opened.take(7), rank, ranks, 2) for rank, opened in enumerate(streams)]
            seen.append(sorted(plain([row for part in parts for micro in part for row in micro])))
        state = through_json(streams[-1].place())
        for opened in streams:
            opened.close()
    assert seen == steps


def test_the_seed_decides_the_order(tmp_path, tokenizer):
    data = texts(tmp_path / "a.jsonl", 30)

    def first(seed):
        with stream(data, tokenizer, seed=seed) as opened:
            return plain(opened.heldout_rows), plain(opened.take(5))

    assert first(1) == first(1)
    assert all(one != other for one, other in zip(first(1), first(2), strict=True))


def test_what_is_held_out(tmp_path, tokenizer, monkeypatch):
    for count, expected in ((2, 1), (99, 1), (1000, 10)):
        data = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [2, 3 + number % 500]} for number in range(count)])
        assert len(origins(stream(data, None).heldout_rows)) == expected
    assert stream(data, None, heldout=0).heldout_rows == []
    with pytest.raises(UserError, match="has 1000 rows, and --heldout 1000 would leave none"):
        stream(data, None, heldout=1000)
    single = write_jsonl(tmp_path / "b.jsonl", [{"input_ids": [2, 3]}])
    with pytest.raises(
        UserError, match="a single row, of which nothing can be held out; give --eval-data FILE, or --heldout 0"
    ):
        stream(single, None)
    assert plain([next(stream(single, None, heldout=0))])[0][0] == [2, 3]
    monkeypatch.setattr(datasets, "load_dataset", from_shards(100))
    with stream("hub:o/n:train", tokenizer) as opened:
        assert [
            where.split(" ")[-1]
            for where in sorted(origins(opened.heldout_rows), key=lambda where: int(where.split(" ")[-1]))
        ] == [str(number) for number in range(1, 65)]
    monkeypatch.setattr(datasets, "load_dataset", from_shards(50))
    with pytest.raises(UserError, match="holds 50 rows, and --heldout 64 leaves none"):
        stream("hub:o/n:train", tokenizer)


def test_less_than_a_batch(tmp_path, tokenizer, small_chunks):
    data = texts(tmp_path / "a.jsonl", 20)
    with stream(data, tokenizer, min_rows=1) as opened:
        while opened.counts.epochs < 1:
            next(opened)
        count = opened.counts.rows
    with stream(data, tokenizer, min_rows=count) as opened:
        opened.take(count + 5)
    with stream(data, tokenizer, min_rows=count + 1) as opened:
        for _ in range(2):  # it says so as often as it is asked
            with pytest.raises(
                UserError,
                match=f"gives only {count} rows of 64 tokens an epoch, fewer than --batch-size {count + 1}; give more",
            ):
                opened.take(count + 1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ladderize-data")]


def test_an_error_comes_where_its_chunk_does(tmp_path, small_chunks):
    """What the thread finds ahead is said when the rows before it are used up."""
    rows = [{"input_ids": [2] * 64} for _ in range(12)] + [{"input_ids": [3]}]
    data = write_jsonl(tmp_path / "a.jsonl", rows)
    failed = {}
    for seed in range(4):
        with stream(data, None, heldout=0, seed=seed) as opened:
            taken = []
            with pytest.raises(BadRow, match="line 13: gives 1 tokens"):
                taken.extend(opened)
        failed[seed] = len(taken)
    assert all(count % 3 == 0 for count in failed.values())
    assert len(set(failed.values())) > 1


def test_the_hub_that_cannot_be_read(monkeypatch, tokenizer):
    def refuse(*_, **__):
        raise ConnectionError("Couldn't reach 'o/n' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        UserError, match="--data hub:o/n:train cannot be opened .Couldn't reach 'o/n' on the Hub.; check its name"
    ):
        stream("hub:o/n:train", tokenizer)

    def breaks(shards):
        for number in range(100):
            if number == 80:
                raise OSError("connection lost")
            yield {"text": text_of(number)}

    features = datasets.Features({"text": datasets.Value("string")})
    made = datasets.IterableDataset.from_generator(breaks, gen_kwargs={"shards": [0]}, features=features)
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **named: asked.append((given, named)) or made)
    with stream("hub:o/n:cfg:train", tokenizer, heldout=10) as opened:
        with pytest.raises(UserError, match="cannot be read beyond row 80 .*connection lost"):
            opened.take(200)
    assert asked == [(("o/n", "cfg"), {"split": "train", "streaming": True})]  # and nobody's code is trusted
    other = made.rename_column("text", "body")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: other)
    with pytest.raises(UserError, match="has the columns body; rows need"):
        stream("hub:o/n:train", tokenizer)
    with pytest.raises(UserError, match="--eval-data hub:o/n:train: a stream cannot be measured"):
        fixed_rows(parse_specs(["hub:o/n:train"], "--eval-data"), tokenizer, options())


def test_counts_and_identity(tmp_path, chat, monkeypatch):
    tokenizer = chat(PLAIN)
    rows = [
        {"messages": TURNS},
        {"prompt": "the cat " * 40, "completion": "sat"},
        {"prompt": "a", "completion": " cat" * 60},
    ]
    data = write_jsonl(tmp_path / "a.jsonl", rows)
    with stream(data, tokenizer, heldout=0, seq_len=50) as opened:
        taken = opened.take(1)
        counts = opened.counts
        identity = opened.identity()
    lengths = sorted(map(len, plain_ids(fixed_rows(parse_specs([data]), tokenizer, options(seq_len=50)))))
    assert (counts.examples, counts.truncated_examples, counts.dropped_examples, counts.epochs) == (
        2,
        2,
        1,
        1.0,
    )
    assert counts.padding_share == pytest.approx(1 - sum(lengths) / (50 * len(lengths)))
    assert len(taken) == 1
    assert json.loads(json.dumps(identity)) == identity
    with stream(data, tokenizer, heldout=0, seq_len=50) as same:
        assert same.identity() == identity
    for limit in (1 << 30, 8):  # hashed as a whole, and by size and ends
        monkeypatch.setattr(sources, "WHOLE_HASH", limit)
        before = sources.source_identity(parse_specs([data])[0])
        Path(data).write_text(Path(data).read_text() + "\n")
        assert sources.source_identity(parse_specs([data])[0]) != before


def plain_ids(rows):
    return [row.ids.tolist() for row in rows]


# --- --show-data ---


def test_a_batch_for_people(tmp_path, chat):
    tokenizer = chat(PLAIN)
    rows = [{"messages": TURNS}, {"prompt": "two\nlines\t", "completion": " sat"}, {"input_ids": [5] * 600}]
    packed = fixed_rows(parse_specs([write_jsonl(tmp_path / "a.jsonl", rows)]), tokenizer, options(seq_len=700))
    text = show_batch(packed, tokenizer)
    assert "<assistant>[[hi there </s>]]<user>and?<assistant>[[bye</s>]]" in text
    assert r"two\nlines\t[[ sat</s>]]" in text
    assert "... 100 tokens left out ..." in text
    lines = text.splitlines()
    assert lines[2] == f"row 1: {len(packed[0])} tokens, {sum(packed[0].targets != -100)} scored, 3 examples"
    assert [line.split(": ")[0].rpartition("/")[2] for line in lines[3::2]] == [
        "a.jsonl, line 3",
        "a.jsonl, line 1",
        "a.jsonl, line 2",
    ]
    (row,) = batch_document(packed, tokenizer)
    assert json.loads(json.dumps(row)) == row
    assert [part["tokens"] for part in row["examples"]] == [part.stop - part.start for part in segments(packed[0])]
    chat_part = row["examples"][1]
    assert "".join(run["text"] for run in chat_part["text"] if run["scored"]) == "hi there </s>bye</s>"
    assert chat_part["scored_tokens"] == sum(chat_part["scored"])
    assert row["scored_tokens"] == sum(part["scored_tokens"] for part in row["examples"])


def test_a_batch_without_a_tokenizer(tmp_path):
    rows = fixed_rows(
        parse_specs([write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]}])]),
        None,
        options(),
    )
    assert show_batch(rows, None).splitlines()[-1].strip() == "5[[ 6]] 7"
    assert batch_document(rows, None)[0]["examples"][0]["text"] is None
