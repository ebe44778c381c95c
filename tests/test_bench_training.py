"""``bench --train``: what it refuses, that a wrong gradient or a missing message stops it, and what it reports."""

import json
import statistics
from dataclasses import replace

import pytest
import torch

from ladderize.checkpoint.config import expected_tensors
from ladderize.runtime.bench import rounds, training
from ladderize.runtime.bench.document import BenchDocument, Overlap
from ladderize.runtime.bench.inference import longest_message, needed_bytes, plan_bench
from ladderize.runtime.bench.messages import Observed
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.collectives.base import Handle
from ladderize.runtime.model import TPLlama
from ladderize.runtime.training import linear
from tests.groups import ALONE
from tests.helpers import SHAPE, assert_there_and_back, invoke, invoke_json, invoke_well, listing, make_model, refusal

QUICK = ["--train", "--batch-size", 2, "--schedules", "sequential,domino", "--prompt-len", 6]
QUICK += ["--repeat", 2, "--warmup", 1, "--threads", 1, "--dtype", "float32"]
EMULATED = ["--emulate-tp", 2, "--link", "50,1"]


def test_two_real_ranks(shape, tmp_path):
    out = tmp_path / "bench.json"
    layouts = ["--layout", "dense,spd+ladder", "--batch-size", "2,1"]
    invoke_well("bench", "--random-weights", shape, *QUICK, "--tp-size", 2, *layouts, "--out", out)
    document = json.loads(out.read_text())
    assert_there_and_back(BenchDocument, document)
    assert document["complete"] is True
    assert document["backend"].startswith("shm")
    assert len(document["checks"]) == len(document["rows"]) == 8
    assert all(check["gradient_difference"] < check["tolerance"] for check in document["checks"].values())
    rows = document["rows"]
    names = [f"{model}{by}" for model in ("dense", "spd+ladder") for by in ("", " by the schedule domino")]
    assert [(row["model"], row["batch_size"]) for row in rows] == [(name, rows) for rows in (2, 1) for name in names]
    assert [row["schedule"] for row in rows] == ["sequential", "domino"] * 4
    for first in (0, 2):  # the bound of a model is its fastest step without communication, whatever the schedule
        silent = [row["no_communication_samples_ms"] for row in rows[first : first + 2]]
        bound = min(sum(statistics.median(part) for part in one.values()) for one in silent)
        for row in rows[first : first + 2]:
            assert row["bound_share"] == pytest.approx(bound / row["ms"]["step"])
    hidden, layers = SHAPE["hidden_size"], SHAPE["num_hidden_layers"]
    for row in rows:
        assert row["ms"]["step"] == pytest.approx(row["ms"]["forward"] + row["ms"]["backward"])
        assert row["tokens_per_s"] == pytest.approx(1e3 * 6 * row["batch_size"] / row["ms"]["step"])
        assert {name: len(samples) for name, samples in row["samples_ms"].items()} == {"forward": 2, "backward": 2}
        sums = layers if row["model"].startswith("spd") else 2 * layers
        tokens = 6 * row["batch_size"]
        assert row["communication"]["forward"]["bytes"] == 4 * tokens * hidden * (sums + 1)
    sequential, domino = (row["communication"]["backward"]["all_reduces"] for row in rows[:2])
    # the embedding's and the layers', and the norms' gradients once
    assert (sequential, domino) == (2 * layers + 2, 2 * (2 * layers + 1) + 1)


def test_a_checkpoint_emulated_with_traces(tmp_path):
    folder = tmp_path / "m"
    make_model("same layer with biases").save_pretrained(folder)
    how = ["--emulate-tp", 2, "--link", "2000,1", "--dtype", "bfloat16"]  # of which the check is in float32, too
    document = invoke_json("bench", folder, *QUICK, *how, "--profile", tmp_path / "t")
    assert_there_and_back(BenchDocument, document)
    plain, domino = document["rows"]
    assert plain["weights"] == str(folder)
    assert domino["overlap"]["forward"]["proven"] is domino["overlap"]["backward"]["proven"] is True
    assert plain["overlap"]["backward"]["proven"] is True
    assert listing(tmp_path / "t") == ["0-m-batch2-rank0.json", "1-m_by_the_schedule_domino-batch2-rank0.json"]
    events = json.loads((tmp_path / "t" / "1-m_by_the_schedule_domino-batch2-rank0.json").read_text())["traceEvents"]
    spans = {event["name"]: event for event in events if event.get("cat") == "user_annotation"}
    assert spans["forward"]["ts"] + spans["forward"]["dur"] <= spans["backward"]["ts"]


