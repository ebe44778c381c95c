"""Examples side by side: rows, masks and targets written out by hand, and what the model makes of them."""

import numpy as np
import pytest
import torch
from transformers.masking_utils import create_causal_mask, find_packed_sequence_indices

from ladderize.adapt.data.examples import Example
from ladderize.adapt.data.packing import (
    IGNORED_TARGET,
    PADDING_TARGET,
    collate,
    join,
    pack,
    segments,
)
from ladderize.adapt.data.stream import rank_rows
from ladderize.runtime.training.batch import Batch
from tests.helpers import make_model, random_ids

X, P = IGNORED_TARGET, PADDING_TARGET


def example(ids, scored=None, origin="here"):
    ids = np.asarray(ids, dtype=np.int64)
    return Example(ids, np.ones(len(ids), dtype=bool) if scored is None else np.asarray(scored, dtype=bool), origin)


A = example([1, 50, 51, 52], origin="a")
B = example([1, 60, 61], [0, 0, 1], origin="b")
C = example([1, 70], origin="c")


def test_a_batch_by_hand():
    """A and B fill a row of 7; C has one of its own. No target crosses from one example into the next."""
    rows = pack([C, B, A], 7)
    assert [row.origins for row in rows] == [("a", "b"), ("c",)]
    assert rows[0].ids.tolist() == [1, 50, 51, 52, 1, 60, 61]
    assert rows[0].positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert rows[0].targets.tolist() == [50, 51, 52, X, X, 61, X]
    assert [(part.start, part.stop) for part in segments(rows[0])] == [(0, 4), (4, 7)]
    batch = collate(rows)
    assert batch["input_ids"].tolist() == [[1, 50, 51, 52, 1, 60, 61], [1, 70, 0, 0, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6]]
    assert batch["targets"].tolist() == [[50, 51, 52, X, X, 61, X], [70, X, P, P, P, P, P]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert find_packed_sequence_indices(batch["position_ids"]).tolist() == [
        [0, 0, 0, 0, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0],
    ]


def test_the_attention_mask_by_hand():
    """What transformers makes of the positions of a row with C and B: nobody sees another example, or what comes
    later."""
    row = collate([join([C, B])])
    model = make_model("dense", attn_implementation="sdpa")
    mask = create_causal_mask(
        config=model.config,
        inputs_embeds=torch.zeros(1, 5, 32),
        attention_mask=None,
        past_key_values=None,
        position_ids=row["position_ids"],
    )
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    assert torch.equal(Batch.of(row, torch.device("cpu")).mask, mask)


def test_what_the_host_knows_of_a_batch():
    batch = Batch.of(collate([join([C, B]), join([A])]), torch.device("cpu"))
    assert batch.starts.tolist() == [0, 2, 5, 10]
    assert batch.starts.dtype == torch.int32
    assert batch.longest == 5
    assert batch.scored_targets.tolist() == [70, 61, 50, 51, 52]
    states = torch.arange(20).view(2, 5, 2)
    assert batch.scored_states(states).tolist() == states[batch.targets >= 0].tolist()
    assert batch.mask is not None
    padded = Batch.of(collate([join([A]), join([C])]), torch.device("cpu"))
    assert padded.mask is None
    assert padded.starts.tolist() == [0, 4, 8]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", ["dense", "ladder all", "spd all 4", "same layer"])
def test_a_packed_row_computes_what_each_example_does_alone(layout, attention):
    model = make_model(layout, seed=1, attn_implementation=attention)
    torch.manual_seed(1)
    examples = [example(random_ids(length).numpy()) for length in (9, 5, 7, 2, 4)]
    rows = pack(examples, 16)
    assert len(rows) == 2
    batch = collate(rows)
    with torch.no_grad():
        # exactly this: without a cache and a mask transformers looks at the positions
        packed = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        default = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
        for number, row in enumerate(rows):
            for order, part in enumerate(segments(row)):
                alone = model(torch.from_numpy(row.ids[part])[None]).logits[0]
                torch.testing.assert_close(packed[number, part], alone, rtol=1e-4, atol=1e-5)
                leaks = (default[number, part] - alone).abs().max() > 1e-2
                assert leaks == (order > 0), "with the model's defaults an example sees those before it"


def test_best_fit_decreasing():
    """Into the fullest row with room, not the first: 6 and 5 begin rows of 10; 4 goes beside 6, 3 beside 5, and 2
    beside those."""
    rows = pack([example(range(length), origin=str(length)) for length in (2, 3, 4, 5, 6)], 10)
    assert [row.origins for row in rows] == [("6", "4"), ("5", "3", "2")]
    rows = pack([example(range(length), origin=str(length)) for length in (7, 6, 3)], 10)
    assert [row.origins for row in rows] == [("7", "3"), ("6",)]


def test_packing_loses_nothing_and_little_room():
    generator = np.random.default_rng(0)
    examples = [
        example(generator.integers(0, 97, length), origin=str(number))
        for number, length in enumerate(generator.integers(2, 64, 3000))
    ]
    rows = pack(examples, 64)
    assert [row.ids.tolist() for row in pack(examples, 64)] == [row.ids.tolist() for row in rows]
    by_name = {item.origin: item.ids.tolist() for item in examples}
    seen = [
        (where, row.ids[part].tolist()) for row in rows for where, part in zip(row.origins, segments(row), strict=True)
    ]
    assert len(seen) == len(by_name)
    assert dict(seen) == by_name
    assert all(len(row) <= 64 for row in rows)
    assert sum(map(len, rows)) / (64 * len(rows)) > 0.97
    with pytest.raises(ValueError, match="longer than 63"):
        pack([example(range(64))], 63)


@pytest.mark.parametrize("micro", [1, 2, 3, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_share_a_step(ranks, micro):
    rows = [join([example([number, number])]) for number in range(7)]
    parts = [rank_rows(rows, rank, ranks, micro) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1  # every rank takes part in every pass
    assert all(len(batch) <= micro for part in parts for batch in part)
    assert sorted(int(row.ids[0]) for part in parts for batch in part for row in batch) == list(range(7))


def test_a_rank_without_rows_counts_nothing():
    batch = collate([])
    assert batch["input_ids"].shape == (1, 1)
    assert batch["targets"].tolist() == [[P]]
