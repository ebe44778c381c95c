"""Several processes make the steps of one."""

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
    more = ["--distill-from", place / "dense", "--hidden-weight", 1, *CLIPPED]
    succeed(place, tmp_path / "one", *more, steps=4)
    run_group(place, tmp_path / "two", *more)
    check_same_run(tmp_path / "two", tmp_path / "one")


def test_two_processes_align_before_they_train(place, tmp_path):
    """What one writes, all train from."""
    run_group(place, tmp_path / "two", "--align", "--distill-from", place / "dense")
    assert listing(tmp_path) == ["two", "two-aligned"]
