"""Several processes make the steps of one."""

import sys

import pytest
import torch
from safetensors.torch import load_file

from ladderize.adapt.retrain.hf_model import HFEngine
from tests import warm
from tests.helpers import CLIPPED
from tests.retrain.commands import adapt, arguments, losses_of, succeed


def command(place, out, *more):
    adapt, model, *options = arguments(place, *more, steps=4)
    return [adapt, model, out, *options]


def run_group(*words, **environment):
    warm.warm_python().preload("accelerate", "datasets", "peft")
    return warm.run_group([sys.executable, "-m", "ladderize", *words], **environment)


def test_two_processes_make_the_steps_of_one(place, tmp_path):
    more = ["--distill-from", place / "dense", "--hidden-weight", 1, *CLIPPED]
    succeed(place, tmp_path / "one", *more, steps=4)
    outcome = run_group(*command(place, tmp_path / "two", *more, "--micro-batch-size", 1))
    assert outcome.returncode == 0, outcome.stderr[-2000:]
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-4)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_fsdp2_goes_on_where_one_process_stopped(place, tmp_path, monkeypatch):
    """States are whole tensors under their own names: another number of ranks may go on, and sharded."""
    more = ["--distill-from", place / "dense", "--hidden-weight", 1, "--save-every", 2, *CLIPPED]
    succeed(place, tmp_path / "one", *more, steps=4)
    with monkeypatch.context() as patch:
        original = HFEngine.losses

        def losses(self, batch):
            if (tmp_path / "two.ladderize-work" / "step-00000002").is_dir():
                raise RuntimeError("killed")
            return original(self, batch)

        patch.setattr(HFEngine, "losses", losses)
        assert "killed" in adapt(place, tmp_path / "two", *more, steps=4).stderr
    again = command(place, tmp_path / "two", *more, "--micro-batch-size", 1)
    outcome = run_group(*again, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    assert outcome.returncode == 0, outcome.stderr[-2000:]
    assert "resuming after step 2" in outcome.stderr
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-4)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4, msg=name)