def test_a_gradient_that_misses_a_part(shape, tmp_path, monkeypatch):
    """Only the last of the two parts of the batch adds to a weight's gradient: the other schedule is timed."""
    add = linear.WeightGradient.add

    def forgetful(self, parts, parameter):
        self.total = None
        return add(self, parts, parameter)

    monkeypatch.setattr(linear.WeightGradient, "add", forgetful)
    arguments = ["--layout", "dense", "--out", tmp_path / "b.json"]
    outcome = invoke("bench", "--random-weights", shape, *QUICK, *EMULATED, *arguments)
    assert outcome.code == 1
    assert outcome.stderr.splitlines()[-1].startswith("Error: dense by the schedule domino, 2 rows: the ")
    document = json.loads((tmp_path / "b.json").read_text())
    assert_there_and_back(BenchDocument, document)
    assert [row["schedule"] for row in document["rows"]] == ["sequential"]
    assert list(document["failed"]) == ["dense by the schedule domino, 2 rows"]


def test_weights_that_are_not_numbers(tmp_path):
    model = make_model("dense")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "m")
    message = refusal("bench", tmp_path / "m", *QUICK, *EMULATED)
    assert "m, 2 rows: the loss is nan and the norm of its gradients nan" in message


class LeavesOut(Observed):
    def __init__(self, inner, number):
        super().__init__(inner)
        self.number, self.count = number, 0

    def send(self, all_reduce, x):
        self.count += 1
        return Handle(lambda: x) if self.count == self.number else all_reduce(x)


@pytest.mark.parametrize(
    ("model", "kind", "number"),
    [(TPLlama, "prefill", 3), (training.TPTraining, "forward", 3), (training.TPTraining, "backward", 12)],
)
def test_a_message_that_is_left_out(shape, monkeypatch, model, kind, number):
    """Emulated sums are delays: nobody sees in the results that one was not even begun."""

    def mutated(self, *arguments, forward=model.forward):
        whole, self.collectives = self.collectives, LeavesOut(self.collectives, number)
        try:
            return forward(self, *arguments)
        finally:
            self.collectives = whole

    monkeypatch.setattr(model, "forward", mutated)
    how = [*QUICK[1:], "--output-len", 3] if model is TPLlama else QUICK
    message = refusal("bench", "--random-weights", shape, *how, *EMULATED, "--layout", "dense")
    assert f"dense: its {kind} completed" in message


def test_no_overlap_in_the_trace_is_an_error(shape, tmp_path, monkeypatch):
    """Of a forward pass only where the layout or the schedule promises some; backward always."""
    monkeypatch.setattr(rounds, "overlap_of", lambda flights: Overlap(9.0, 0.0))
    more = ["--layout", "dense,ladder", "--profile", tmp_path / "t"]
    outcome = invoke("bench", "--random-weights", shape, *QUICK, *EMULATED, *more)
    assert outcome.code == 1
    variants = ("dense by the schedule domino", "ladder", "ladder by the schedule domino")
    passes = ["dense (backward)"]
    passes += [f"{variant} ({name})" for variant in variants for name in ("forward", "backward")]
    assert f"nothing overlapped in the trace of {' and '.join(passes)}," in outcome.stderr.splitlines()[-1]


def test_memory_is_weights_and_gradients(shape):
    models = {"random_weights": str(shape), "layout": "dense,ladder,spd", "sync_tp_size": 4, "dtype": "float32"}
    options = BenchOptions(**models, train=True, emulate_tp=2, link="1,1", prompt_len=6)
    needed = needed_bytes(plan_bench(options), options, ALONE.device)
    stored = plan_bench(replace(options, dtype="bfloat16"))
    assert longest_message(stored, options) >= 4 * 6 * SHAPE["hidden_size"]  # the check computes in float32
    # dense and ladder share theirs; spd's virtual ranks are pieces of their own; and gradients of one of them
    whole = 4 * sum(torch.Size(size).numel() for size in expected_tensors(SHAPE).values())
    assert 1.5 * whole < needed < 1.8 * whole
