"""Retraining that was killed, stopped or changed on the way goes on where it was."""

import contextlib
import math
import random
import signal
import sys

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ladderize.adapt.train import loop
from ladderize.adapt.train.loop import Loop, Scores, TrainingFolder, read_metrics
from ladderize.adapt.train.training_model import HFTraining
from tests import warm
from tests.helpers import all_tensors, invoke_well, listing, one_sentence
from tests.train.commands import (
    adapt,
    arguments,
    check_same_run,
    losses_of,
    refused,
    same_weights,
    stopped_before_the_end,
    succeed,
)

# The command, which waits for its end before step 21.
WAITS = """
import sys, time
from ladderize.adapt.train.loop import Loop
step, made = Loop.step, []
def waiting(self, *given):
    if len(made) == 20:
        time.sleep(3600)
    made.append(1)
    return step(self, *given)
Loop.step = waiting
sys.argv[:1] = ["ladderize"]
from ladderize.cli import main
main()
"""


def check_bit_for_bit(folder, *keys):
    for key in keys:
        ours, theirs = (read_metrics(folder / name / "metrics.jsonl", key) for name in ("out", "whole"))
        assert ours == theirs


def test_a_killed_run_goes_on_bit_for_bit(place, tmp_path):
    """SIGKILL at a random moment; the same command then makes the same steps."""
    more = ["--method", "lora", "--lora-rank", 2, "--lora-dropout", 0.2, "--eval-every", 2]
    more += ["--distill-from", place / "dense"]
    succeed(place, tmp_path / "whole", *more, steps=30)
    work = tmp_path / "out.ladderize-work"
    kill = random.randint(3, 15)
    warm.warm_python().preload("accelerate", "datasets", "peft")
    command = arguments(place, tmp_path / "out", *more, steps=30)
    process = warm.WarmProcess([sys.executable, "-c", WAITS, *map(str, command)])
    metrics = work / "metrics.jsonl"
    warm.wait_until(lambda: metrics.is_file() and f'"step": {kill},' in metrics.read_text(), process)
    process.kill()
    _, stderr = process.communicate()
    assert process.returncode == -signal.SIGKILL, stderr
    assert "resuming after step" in invoke_well(*arguments(place, tmp_path / "out", *more, steps=30)).stderr
    check_bit_for_bit(tmp_path, "loss", "step")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "whole"))
    assert same_weights(ours, theirs)
    assert not work.exists()


@pytest.mark.parametrize(
    ("kind", "method", "made", "saved", "validated"),
    [
        (Loop, "check", 3, 4, 1),  # in a step, after which validation is due
        (Loop, "check", 5, 6, 2),  # in the last one
        (Loop, "score", 4, 4, 1),  # in a validation
        (TrainingFolder, "save", 4, 4, 2),
    ],
)
def test_sigterm_ends_it_after_the_step_under_way(place, tmp_path, monkeypatch, kind, method, made, saved, validated):
    """It comes when this method is called after so many steps. validated: so often after steps."""
    original = getattr(kind, method)

    def signalled(self, *given):
        progress = self.progress if isinstance(self, Loop) else given[0]
        if progress.step == made:
            signal.raise_signal(signal.SIGTERM)
        return original(self, *given)

    more = ["--eval-every", 2]
    succeed(place, tmp_path / "whole", *more)
    with monkeypatch.context() as patch:
        patch.setattr(kind, method, signalled)
        outcome = adapt(place, tmp_path / "out", *more)
    assert f"stopped by a signal after step {saved}, which is saved" in one_sentence(outcome)
    metrics = tmp_path / "out.ladderize-work" / "metrics.jsonl"
    assert len(read_metrics(metrics, "heldout_perplexity")) == 1 + validated
    assert not (tmp_path / "out").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    np.save(tmp_path / "other.npy", np.load(place / "eval.npy")[:1])
    files = ("--eval-data", tmp_path / "other.npy")
    for name, change in {"weight_decay (0.0, now 0.5)": ("--weight-decay", 0.5), "eval_data": files}.items():
        said = refused(place, tmp_path / "out", *change)
        assert f"another {name}; give the old value again" in said
    assert adapt(place, tmp_path / "out", *more).code == 0
    check_bit_for_bit(tmp_path, "loss", "heldout_perplexity")
    assert same_weights(all_tensors(tmp_path / "out"), all_tensors(tmp_path / "whole"))


