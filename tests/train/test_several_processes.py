"""Several processes make the steps of one."""

import random
import sys

from tests import warm
from tests.helpers import CLIPPED, listing
from tests.train.commands import arguments, check_same_run, succeed


def run_group(place, out, *more, **environment):
    warm.warm_python().preload("accelerate", "datasets", "peft")
    command = arguments(place, out, *more, "--micro-batch-size", 1, steps=4)
    outcome = warm.run_group([sys.executable, "-m", "ladderize", *command], **environment)
    assert outcome.returncode == 0, outcome.stderr[-2000:]
    return outcome


def test_two_processes_make_the_steps_of_one(place, tmp_path):
    more = ["--distill-from", place / "dense", *CLIPPED]
    succeed(place, tmp_path / "one", *more, steps=4)
    run_group(place, tmp_path / "two", *more)
    check_same_run(tmp_path / "two", tmp_path / "one")
    run_group(place, tmp_path / "three", "--align", "--distill-from", place / "dense")  # from what one of them writes
    assert listing(tmp_path) == ["one", "three", "three-aligned", "two"]


# A dataset of the hub, of four files.
STREAMED = """
import sys
import datasets, numpy as np
from ladderize.cli import main
rows = [{"input_ids": row} for row in np.load(sys.argv[1]).tolist()]
hub = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=4)
datasets.load_dataset = lambda *given, streaming, **named: hub
sys.argv = ["ladderize", *sys.argv[2:]]
main()
"""


def test_two_processes_read_a_stream_as_one_does(place, tmp_path):
    more = ["--data", "hub:o/n:train", "--heldout", 4, "--micro-batch-size", 1]
    for name, processes in (("one", 1), ("two", 2)):
        command = arguments(place, tmp_path / name, *more, steps=8, without=["--eval-data"])
        outcome = warm.run_group([sys.executable, "-c", STREAMED, place / "ids.npy", *command], ranks=processes)
        assert outcome.returncode == 0, outcome.stderr[-2000:]
    check_same_run(tmp_path / "two", tmp_path / "one")


# Accelerate has FSDP on GPUs alone: there its state says so of processes on CPUs, too. The first argument is a step
# before which the process ends as if it was killed; 0: it does not.
FSDP_ON_CPUS = """
import os, sys
from accelerate import DistributedType
from accelerate.state import AcceleratorState, PartialState
from ladderize.adapt.train.loop import Loop
from ladderize.cli import main
made, stepped, last = AcceleratorState.__init__, Loop.step, int(sys.argv[1])
def made_sharded(self, *given, **more):
    made(self, *given, **more)
    if more.get("fsdp_plugin") is not None:
        self.fsdp_plugin = more["fsdp_plugin"]
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        if self._mixed_precision != "no":
            self.fsdp_plugin.set_mixed_precision(self._mixed_precision)
def step(self, *given):
    if self.progress.step + 1 == last:
        os._exit(9)
    return stepped(self, *given)
AcceleratorState.__init__, Loop.step = made_sharded, step
sys.argv = ["ladderize", *sys.argv[2:]]
main()
"""


def run_sharded(place, out, kill, *more, **kwargs):
    command = arguments(place, out, *more, "--micro-batch-size", 1, steps=4, **kwargs)
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    fsdp |= {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    return warm.run_group([sys.executable, "-c", FSDP_ON_CPUS, kill, *command], **fsdp)


def test_fsdp2_makes_the_steps_of_one_process_and_goes_on(qwen3, tmp_path):
    """Killed, and ended by the same command. Of another family than elsewhere in this file."""
    method = random.choice(["full", "lora"])
    more = ["--distill-from", qwen3 / "dense", "--eval-every", 2, "--method", method, *CLIPPED]
    succeed(qwen3, tmp_path / "one", *more, steps=4)
    assert run_sharded(qwen3, tmp_path / "two", 4, *more).returncode != 0
    assert (tmp_path / "two.ladderize-work" / "step-00000002" / "state.json").is_file()
    outcome = run_sharded(qwen3, tmp_path / "two", 0, *more)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    assert "resuming after step 2" in outcome.stderr
    check_same_run(tmp_path / "two", tmp_path / "one")
