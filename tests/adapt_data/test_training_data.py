"""What is trained on and what is held out: every example once, packed, mixed by weights, cached, streamed."""

import itertools
import random

import datasets
import numpy as np
import pytest
import torch
from transformers.masking_utils import find_packed_sequence_indices

from ladderize.adapt import training_data
from ladderize.adapt.examples import Encoder
from ladderize.adapt.training_data import IGNORED_TARGET, PADDING_TARGET, collate
from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.modeling import load_tokenizer
from tests.adapt_data.rows import DEMO, PLAIN, QWEN3, TURNS, VOCAB, encode, examples_of, opened, packed, write_jsonl
from tests.helpers import fresh_rng, make_model, random_ids


def texts(count, start=0):
    return [{"text": f"row {n} " + "the cat sat. " * random.randint(1, 9)} for n in range(start, start + count)]


def slowly(tokenizer, rows, seq_len=64):
    found = [example for row in rows for example in encode(tokenizer, row, seq_len=seq_len)]
    return examples_of(packed(*zip(*found, strict=True), 10_000))


@pytest.mark.parametrize("kind", ["texts", "ids", "chats", "two files"])
def test_every_example_once(kind, tmp_path, chat):
    tokenizer, seq_len = chat(QWEN3), random.randint(60, 150)
    files = {
        "texts": [texts(40)],
        "ids": [[{"input_ids": np.random.randint(2, VOCAB, random.randint(2, 200)).tolist()} for _ in range(30)]],
        "chats": [[{"messages": [{"role": "user", "content": str(n)}, *TURNS[2:4],
                                 {"role": "assistant", "content": f"<think>\n{n}\n</think>\n\nbye"}]}
                   for n in range(30)]],
        "two files": [texts(15), texts(25, 15)],
    }[kind]  # fmt: skip
    names = [write_jsonl(tmp_path / f"{number}.jsonl", rows) for number, rows in enumerate(files)]
    data = opened(names, tokenizer, seq_len=seq_len)
    rows = list(data.train)
    every = slowly(tokenizer, [row for rows in files for row in rows], seq_len)
    assert sorted(examples_of(rows) + examples_of(data.heldout)) == every
    assert all(len(row["input_ids"]) <= seq_len for row in [*rows, *data.heldout])
    tokens = sum(len(row["input_ids"]) for row in rows)
    counts = data.counts
    assert (counts["rows"], counts["tokens"], counts["examples"]) == (len(rows), tokens, len(examples_of(rows)))
    if kind == "chats":  # no held-out turn is the continuation of one that is trained on
        heldout = {str(ids) for ids, _ in examples_of(data.heldout)}
        for row in files[0]:
            assert len({str(ids) in heldout for ids, _ in encode(tokenizer, row, seq_len=seq_len)}) <= 1


def test_what_is_held_out(tmp_path):
    for count, expected in ((2, 1), (50, 5), (99, 8), (1000, 10), (30_000, 256)):
        data = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [2, 3 + number % 500]} for number in range(count)])
        assert len(examples_of(opened(data, None).heldout)) == expected
    data = write_jsonl(tmp_path / "b.jsonl", [{"input_ids": [2, 3 + number]} for number in range(30)])
    assert opened(data, None, heldout=0).heldout == []
    drawn = [examples_of(opened(data, None, heldout=7, seed=seed).heldout) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 7
    other = write_jsonl(tmp_path / "c.jsonl", [{"input_ids": [5, 6]}, {"input_ids": [7, 8]}])
    given = opened(data, None, heldout=7, eval_data=[other])
    assert [ids for ids, _ in examples_of(given.heldout)] == [[5, 6], [7, 8]]
    assert given.counts["examples"] == 30
    twice = opened([data, data], None, heldout=7)  # counts twice, and what is held out is so of both
    trained = {str(ids) for ids, _ in examples_of(list(twice.train))}
    assert (len(trained), twice.counts["examples"]) == (23, 46)


def test_weights_are_shares(tmp_path, tokenizer):
    """Of packed rows, which are as good as full, whatever the lengths of the examples."""
    short = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [2] * random.randint(5, 9)} for _ in range(600)])
    long = write_jsonl(tmp_path / "b.jsonl", [{"input_ids": [3] * 60} for _ in range(300)])
    rows = list(opened([short + "=1", long + "=2.5"], tokenizer, heldout=0).train)
    tokens = np.concatenate([row["input_ids"] for row in rows])
    assert (tokens == 3).mean() == pytest.approx(2.5 / 3.5, abs=0.06)
    assert {2, 3} == set(tokens)