def test_ctrl_c_says_what_happens_and_a_second_one_while_saving_loses_nothing(place, tmp_path, monkeypatch, capfd):
    """The second comes while the state is being written: what was saved before it stays whole."""
    more = ["--eval-every", 2]
    succeed(place, tmp_path / "whole", *more)

    def save(self, folder, original=HFTraining.save):
        if list(folder.parent.glob("step-*[0-9]")):  # the second save
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        original(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr(HFTraining, "save", save)
        outcome = adapt(place, tmp_path / "out", *more)
    assert outcome.code == 130
    work = tmp_path / "out.ladderize-work"
    kept = f"stopped; {work} keeps what is done, and the same command goes on from there"
    assert outcome.stderr.strip().splitlines()[-2:] == [kept, "Interrupted."]
    assert "the same command goes on from there (Ctrl-C again stops at once)" in capfd.readouterr().err
    assert not list(work.glob("*.part"))
    assert [path.name for path in work.glob("step-*")] == ["step-00000002"]
    assert adapt(place, tmp_path / "out", *more).code == 0
    assert losses_of(tmp_path / "out") == losses_of(tmp_path / "whole")


@pytest.mark.parametrize("launcher", [True, False])
def test_a_launcher_passes_a_ctrl_c_on_to_ranks_that_had_it(monkeypatch, launcher):
    monkeypatch.setattr(loop, "already_started", lambda: launcher)
    interrupted = contextlib.nullcontext() if launcher else pytest.raises(KeyboardInterrupt)
    with loop.stop_signals(announce=False) as stopped:
        signal.raise_signal(signal.SIGINT)
        with interrupted:
            signal.raise_signal(signal.SIGINT)
        assert stopped()


def test_a_stream_beside_a_file_goes_on(place, tmp_path, monkeypatch):
    rows = [{"input_ids": row} for row in np.load(place / "ids.npy").tolist()]
    hub = datasets.Dataset.from_list(rows).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, streaming, **named: hub)
    more = ["--data", "hub:o/n:train=1", "--data", f"{place / 'ids.npy'}=2", "--eval-every", 2]
    more += ["--lr-schedule", "constant"]  # a shorter run then makes the first steps of a longer one
    assert succeed(place, tmp_path / "whole", *more, steps=6)["data_counts"] == {}
    stopped_before_the_end(place, tmp_path / "out", *more, steps=4)
    assert "resuming after step 4" in adapt(place, tmp_path / "out", *more, steps=6).stderr
    assert losses_of(tmp_path / "out") == losses_of(tmp_path / "whole")
    assert read_metrics(tmp_path / "out" / "metrics.jsonl", "lr") == [3e-3] * 6


def test_the_rate_and_the_budget_may_change_on_the_way(place, tmp_path):
    stopped_before_the_end(place, tmp_path / "out")
    outcome = invoke_well(*arguments(place, tmp_path / "out", "--lr", "1e-4", steps=9))
    assert "resuming after step 6" in outcome.stderr
    rates = read_metrics(tmp_path / "out" / "metrics.jsonl", "lr")
    assert len(rates) == 9
    assert max(rates[6:]) <= 1e-4 < rates[2]


def test_a_smaller_micro_batch_goes_on_after_an_odd_step(place, tmp_path):
    """As the message of a full GPU advises. A state counts micro-batches, and a step must still end with its last."""
    more = ["--lr-schedule", "constant"]
    succeed(place, tmp_path / "whole", *more, steps=5)
    stopped_before_the_end(place, tmp_path / "out", *more, "--micro-batch-size", 4, steps=3)
    outcome = invoke_well(*arguments(place, tmp_path / "out", *more, "--micro-batch-size", 2, steps=5))
    assert "resuming after step 3" in outcome.stderr
    check_same_run(tmp_path / "out", tmp_path / "whole")


def test_best_weights_that_went_with_a_later_state(place, tmp_path, monkeypatch):
    """They are of a state that was damaged and deleted: the best of what comes is written."""
    values = iter([9000.0, 4000.0, 6000.0, 7000.0, 8000.0])
    monkeypatch.setattr(Loop, "score", lambda self, advance: Scores(math.log(next(values)), 0.0, 9))
    more = ["--eval-every", 1, "--write", "best"]
    stopped_before_the_end(place, tmp_path / "out", *more, steps=3)
    (tmp_path / "out.ladderize-work" / "weights-00000001.safetensors").unlink()
    assert succeed(place, tmp_path / "out", *more, steps=4)["written_step"] == 4


def test_states_kept_and_the_best_one_written(place, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingFolder, "remove", lambda self: None)
    values = iter([9000.0, 5000.0, 4000.0, 6000.0, 7000.0, 8000.0, 4500.0])
    monkeypatch.setattr(Loop, "score", lambda self, advance: Scores(math.log(next(values)), 0.0, 9))
    document = succeed(place, tmp_path / "out", "--eval-every", 1, "--write", "best")
    work = tmp_path / "out.ladderize-work"
    expected = ["metrics.jsonl", "run.json", "step-00000005", "step-00000006", "weights-00000002.safetensors"]
    assert listing(work) == expected
    assert document["written_step"] == 2
    kept = load_file(work / "weights-00000002.safetensors")
    written = all_tensors(tmp_path / "out")
    assert all(torch.equal(written[name], value) for name, value in kept.items())
    assert document["heldout_perplexity"]["before"] == pytest.approx(9000.0)
    assert document["heldout_perplexity"]["after"] == pytest.approx(4000.0)
