"""Tensors of files on their way to the simulated GPU, through pinned memory that is used again and again."""

import pytest
import torch
from safetensors.torch import save_file

from ladderize.checkpoint import tensors
from ladderize.checkpoint.reading import read_header
from ladderize.checkpoint.tensors import TensorReader
from tests.simulated_gpu.device import DEVICE, Event, SimulatedGpu
from tests.simulated_gpu.models import seed


@pytest.fixture
def values(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 300)
    made = {
        "scalar": torch.tensor(2.5),
        "vector": torch.randn(7),
        "empty": torch.zeros(0, 4),
        "matrix": torch.randn(40, 12),
        "cube": torch.randn(9, 6, 3).bfloat16(),
    }
    save_file(made, tmp_path / "a.safetensors")
    return made


def read_all(folder, device):
    """Every tensor, whole and in parts, as it is stored and as another dtype."""
    infos = read_header(folder, "a.safetensors")
    with TensorReader(folder) as reader:
        for name, info in infos.items():
            for dtype in (None, torch.float64):
                for dim in (None, 0, 1)[: 1 + len(info.shape)]:
                    part = {} if dim is None else {"dim": dim, "start": info.shape[dim] // 3, "stop": info.shape[dim]}
                    yield name, part, reader.read(info, dtype=dtype, device=device, **part)


def test_parts_of_tensors(values, tmp_path):
    with SimulatedGpu(seed()) as gpu:
        found = list(read_all(tmp_path, DEVICE))
        assert not gpu.syncs, "the host waited for more than the memory that it fills again"
        found = [(name, part, tensor.cpu()) for name, part, tensor in found]
    assert not gpu.problems, gpu.problems[0]
    for name, part, tensor in found:
        whole = values[name].to(tensor.dtype)
        expected = whole.narrow(part["dim"], part["start"], part["stop"] - part["start"]) if part else whole
        assert torch.equal(tensor, expected)


def test_memory_that_is_filled_too_early_is_found(values, tmp_path, monkeypatch):
    monkeypatch.setattr(Event, "synchronize", lambda self: None)
    with SimulatedGpu(seed()):
        found = [
            tensor.cpu() for name, part, tensor in list(read_all(tmp_path, DEVICE)) if name == "matrix" and not part
        ]
    assert not torch.equal(found[0], values["matrix"])