def test_the_same_data_are_found_in_the_cache(tmp_path, monkeypatch):
    data = write_jsonl(tmp_path / "a.jsonl", texts(40))
    first, calls, call = opened(data, load_tokenizer(DEMO)), [], Encoder.__call__
    monkeypatch.setattr(Encoder, "__call__", lambda *given: calls.append(1) or call(*given))
    again = opened(data, load_tokenizer(DEMO))
    assert again.train._fingerprint == first.train._fingerprint
    assert (again.heldout, again.counts, list(again.train)) == (first.heldout, first.counts, list(first.train))
    assert opened(data, load_tokenizer(DEMO), seed=9).train._fingerprint != first.train._fingerprint
    assert calls == []  # of another seed only the packing is
    fresh = load_tokenizer(DEMO)
    fresh.add_tokens(["cat"])
    assert opened(data, fresh, vocab_size=VOCAB + 1).train._fingerprint != first.train._fingerprint
    assert opened(data, load_tokenizer(DEMO), seq_len=32).train._fingerprint != first.train._fingerprint
    write_jsonl(tmp_path / "a.jsonl", texts(41))
    assert opened(data, load_tokenizer(DEMO)).train._fingerprint != first.train._fingerprint
    assert len(calls) == 3


def test_cut_off_and_dropped_examples_are_counted(tmp_path, chat):
    rows = [
        {"messages": TURNS},
        {"prompt": "the cat " * 40, "completion": "sat"},
        {"prompt": "a", "completion": " cat" * 60},
    ]
    counts = opened(write_jsonl(tmp_path / "a.jsonl", rows), chat(PLAIN), heldout=0, seq_len=50).counts
    assert (counts["examples"], counts["truncated_examples"], counts["dropped_examples"]) == (2, 2, 1)


@pytest.fixture
def hub(tmp_path, monkeypatch):

    def put(rows):
        path, load = write_jsonl(tmp_path / "hub.jsonl", rows), datasets.load_dataset

        def loaded(*given, **named):
            if "streaming" in named:
                given, named = ("json",), {"data_files": path, "split": "train", "streaming": True}
            return load(*given, **named)

        monkeypatch.setattr(datasets, "load_dataset", loaded)
        return "hub:o/n:train"

    return put


def test_a_stream(hub, tokenizer, monkeypatch):
    monkeypatch.setattr(training_data, "EXAMPLES_AT_ONCE", 30)
    rows = texts(150)
    data = opened(hub(rows), tokenizer, heldout=10)
    every = slowly(tokenizer, rows)
    in_order = [example for row in rows for example in slowly(tokenizer, [row])]
    assert len(examples_of(data.heldout)) == 10
    train = sorted(every, key=str)
    for example in examples_of(data.heldout):
        train.remove(example)
    assert {str(one) for one in examples_of(data.heldout)} <= {str(one) for one in in_order[:30]}
    epoch, count = [], 0
    endless = iter(data.train)
    while count < len(train):
        epoch.append(next(endless))
        count += len(epoch[-1]["lengths"])
    assert sorted(examples_of(epoch), key=str) == train
    again = list(itertools.islice(endless, len(epoch)))
    assert sorted(examples_of(again), key=str) == train
    assert data.counts == {}
    assert list(itertools.islice(opened("hub:o/n:train", tokenizer, heldout=10).train, 5)) == epoch[:5]
    assert list(itertools.islice(opened("hub:o/n:train", tokenizer, heldout=10, seed=5).train, 5)) != epoch[:5]


@pytest.mark.parametrize("streamed", [False, True])
def test_rows_that_are_left_out(tmp_path, hub, chat, capfd, streamed):
    """Of empty text, as a third of wikitext's, and up to a twentieth that cannot be used: counted in one line."""
    empty, bad = [{"text": text} for text in ("", " \n")], [{"messages": TURNS[:2]}, {"text": 7}]
    usable = texts(36)
    rows = random.sample([*usable, *empty, *bad], 40)
    first = next(number for number, row in enumerate(rows, 1) if row in bad)
    data = hub(rows) if streamed else write_jsonl(tmp_path / "a.jsonl", rows)
    opened_data = opened(data, chat(PLAIN), heldout=4, console=Console(False))
    warnings = " ".join(capfd.readouterr().err.split())
    assert "of 40 rows 2 of empty text and 2 that cannot be used (the first: " in warnings
    assert f", row {first}: " in warnings
    train = list(itertools.islice(opened_data.train, 200)) if streamed else list(opened_data.train)
    every = [(str(ids), str(targets)) for ids, targets in slowly(chat(PLAIN), usable)]
    assert {(str(ids), str(targets)) for ids, targets in examples_of(train + opened_data.heldout)} == {*every}
    if not streamed:
        assert opened_data.counts["examples"] == 32
        assert opened_data.counts["dropped_examples"] == 0


