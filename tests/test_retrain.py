"""`ladderize adapt --method full | lora`: the losses, a step against a plain loop, resuming, ranks, and what goes
wrong."""

import json
import math
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

import ladderize
from ladderize.adapt.retrain import run as retraining
from ladderize.adapt.retrain import trainer as training
from ladderize.adapt.retrain.engine import BETAS, EPSILON, Engine
from ladderize.adapt.retrain.losses import Objective, token_losses
from ladderize.adapt.retrain.memory_estimate import Demand, what_would_fit
from ladderize.adapt.retrain.metrics import read_metrics
from ladderize.adapt.retrain.models import ModelSetup, build_student, build_teacher, trained_parameters, trained_tensors
from ladderize.adapt.retrain.schedule import Budget, Schedule, parse_count
from ladderize.adapt.retrain.state import TrainingFolder
from ladderize.blocks import open_checkpoint
from ladderize.console import UserError
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from ladderize.ranks.training import wants_fsdp
from tests.helpers import ROOT, SHAPE, invoke, last_error, listing, one_sentence, run_ranks, save_llama

CPU = Ranks(0, 1, torch.device("cpu"))
LENGTH, ROWS = 24, 40


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A dense model, the same with every layer ladder and dropped, and data."""
    folder = tmp_path_factory.mktemp("retrain")
    save_llama(folder / "dense")
    convert_checkpoint(
        str(folder / "dense"), folder / "both", Recipe(ladder="all", spd="all", sync_tp_size=4), verify=False
    )
    convert_checkpoint(str(folder / "dense"), folder / "upper", Recipe(ladder="2:"), verify=False)
    ids = np.random.default_rng(0).integers(3, SHAPE["vocab_size"], (ROWS, LENGTH))
    np.save(folder / "ids.npy", ids)
    np.save(folder / "eval.npy", ids[:3])
    return folder


def arguments(place, *more, model="both", steps=6):
    return [
        "adapt",
        place / model,
        "--data",
        place / "ids.npy",
        "--eval-data",
        place / "eval.npy",
        "--max-steps",
        steps,
        "--batch-size",
        4,
        "--seq-len",
        2 * LENGTH,
        "--lr",
        "3e-3",
        "--threads",
        1,
        "--no-verify",
        "--device",
        "cpu",
        *more,
    ]


def adapt(place, out, *more, **kwargs):
    command = arguments(place, *more, **kwargs)
    if "lora" in more:
        command.remove("--no-verify")
    return invoke(*command[:2], out, *command[2:])


def succeed(place, out, *more, **kwargs):
    outcome = adapt(place, out, *more, **kwargs)
    assert outcome.code == 0, outcome.stderr
    return json.loads((out / "adaptation.json").read_text())


def losses_of(folder):
    return read_metrics(folder / "metrics.jsonl", "loss")


# --- losses and schedule ---


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_losses_are_their_definitions(temperature, monkeypatch):
    logits, teacher = (torch.randn(11, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    targets = torch.randint(7, (11,))
    entropy = sum(-torch.log(row.exp() / row.exp().sum())[target] for row, target in zip(logits, targets, strict=True))
    divergence = 0
    for own, dense in zip(logits / temperature, teacher / temperature, strict=True):
        p, q = dense.softmax(0), own.softmax(0)
        divergence += (p * (p / q).log()).sum()
    expected = torch.autograd.grad(0.3 * entropy + 0.7 * temperature**2 * divergence, logits)[0]
    for at_once in (1 << 26, 3 * 7):  # whole, and three tokens at a time
        monkeypatch.setattr("ladderize.adapt.retrain.losses.LOGITS_AT_ONCE", at_once)
        parts = token_losses(logits, targets, teacher.detach(), temperature)
        torch.testing.assert_close(parts[0].double(), entropy, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(parts[1].double(), divergence, rtol=1e-5, atol=1e-5)
        gradient = torch.autograd.grad(Objective(0.7, temperature).total(*parts), logits)[0]
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
    assert token_losses(logits, targets, None, 1.0)[1] == 0


def test_schedules():
    cosine = Schedule("cosine", 2.0, warmup_steps=3)
    assert [cosine.rate(step, 0.0) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert cosine.rate(9, 0.5) == pytest.approx(1.0)
    assert cosine.rate(9, 1.0) == pytest.approx(0.0)
    assert Schedule("cosine", 2.0, floor=0.1).rate(9, 1.0) == pytest.approx(0.2)
    wsd = Schedule("wsd", 1.0)
    assert [wsd.rate(0, share) for share in (0.0, 0.5, 0.8)] == [1.0, 1.0, pytest.approx(1.0)]
    assert wsd.rate(0, 0.9) == pytest.approx(0.5)
    assert Schedule("constant", 1.0).rate(5, 0.99) == 1.0
    assert Budget(tokens=100).share(3, 25) == 0.25
    assert Budget(steps=10).share(3, 25) == 0.3
    assert Budget(tokens=100).about_steps(30) == 4
    assert [parse_count(text, option="x") for text in ("3B", "20M", "1.5k", "7")] == [
        3_000_000_000,
        20_000_000,
        1500,
        7,
    ]
    for text in ("", "3 tokens", "-3", "0", "1e9"):
        with pytest.raises(UserError, match="no count"):
            parse_count(text, option="--max-tokens")


# --- one step, and the models ---


def test_training_is_a_plain_loop(place, tmp_path):
    """Examples one by one through the whole transformers model, AdamW, the mean over the step's tokens: the same
    weights."""
    weight, rate = 0.6, 2e-3
    document = succeed(
        place,
        tmp_path / "out",
        "--distill-from",
        place / "dense",
        "--distill-weight",
        weight,
        "--lr",
        rate,
        "--schedule",
        "constant",
        "--warmup-steps",
        0,
        "--weight-decay",
        0.1,
        "--max-gradient",
        0.5,
        "--micro-batch-size",
        2,
        "--write",
        "last",
        "--train",
        "all",
        steps=3,
    )
    checkpoint = open_checkpoint(str(place / "both"))
    options = retraining.RetrainOptions(
        data=tuple(retraining_specs(place / "ids.npy")),
        eval_data=tuple(retraining_specs(place / "eval.npy")),
        batch_size=4,
        seq_len=2 * LENGTH,
        budget=Budget(steps=3),
    )
    stream, _ = retraining.open_data(checkpoint, options, options.resolve(checkpoint.config, 1))
    model, dense = ladderize.load(place / "both").train(), ladderize.load(place / "dense")
    names = dict(model.named_parameters())
    matrices = [p for p in names.values() if p.ndim > 1]
    vectors = [p for p in names.values() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=BETAS, eps=EPSILON)
    losses = []
    with stream:
        for _ in range(3):
            entropy, divergence, count = 0.0, 0.0, 0
            for row in stream.take(4):
                starts = [*np.flatnonzero(row.positions == 0), len(row)]
                for begin, end in pairwise(starts):
                    ids = torch.from_numpy(row.ids[begin:end])[None]
                    scores, targets = model(ids).logits[0, :-1], ids[0, 1:]
                    with torch.no_grad():
                        p = dense(ids).logits[0, :-1].softmax(-1)
                    entropy = entropy + cross_entropy(scores, targets, reduction="sum")
                    divergence = divergence + (p * (p.log() - scores.log_softmax(-1))).sum()
                    count += len(targets)
            loss = ((1 - weight) * entropy + weight * divergence) / count
            losses.append(float(loss.detach()))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(list(names.values()), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert losses_of(tmp_path / "out") == pytest.approx(losses, rel=1e-4)
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, parameter in names.items():
        if name in written:
            torch.testing.assert_close(written[name], parameter.detach(), rtol=2e-3, atol=2e-5, msg=name)
    assert document["options"]["train"] == "all"


def retraining_specs(path):
    from ladderize.adapt.data.sources import parse_specs

    return parse_specs([str(path)])


def test_only_what_is_named_is_trained(place, tmp_path):
    before = load_file(place / "upper" / "model.safetensors")
    for train, layers in (("converted", {1, 2, 3}), ("1", {1}), ("all", {0, 1, 2, 3})):
        out = tmp_path / f"out-{train}"
        document = succeed(place, out, "--train", train, model="upper", steps=1)
        after = load_file(out / "model.safetensors")
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert {int(name.split(".")[2]) for name in changed if ".layers." in name} <= layers | {1}
        assert {"model.embed_tokens.weight", "model.norm.weight"} <= changed or train != "all"
        assert set(document["layers"]) == {int(name.split(".")[2]) for name in changed if ".layers." in name}
        assert "embed" not in str(changed) or train == "all"
        ladderize.load(out)


def test_student_and_teacher_share_what_is_frozen(place):
    student_checkpoint, dense = open_checkpoint(str(place / "upper")), open_checkpoint(str(place / "dense"))
    layout, setup = Layout.from_config(student_checkpoint.config), ModelSetup(CPU.device, torch.bfloat16)
    student = build_student(
        student_checkpoint, layout, setup, trained=trained_tensors(student_checkpoint.tensors, [2, 3], False)
    )
    teacher = build_teacher(dense, setup, student)
    own, theirs = dict(student.model.named_parameters()), dict(teacher.model.named_parameters())
    assert own.keys() == theirs.keys()
    for name in own:
        trained = name.startswith(("model.layers.2.", "model.layers.3."))
        assert own[name].requires_grad == trained
        assert own[name].dtype == (torch.float32 if trained else torch.bfloat16)
        assert (own[name] is theirs[name]) == (not trained)
    ids = torch.randint(3, 90, (2, 9))
    expected = ladderize.load(place / "dense")(ids).logits
    positions, targets = torch.arange(9).expand(2, 9), torch.zeros(2, 9, dtype=torch.long)
    plain = build_teacher(dense, ModelSetup(CPU.device), student)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids, positions, targets).view(2, 9, -1), expected, rtol=1e-4, atol=1e-4)


CUTS = [["--micro-batch-size", 1], ["--gradient-checkpointing"], ["--micro-batch-size", 4, "--attention", "eager"]]


@pytest.mark.parametrize("more", CUTS)
def test_how_a_step_is_cut_does_not_matter(place, tmp_path, more):
    distil = ["--distill-from", place / "dense"]
    succeed(place, tmp_path / "a", *distil, "--micro-batch-size", 2, steps=3)
    succeed(place, tmp_path / "b", *distil, *more, steps=3)
    assert losses_of(tmp_path / "a") == pytest.approx(losses_of(tmp_path / "b"), rel=1e-4)


def test_bfloat16_and_no_packing(place, tmp_path):
    document = succeed(
        place, tmp_path / "out", "--dtype", "bfloat16", "--no-packing", "--distill-from", place / "dense", steps=12
    )
    assert document["dtype"] == "bfloat16"
    assert document["heldout_perplexity"]["after"] < document["heldout_perplexity"]["before"]
    assert document["tokens"] == 12 * 4 * LENGTH
    assert load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].dtype == torch.float32  # as stored


def test_token_budget_and_document(place, tmp_path):
    document = succeed(place, tmp_path / "out", "--max-steps", "1", steps=1)
    assert document["steps"] == 1
    command = [argument for argument in arguments(place) if argument not in ("--max-steps", 6)]
    outcome = invoke(*command[:2], tmp_path / "tokens", *command[2:], "--max-tokens", "500", "--json")
    assert outcome.code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    rows = 4 * 2 * LENGTH  # two examples fill a row
    assert document["tokens"] == math.ceil(500 / rows) * rows
    assert document["scored_tokens"] == document["tokens"] // LENGTH * (LENGTH - 1)
    assert document["heldout_perplexity"]["after"] == pytest.approx(
        perplexity(tmp_path / "tokens", place / "eval.npy"), rel=1e-4
    )
    card = (tmp_path / "tokens" / "README.md").read_text()
    assert "retrained" in card.lower()
    assert f"{document['tokens']:,} tokens" in card


def perplexity(folder, data):
    ids = torch.from_numpy(np.load(data))
    with torch.no_grad():
        logits = ladderize.load(folder)(ids).logits[:, :-1]
    return float(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).exp())


# --- going on ---


def test_a_killed_run_goes_on_bit_for_bit(place, tmp_path):
    """SIGKILL at a random moment; the same command then makes the same steps."""
    more = [
        "--method",
        "lora",
        "--lora-rank",
        2,
        "--lora-dropout",
        0.2,
        "--save-every",
        2,
        "--distill-from",
        place / "dense",
    ]
    succeed(place, tmp_path / "whole", *more, steps=30)
    command = [argument for argument in arguments(place, *more, steps=30) if argument != "--no-verify"]
    work = tmp_path / "out.ladderize-work"
    kill = random.randint(3, 25)
    process = subprocess.Popen(
        [sys.executable, "-m", "ladderize", *map(str, [*command[:2], tmp_path / "out", *command[2:]])],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        metrics = work / "metrics.jsonl"
        if metrics.is_file() and f'"step": {kill},' in metrics.read_text():
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    process.wait(timeout=60)
    assert process.returncode == -signal.SIGKILL, process.stderr.read()
    assert work.is_dir()
    outcome = adapt(place, tmp_path / "out", *more, steps=30)
    assert outcome.code == 0, outcome.stderr
    assert "going on after step" in outcome.stderr
    assert losses_of(tmp_path / "out") == losses_of(tmp_path / "whole")
    assert [line["step"] for line in map(json.loads, (tmp_path / "out" / "metrics.jsonl").open())] == [
        line["step"] for line in map(json.loads, (tmp_path / "whole" / "metrics.jsonl").open())
    ]
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not work.exists()


def test_sigterm_saves_and_stops(place, tmp_path, monkeypatch):
    def step(self, rate, original=Engine.step):
        original(self, rate)
        if self.optimizer.state and next(iter(self.optimizer.state.values()))["step"] == 3:
            signal.raise_signal(signal.SIGTERM)

    succeed(place, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", step)
        outcome = adapt(place, tmp_path / "out")
    assert outcome.code == 1
    assert "stopped by a signal after step 4, which is saved" in last_error(
        outcome
    )  # the flag is looked at when a step begins
    assert not (tmp_path / "out").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    other = adapt(place, tmp_path / "out", "--weight-decay", "0.5")
    assert "another weight_decay; give it again as it was, begin anew with --resume no" in last_error(other)
    np.save(tmp_path / "other.npy", np.load(place / "eval.npy")[:1])
    other = adapt(place, tmp_path / "out", "--eval-data", tmp_path / "other.npy")
    assert "another eval_data; give it again" in last_error(other)
    assert adapt(place, tmp_path / "out").code == 0
    assert losses_of(tmp_path / "out") == losses_of(tmp_path / "whole")
    written = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole")]
    assert all(torch.equal(written[0][name], written[1][name]) for name in written[1])


def test_the_schedule_may_change_on_the_way(place, tmp_path, monkeypatch):
    monkeypatch.setattr(retraining, "write_outcome", lambda *a, **k: (_ for _ in ()).throw(UserError("no outcome")))
    assert "no outcome" in last_error(adapt(place, tmp_path / "out"))
    monkeypatch.undo()
    outcome = adapt(place, tmp_path / "out", "--lr", "1e-4", steps=9)
    assert outcome.code == 0, outcome.stderr
    assert "going on after step 6" in outcome.stderr
    assert "with another budget and schedule from here on" in outcome.stderr
    rates = read_metrics(tmp_path / "out" / "metrics.jsonl", "lr")
    assert len(rates) == 9
    assert max(rates[6:]) <= 1e-4 < rates[2]


def test_what_a_killed_run_left_before_its_first_state_is_no_harm(place, tmp_path):
    work = tmp_path / "out.ladderize-work"
    succeed(place, tmp_path / "whole")
    work.mkdir()
    (work / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    assert "no folder of unfinished work" in last_error(
        adapt(place, tmp_path / "out")
    )  # without run.json it is somebody's
    (work / "run.json").write_text("")
    (work / "step-00000002.part").mkdir()
    assert adapt(place, tmp_path / "out").code == 0
    assert losses_of(tmp_path / "out") == losses_of(tmp_path / "whole")


def test_somebodys_folder_is_left_alone(place, tmp_path):
    (tmp_path / "mine" / "step-00001000").mkdir(parents=True)
    for more in ([], ["--resume", "no"]):
        message = last_error(adapt(place, tmp_path / "out", "--work-dir", tmp_path / "mine", *more))
        assert "no folder of unfinished work" in message
    assert listing(tmp_path / "mine") == ["step-00001000"]


def test_a_bad_row_on_the_way_can_be_skipped_from_there(place, tmp_path, monkeypatch):
    """The state before it is saved, and --skip-bad-rows goes on."""
    from datasets import Dataset

    rows = np.random.default_rng(1).integers(3, SHAPE["vocab_size"], (60, LENGTH)).tolist()
    rows[7] = [5]
    Dataset.from_dict({"input_ids": rows}).to_parquet(tmp_path / "rows.parquet")
    more = ["--data", tmp_path / "rows.parquet", "--save-every", 1000, "--no-packing"]
    monkeypatch.setattr("ladderize.adapt.data.chunks.CHUNK_ROWS", 4)
    command = [argument for argument in arguments(place, *more, steps=12) if argument != place / "ids.npy"]
    command.remove("--data")
    message = last_error(invoke(*command[:2], tmp_path / "out", *command[2:]))
    assert "row 8" in message
    assert "--skip-bad-rows" in message
    outcome = invoke(*command[:2], tmp_path / "out", *command[2:], "--skip-bad-rows")
    assert outcome.code == 0, outcome.stderr
    assert "going on after step" in outcome.stderr
    whole = invoke(*command[:2], tmp_path / "whole", *command[2:], "--skip-bad-rows")
    assert whole.code == 0, whole.stderr
    assert losses_of(tmp_path / "out") == losses_of(tmp_path / "whole")


def test_a_tied_head_that_the_file_has_twice(place, tmp_path):
    from safetensors.torch import save_file

    save_llama(tmp_path / "dense", tie_word_embeddings=True)
    convert_checkpoint(str(tmp_path / "dense"), tmp_path / "both", Recipe(ladder="all"), verify=False)
    path = tmp_path / "both" / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path, metadata={"format": "pt"}
    )
    command = arguments(place, "--train", "all", steps=2)
    command[1] = tmp_path / "both"
    outcome = invoke(*command[:2], tmp_path / "out", *command[2:])
    assert outcome.code == 0, outcome.stderr
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])
    assert not torch.equal(written["lm_head.weight"], tensors["model.embed_tokens.weight"])
    path.unlink()
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path, metadata={"format": "pt"})
    assert "has an lm_head.weight of its own" in last_error(invoke(*command[:2], tmp_path / "another", *command[2:]))


def test_resume_no_begins_anew(place, tmp_path, monkeypatch):
    monkeypatch.setattr(retraining, "write_outcome", lambda *a, **k: (_ for _ in ()).throw(UserError("no outcome")))
    assert "no outcome" in last_error(adapt(place, tmp_path / "out"))
    assert "going on after step 6" in adapt(place, tmp_path / "out").stderr
    assert "going on" not in adapt(place, tmp_path / "out", "--resume", "no").stderr
    (tmp_path / "out.ladderize-work" / "somebody's.txt").write_text("x")
    assert "no folder of unfinished work" in last_error(adapt(place, tmp_path / "out", "--resume", "no"))


def test_states_kept_and_the_best_one_written(place, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingFolder, "remove", lambda self: None)
    values = iter([9.0, 5.0, 4.0, 6.0, 7.0, 8.0, 4.5])

    def score(*arguments, original=training.score):
        scores = original(*arguments)
        return training.Scores(math.log(next(values, 1.0)), scores.divergence, scores.tokens)

    monkeypatch.setattr(training, "score", score)
    document = succeed(place, tmp_path / "out", "--eval-every", 1, "--save-every", 1, "--keep", 2)
    work = tmp_path / "out.ladderize-work"
    assert listing(work) == ["metrics.jsonl", "run.json", "step-00000002", "step-00000005", "step-00000006"]
    assert listing(work / "step-00000002") == ["state.json", "weights.safetensors"]
    assert document["written_step"] == 2
    kept = load_file(work / "step-00000002" / "weights.safetensors")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in kept.items())
    assert document["heldout_perplexity"]["before"] == pytest.approx(9.0)


# --- several processes ---


def launched(place, out, *more, steps=4, **environment):
    command = arguments(place, *more, steps=steps)
    return run_ranks(*command[:2], out, *command[2:], **environment)


def test_two_processes_make_the_steps_of_one(place, tmp_path):
    succeed(place, tmp_path / "one", "--distill-from", place / "dense", steps=4)
    outcome = launched(place, tmp_path / "two", "--distill-from", place / "dense", "--micro-batch-size", 1)
    assert outcome.returncode == 0, outcome.stderr[-2000:]
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-5)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_fsdp2_goes_on_where_one_process_stopped(place, tmp_path, monkeypatch):
    """States are whole tensors under their own names: another number of ranks may go on, and sharded."""
    more = ["--distill-from", place / "dense", "--save-every", 2]
    succeed(place, tmp_path / "one", *more, steps=4)
    with monkeypatch.context() as patch:
        original = Engine.losses

        def losses(self, batch):
            if (tmp_path / "two.ladderize-work" / "step-00000002").is_dir():
                raise RuntimeError("killed")
            return original(self, batch)

        patch.setattr(Engine, "losses", losses)
        assert "killed" in adapt(place, tmp_path / "two", *more, steps=4).stderr
    outcome = launched(
        place, tmp_path / "two", *more, "--micro-batch-size", 1, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2"
    )
    assert outcome.returncode == 0, outcome.stderr[-2000:]
    assert "going on after step 2" in outcome.stderr
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-4)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4, msg=name)


# --- what goes wrong ---


def test_nan_names_the_step_and_the_rows_and_loses_nothing(place, tmp_path, monkeypatch):
    def losses(self, batch, original=Engine.losses):
        sums = original(self, batch)
        return (
            sums * math.nan
            if self.student.training and (tmp_path / "out.ladderize-work" / "step-00000002").is_dir()
            else sums
        )

    succeed(place, tmp_path / "whole", "--save-every", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "losses", losses)
        message = last_error(adapt(place, tmp_path / "out", "--save-every", 2))
    assert "the loss of step 3 is nan; step 3, of " in message
    assert "ids.npy, row" in message
    assert "was not applied; go on from step 2, which is saved in" in message
    assert adapt(place, tmp_path / "out", "--save-every", 2).code == 0
    assert losses_of(tmp_path / "out") == losses_of(tmp_path / "whole")


def test_an_exploding_loss_stops(place, tmp_path, monkeypatch):
    def losses(self, batch, original=Engine.losses):
        taken = next((int(state["step"]) for state in self.optimizer.state.values()), 0)
        return original(self, batch) * (4 if taken in (15, *range(17, 30)) else 1)

    monkeypatch.setattr(Engine, "losses", losses)
    message = last_error(adapt(place, tmp_path / "out", steps=30))
    assert "the loss exploded: " in message  # not in step 16, after which it fell again
    assert "in steps 18 to 20" in message
    assert "lower --lr" in message
    bound = training.explosion_bound([2.0] * 20)
    assert bound == 6.0
    assert training.explosion_bound([3.0] * 20) == 9.0
    assert training.explosion_bound([2.0] * 9) == math.inf


def test_memory_is_counted_and_refused(place, tmp_path, monkeypatch):
    config = json.loads((place / "both" / "config.json").read_text())
    demand = Demand(config, Layout.from_config(config), trained=1000, compute=2, rows=4, seq_len=10, teacher=True)
    parts = demand.parts()
    numbers = sum(parameter.numel() for parameter in ladderize.load(place / "dense").parameters())
    assert parts["parameters"] == 1000 * 4 + (numbers - 1000) * 2
    assert parts["optimizer"] == 2 * parts["gradients"] == 8000
    assert parts["teacher"] == numbers * 2
    assert "--micro-batch-size 1 would fit" in what_would_fit(demand, demand.total - 1, lora_trained=None, on_gpu=False)
    monkeypatch.setattr("ladderize.adapt.retrain.task.available_bytes", lambda device: 500_500_000)
    message = last_error(adapt(place, tmp_path / "out"))
    assert "this needs about 50" in message
    assert "would" in message
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    ("more", "code", "expected"),
    [
        (["--method", "half"], 2, "--method half is not one of full, lora, blocks"),
        (["--samples", "4"], 2, "--samples has no effect with --method full"),
        (["--lora-rank", "4"], 2, "--lora-rank has no effect with --method full"),
        (["--method", "blocks"], 2, "--max-steps has no effect with --method blocks"),
        (["--temperature", "2"], 2, "--temperature has no effect without --distill-from"),
        (["--max-tokens", "9"], 2, "give one of them"),
        (["--schedule", "linear"], 2, "--schedule linear is not one of cosine, wsd, constant"),
        (["--preset", "best"], 2, "--preset best is not one of ladder-paper"),
        (["--heldout", "3"], 2, "--heldout has no effect with --eval-data"),
        (["--lr", "0"], 2, "--lr must be above 0"),
        (["--log-dir", "x"], 2, "--log-dir has no effect without --log-with"),
        (["--log-with", "pigeon"], 1, "--log-with pigeon is not one of tensorboard, wandb, trackio"),
        (["--log-with", "trackio"], 1, "needs the package trackio, which is not installed"),
        (["--seq-len", "65"], 1, "--seq-len 65 is more than the 64 positions"),
        (["--train", "9"], 1, "--train: 9 is out of range"),
        (["--micro-batch-size", "3"], 1, "--micro-batch-size 3 does not divide the 4 rows"),
        (["--batch-size", "99"], 1, "fewer than --batch-size 99"),
        (["--distill-from", "OTHER"], 1, "--distill-from OTHER is not dense"),
        (["--attention", "magic"], 2, "--attention magic is not one of"),
        (["--attention", "flash_attention_2"], 1, "needs the package flash-attn"),
        (["--attention", "flex_attention"], 1, "--attention flex_attention needs a GPU"),
        (
            ["--log-dir", "x", "--log-with", "trackio"],
            2,
            "--log-dir has no effect without --log-with tensorboard or wandb",
        ),
        (["--log-with", ","], 2, "--log-with names no tracker"),
        (["--min-lr", "0.1", "--schedule", "constant"], 2, "--min-lr has no effect with --schedule constant"),
    ],
)
def test_bad_arguments(place, tmp_path, more, code, expected):
    more = [str(place / "upper") if argument == "OTHER" else argument for argument in more]
    outcome = adapt(place, tmp_path / "out", *more)
    assert outcome.code == code, outcome
    assert expected.replace("OTHER", str(place / "upper")) in last_error(outcome)
    assert listing(tmp_path) == []


def test_the_launcher_is_believed_or_refused(place, tmp_path, monkeypatch):
    for variables, expected in (
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed, which adapt does not support"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "FSDP with one process"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision fp16"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}, "--gradient_accumulation_steps has no effect"),
    ):
        with monkeypatch.context() as patch:
            for key, value in variables.items():
                patch.setenv(key, value)
            assert expected in last_error(adapt(place, tmp_path / "out"))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert succeed(place, tmp_path / "out", steps=1)["dtype"] == "bfloat16"


def test_of_fsdp_what_is_here(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(UserError, match="FSDP 1"):
        wants_fsdp(2)
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert wants_fsdp(2)
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    with pytest.raises(UserError, match="--fsdp_offload_params has no effect"):
        wants_fsdp(2)


def test_dense_models_and_missing_budgets_are_refused(place, tmp_path):
    assert "is dense; there is nothing to win back" in one_sentence(adapt(place, tmp_path / "out", model="dense"))
    command = [argument for argument in arguments(place) if argument not in ("--max-steps", 6)]
    assert "say how long to train" in one_sentence(invoke(*command[:2], tmp_path / "out", *command[2:]))
    assert "OUT is missing" in one_sentence(invoke(*command, "--max-steps", 1))
    shown = invoke(*command, "--show-data")
    assert shown.code == 0
    assert "row 1:" in shown.stdout
    assert listing(tmp_path) == []


def test_trained_parameters_have_names_that_files_give_them(place):
    from ladderize.adapt.lora.config import LoraOptions, lora_config

    checkpoint = open_checkpoint(str(place / "both"))
    layout = Layout.from_config(checkpoint.config)
    student = build_student(
        checkpoint, layout, ModelSetup(CPU.device), trained=trained_tensors(checkpoint.tensors, [1], False)
    )
    assert {name for name, _ in trained_parameters(student)} == {
        name for name in checkpoint.tensors if name.startswith("model.layers.1.")
    }
    config = lora_config(checkpoint.config, [1], LoraOptions(rank=2, targets=("o_proj",)))
    lora = build_student(checkpoint, layout, ModelSetup(CPU.device), lora=config, seed=3)
    prefix = "base_model.model.model.layers.1.self_attn.o_proj."
    values = dict(trained_parameters(lora))
    assert set(values) == {f"{prefix}lora_A.weight", f"{prefix}lora_B.weight"}
    assert values[f"{prefix}lora_B.weight"].abs().sum() == 0
    again = dict(trained_parameters(build_student(checkpoint, layout, ModelSetup(CPU.device), lora=config, seed=3)))
    assert torch.equal(values[f"{prefix}lora_A.weight"], again[f"{prefix}lora_A.weight"])
