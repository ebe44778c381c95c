"""Files of tensors: every kind is written, and a file that cannot be written is not left."""

import errno
import os
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ladderize.checkpoint.tensors import locate_tensors, write_tensors
from ladderize.errors import UserError
from tests.helpers import listing


def infos_of(tensors):
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def test_tensors_of_every_kind_are_written(tmp_path):
    tensors = {
        "step": torch.tensor(7), "odd": torch.arange(5, dtype=torch.uint8),
        "moments": torch.randn(3, 4, 5).transpose(0, 2), "half": torch.randn(6, 2).bfloat16()[::2],
        "parameter": torch.nn.Parameter(torch.randn(3)), "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]), "wide": torch.randn(2, dtype=torch.float64),
        "scalar": torch.tensor(2.5, dtype=torch.float16),
    }  # fmt: skip
    path, asked = tmp_path / "x.safetensors", []

    def produce(name):
        asked.append(name)
        return tensors[name]

    write_tensors(path, infos_of(tensors), produce)
    assert sorted(asked) == sorted(tensors)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)
    for info in locate_tensors(path).values():
        assert info.file == str(path)
        assert info.start % tensors[info.name].dtype.itemsize == 0


def test_a_file_that_cannot_be_written_is_not_left(tmp_path, monkeypatch):
    path, tensors = tmp_path / "x.safetensors", {"a": torch.ones(3)}
    with pytest.raises(ValueError, match=r"a was declared as torch.float32 \[3\], but is torch.float32 \[2\]"):
        write_tensors(path, infos_of(tensors), lambda name: torch.ones(2))
    with pytest.raises(UserError, match="cannot be written .*no such file or directory"):
        write_tensors(tmp_path / "nowhere" / "x", infos_of(tensors), tensors.__getitem__)

    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(UserError, match="x.safetensors cannot be written .no space left on device.; nothing was left"):
        write_tensors(path, infos_of(tensors), tensors.__getitem__)
    assert listing(tmp_path) == []