def test_data_that_cannot_be_used(tmp_path, hub):
    ids = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [2, 3]}] * 5)
    short = [{"input_ids": [2]}] * 2
    bad = write_jsonl(tmp_path / "c.jsonl", [*[{"input_ids": [2, 3]}] * 3, *short, *[{"input_ids": [2, 3]}] * 34])
    stream = hub([{"input_ids": [2, 3]}] * 64)
    for given, changed, message in [
        (stream, {}, "64 of 64 examples held out leave none"),
        (ids, {"eval_data": [stream]}, "--eval-data hub:o/n:train is a stream"),
        (ids, {"heldout": 5}, "5 of 5 examples held out leave none; lower --heldout"),
        (bad, {}, "c.jsonl, row 4: gives 1 tokens.* .2 of the first 39 rows cannot be used"),
    ]:
        with pytest.raises(UserError, match=message):
            opened(given, None, **changed)


X, P = IGNORED_TARGET, PADDING_TARGET
A, B, C = ([1, 50, 51, 52], [1] * 4), ([1, 60, 61], [0, 0, 1]), ([1, 70], [1, 1])


def test_a_batch_by_hand():
    """A and B fill a row of 7; C has one of its own. No target crosses from one example into the next."""
    rows = packed(*zip(C, B, A, strict=True), 7)
    assert rows == [
        {"input_ids": [1, 50, 51, 52, 1, 60, 61], "targets": [50, 51, 52, X, X, 61, X], "lengths": [4, 3]},
        {"input_ids": [1, 70], "targets": [70, X], "lengths": [2]},
    ]
    batch = collate(rows)
    assert batch["input_ids"].tolist() == [[1, 50, 51, 52, 1, 60, 61], [1, 70, 0, 0, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6]]
    assert batch["targets"].tolist() == [[50, 51, 52, X, X, 61, X], [70, X, P, P, P, P, P]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert find_packed_sequence_indices(batch["position_ids"]).tolist() == [[0] * 4 + [1] * 3, [0] * 7]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", ["spd all 4", "same layer", "every mode"])
def test_a_packed_row_computes_what_each_example_does_alone(layout, attention):
    model = make_model(layout, seed=1, attn_implementation=attention)
    torch.manual_seed(1)
    examples = [random_ids(length).tolist() for length in (9, 5, 7, 2, 4)]
    rows = packed(examples, [[1] * len(ids) for ids in examples], 16)
    assert len(rows) == 2
    batch = collate(rows)
    with torch.no_grad():
        # exactly this: without a cache and a mask transformers looks at the positions
        logits = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        default = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
        for number, row in enumerate(rows):
            ends = np.cumsum(row["lengths"])
            for order, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                alone = model(torch.tensor([row["input_ids"][begin:end]])).logits[0]
                torch.testing.assert_close(logits[number, begin:end], alone, rtol=1e-4, atol=1e-5)
                leaks = (default[number, begin:end] - alone).abs().max() > 1e-2
                assert leaks == (order > 0), "with the model's defaults an example sees those before it"


def test_packing_loses_nothing_and_little_room():
    rng = fresh_rng()
    ids = [rng.integers(0, 97, length).tolist() for length in rng.integers(2, 64, 3000)]
    scored = [rng.integers(0, 2, len(one)).tolist() for one in ids]
    rows = packed(ids, scored, 64)
    slowly = [
        [after if counts else X for after, counts in zip(one[1:], mask[1:], strict=True)] + [X]
        for one, mask in zip(ids, scored, strict=True)
    ]
    assert examples_of(rows) == sorted(zip(ids, slowly, strict=True))
    lengths = [len(row["input_ids"]) for row in rows]
    assert max(lengths) <= 64
    assert sum(lengths) / (64 * len(rows)) > 0.97
