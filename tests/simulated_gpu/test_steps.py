"""Training on the simulated GPU: gradients are those of the host, which waits once in a step of retraining, to judge it
before it is applied, and not once more for each batch of an alignment."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from ladderize.adapt.layers.align import align
from ladderize.adapt.layers.layer_files import LayerFiles, LayerJob
from ladderize.adapt.layers.options import AlignOptions
from ladderize.adapt.layers.windows import Windows
from ladderize.adapt.options import Objective
from ladderize.adapt.train.loop import Loop, micro_batches
from ladderize.adapt.train.run import open_accelerator, reset_accelerate
from ladderize.adapt.train.teacher_cache import answer
from ladderize.adapt.train.tensor_parallel import TensorParallelTraining
from ladderize.adapt.train.training_model import HFTraining, make_student, make_teacher, open_model, trained_tensors
from ladderize.blocks import Blocks
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.console import SILENT
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.training import outcome_of, step_opener
from ladderize.runtime.loader import CheckpointSource
from ladderize.runtime.schedule import SEQUENTIAL, Schedule
from ladderize.runtime.shards import Shape
from ladderize.runtime.spec import checkpoint_spec
from ladderize.runtime.training.batch import ANSWERS, LIKELIEST, Batch
from ladderize.runtime.training.model import TPTraining
from ladderize.runtime.training.weights import build_weights
from tests.adapt_data.rows import packed
from tests.helpers import SHAPE, fresh_rng, random_ids
from tests.simulated_gpu.device import DEVICE, SimulatedGpu
from tests.simulated_gpu.groups import LAYERS, LAYOUTS, RANKS, Alike, AlikeRanks, collectives, seed

HOST = torch.device("cpu")
OPTIONS = SimpleNamespace(max_grad_norm=1e-3, seed=3, objective=Objective(0.4))
PACE = SimpleNamespace(batch_size=6, micro_batch_size=2, rate=lambda *given: 1e-3, options=OPTIONS)


def some_rows():
    """Of which some hold several texts, some end in padding, and not every token counts."""
    rng, lengths = fresh_rng(), (12, 11, 7, 5, 9, 3, 12, 10)
    texts, scored = ([rng.integers(3, SHAPE["vocab_size"], n) for n in lengths], [rng.random(n) < 0.7 for n in lengths])
    return packed(texts, scored, 12)


def random_answers(row):
    targets = torch.tensor([target for target in row["targets"] if target >= 0], dtype=torch.long)
    likeliest, answers = answer(torch.randn(len(targets), SHAPE["vocab_size"]), targets)
    return {LIKELIEST: likeliest, ANSWERS: answers}


class AlikeAccelerator:
    """What training asks of Accelerate, for the first of ranks that all say the same: Accelerate's own would have to
    join a group."""

    process_index, num_processes = 0, RANKS
    gradient_accumulation_steps = 1

    def __init__(self, device):
        self.device = device

    def accumulate(self, model):
        return contextlib.nullcontext()

    def backward(self, loss):
        (loss / self.gradient_accumulation_steps).backward()

    def reduce(self, values, reduction):
        assert reduction == "sum"
        return values * RANKS


@contextlib.contextmanager
def alone(folder, dense, device, gpu):
    """The Hugging Face model in training beside its teacher, in float32, on an Accelerator of the device."""
    reset_accelerate()
    try:
        accelerator = open_accelerator(SimpleNamespace(device=device.type, log_with=()))
        assert accelerator.device.type == device.type
        checkpoint, teacher = open_checkpoint(str(folder)), open_checkpoint(str(dense))
        model = open_model(checkpoint, Layout.from_config(checkpoint.config), device, torch.float32)
        student = make_student(model, torch.float32, trained=trained_tensors(checkpoint.tensors, range(LAYERS), True))
        taught = make_teacher(open_model(teacher, Layout.dense(LAYERS), device, torch.float32), torch.float32, student)
        yield HFTraining(accelerator, student, taught, {})
    finally:
        reset_accelerate()


@contextlib.contextmanager
def tensor_parallel(folder, dense, device, gpu):
    made = Alike(RANKS) if gpu is None else collectives("nccl", gpu)

    def model(folder, trained):
        checkpoint = open_checkpoint(str(folder))
        layout = Layout.from_config(checkpoint.config)
        shape = Shape.from_config(checkpoint.config, tp_size=RANKS, rank=0)
        weights = build_weights(
            lambda dtype: CheckpointSource(checkpoint, dtype, device).read, checkpoint.config, shape, layout,
            trained=frozenset(checkpoint.tensors) if trained else frozenset(), compute=torch.float32,
        )  # fmt: skip
        return TPTraining(weights, checkpoint.config, layout, made)

    student, teacher = model(folder, True).train(), model(dense, False).eval()
    ranks = Ranks(0, 1, device), AlikeRanks(0, RANKS, device)
    yield TensorParallelTraining(AlikeAccelerator(device), student, teacher, made, *ranks, {})


@pytest.mark.parametrize("make", [alone, tensor_parallel])
@pytest.mark.parametrize("name", ["ladder", "spd", "answers"])
def test_the_host_waits_once(folders, monkeypatch, name, make):
    """Answers: a dense model's, that the rows bring."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # transformers' own threads do not see the simulated GPU
    rows = some_rows()
    assert len(rows) == PACE.batch_size
    if name == "answers":
        rows = [row | random_answers(row) for row in rows]

    def steps(device, gpu=None):
        """Metrics of two steps, and how often the host has waited in the second: the first makes the moments."""
        with make(folders.get(name, folders["spd"]), folders["dense"], device, gpu) as model:
            if name == "answers":
                model.teacher = None
            loop, batches = Loop(model, rows, [], PACE, None, SILENT), micro_batches(rows, PACE, model, 0)
            loop.accelerator.gradient_accumulation_steps = PACE.batch_size // PACE.micro_batch_size
            for _ in range(2):
                if gpu is not None:
                    gpu.syncs.clear()
                metrics = loop.step(batches, 0.0)
        return metrics

    expected = steps(HOST)
    with SimulatedGpu(seed(), RANKS) as gpu:
        found = steps(DEVICE, gpu)
        assert gpu.syncs == {"copy to host": 1}
    for key in ("loss", "cross_entropy", "divergence", "gradient_norm"):
        assert found[key] == pytest.approx(expected[key], rel=1e-2), key


