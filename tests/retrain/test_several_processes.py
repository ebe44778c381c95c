"""Several processes make the steps of one."""

import sys

from ladderize.adapt.retrain.hf_model import HFEngine

from tests import warm
from tests.helpers import CLIPPED, listing
from tests.retrain.commands import adapt, arguments, check_same_run, succeed


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


def test_fsdp2_goes_on_where_one_process_stopped(qwen3, tmp_path, monkeypatch):
    """States are whole tensors under their own names: another number of ranks may go on, and sharded. Of another family
    than elsewhere in this file."""
    more = ["--distill-from", qwen3 / "dense", "--hidden-weight", 1, "--save-every", 2, *CLIPPED]
    succeed(qwen3, tmp_path / "one", *more, steps=4)
    with monkeypatch.context() as patch:
        original = HFEngine.losses

        def losses(self, batch):
            if (tmp_path / "two.ladderize-work" / "step-00000002").is_dir():
                raise RuntimeError("killed")
            return original(self, batch)

        patch.setattr(HFEngine, "losses", losses)
        assert "killed" in adapt(qwen3, tmp_path / "two", *more, steps=4).stderr
    outcome = run_group(qwen3, tmp_path / "two", *more, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    assert "resuming after step 2" in outcome.stderr
    check_same_run(tmp_path / "two", tmp_path / "one")
