"""Variables of launchers, and the device and dtype to compute in."""

import ctypes
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ladderize.blocks import compute_dtype
from ladderize.errors import UserError
from ladderize.ranks.environment import ALONE, Place, already_started, launched, started_rank_variables
from ladderize.ranks.group import MEETING_TIMEOUT, join_group, join_ranks, rank_device
from tests import warm
from tests.helpers import ROOT, refusal

PAIR = {"WORLD_SIZE": "2", "RANK": "0"}
# Joins the group that its variables name, within so many seconds, and prints the ranks that are there.
JOIN = """
import sys
from datetime import timedelta
from ladderize.boundary import error_boundary
from ladderize.ranks import group
group.MEETING_TIMEOUT = timedelta(seconds=float(sys.argv[1]))
with error_boundary(False):
    ranks = group.join_ranks("cpu")
    print(ranks.gather(ranks.rank))
"""


def test_without_a_launcher_a_process_is_alone():
    assert launched() == launched({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": ""}) == ALONE
    assert launched({"LOCAL_WORLD_SIZE": "2"}) == ALONE  # vLLM's own
    assert launched({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}) == ALONE
    assert not already_started()
    ranks = join_ranks("cpu")
    assert (ranks.rank, ranks.size, ranks.local_size, ranks.is_main) == (0, 1, 1, True)
    assert ranks.gather("x") == ["x"]
    assert ranks.broadcast("x") == "x"


def test_a_started_rank_reads_what_it_was_given():
    place = Place(rank=3, size=4, local_rank=1, local_size=2)
    variables = started_rank_variables(place, {})
    assert launched(variables) == place
    del variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"]  # torchrun says them, other launchers may not
    assert launched(variables) == Place(3, 4, 3, 4)


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "4"},
        {"RANK": "1", "WORLD_SIZE": "1"},
        {**PAIR, "WORLD_SIZE": "1e9"},
        {**PAIR, "LOCAL_WORLD_SIZE": "3"},
    ],
    ids=str,
)
def test_nonsense_is_refused_by_every_command(tmp_path, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    message = refusal("inspect", tmp_path)
    assert all(f"{name}={value}" in message for name, value in variables.items())


@pytest.mark.parametrize(("local_rank", "gpus", "index"), [(3, 4, 3), (3, 1, 0), (0, 2, 0), (2, 2, None), (7, 4, None)])
def test_two_ranks_never_get_one_gpu_in_silence(monkeypatch, local_rank, gpus, index):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    if index is None:
        with pytest.raises(UserError, match=f"process {local_rank} of its machine, .* torch sees {gpus} GPUs"):
            rank_device("cuda", local_rank)
    else:
        assert rank_device("cuda", local_rank) == torch.device("cuda", index)


@pytest.mark.parametrize(("set_to", "joined_with"), [(None, "0"), ("1", "1")])
def test_nccl_registers_no_messages_of_graphs_unless_asked_to(monkeypatch, set_to, joined_with):
    def join(*_, **__):
        assert os.environ["NCCL_GRAPH_REGISTER"] == joined_with
        raise ValueError("as far as this test goes")

    environment = {} if set_to is None else {"NCCL_GRAPH_REGISTER": set_to}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(dist, "init_process_group", join)
    with pytest.raises(UserError, match="as far as this test goes"):
        join_group(Place(1, 2, 1, 2), "cuda", timeout=MEETING_TIMEOUT)


def start(rank, port, seconds, **variables):
    given = {**PAIR, "RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), **variables}
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **given}
    return warm.WarmProcess([sys.executable, "-c", JOIN, seconds], cwd=ROOT, env=environment)


@pytest.mark.parametrize(("rank", "variables"), [(1, {}), (0, {"taken": "yes"})])
def test_a_rank_that_finds_nobody_says_so(rank, variables):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1] if variables.pop("taken", None) else warm.free_port()
        process = start(rank, port, 1, **variables)
        stderr = process.communicate()[1]
    assert process.returncode == 1
    assert f"Error: rank {rank} of 2 does not find the others (" in stderr
    assert stderr.count("\n") == 1


FAULTS = """
import resource, torch
from ladderize.ranks.device import set_up_heap
set_up_heap()
for count in (16, 4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        torch.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another malloc than glibc's")
def test_a_freed_tensor_is_memory_of_the_next():
    """After a few, that is. 64 MiB have 16,384 pages, each of which would be one fault."""
    process = warm.WarmProcess([sys.executable, "-c", FAULTS], cwd=ROOT)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert int(stdout) < 1000


HEAP = """
import pathlib, sys, torch
from ladderize.ranks import device
device.OVERCOMMIT = pathlib.Path(sys.argv[1])
def kilobytes(file, name):
    [line] = (line for line in open(f"/proc/self/{file}") if line.startswith(name))
    return int(line.split()[1])
huge, addresses = kilobytes("smaps_rollup", "AnonHugePages"), kilobytes("status", "VmData")
for _ in range(2):
    device.set_up_heap()
tensors = [torch.ones(1 << 18) for _ in range(64)]
print(kilobytes("smaps_rollup", "AnonHugePages") - huge, kilobytes("status", "VmData") - addresses)
"""


def heap_of(tmp_path: Path, mode: str) -> tuple[int, int]:
    """Return by how much huge pages and addresses grow, in KiB, for 64 tensors of 1 MiB (of which none would get a page
    of 2 MiB for itself)."""
    (tmp_path / "mode").write_text(f"{mode}\n")
    process = warm.WarmProcess([sys.executable, "-c", HEAP, str(tmp_path / "mode")], cwd=ROOT)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    huge, addresses = map(int, stdout.split())
    return huge, addresses


def test_small_tensors_lie_in_huge_pages(tmp_path):
    offered = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not offered.is_file() or "[never]" in offered.read_text():
        pytest.skip("this system offers no huge pages")
    assert heap_of(tmp_path, "0")[0] >= 50 << 10


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="no Linux")
def test_a_heap_takes_no_addresses_where_they_count_as_memory(tmp_path):
    """It would take all that is left."""
    assert heap_of(tmp_path, "2")[1] < 256 << 10 < heap_of(tmp_path, "0")[1]


STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float32, "float16": torch.bfloat16}


def test_one_policy_for_the_dtype():
    assert {stored: compute_dtype("auto", stored) for stored in STORED} == STORED
    assert compute_dtype("float32", "bfloat16") == torch.float32
