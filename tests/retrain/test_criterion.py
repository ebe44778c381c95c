"""By what the weights that are written are chosen, on held-out rows."""

import json
import math

import numpy as np
import pytest
from ladderize.adapt.retrain import outcome, trainer
from ladderize.adapt.retrain.options import Objective
from ladderize.adapt.retrain.state import read_metrics

from tests.helpers import listing, one_sentence
from tests.retrain.commands import adapt, stopped_before_the_end, succeed

BEST = ("--write", "best", "--eval-every", 1)


def scripted(monkeypatch, values):
    """Each validation has the next of these cross-entropies and divergences, and the weights as they are stored the
    last ones."""
    values = iter(values)
    for module in (trainer, outcome):
        monkeypatch.setattr(module, "score", lambda *arguments: trainer.Scores(*next(values), tokens=9))


@pytest.mark.parametrize(
    ("objective", "name", "expected"),
    [
        (Objective(), "cross-entropy", 3.0),
        (Objective(hidden_weight=2.0), "cross-entropy", 3.0),
        (Objective(distill_weight=1.0), "KL", 0.5),
        (Objective(distill_weight=1.0, hidden_weight=2.0), "KL", 0.5),
        (Objective(distill_weight=0.25, temperature=2.0), "0.25 KL + 0.75 cross-entropy", 2.25 + 0.25 * 4 * 0.5),
    ],
)
def test_the_criterion_is_the_loss_without_the_hidden_error(objective, name, expected):
    assert objective.criterion.label == name
    assert trainer.Scores(3.0, 0.5, 9, 7.0).criterion(objective) == pytest.approx(expected)
    assert trainer.Scores(math.nan, math.nan, 9).criterion(objective) == math.inf


def test_a_model_better_than_the_dense_one_is_brought_back_to_it(place, tmp_path):
    """It fits the held-out rows, which the dense model has never seen: its perplexity rises while its KL falls."""
    succeed(place, tmp_path / "fitted", "--lr", "1e-2", steps=50)
    teacher = ("--distill-from", place / "dense", "--hidden-weight", 1, *BEST)
    document = succeed(place, tmp_path / "out", *teacher, model=tmp_path / "fitted", steps=4)
    perplexity, criterion = document["heldout_perplexity"], document["criterion"]
    assert perplexity["before"] < perplexity["after"]
    assert perplexity["before"] < perplexity["dense"]
    divergences = read_metrics(tmp_path / "out" / "metrics.jsonl", "heldout_divergence")
    assert document["written_step"] == np.argmin(divergences) > 0
    assert criterion["name"] == "KL"
    assert criterion["before"] == divergences[0]
    assert criterion["after"] == pytest.approx(min(divergences), rel=1e-3)
    assert f"held-out KL {criterion['before']:.4g} before and" in (tmp_path / "out" / "README.md").read_text()


def test_the_step_of_least_divergence_is_written(place, tmp_path, monkeypatch):
    scripted(monkeypatch, [(3.0, 0.5), (3.1, 0.4), (3.2, 0.2), (2.9, 0.3), (3.2, 0.2)])
    told = adapt(place, tmp_path / "out", "--distill-from", place / "dense", *BEST, steps=3)
    assert told.code == 0, told.stderr
    assert "before training: held-out KL 0.5, perplexity 20.0855; dense model (target)" in told.stderr
    assert "step 2: held-out KL 0.2, perplexity 24.5325 after" in told.stderr
    assert "held-out KL 0.5 before, 0.2 after\nheld-out perplexity 20.0855 before, 24.5325 after (step 2" in told.stdout
    document = json.loads((tmp_path / "out" / "adaptation.json").read_text())
    assert document["criterion"] == {"name": "KL", "before": 0.5, "after": 0.2}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "KL (before 0.2, after 0.3)"),
        (("--distill-weight", 0.5), "0.5 KL + 0.5 cross-entropy (before 1.6, after 1.645)"),
    ],
)
def test_a_divergence_that_rises_is_refused(place, tmp_path, monkeypatch, more, said):
    scripted(monkeypatch, [(3.0, 0.2), (2.99, 0.3), (2.99, 0.3)])
    refused = adapt(place, tmp_path / "out", "--distill-from", place / "dense", *more, *BEST, steps=1)
    assert f"training never lowered the held-out {said}, so nothing is written" in one_sentence(refused)
    assert listing(tmp_path) == ["out.ladderize-work"]


@pytest.mark.parametrize(
    ("weight", "more", "then", "step", "criterion"),
    [
        (1, 0, (9.0, 0.3), 2, ("KL", 0.5, 0.3)),  # nothing is trained; it was refused for its perplexity
        (1, 1, (3.3, 0.35), 2, ("KL", 0.5, 0.35)),  # step 3 is worse than step 2, which is kept
        (1, 1, (3.3, 0.25), 3, ("KL", 0.5, 0.25)),
        (0, 1, (2.9, 0.0), 3, ("cross-entropy", 3.0, 2.9)),
    ],
)
def test_a_state_of_an_earlier_version(place, tmp_path, monkeypatch, weight, more, then, step, criterion):
    """It knows the best step and the one before the first by their perplexities only."""
    taught = [*BEST, *(("--distill-from", place / "dense") if weight else ())]
    scripted(monkeypatch, [(3.0, 0.5), (3.1, 0.4), (3.2, 0.3)])
    stopped_before_the_end(place, tmp_path / "out", *taught, steps=2)
    state = tmp_path / "out.ladderize-work" / "step-00000002" / "state.json"
    content = json.loads(state.read_text())
    assert (content.pop("best_loss"), content.pop("before_loss")) == ((0.3, 0.5) if weight else (3.0, 3.0))
    state.write_text(json.dumps({**content, "best_step": 0, "best_perplexity": content["before_perplexity"]}))
    scripted(monkeypatch, [then] * (1 + more))
    document = succeed(place, tmp_path / "out", *taught, steps=2 + more)
    assert document["written_step"] == step
    assert document["criterion"] == dict(zip(("name", "before", "after"), criterion, strict=True))
