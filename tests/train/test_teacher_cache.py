"""`adapt --teacher-cache`: the dense model's answers, kept on disk, teach as the model itself would."""

import errno
import shutil
from unittest import mock

import pytest
import torch

from ladderize.adapt.train import teacher_cache
from ladderize.adapt.train.loop import read_metrics
from ladderize.adapt.train.teacher_cache import answer
from ladderize.checkpoint import tensors
from ladderize.errors import UserError
from tests.helpers import CLIPPED, all_tensors, listing
from tests.train.commands import LENGTH, check_same_run, losses_of, refused, same_weights, succeed
from tests.train.test_several_processes import run_group


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(teacher_cache, "PART_TOKENS", 6 * LENGTH)  # three rows


def taught(place, folder, *more):
    return ["--distill-from", place / "dense", "--teacher-cache", folder, *more]


def test_whole_answers_teach_what_the_model_does(place, tmp_path, small_parts, monkeypatch):
    """Over more than an epoch, with held-out rows and a method that trains all; the second run loads no teacher."""
    monkeypatch.setattr(teacher_cache, "KEPT", 97)  # the whole vocabulary
    more = ["--train", "all", "--distill-weight", 0.7, "--eval-every", 3]
    succeed(place, tmp_path / "loaded", "--distill-from", place / "dense", *more)
    told = succeed(place, tmp_path / "told", *taught(place, tmp_path / "answers", *more))
    assert losses_of(tmp_path / "told") == pytest.approx(losses_of(tmp_path / "loaded"), rel=1e-3)
    for key in ("heldout_divergence", "heldout_perplexity", "dense_heldout_perplexity"):
        found, expected = (read_metrics(tmp_path / name / "metrics.jsonl", key) for name in ("told", "loaded"))
        assert found == pytest.approx(expected, rel=1e-3), key
    assert told["options"]["teacher_cache"] == str(tmp_path / "answers")
    with mock.patch.object(teacher_cache, "make_teacher", side_effect=AssertionError("the dense model was loaded")):
        succeed(place, tmp_path / "again", *taught(place, tmp_path / "answers", *more))
    assert same_weights(all_tensors(tmp_path / "again"), all_tensors(tmp_path / "told"))


def test_a_killed_run_goes_on_and_a_longer_one_adds(place, tmp_path, small_parts):
    """Each row is asked about once. A part is whole though the training reads some of its rows only."""
    answers, asked = tmp_path / "answers", []

    def count(*given, original=teacher_cache._answers):
        asked.append(len(given[0]))
        if len(asked) == 3:
            raise UserError("killed")
        return original(*given)

    with mock.patch.object(teacher_cache, "_answers", count):
        assert "killed" in refused(place, tmp_path / "out", *taught(place, answers), steps=2)
        succeed(place, tmp_path / "out", *taught(place, answers), steps=2)
        assert asked == [3, 3, 3, 3, 2]  # 8 rows to train on, whose last file is asked twice; 3 held out
        tokens = ["--max-tokens", 16 * LENGTH]
        succeed(place, tmp_path / "tokens", *taught(place, answers, *tokens), without=["--max-steps"])
        assert len(asked) == 5  # no more rows than those
        succeed(place, tmp_path / "all", *taught(place, answers), steps=9)
        assert asked[5:] == [3, 3, 3, 2]
        assert len(listing(answers)) == 1
        shutil.copy(place / "ids.npy", tmp_path / "same.npy")
        succeed(place, tmp_path / "moved", *taught(place, answers, "--data", tmp_path / "same.npy"), steps=1)
        assert len(asked) == 9
        for number, other in enumerate((["--seed", 1], ["--seq-len", LENGTH], ["--heldout", 1]), 2):
            without = ["--eval-data"] if "--heldout" in other else []
            succeed(place, tmp_path / str(number), *taught(place, answers, *other), steps=1, without=without)
            assert len(listing(answers)) == number


def test_several_processes_share_the_answers_out(place, tmp_path):
    succeed(place, tmp_path / "one", *taught(place, tmp_path / "a", *CLIPPED), steps=4)
    run_group(place, tmp_path / "two", *taught(place, tmp_path / "b", *CLIPPED))
    check_same_run(tmp_path / "two", tmp_path / "one")
    run_group(place, tmp_path / "shared", *taught(place, tmp_path / "b", *CLIPPED, "--tp-size", 2))
    check_same_run(tmp_path / "shared", tmp_path / "one")


def test_refusals(place, tmp_path, small_parts):
    out, answers = tmp_path / "out", tmp_path / "answers"
    succeed(place, tmp_path / "first", *taught(place, answers), steps=1)

    def said(*more):
        text = refused(place, out, *more, steps=1)
        assert not out.exists()
        return text

    for folder in (out, place / "dense" / "answers"):
        assert "name a folder apart from models and OUT" in said(*taught(place, folder))
    assert not (place / "dense" / "answers").exists()
    assert "a stream's rows have no numbers" in said(*taught(place, answers, "--data", "hub:a/b:train"))
    first, second, *_ = sorted(answers.glob("*/train*"))
    whole = first.read_bytes()
    first.write_bytes(second.read_bytes())
    assert "holds answers for other rows: --data changed" in said(*taught(place, answers))
    first.write_bytes(whole[:100])
    assert "cannot be read" in said(*taught(place, answers))
    with mock.patch.object(tensors, "write_file", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        assert "cannot be written (no space left on device)" in said(*taught(place, tmp_path / "full"))
    assert not list(tmp_path.glob("full/*/*"))
    with mock.patch.object(teacher_cache, "answer", lambda logits, targets: answer(logits * torch.nan, targets)):
        assert "NaN or infinite" in said(*taught(place, tmp_path / "nan"))
