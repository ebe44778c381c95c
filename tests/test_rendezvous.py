"""Variables of launchers that make no sense, and ranks that do not find each other: one sentence, and soon."""

import itertools
import os
import socket
import sys

import pytest
import torch

from ladderize.errors import UserError
from ladderize.ranks.environment import STARTERS, launch_variables, launched
from ladderize.ranks.group import rank_device
from tests import warm
from tests.helpers import invoke, one_sentence

HALF = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
LAUNCHER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
# Says that it has started; when it may go, joins the group that its variables name, and prints what all ranks say.
JOIN = """
import os, sys
from pathlib import Path
from ladderize.boundary import error_boundary
from ladderize.ranks.group import join_ranks
from tests.warm import wait_until
place = Path(sys.argv[1])
(place / os.environ["RANK"]).touch()
wait_until((place / "go").exists)
with error_boundary(False):
    ranks = join_ranks("cpu")
    print(ranks.gather(ranks.rank))
"""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is 4, but RANK is not set"),
        ({"RANK": "0"}, "RANK is set, but WORLD_SIZE is not"),
        ({"RANK": "1"}, "RANK is set, but WORLD_SIZE is not"),
        ({**HALF, "RANK": "2"}, "RANK is 2, but must be below WORLD_SIZE, which is 2"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK is 1, but must be below WORLD_SIZE"),
        ({**HALF, "RANK": "-1"}, "RANK is '-1', but must be a whole number from 0"),
        ({**HALF, "RANK": "one"}, "RANK is 'one', but must be a whole number"),
        ({**HALF, "WORLD_SIZE": "0"}, "WORLD_SIZE is '0', but must be a whole number from 1"),
        ({**HALF, "WORLD_SIZE": "1e9"}, "WORLD_SIZE is '1e9', but must be a whole number"),
        ({**HALF, "MASTER_PORT": ""}, "WORLD_SIZE is 2, but MASTER_PORT is not set"),
        ({**HALF, "MASTER_PORT": "70000"}, "MASTER_PORT is '70000', but must be a whole number from 1 to 65535"),
        ({**HALF, "MASTER_PORT": "http"}, "MASTER_PORT is 'http', but must be a whole number from 1 to 65535"),
        ({"LOCAL_RANK": "abc"}, "LOCAL_RANK is 'abc', but must be a whole number"),
        ({**HALF, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK is 1, but must be below LOCAL_WORLD_SIZE"),
        ({**HALF, "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE is 3, but must not be above WORLD_SIZE, which is 2"),
        ({"OMP_NUM_THREADS": "abc"}, "OMP_NUM_THREADS is 'abc', but must be a whole number of threads"),
        ({"OMP_NUM_THREADS": "0"}, "OMP_NUM_THREADS is '0', but must be"),
        ({"LADDERIZE_RENDEZVOUS_SECONDS": "soon"}, "LADDERIZE_RENDEZVOUS_SECONDS is 'soon', but must be"),
    ],
)
def test_nonsense_is_refused_by_every_command(tmp_path, monkeypatch, variables, expected):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    outcome = invoke("inspect", tmp_path)
    assert f"the environment variable {expected}" in one_sentence(outcome)
    assert outcome.code == 1


def test_what_makes_sense_is_read():
    assert not launch_variables({}).is_group
    assert not launch_variables({"WORLD_SIZE": "1", "RANK": "0", "OMP_NUM_THREADS": "4,2", "LOCAL_RANK": ""}).is_group
    found = launch_variables({**HALF, "LADDERIZE_RENDEZVOUS_SECONDS": "7"})
    assert found.is_group
    assert (found.rank, found.world_size, found.master_port, found.rendezvous_seconds) == (0, 2, 29500, 7)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        # torchrun, also within a job of Slurm; a shell that starts several processes in one job
        ({"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, (1, 4)),
        ({"RANK": "5", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, (5, 8)),
        # srun, two kinds of mpirun: RANK and WORLD_SIZE by a script
        ({"RANK": "5", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"}, (1, 4)),
        ({"RANK": "5", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}, (1, 8)),
        (
            {"RANK": "7", "OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
            | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            (3, 4),
        ),
        ({"RANK": "2", "PMI_RANK": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, (0, 2)),
        ({"RANK": "6"}, (6, 8)),
    ],
)
def test_a_rank_knows_its_place_on_its_machine_by_every_launcher(monkeypatch, variables, place):
    for name in [*LAUNCHER, *itertools.chain(*STARTERS)]:
        monkeypatch.delenv(name, raising=False)
    for name, value in {**HALF, "WORLD_SIZE": "8", **variables}.items():
        monkeypatch.setenv(name, value)
    found = launched()
    assert (found.rank, found.size) == (int(variables["RANK"]), 8)
    assert (found.local_rank, found.local_size) == place


def torchrun(rank, local_rank, local_size):
    return {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size, "GROUP_RANK": rank // local_size}


# what launchers say to a process, where a script hands on their number of it as RANK
LAUNCHERS = {
    "torchrun": torchrun,
    "accelerate launch": lambda *place: {**torchrun(*place), "ACCELERATE_MIXED_PRECISION": "bf16"},
    "torchrun in a job of Slurm": lambda *place: {**torchrun(*place), "SLURM_PROCID": 0, "SLURM_LOCALID": 0},
    "srun": lambda rank, here, size: (
        {"SLURM_PROCID": rank, "SLURM_LOCALID": here, "SLURM_NTASKS_PER_NODE": size, "SLURM_NODEID": rank // size}
    ),
    "srun without --ntasks-per-node": lambda rank, here, size: (
        {"SLURM_PROCID": rank, "SLURM_LOCALID": here, "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}
        | {"SLURM_NODEID": rank // size}
    ),
    "Open MPI's mpirun": lambda rank, here, size: (
        {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": here, "OMPI_COMM_WORLD_LOCAL_SIZE": size}
    ),
    "Intel's mpirun": lambda rank, here, size: (
        {"PMI_RANK": rank, "MPI_LOCALRANKID": here, "MPI_LOCALNRANKS": size, "PMI_SIZE": 2 * size}
    ),
}


@pytest.mark.parametrize("gpus", [4, 1], ids=["a host's GPUs", "the own GPU"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_rank_of_two_hosts_has_a_gpu_of_its_own(monkeypatch, launcher, gpus):
    """Four on each; gpus: how many of them a process sees."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    taken = []
    for rank in range(8):
        variables = {**HALF, "WORLD_SIZE": 8, "RANK": rank, **LAUNCHERS[launcher](rank, rank % 4, 4)}
        with monkeypatch.context() as patch:
            for name in [*LAUNCHER, *itertools.chain(*STARTERS)]:
                patch.delenv(name, raising=False)
            for name, value in variables.items():
                patch.setenv(name, str(value))
            place = launched()
        assert (place.rank, place.size, place.local_rank, place.local_size) == (rank, 8, rank % 4, 4)
        taken.append(rank_device("cuda", place.local_rank).index)
    assert taken == ([0, 1, 2, 3] * 2 if gpus == 4 else [0] * 8)


@pytest.mark.parametrize(("local_rank", "gpus", "index"), [(3, 4, 3), (3, 1, 0), (0, 2, 0), (2, 2, None), (7, 4, None)])
def test_two_ranks_never_get_one_gpu_in_silence(monkeypatch, local_rank, gpus, index):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    if index is None:
        with pytest.raises(UserError, match=f"process {local_rank} of its machine, .* torch sees {gpus} GPUs"):
            rank_device("cuda", local_rank)
    else:
        assert rank_device("cuda", local_rank) == torch.device("cuda", index)


def test_a_gpu_that_is_named_by_its_number_is_the_current_one(monkeypatch):
    """CUDA graphs are captured from the current one, whatever the tensors lie on."""
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert rank_device("cuda:1", 0) == torch.device("cuda", 1)
    assert current == [torch.device("cuda", 1)]
    assert rank_device("cpu", 0) == torch.device("cpu")
    assert len(current) == 1


def start(place, rank, size, port, *, seconds, host="localhost"):
    """One rank of a group, which has started and joins when the file ``go`` is in ``place``; others may never come."""
    variables = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "LADDERIZE_RENDEZVOUS_SECONDS": str(seconds)}
    variables |= {"RANK": str(rank), "WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    process = warm.WarmProcess([sys.executable, "-c", JOIN, place], env={**os.environ, **variables})
    warm.wait_until((place / str(rank)).exists, process)
    return process


def end(process):
    stdout, stderr = process.communicate()
    return process.returncode, stdout, stderr


def test_ranks_that_come_at_different_times_meet(tmp_path):
    port = warm.free_port()
    (tmp_path / "go").touch()
    processes = [start(tmp_path, rank, 2, port, seconds=600) for rank in (1, 0)]
    for process in processes:
        assert end(process)[:2] == (0, "[0, 1]\n")


def test_whoever_is_missing_is_named(tmp_path):
    port = warm.free_port()
    processes = [start(tmp_path, rank, 4, port, seconds=10) for rank in (0, 2)]
    (tmp_path / "go").touch()
    for process in processes:
        code, _, stderr = end(process)
        assert code == 1
        assert "ranks 1, 3 of 4 did not start within 10 s; start all of them" in stderr
        assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("rank", "host", "expected"),
    [
        (1, "localhost", "rank 1 found no rank 0 at localhost:"),
        (0, "no.such.host.invalid", "MASTER_ADDR is 'no.such.host.invalid', which does not resolve to an address"),
    ],
)
def test_an_address_where_nobody_is(tmp_path, rank, host, expected):
    (tmp_path / "go").touch()
    code, _, stderr = end(start(tmp_path, rank, 2, warm.free_port(), seconds=1, host=host))
    assert code == 1
    assert stderr.startswith(f"Error: {expected}")
    assert stderr.count("\n") == 1


def test_a_port_of_another_program(tmp_path):
    (tmp_path / "go").touch()
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        server, client = (start(tmp_path, rank, 2, port, seconds=2) for rank in (0, 1))
        _, _, stderr = end(server)
        assert stderr == f"Error: MASTER_PORT {port} is taken by another program on this machine; choose another port\n"
        code, _, stderr = end(client)
        assert code == 1
        assert f"localhost:{port} does not answer as rank 0 would" in stderr
        assert stderr.count("\n") == 1
