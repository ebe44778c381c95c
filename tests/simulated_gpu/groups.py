"""Small models, and a group on the simulated GPU and the same on the host for comparison: every rank sends what this
one sends."""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from ladderize.convert.remote_code.configuration_ladderized import LadderizedLlamaConfig
from ladderize.convert.remote_code.modeling_ladderized import LadderizedLlamaForCausalLM
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.base import Collectives, Handle
from ladderize.runtime.collectives.emulated import EmulatedOnGpu
from ladderize.runtime.collectives.gpu import Nccl, SymmetricMemory
from ladderize.runtime.collectives.links import Link
from tests.helpers import BIASES, SHAPE, randomise
from tests.simulated_gpu.device import DEVICE, HANDLERS, SimTensor, SimulatedGpu

RANKS = 2  # of the groups that are simulated
LAYERS = 2
LAYOUTS = {
    "dense": {},
    "ladder": {"ladder": range(LAYERS)},
    "spd": {"spd": range(LAYERS), "sync_tp_size": 4},
    "both": {"ladder": range(LAYERS), "spd": range(LAYERS), "sync_tp_size": 2},
    "delayed": {"delayed": range(LAYERS), "spd": [1], "sync_tp_size": 8},
}


def seed() -> int:
    return int(torch.randint(1 << 30, ()))


def save_model(name: str, folder: Path) -> Path:
    """A random model of one of LAYOUTS; returns its folder."""
    layout = Layout.from_layers(LAYERS, **LAYOUTS[name]).to_config()
    sizes = {**SHAPE, "num_hidden_layers": LAYERS, "max_position_embeddings": 600, **(BIASES if name == "spd" else {})}
    model = LadderizedLlamaForCausalLM(LadderizedLlamaConfig(**sizes, **layout))
    randomise(model, seed())
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class AlikeRanks(Ranks):
    """Rank 0 of a group where every rank says the same."""

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def broadcast(self, value: Any) -> Any:
        return value

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values.mul_(self.size)


class Alike(Collectives):
    """On the host: sums of equal messages."""

    def all_reduce_async(self, x: torch.Tensor) -> Handle:
        return Handle(lambda: x * self.ranks)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.ranks, -1)


class Store:
    timeout = datetime.timedelta(hours=2)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self.timeout = timeout


@contextmanager
def process_group(store: Store | None = None) -> Iterator[None]:
    """What symmetric memory asks of torch's process groups, and the rendezvous of a buffer."""
    own = SimpleNamespace(group_name="0")
    store = store or Store()
    with (
        mock.patch.object(dist, "group", SimpleNamespace(WORLD=own)),
        mock.patch.object(dist.distributed_c10d, "_get_process_group_store", return_value=store),
        mock.patch.object(symm_mem, "empty", symmetric_empty),
        mock.patch.object(symm_mem, "rendezvous", symmetric_handle),
    ):
        yield


def symmetric_empty(size: int, *, dtype: torch.dtype, device: torch.device) -> SimTensor:
    made = torch.empty(size, dtype=dtype, device=device)
    assert isinstance(made, SimTensor)
    made.memory.gpu.symmetric.add(made.memory.pointer)
    return made


def symmetric_handle(buffer: SimTensor, group: str) -> Any:
    gpu = buffer.memory.gpu
    if buffer.memory.pointer not in gpu.symmetric:
        raise RuntimeError("not allocated with symm_mem.empty")
    return SimpleNamespace(multicast_ptr=gpu.multicast)


def collectives(name: str, gpu: SimulatedGpu) -> Collectives:
    """A backend of GPUs for as many ranks as ``gpu`` says. name: a backend's, or multicast."""
    group = AlikeRanks(0, gpu.ranks, DEVICE)
    if name == "emulated":
        return EmulatedOnGpu(gpu.ranks, Link("test", 10.0, 1.0), DEVICE)
    if name == "nccl":
        return Nccl(group)
    gpu.multicast = int(name == "multicast")
    with process_group():
        made = SymmetricMemory(group)
    assert made.multicast == (name == "multicast")
    return made


# ---- operators of symmetric memory; their signatures are the installed torch's ----


def _one_shot_copy(gpu: SimulatedGpu, buffer: SimTensor, own: SimTensor, op: str, group: str, out: SimTensor) -> Any:
    assert (op, buffer.numel(), buffer.dtype) == ("sum", own.numel(), own.dtype)
    assert buffer.memory.pointer in gpu.symmetric
    staged, values, into = buffer.backing, own.backing, out.backing
    writes = {buffer.memory.pointer, out.memory.pointer}

    def run() -> None:
        staged.view(-1).copy_(values.reshape(-1))
        into.copy_(values * gpu.ranks)

    gpu.launch("one_shot_all_reduce_copy", run, {own.memory.pointer}, writes)
    return out


def _multimem(gpu: SimulatedGpu, message: SimTensor, op: str, group: str, out: SimTensor) -> Any:
    assert op == "sum"
    assert gpu.multicast
    assert message.is_contiguous()
    assert message.memory.pointer in gpu.symmetric
    into, values, reads, writes = out.backing, message.backing, {message.memory.pointer}, {out.memory.pointer}
    gpu.launch("multimem_one_shot_all_reduce", lambda: into.copy_(values * gpu.ranks), reads, writes)
    return out


HANDLERS[torch.ops.symm_mem.one_shot_all_reduce_copy_out] = _one_shot_copy
HANDLERS[torch.ops.symm_mem.multimem_one_shot_all_reduce_out] = _multimem
