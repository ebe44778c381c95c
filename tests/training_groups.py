"""What the ranks of the tests of tensor-parallel retraining do; functions here are pickled by name."""

import contextlib
import math
from pathlib import Path
from unittest import mock

import torch

from ladderize.adapt.train import tensor_parallel
from ladderize.adapt.train.run import retrain
from ladderize.console import SILENT
from ladderize.errors import UserError
from tests.groups import Counting


class Killed(Exception):
    """Stands for a kill: what was saved before is all that is left."""


def retrain_all(group, runs):
    """Each of ``runs`` (options, more) in turn; for each what every rank ended with: nothing, or a message.

    more: ``kill_at`` (a step: the run ends after it was saved), ``nan_at`` (rank, step: this rank's weights go wrong
    when the step was saved).
    """
    results = []
    for options, more in runs:
        with contextlib.ExitStack() as patches:
            counted = []
            patches.enter_context(mock.patch.object(tensor_parallel, "choose", _counting(counted)))
            if more:
                wrong = failing(tensor_parallel.TensorParallelTraining, group.rank, Path(options.out), **more)
                patches.enter_context(mock.patch.object(tensor_parallel.TensorParallelTraining, "losses", wrong))
            try:
                retrain(group, options, SILENT)
                ended = None
            except (UserError, Killed) as error:
                ended = f"{type(error).__name__}: {error}"
            in_flight = [one.started - one.waited for one in counted]
        results.append(group.gather((ended, in_flight)))
    return results


def _counting(counted):
    def choose(*args, original=tensor_parallel.choose, **kwargs):
        collectives, said = original(*args, **kwargs)
        counted.append(Counting(collectives))
        return counted[-1], said

    return choose


def failing(engine, rank, out, *, kill_at=None, nan_at=None):
    """``losses`` of a class of training models, for ``rank``; see ``retrain_all``."""

    def saved(step):
        return out.with_name(f"{out.name}.ladderize-work").joinpath(f"step-{step:08d}").is_dir()

    def losses(self, batch, original=engine.losses):
        if kill_at is not None and saved(kill_at):
            raise Killed(f"after step {kill_at}")
        if nan_at is not None and rank == nan_at[0] and saved(nan_at[1]):
            with torch.no_grad():
                self.parameters[0].view(-1)[0] = math.nan
        return original(self, batch)

    return losses