def test_align_waits_for_no_batch(folders, tmp_path, monkeypatch):
    """The states lie on the GPU."""
    ids = random_ids(8, 16)
    # rounding decides how many others are tried
    monkeypatch.setattr("ladderize.adapt.layers.align.RIDGES", [1e-3])

    def waits(place):
        place.mkdir()
        with SimulatedGpu(seed()) as gpu:
            blocks = Blocks(open_checkpoint(str(folders["both"])), torch.float32, DEVICE)
            files, ranks = LayerFiles(place), Ranks(0, 1, DEVICE)
            windows, weights = Windows(ids[:6], ids[6:]), blocks.weights
            job = LayerJob(blocks, blocks, blocks.layout, tuple(range(LAYERS)), weights, weights, windows, ranks, files)
            align(job, AlignOptions("a.npy"))
        return sum(gpu.syncs.values())

    whole = waits(tmp_path / "whole")
    monkeypatch.setattr("ladderize.adapt.layers.align.TOKENS_AT_ONCE", 1)
    assert waits(tmp_path / "one by one") == whole


def outcome(folder, device, schedule, backend):
    spec, group = checkpoint_spec(str(folder), tp_size=RANKS), Ranks(0, 1, device)
    batch = Batch.random(spec.config["vocab_size"], 3, 7, 0, device)
    return outcome_of(step_opener(group, RANKS)(spec, schedule, backend, batch))


@pytest.mark.parametrize("schedule", [SEQUENTIAL, Schedule("domino", 3)], ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients(folders, name, schedule):
    expected = outcome(folders[name], HOST, SEQUENTIAL, Alike(RANKS))
    with SimulatedGpu(seed(), RANKS) as gpu:
        found = outcome(folders[name], DEVICE, schedule, collectives("nccl", gpu))
        assert found.loss == pytest.approx(expected.loss, rel=1e-4)
        for key, gradient in expected.gradients.items():
            own = found.gradients[key].cpu()
            assert (own - gradient).norm() <= 1e-3 * gradient.norm().clamp_min(1e-3 * expected.norm), key
