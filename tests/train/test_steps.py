"""The pace; a step against a plain loop, what it trains, which step is written; a dense model as a control."""

import itertools
import json
import math
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate import tracking
from accelerate.utils import LoggerType
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import ladderize
from ladderize.adapt.options import AdaptOptions, parse_count
from ladderize.adapt.train.loop import read_metrics, row_order
from ladderize.adapt.train.task import Pace
from ladderize.adapt.train.training_model import BETAS, EPSILON
from ladderize.adapt.training_data import open_data
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.errors import UserError
from tests.helpers import (
    CLIPPED,
    SHAPE,
    all_tensors,
    changed_tensors,
    invoke_well,
    record_bars,
)
from tests.train.commands import LENGTH, losses_of, perplexity_of, refused, stopped_before_the_end, succeed


def pace_of(**options):
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 4096}
    return Pace.of(AdaptOptions(model="m", out="o", data=("hub:o/n:train",), **options), sizes, 1)


def test_the_rate_rises_and_falls():
    pace = pace_of(lr=2.0, warmup_steps=3, max_steps=10)
    assert [pace.rate(step, 0.0) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert pace.rate(9, 0.5) == pytest.approx(1.0)
    assert pace.rate(9, 1.0) == pytest.approx(0.0)


@pytest.mark.parametrize(("left", "share"), [(0.15, 0.5), (7, 1), (0, 0.2)])
def test_the_peak_goes_with_the_root_of_what_an_alignment_left(left, share):
    """At least a fifth of it, and never more than all; the rise takes ten steps, or a fifth of a shorter training."""
    for steps, warmup in ((4, 0), (20, 4), (190, 10), (600, 30), (9000, 200)):
        usual = pace_of(max_steps=steps)
        aligned = usual.after_alignment(left)
        assert (aligned.lr, usual.lr) == (pytest.approx(2e-5 * share), pytest.approx(2e-5))
        assert (aligned.warmup_steps, usual.warmup_steps) == (warmup, min(200, steps // 20))


def test_budgets():
    tokens, steps = pace_of(max_tokens=100), pace_of(max_steps=10)
    assert (tokens.share(3, 25), steps.share(3, 25), steps.share(11, 0)) == (0.25, 0.3, 1.0)
    assert [parse_count(text) for text in ("3B", "20M", "1.5k", "7")] == [3_000_000_000, 20_000_000, 1500, 7]
    for text in ("", "3 tokens", "-3", "0", "0.2", "1e9", "1000000T", "9" * 5000):
        with pytest.raises(UserError, match="not a number of tokens"):
            parse_count(text)


def test_training_is_a_plain_loop(place, tmp_path):
    """Examples one by one through the whole transformers model, AdamW, the mean over the step's tokens: the same
    weights."""
    weight, rate = 0.6, 2e-3
    loss = ["--distill-from", place / "dense", "--distill-weight", weight, "--lr", rate, "--weight-decay", 0.1]
    more = ["--lr-schedule", "linear", "--warmup-steps", "0", "--micro-batch-size", "2", "--train", "all"]
    document = succeed(place, tmp_path / "out", *loss, *CLIPPED, *more, steps=3)
    checkpoint = open_checkpoint(str(place / "both"))
    files = [str(place / "ids.npy")], None
    how = {"seq_len": 2 * LENGTH, "vocab_size": checkpoint.config["vocab_size"], "seed": 0, "heldout": 0}
    rows, *_ = open_data(*files, **how)
    order = row_order(len(rows), 0)
    model, dense = ladderize.load(place / "both").train(), ladderize.load(place / "dense")
    names = dict(model.named_parameters())
    groups = [{"params": [p for p in names.values() if (p.ndim > 1) == wide]} for wide in (True, False)]
    groups[0]["weight_decay"], groups[1]["weight_decay"] = 0.1, 0.0
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=BETAS, eps=EPSILON)
    losses = []
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / 3)
        entropy, divergence, count = 0.0, 0.0, 0
        for number in itertools.islice(order, 4):
            row = rows[number]
            starts = [0, *itertools.accumulate(row["lengths"])]
            for begin, end in itertools.pairwise(starts):
                ids = torch.tensor(row["input_ids"][begin:end])[None]
                scores, targets = model(ids).logits[0, :-1], ids[0, 1:]
                with torch.no_grad():
                    p = dense(ids).logits[0, :-1].softmax(-1)
                entropy = entropy + cross_entropy(scores, targets, reduction="sum")
                divergence = divergence + (p * (p.log() - scores.log_softmax(-1))).sum()
                count += len(targets)
        loss = ((1 - weight) * entropy + weight * divergence) / count
        losses.append(float(loss.detach()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(names.values()), CLIPPED[1])
        optimizer.step()
        optimizer.zero_grad()
    assert losses_of(tmp_path / "out") == pytest.approx(losses, rel=1e-4)
    written = all_tensors(tmp_path / "out")
    for name, parameter in names.items():
        if name in written:
            torch.testing.assert_close(written[name], parameter.detach(), rtol=2e-3, atol=2e-5, msg=name)
    assert document["options"]["train"] == "all"


def test_only_what_is_named_is_trained(place, tmp_path):
    for train, layers in (("converted", {1, 2, 3}), ("1", {1}), ("all", {0, 1, 2, 3})):
        out = tmp_path / f"out-{train}"
        document = succeed(place, out, "--train", train, model="upper", steps=1)
        changed = changed_tensors(place / "upper", out)
        assert {int(name.split(".")[2]) for name in changed if ".layers." in name} <= layers | {1}
        assert {"model.embed_tokens.weight", "model.norm.weight"} <= changed or train != "all"
        assert set(document["layers"]) == {int(name.split(".")[2]) for name in changed if ".layers." in name}
        assert "embed" not in str(changed) or train == "all"
        ladderize.load(out)
    assert "is dense and has no converted layers to train" in refused(place, tmp_path / "out", model="dense")


def test_bfloat16(place, tmp_path):
    document = succeed(place, tmp_path / "out", "--dtype", "bfloat16", "--distill-from", place / "dense", steps=12)
    assert document["dtype"] == "bfloat16"
    losses = losses_of(tmp_path / "out")
    assert sum(losses[-3:]) < sum(losses[:3])  # what random models learn need not show on held-out rows
    assert document["tokens"] == 12 * 4 * 2 * LENGTH
    assert all_tensors(tmp_path / "out")["model.norm.weight"].dtype == torch.float32  # as stored


def test_token_budget_and_document(place, tmp_path):
    document = succeed(place, tmp_path / "tokens", "--max-tokens", 500, without=["--max-steps", "--seq-len"])
    assert document["options"]["seq_len"] == LENGTH  # of the rows of ids
    assert document["tokens"] == math.ceil(500 / (4 * LENGTH)) * 4 * LENGTH
    assert document["scored_tokens"] == document["tokens"] // LENGTH * (LENGTH - 1)
    perplexity = perplexity_of(tmp_path / "tokens", place / "eval.npy")
    assert document["heldout_perplexity"]["after"] == pytest.approx(perplexity, rel=1e-4)


@pytest.mark.parametrize(
    ("steps", "given", "rows", "validations"),
    [
        (1, {}, 1, 1),
        (10, {}, 3, 1),  # 80 rows are trained on, 8 scored, half of them more by the dense model
        (200, {}, 16, 8),
        (1000, {}, 69, 10),
        (100_000, {}, 256, 200),
        (30, {"eval_every": 3}, 2, 10),
        (30, {"heldout": 300}, 256, 1),
        (30_000, {"eval_data": ("eval.npy",)}, 256, 60),
        (30, {"heldout": 300, "eval_every": 3}, 256, 10),
    ],
)
def test_validation_takes_at_most_a_tenth_of_the_time(steps, given, rows, validations):
    sizes = {"batch_size": 8, "seq_len": 256, "max_steps": steps, "device": "cpu"}
    options = AdaptOptions(model="m", out="o", data=("ids.npy",), distill_from="dense", **sizes, **given)
    pace = Pace.of(options, SHAPE | {"model_type": "llama", "max_position_embeddings": 512}, 1)
    assert pace.validations(256) == (rows, validations)
    if not given and rows > 1:
        assert rows * (validations + 1.5) <= 0.1 * steps * 8
    assert pace.validations(0)[0] == 0


def test_the_same_rows_are_scored_before_and_after(place, tmp_path, monkeypatch):
    """Also by a longer run that goes on, and would score more."""
    bars = record_bars(monkeypatch)
    stopped_before_the_end(place, tmp_path / "out", steps=6, without=["--eval-data"])
    assert [bar.total for bar in bars if bar.description == "validating"] == [1]
    document = succeed(place, tmp_path / "out", steps=40, without=["--eval-data"])
    assert document["heldout_perplexity"]["tokens"] == 2 * LENGTH - 2  # a row of two examples
    # before and after the shorter run, and six of the seven times of the longer one
    assert len(read_metrics(tmp_path / "out" / "metrics.jsonl", "heldout_perplexity")) == 2 + 6


def test_a_tracker_is_told_what_metrics_jsonl_has(place, tmp_path, monkeypatch):
    kind = mock.Mock(requires_logging_directory=True)
    kind.return_value.name = "tensorboard"
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.TENSORBOARD])
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", kind)
    succeed(place, tmp_path / "out", "--log-with", "tensorboard", steps=2)
    told = [{"step": call.kwargs["step"], **call.args[0]} for call in kind.return_value.log.call_args_list]
    assert told == list(map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()))
    kind.return_value.finish.assert_called_once()
    assert str(tmp_path / "out-logs") in map(str, [*kind.call_args.args, *kind.call_args.kwargs.values()])
    assert kind.return_value.store_init_configuration.call_args.args[0]["lr"] == 3e-3


