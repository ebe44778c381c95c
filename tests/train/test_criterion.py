"""By what the weights that are written are chosen, on held-out rows."""

import numpy as np
import pytest

from ladderize.adapt.train.loop import Loop
from ladderize.adapt.train.states import Scores, read_metrics
from tests.helpers import listing, one_sentence
from tests.train.commands import adapt, perplexity_of, succeed

BEST = ("--write", "best", "--eval-every", 1)


def test_a_model_better_than_the_dense_one_is_brought_back_to_it(place, tmp_path):
    """It fits the held-out rows, which the dense model has never seen: its perplexity rises while its KL falls."""
    succeed(place, tmp_path / "fitted", "--lr", "1e-2", steps=50)
    teacher = ("--distill-from", place / "dense", "--hidden-weight", 1, *BEST)
    document = succeed(place, tmp_path / "out", *teacher, model=tmp_path / "fitted", steps=4)
    perplexity, criterion = document["heldout_perplexity"], document["criterion"]
    assert perplexity["before"] < perplexity["after"]
    assert perplexity["before"] < perplexity["dense"]
    assert perplexity["dense"] == pytest.approx(perplexity_of(place / "dense", place / "eval.npy"), rel=1e-4)
    divergences = read_metrics(tmp_path / "out" / "metrics.jsonl", "heldout_divergence")
    assert document["written_step"] == np.argmin(divergences) > 0
    assert criterion["name"] == "KL"
    assert criterion["before"] == divergences[0]
    assert criterion["after"] == pytest.approx(min(divergences), rel=1e-3)
    assert f"held-out KL {criterion['before']:.4g} before," in (tmp_path / "out" / "README.md").read_text()


def test_a_divergence_that_rises_is_refused(place, tmp_path, monkeypatch):
    values = iter([(3.0, 0.2), (2.99, 0.3)])  # cross-entropy and divergence of each validation
    monkeypatch.setattr(Loop, "score", lambda self, advance: Scores(*next(values), tokens=9))
    refused = adapt(place, tmp_path / "out", "--distill-from", place / "dense", *BEST, steps=1)
    said = "training never lowered the held-out KL (before 0.2, after 0.3), so nothing is written"
    assert said in one_sentence(refused)
    assert listing(tmp_path) == ["out.ladderize-work"]
