"""What block-to-block distillation reads: the rows of retraining, by the same rules, joined and cut into windows."""

import random
import shutil

import numpy as np
import pytest

from ladderize.adapt.layers.options import BlockwiseOptions
from ladderize.adapt.layers.windows import read_rows, training_windows
from ladderize.adapt.training_data import open_data
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.errors import UserError
from ladderize.modeling import load_tokenizer
from tests.adapt_data.rows import DEMO, EOS, QWEN3, TURNS, VOCAB, examples_of, write_jsonl

TEXTS = [f"row {number} the cat sat on a mat." for number in range(12)]


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(str(DEMO))


def write_data(kind, folder):
    rows = {
        "text": [{"text": text} for text in TEXTS],
        "completion": [{"prompt": text, "completion": " then it left"} for text in TEXTS],
        "ids": [{"input_ids": list(range(3, 9 + number)), "text": "x"} for number in range(12)],
    }
    ids = np.random.default_rng(0).integers(3, VOCAB, (20, 8))
    if kind in rows:
        return write_jsonl(folder / "a.jsonl", rows[kind])
    if kind == "txt":
        (folder / "a.txt").write_text("\n".join(TEXTS * 80))  # more than one passage
        return str(folder / "a.txt")
    np.save(folder / "rows.npy", ids)
    np.savez(folder / "flat.npz", train=np.arange(40_000) % VOCAB)
    return str(folder / "rows.npy") if kind == "rows" else f"{folder / 'flat.npz'}:train"


@pytest.mark.parametrize("kind", ["text", "completion", "ids", "txt", "rows", "flat"])
def test_the_rows_are_those_of_retraining(kind, tmp_path, checkpoint):
    data = write_data(kind, tmp_path)
    read = read_rows(checkpoint, data)
    expected, *_ = open_data([data], load_tokenizer(DEMO), seq_len=100_000, vocab_size=VOCAB, seed=0, heldout=0)
    assert sorted(ids.tolist() for ids in read) == [ids for ids, _ in examples_of(list(expected))]
    if kind in ("text", "completion"):
        assert [ids[-1] for ids in read] == [EOS] * len(TEXTS)
    if kind == "text":
        given = load_tokenizer(DEMO)(TEXTS)["input_ids"]
        assert [ids.tolist() for ids in read] == [[*ids, EOS] for ids in given]


def test_a_conversation_is_read_once_however_many_examples_it_gives(tmp_path, checkpoint):
    folder = shutil.copytree(DEMO, tmp_path / "m")
    (folder / "chat_template.jinja").write_text(QWEN3)
    more = zip(TURNS[3:], random.sample(TEXTS, 2), strict=True)
    turns = [*TURNS, *({**turn, "content": text} for turn, text in more)]
    read = read_rows(open_checkpoint(str(folder)), write_jsonl(tmp_path / "a.jsonl", 2 * [{"messages": turns}]))
    assert [ids.tolist() for ids in read] == 2 * [load_tokenizer(folder).apply_chat_template(turns, return_dict=False)]


def test_what_a_retraining_holds_out_is_read_last(tmp_path, checkpoint):
    """With enough rows none of it is read, and with ``spare`` never. Some rows have pieces that training drops, and
    many are empty."""
    count, seed = 60, random.randrange(100)
    masks = [[0, int(number % 9 > 0), 0, 0, 1] for number in range(count)]
    rows = [{"input_ids": [number + 2] * 5, "loss_mask": mask} for number, mask in enumerate(masks)]
    rows = random.sample([*rows, *[{"text": ""}] * 40], 100)
    data, how = write_jsonl(tmp_path / "a.jsonl", rows), {"seq_len": 3, "vocab_size": VOCAB, "seed": seed}
    tokenizer = load_tokenizer(DEMO)

    def heldout(asked):
        return {ids[0] for ids, _ in examples_of(open_data([data], tokenizer, **how, heldout=asked)[1])}

    def read(**more):
        return {int(ids[0]) for ids in read_rows(checkpoint, data, seed=seed, **more)}

    for asked in (None, 17):
        assert len(heldout(asked)) > 2
        assert heldout(asked).isdisjoint(read(enough=5 * 30))
        assert heldout(asked).isdisjoint(read(enough=5 * count, spare=asked))
    assert len(read(enough=5 * count)) == len(read()) == count


@pytest.mark.parametrize("kind", ["text", "rows"])
def test_windows_are_cut_from_the_joined_rows_and_held_out_apart(kind, tmp_path, checkpoint):
    data = write_data(kind, tmp_path)
    options = BlockwiseOptions(data, samples=9, heldout=3, seq_len=8)
    windows = training_windows(checkpoint, options)
    joined = np.concatenate(read_rows(checkpoint, options.data))
    every = joined[: len(joined) // 8 * 8].reshape(-1, 8)
    drawn = np.random.default_rng(0).permutation(len(every))[:12]
    assert windows.train.tolist() == every[drawn[:9]].tolist()
    assert windows.heldout.tolist() == every[drawn[9:]].tolist()


def test_rows_of_ids_are_windows_and_passages_are_none(tmp_path, checkpoint):
    rows = training_windows(checkpoint, BlockwiseOptions(write_data("rows", tmp_path)))
    assert sorted(rows.all.tolist()) == sorted(np.load(tmp_path / "rows.npy").tolist())
    positions = checkpoint.config["max_position_embeddings"]
    flat = training_windows(checkpoint, BlockwiseOptions(f"{tmp_path / 'flat.npz'}:train"))
    assert flat.train.shape[1] == min(2048, positions)
    with pytest.raises(UserError, match=f"--seq-len {positions + 1} is over the model's {positions} positions"):
        training_windows(checkpoint, BlockwiseOptions(str(tmp_path / "rows.npy"), seq_len=positions + 1))
