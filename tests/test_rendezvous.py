"""Variables of launchers that make no sense, and ranks that do not find each other: one sentence, and soon."""

import os
import socket
import sys

import pytest

from ladderize.ranks.environment import launch_variables
from tests import warm
from tests.helpers import invoke, one_sentence

HALF = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
LAUNCHER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
# Says that it has started; when it may go, joins the group that its variables name, and prints what all ranks say.
JOIN = """
import os, sys
from pathlib import Path
from ladderize.console import error_boundary
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
    processes = [start(tmp_path, rank, 4, port, seconds=2) for rank in (0, 2)]
    (tmp_path / "go").touch()
    for process in processes:
        code, _, stderr = end(process)
        assert code == 1
        assert "ranks 1, 3 of 4 did not start within 2 s; start all of them" in stderr
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
