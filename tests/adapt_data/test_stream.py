"""In which order rows come, and that a resumed stream goes on exactly where it was."""

import json
import re
import threading
from pathlib import Path

import datasets
import numpy as np
import pytest

from ladderize.adapt.data import sources
from ladderize.adapt.data.stream import fixed_rows, rank_rows
from ladderize.adapt.data_specs import parse_specs
from ladderize.errors import UserError
from ladderize.rows import BadRow
from tests.adapt_data.rows import (
    PLAIN,
    TURNS,
    VOCAB,
    options,
    origins,
    plain,
    stream,
    text_of,
    texts,
    through_json,
    write_jsonl,
)


def from_shards(count, shards=4):
    data = datasets.Dataset.from_dict({"text": [text_of(number) for number in range(count)]})
    return lambda *_, **__: data.to_iterable_dataset(num_shards=shards)


def from_generator(count):
    def generate(shards):
        for shard in shards:
            yield from ({"text": text_of(number)} for number in range(shard, count, 3))

    return lambda *_, **__: datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": [0, 1, 2]})


def plain_ids(rows):
    return [row.ids.tolist() for row in rows]


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
    if kind == "txt":  # --eval-data is cut into longer passages: compared by what they cover
        found = [re.findall(r"bytes (\d+) to (\d+)", where)[0] for where in [*heldout, *per_epoch[0]]]
        ranges = {(int(begin), int(end)) for begin, end in found}
        assert [begin for begin, _ in sorted(ranges)] == [0, *(end + 1 for _, end in sorted(ranges)[:-1])]
        assert max(end for _, end in ranges) == Path(data[0]).stat().st_size - 1
    elif not specs[0].is_streamed:
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
    for count, expected in ((2, 1), (99, 8), (1000, 10)):
        data = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [2, 3 + number % 500]} for number in range(count)])
        assert len(origins(stream(data, None).heldout_rows)) == expected
    assert stream(data, None, heldout=0).heldout_rows == []
    with pytest.raises(UserError, match="has 1000 rows, and --heldout 1000 would leave none"):
        stream(data, None, heldout=1000)
    single = write_jsonl(tmp_path / "b.jsonl", [{"input_ids": [2, 3]}])
    with pytest.raises(UserError, match="a single row, so none can be held out; give --eval-data FILE, or --heldout 0"):
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
    with pytest.raises(UserError, match="--eval-data hub:o/n:train: a stream cannot be used for validation"):
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


@pytest.mark.parametrize("kind", ["txt", "npy"])
def test_a_long_text_is_shuffled_as_a_whole(tmp_path, tokenizer, kind):
    """The rows of a step come from all over it, and every part of it comes once an epoch."""
    if kind == "txt":
        (tmp_path / "a.txt").write_text("\n".join(text_of(number) for number in range(4000)))
        data = str(tmp_path / "a.txt")
    else:
        np.save(tmp_path / "a.npy", np.arange(100_000) % (VOCAB - 2) + 2)
        data = str(tmp_path / "a.npy")
    with stream(data, tokenizer, heldout=0) as opened:
        first = opened.take(64)
        places = {int(where.split(" to ")[0].split(" ")[-1]) for row in first for where in row.origins}
        end = (tmp_path / "a.txt").stat().st_size if kind == "txt" else 100_000
        tenths = [sum(tenth <= 10 * place / end < tenth + 1 for place in places) for tenth in range(10)]
        assert min(tenths) >= 1, tenths
        assert sum(map(len, first)) > 0.85 * 64 * 64  # and rows are full
        seen = []
        while opened.counts.epochs < 1:
            seen.append(next(opened))
        assert opened.counts.padding_share < 0.15