def test_retrained_weights_are_known_as_such(place, tmp_path):
    """Another layout is warned of, in its card too."""
    out, warning = tmp_path / "out", "weights were retrained (full) for another layout"
    succeed(place, out, "--distill-from", place / "dense", steps=1)
    both = ("--ladder", "all", "--spd", "all", "--sync-tp-size", 4)
    for source, name, layout, warned in (
        (out, "dense", ("--dense", "all"), True),
        (out, "same", ("--dtype", "bfloat16"), False),
        (tmp_path / "dense", "again", both, False),
        (out, "other", ("--ladder", "2:"), True),
        (tmp_path / "other", "round", ("--dtype", "bfloat16"), True),
    ):
        outcome = invoke_well("convert", source, tmp_path / name, *layout, "--no-verify")
        assert (warning in outcome.stderr) == warned == (warning in (tmp_path / name / "README.md").read_text())


def test_a_model_better_than_the_dense_one_is_brought_back_to_it(place, tmp_path):
    """It fits the held-out rows, which the dense model has never seen: its perplexity rises while its KL falls."""
    succeed(place, tmp_path / "fitted", "--lr", "1e-2", steps=50)
    teacher = ("--distill-from", place / "dense", "--write", "best", "--eval-every", 1)
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


def test_a_control_learns_the_text_and_is_a_plain_llama(place, tmp_path):
    out = tmp_path / "out"
    document = succeed(place, out, "--train", "all", model="dense", steps=12)
    losses = losses_of(out)
    assert losses[-1] < 0.95 * losses[0]
    assert document["layout"] == "4 layers: dense"
    assert document["layers"] == [0, 1, 2, 3]
    assert document["heldout_perplexity"]["after"] < document["heldout_perplexity"]["before"]  # its rows are trained on
    assert changed_tensors(place / "dense", out) == all_tensors(out).keys()
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert not {"auto_map", "attention_sync", "mlp_sync", "sync_tp_size"} & config.keys()
    assert list(out.glob("*.py")) == []
    model, ids = AutoModelForCausalLM.from_pretrained(out).eval(), torch.from_numpy(np.load(place / "eval.npy"))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, ladderize.load(out)(ids).logits)
    perplexity = perplexity_of(out, place / "eval.npy")
    assert document["heldout_perplexity"]["after"] == pytest.approx(perplexity, rel=1e-4)
    # a dense model that was trained further may be converted like any other
    converted = invoke_well("convert", out, tmp_path / "ladder", "--ladder", "all", "--no-verify")
    assert "were retrained" not in converted.stderr
