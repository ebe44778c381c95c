"""Training with tensor parallelism on the simulated GPU: loss and gradients are those of the host."""

import pytest
import torch

from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.training import outcome_of, step_opener
from ladderize.runtime.schedule import SEQUENTIAL, Schedule
from ladderize.runtime.spec import checkpoint_spec
from ladderize.runtime.training.batch import Batch
from tests.simulated_gpu.device import DEVICE, SimulatedGpu
from tests.simulated_gpu.groups import LAYOUTS, RANKS, Alike, collectives, seed

HOST = torch.device("cpu")


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
