"""What fits into memory: the estimate, and what is chosen to make a training fit."""

import dataclasses
import json
import random
import re

import numpy as np
import pytest
import torch
from ladderize.adapt.retrain import memory_estimate
from ladderize.adapt.retrain import run as retraining
from ladderize.adapt.retrain.memory_estimate import Cut, Demand, cuts_of, demand_of, fit_memory, fitted, remedies
from ladderize.adapt.retrain.options import Budget, Objective, RetrainOptions
from ladderize.adapt.retrain.task import open_task

import ladderize
from ladderize.adapt.data_specs import parse_specs
from ladderize.console import SILENT, human_bytes
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.errors import UserError
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime import launch
from ladderize.runtime.schedule import Schedule
from tests.helpers import CLIPPED, listing, one_sentence, save_llama
from tests.retrain.commands import CPU, adapt, losses_of, stopped_before_the_end, succeed
from tests.retrain.peaks import of_ranks, peak_and_estimate
from tests.simulated_gpu import device
from tests.simulated_gpu.device import DEVICE, SimulatedGpu
from tests.simulated_gpu.groups import AlikeRanks

ROWS, TOKENS = 4, 192  # of a micro-batch


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """Models of which layers, ends and activations all count, and their data."""
    folder = tmp_path_factory.mktemp("larger")
    shape = {"hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 4, "vocab_size": 1024}
    save_llama(folder / "dense", **shape, max_position_embeddings=TOKENS, num_attention_heads=4, head_dim=32)
    recipes = {"ladder": Recipe(ladder="all"), "upper": Recipe(ladder="2:")}
    for name, recipe in {**recipes, "spd": Recipe(spd="all", sync_tp_size=4)}.items():
        convert_checkpoint(str(folder / "dense"), folder / name, recipe, verify=False)
    np.save(folder / "ids.npy", np.random.randint(3, 1000, (40, TOKENS)))
    np.save(folder / "short.npy", np.random.randint(3, 1000, (80, TOKENS // 2)))  # two of which share a row
    return folder


def options(larger, data="ids.npy", **more):
    given = {"budget": Budget(steps=2), "batch_size": 2 * ROWS, "micro_batch_size": ROWS, "seq_len": TOKENS}
    given |= {"distill_from": str(larger / "dense"), "objective": Objective(1.0), "heldout": 0, "write": "last"}
    return RetrainOptions(data=parse_specs([str(larger / data)]), device="cpu", **{**given, **more})


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("ladder", {}),
        ("upper", {"objective": Objective(0.5, hidden_weight=1.0), "data": "short.npy"}),
        ("spd", {"gradient_checkpointing": True}),
        ("ladder", {"method": "lora", "gradient_checkpointing": True}),
        ("upper", {"method": "lora", "distill_from": None, "objective": Objective()}),
    ],
)
def test_the_estimate_is_the_peak_of_a_step(larger, tmp_path, model, more):
    dtype = random.choice(["float32", "bfloat16"])
    peak, estimate = peak_and_estimate(CPU, larger / model, tmp_path / "out", options(larger, dtype=dtype, **more))
    assert peak <= estimate <= 1.4 * peak, dtype


def test_the_estimate_is_the_peak_of_a_rank(larger, tmp_path):
    """Data parallel, with FSDP2, and tensor parallel."""
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    narrow = options(larger, dtype="bfloat16", batch_size=4 * ROWS)
    again, split = (dataclasses.replace(narrow, **how) for how in ({"gradient_checkpointing": True}, {"tp_size": 2}))
    runs = [(narrow, {}), (again, fsdp), (split, {})]
    runs = [(larger / "ladder", tmp_path / str(number), *run) for number, run in enumerate(runs)]
    found = launch.run(of_ranks, runs, tp_size=2, device="cpu", threads=1)
    for run, (peak, estimate) in zip(runs, found, strict=True):
        assert peak <= estimate <= 1.4 * peak, run


def test_memory_is_counted_in_parts(place):
    config = json.loads((place / "both" / "config.json").read_text())
    demand = Demand(config, Layout.from_config(config), trained=1000, compute=2, rows=4, seq_len=10, teacher=True)
    parts = demand.parts()
    numbers = sum(parameter.numel() for parameter in ladderize.load(place / "dense").parameters())
    assert parts["parameters"] == 1000 * 4 + (numbers - 1000) * 2
    assert parts["optimizer"] == 2 * parts["gradients"] == 8000
    assert parts["teacher"] == numbers * 2
    assert parts["compared outputs"] == 0
    compared = dataclasses.replace(demand, compared=3).parts()
    assert compared["compared outputs"] == 4 * 10 * config["hidden_size"] * (3 * 4 * 2 + 3 * 4)
    assert {**compared, "compared outputs": 0} == parts


# ---- what is chosen ----


def task_of(larger, ranks=1, **more):
    return open_task(str(larger / "ladder"), options(larger, **more), Ranks(0, ranks, torch.device("cpu"), ranks), None)


def test_what_was_left_open_is_chosen(larger):
    task = task_of(larger, micro_batch_size=None)
    cuts = cuts_of(task)
    assert cuts == [Cut(rows, again) for again in (False, True) for rows in (8, 4, 2, 1)]
    totals = [demand_of(cut.apply(task)).total for cut in cuts]
    for cut, total in zip(cuts, totals, strict=True):
        chosen = fitted(task, total)
        assert demand_of(chosen).total <= total
        assert Cut.of(chosen) == next(other for other, size in zip(cuts, totals, strict=True) if size <= total)
        assert Cut.of(fitted(task, total, cut)) == cut  # as it began
    assert Cut.of(fitted(task, min(totals) - 1)) == cuts[-1]
    assert cuts_of(task_of(larger, gradient_checkpointing=True)) == [Cut(ROWS, True)]
    assert cuts_of(task_of(larger, gradient_checkpointing=False)) == [Cut(ROWS, False)]
    domino = task_of(larger, micro_batch_size=None, tp_size=2, schedule=Schedule("domino", chunks=3), ranks=2)
    assert [cut.micro_batch_size for cut in cuts_of(domino)] == 2 * [8, 4, 1]  # two rows cannot be cut in three


def test_what_would_fit_is_said_with_figures(larger):
    task = task_of(larger)
    open_one = dataclasses.replace(task, options=dataclasses.replace(task.options, micro_batch_size=None))
    leanest = demand_of(Cut(1, True).apply(open_one)).total
    assert f"leaving the micro-batch and checkpointing open: {human_bytes(leanest)}" in remedies(
        task, leanest, on_gpu=False
    )
    again = Cut(ROWS, True).apply(task)
    kinds = [dataclasses.replace(again, options=dataclasses.replace(again.options, tp_size=2))]
    kinds += [dataclasses.replace(again, data_ranks=8, sharded=True)]
    kinds += [dataclasses.replace(again, options=dataclasses.replace(again.options, method="lora"))]
    enough = max(demand_of(kind).total for kind in kinds)
    said = remedies(task, enough, on_gpu=True)
    for words in (
        "--tp-size 2",
        r"FSDP2 over [248] processes \(.*examples/accelerate/fsdp2_8_gpus.yaml\)",
        "--method lora",
    ):
        assert re.search(rf"; {words}: \d+ MB", said), words
    assert said.endswith(" for each process would fit")
    assert "processes" not in remedies(task, enough, on_gpu=False)
    assert remedies(task, 1000, on_gpu=True) == "devices with more memory would be needed"


def test_what_is_free_on_a_gpu_decides(larger, tmp_path, monkeypatch):
    """Of what others hold there nothing is counted on, and of a smaller GPU its own size."""
    open_one = task_of(larger, micro_batch_size=None)
    cuts = cuts_of(open_one)
    sizes = [demand_of(cut.apply(open_one)).total for cut in cuts]
    with SimulatedGpu(0) as gpu:
        ranks = AlikeRanks(0, 1, DEVICE)

        def fit():
            return Cut.of(fit_memory(open_one, ranks, tmp_path, SILENT))

        assert fit() == cuts[0]
        monkeypatch.setattr(device, "MEMORY_BYTES", gpu.peak + min(sizes))
        assert fit() == cuts[sizes.index(min(sizes))]
        held = torch.zeros(1 << 16, device=DEVICE)
        with pytest.raises(UserError, match=r"are free; .*--tp-size 2: \d+ MB; FSDP2 over 2 processes"):
            fit()
        del held
        assert fit() == cuts[sizes.index(min(sizes))]


def test_a_training_that_does_not_fit_is_cut_and_goes_on_so(place, tmp_path, monkeypatch):
    distil = ["--distill-from", place / "dense", "--save-every", 2, "--lr-schedule", "constant", "--warmup-steps", 0]
    distil += CLIPPED
    whole = succeed(place, tmp_path / "whole", *distil)
    assert whole["cut"] == {"micro_batch_size": 4, "gradient_checkpointing": False}
    leanest = []

    def fit(task, *given, original=memory_estimate.fit_memory):
        leanest.append(demand_of(cuts_of(task)[-1].apply(task)).total)
        monkeypatch.setattr(memory_estimate, "available_bytes", lambda device: leanest[0])
        return original(task, *given)

    monkeypatch.setattr(retraining, "fit_memory", fit)
    said = stopped_before_the_end(place, tmp_path / "out", *distil, steps=2)
    assert "computed with --micro-batch-size 1 --gradient-checkpointing, to fit into the " in said
    monkeypatch.undo()
    outcome = adapt(place, tmp_path / "out", *distil)
    assert "computed with --micro-batch-size 1 --gradient-checkpointing, as the run began;" in outcome.stderr
    document = json.loads((tmp_path / "out" / "adaptation.json").read_text())
    assert document["cut"] == {"micro_batch_size": 1, "gradient_checkpointing": True}
    assert losses_of(tmp_path / "out") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-4)
    monkeypatch.setattr(memory_estimate, "available_bytes", lambda device: leanest[0])
    message = one_sentence(adapt(place, tmp_path / "other", *distil, "--micro-batch-size", 4))
    assert re.match(r"Error: this needs about .* for each process, with --micro-batch-size 4 --gradient-check", message)
    assert "leaving the micro-batch and checkpointing open: " in message
    assert listing(tmp_path) == ["out", "whole"]
