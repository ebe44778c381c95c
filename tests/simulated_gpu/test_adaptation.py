"""What changes and judges weights on one device, on the simulated GPU: the results are those of the host."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ladderize.adapt.layers import align_layer
from ladderize.adapt.layers.align import align
from ladderize.adapt.layers.assign import assign_layers
from ladderize.adapt.layers.distill import BlockReport, distill
from ladderize.adapt.layers.layer_files import LayerFiles, LayerJob, StudentBlocks
from ladderize.adapt.layers.options import BlockwiseOptions
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks, open_checkpoint
from ladderize.console import SILENT
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from tests.helpers import random_ids
from tests.simulated_gpu.device import DEVICE, SimulatedGpu
from tests.simulated_gpu.models import LAYERS, seed

HOST = torch.device("cpu")
WINDOWS, TOKENS = 8, 16


def windows():
    ids = random_ids(WINDOWS, TOKENS)
    return Windows(ids[: WINDOWS - 2], ids[WINDOWS - 2 :])


def job_of(folder, device, place):
    """Every layer of a converted model, which has the dense one's weights."""
    blocks = Blocks(open_checkpoint(str(folder)), torch.float32, device)
    student = StudentBlocks(blocks.layout, tuple(range(LAYERS)), blocks.weights)
    (place / device.type).mkdir()
    files, ranks = LayerFiles(place / device.type), Ranks(0, 1, device)
    return LayerJob(blocks, blocks, student, blocks.weights, windows(), files, ranks, SILENT)


def on_both(compute):
    """What ``compute(device)`` gives on the host and on the simulated GPU, and that GPU."""
    expected = compute(HOST)
    with SimulatedGpu(seed()) as gpu:
        found = compute(DEVICE)
    assert not gpu.problems, gpu.problems[0]
    assert not gpu.recorded
    return found, expected, gpu


def test_blocks(folders, tmp_path):
    data = windows()

    def distilled(device):
        job = replace(job_of(folders["both"], device, tmp_path), windows=data)
        distill(job, BlockwiseOptions("a.npy", epochs=2, lr=1e-3))
        return job.files

    found, expected, _ = on_both(distilled)
    for layer in range(LAYERS):
        own, theirs = found.report(BlockReport, layer), expected.report(BlockReport, layer)
        # whether training helps at all on these few random windows is drawn; that it does the same is not
        assert len({loss for _, loss in theirs.curve}) > 1
        np.testing.assert_allclose(own.curve, theirs.curve, rtol=1e-3)
        assert own.loss_after == pytest.approx(theirs.loss_after, rel=1e-3)
        weights = found.weights(layer)
        for name, tensor in expected.weights(layer).items():
            assert (weights[name] - tensor).norm() <= 1e-3 * tensor.norm(), name


def test_assignment(folders):
    data, layout = windows(), Layout.from_layers(LAYERS, spd=range(LAYERS), sync_tp_size=2)

    def assigned(device):
        blocks = Blocks(open_checkpoint(str(folders["dense"])), torch.float32, device)
        return assign_layers(blocks, layout, ("heads", "neurons"), data)

    found, expected, _ = on_both(assigned)
    for layer in range(LAYERS):
        own, theirs = found.report[layer], expected.report[layer]
        assert sorted(found.heads[layer]) == sorted(expected.heads[layer])
        assert sorted(found.neurons[layer]) == sorted(expected.neurons[layer])
        for name in ("error_before", "error_after"):
            assert getattr(own, name) == pytest.approx(getattr(theirs, name), rel=1e-3)


def test_align_waits_for_no_batch(folders, tmp_path, monkeypatch):
    """The states lie on the GPU: how often the host waits does not depend on the number of batches."""

    def waits(place):
        place.mkdir()
        with SimulatedGpu(seed()) as gpu:
            align(job_of(folders["both"], DEVICE, place), ridges=[1e-3])  # rounding decides how many others are tried
        return sum(gpu.syncs.values())

    whole = waits(tmp_path / "whole")
    monkeypatch.setattr(align_layer, "TOKENS_AT_ONCE", 1)
    assert waits(tmp_path / "one by one") == whole
