"""A step of retraining on the simulated GPU: the host waits for the device once, to judge the step before it is
applied, however many micro-batches there are."""

from types import SimpleNamespace

import pytest
import torch
from ladderize.adapt.retrain.hf_model import HFEngine, ModelSetup, build_student, build_teacher
from ladderize.adapt.retrain.options import Objective, RateSchedule
from ladderize.adapt.retrain.tensor_parallel import TPEngine, TPRanks
from ladderize.adapt.retrain.trainer import Trainer

from ladderize.adapt.data.examples import Example
from ladderize.adapt.data.packing import pack
from ladderize.blocks import open_checkpoint
from ladderize.console import SILENT
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime.loader import CheckpointSource
from ladderize.runtime.shards import Shape
from ladderize.runtime.training.model import TPTraining
from ladderize.runtime.training.weights import build_weights
from tests.helpers import SHAPE, fresh_rng
from tests.simulated_gpu.device import DEVICE, SimulatedGpu
from tests.simulated_gpu.groups import Alike, AlikeRanks, collectives
from tests.simulated_gpu.models import LAYERS, RANKS, seed

HOST = torch.device("cpu")
OBJECTIVE = Objective(0.4, 1.5, hidden_weight=0.5)
OPTIONS = SimpleNamespace(
    batch_size=5,
    micro_batch_size=2,
    max_gradient=1e-3,
    seed=3,
    objective=OBJECTIVE,
    schedule=RateSchedule("constant", 1e-3),
)


def some_rows():
    """Of which some hold several texts, some end in padding, and not every token counts."""
    rng = fresh_rng()
    lengths = (12, 11, 7, 5, 9, 3, 12)
    return pack([Example(rng.integers(3, SHAPE["vocab_size"], n), rng.random(n) < 0.7, str(n)) for n in lengths], 12)


def hf_engine(folder, dense, device, gpu):
    checkpoint, setup = open_checkpoint(str(folder)), ModelSetup(device, collecting=True)
    student = build_student(
        checkpoint,
        Layout.from_config(checkpoint.config),
        setup,
        trained=frozenset(checkpoint.tensors),
        temperature=OBJECTIVE.temperature,
    )
    how = {"compute": torch.float32, "sharded": False, "weight_decay": 0.1, "compared": range(LAYERS)}
    return HFEngine(
        student, Ranks(0, 1, device), teacher=build_teacher(open_checkpoint(str(dense)), setup, student), **how
    )


def tp_engine(folder, dense, device, gpu):
    made = Alike(RANKS) if gpu is None else collectives("nccl", gpu)

    def model(folder, trained):
        checkpoint = open_checkpoint(str(folder))
        layout, shape = (
            Layout.from_config(checkpoint.config),
            Shape.from_config(checkpoint.config, tp_size=RANKS, rank=0),
        )
        weights = build_weights(
            lambda dtype: CheckpointSource(checkpoint, dtype, device),
            checkpoint.config,
            shape,
            layout,
            trained=frozenset(checkpoint.tensors) if trained else frozenset(),
            compute=torch.float32,
        )
        return TPTraining(weights, checkpoint.config, layout, made, temperature=OBJECTIVE.temperature)

    ranks = AlikeRanks(0, RANKS, device)
    places = TPRanks(ranks, ranks, Ranks(0, 1, device))
    return TPEngine(
        model(folder, True).train(),
        places,
        made,
        compute=torch.float32,
        weight_decay=0.1,
        teacher=model(dense, False).eval(),
        compared=range(LAYERS),
    )


@pytest.mark.parametrize("make", [hf_engine, tp_engine])
@pytest.mark.parametrize("name", ["ladder", "spd"])
def test_the_host_waits_once(folders, name, make):
    rows = some_rows()
    assert len(rows) == OPTIONS.batch_size
    stream = SimpleNamespace(take=lambda count: rows, place=lambda: None)

    def steps(device, gpu=None):
        """Metrics of two steps, and how often the host has waited in the second: the first makes the moments."""
        trainer = Trainer(make(folders[name], folders["dense"], device, gpu), stream, [], OPTIONS, None, SILENT)
        for _ in range(2):
            if gpu is not None:
                gpu.syncs.clear()
            metrics = trainer.step(0.0, lambda: False)
        return metrics

    expected = steps(HOST)
    with SimulatedGpu(seed(), RANKS) as gpu:
        found = steps(DEVICE, gpu)
        assert gpu.syncs == {"copy to host": 1}
    for key in ("loss", "cross_entropy", "divergence", "hidden_error", "gradient_norm"):
        assert found[key] == pytest.approx(expected[key], rel=1e-2), key
    assert not gpu.problems, gpu.problems[0]
