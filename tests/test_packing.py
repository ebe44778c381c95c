"""Examples side by side: rows, masks and targets written out by hand, and what the model makes of them."""

import numpy as np
import pytest
import torch
from transformers.masking_utils import find_packed_sequence_indices

from ladderize.adapt.training_data import IGNORED_TARGET, PADDING_TARGET, collate
from tests.adapt_data.rows import examples_of, packed
from tests.helpers import fresh_rng, make_model, random_ids

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
