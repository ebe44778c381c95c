"""Unfinished training on disk: a folder for each saved step, and the weights that may become OUT."""

import json
import math
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError

from ladderize.adapt.options import METRICS, Objective
from ladderize.adapt.train.training_model import TrainingModel
from ladderize.checkpoint.tensors import write_tensors
from ladderize.console import sentence, to_json
from ladderize.errors import UserError
from ladderize.files.documents import read_json
from ladderize.files.output import fsync, fsync_tree
from ladderize.files.records import Record
from ladderize.files.unfinished import Unfinished

TRAINING_COMMAND = "adapt --method full or lora"
STATE, STATES_KEPT = "state.json", 2
STATE_BYTES, WEIGHT_BYTES = 12, 4  # per trained number: a state (weights and two moments), and weights alone
DIGITS = 8 * "[0-9]"
STATES = f"step-{DIGITS}/{STATE}"
# what reading a state that is cut off, or of something else, raises
DAMAGED = OSError, ValueError, KeyError, RuntimeError, EOFError, UserError, SafetensorError, pickle.UnpicklingError


@dataclass(frozen=True)
class Scores(Record):
    """Held-out losses: means per scored token in nats."""

    cross_entropy: float
    divergence: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.cross_entropy) if self.cross_entropy < 700 else math.inf

    def criterion(self, objective: Objective) -> float:
        """Return the value by which the best weights are chosen, the lowest; infinite where it is not a number."""
        value = objective.total(self.cross_entropy, self.divergence)
        return value if math.isfinite(value) else math.inf

    def text(self, objective: Objective) -> str:
        criterion = f"{objective.label} {self.criterion(objective):.4g}, " if objective.distill_weight else ""
        return f"held-out {criterion}perplexity {self.perplexity:.4f}"


@dataclass
class Progress(Record):
    """The progress of a training.

    model: the fingerprint of the trained checkpoint, as it was at the beginning.
    seconds: spent in steps, over all runs.
    before, best, last: scores before the first step, at the best validation by the criterion, and at the last one.
    dense_perplexity: the teacher's, on the same rows.
    kept_step: the best step whose weights were saved.
    heldout_rows: scored at each validation; 0: not decided yet.
    unscored: True where a signal came before the validation of this step was done, which the next run then makes.
    recent: losses of the last steps.
    metrics_bytes: the length of metrics.jsonl.
    """

    model: str = ""
    step: int = 0
    tokens: int = 0
    scored: int = 0
    seconds: float = 0.0
    before: Scores | None = None
    best: Scores | None = None
    last: Scores | None = None
    dense_perplexity: float | None = None
    kept_step: int | None = None
    heldout_rows: int = 0
    unscored: bool = False
    recent: list[float] = field(default_factory=list)
    metrics_bytes: int = 0


class TrainingFolder(Unfinished):
    """An unfinished training: states named by their step, weights, and metrics.jsonl."""

    at: int | None = None  # the step of the state that this process wrote or read last

    @property
    def metrics(self) -> Path:
        return self.folder / METRICS

    def weights(self, step: int) -> Path:
        return self.folder / f"weights-{step:08d}.safetensors"

    def states(self) -> list[Path]:
        """Return the folders of whole states, the last one last."""
        return [path.parent for path in sorted(self.folder.glob(STATES))]

    def latest(self) -> int | None:
        """Return the last step from which training can resume; None where there is none."""
        states = self.states()
        return int(states[-1].name[len("step-") :]) if states else None

    def save(self, progress: Progress, model: TrainingModel) -> None:
        """Write this step's state, whole or not at all; delete older ones and other weights. All ranks call it."""
        if self.at == progress.step:
            return  # while it is written again a killed run would lose it
        accelerator, path = model.accelerator, self.folder / f"step-{progress.step:08d}"
        unfinished = path.with_suffix(".part")
        if accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
        accelerator.wait_for_everyone()
        try:
            model.save(unfinished)
        except BaseException as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if isinstance(error, RuntimeError | SafetensorError):  # a full disk, in the words of torch and safetensors
                raise UserError(
                    f"the state of step {progress.step} cannot be written to {self.folder}: {sentence(error)}; the run"
                    " goes on from the last saved one"
                ) from None
            raise
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            self.metrics.touch()
            fsync(self.metrics)  # the metrics of the saved steps must be on disk before the state is
            progress.metrics_bytes = self.metrics.stat().st_size
            (unfinished / STATE).write_text(to_json(progress.to_dict()) + "\n")
            fsync_tree(unfinished)
            shutil.rmtree(path, ignore_errors=True)
            unfinished.rename(path)
            fsync(self.folder)
            for old in self.states()[:-STATES_KEPT]:
                shutil.rmtree(old)
            for old in self.folder.glob(f"weights-{DIGITS}.safetensors"):
                if old != self.weights(progress.kept_step or 0):
                    old.unlink()
        accelerator.wait_for_everyone()
        self.at = progress.step

    def load(self, step: int, model: TrainingModel) -> Progress:
        path = self.folder / f"step-{step:08d}"
        try:
            progress = Progress.from_dict(read_json(path / STATE), STATE)
            model.load(path)
        except DAMAGED as error:
            raise UserError(
                f"{path} is damaged ({sentence(error)[:200]}); delete it to resume from the state before it"
            ) from None
        self.at = step
        return progress

    def save_weights(self, step: int, model: TrainingModel, stored: Mapping[str, torch.dtype]) -> None:
        """Write the trained tensors in their ``stored`` dtypes, or float32. All ranks call it, which have parts."""
        infos = {name: (stored.get(name, torch.float32), shape) for name, shape in model.shapes.items()}
        if model.accelerator.is_main_process:
            unfinished = self.weights(step).with_suffix(".part")
            write_tensors(unfinished, infos, lambda name: model.whole(name).to(infos[name][0]))
            unfinished.replace(self.weights(step))
        else:
            for name in infos:
                model.whole(name)


def read_metrics(path: Path, key: str) -> list[float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row[key] for row in rows if row.get(key) is not None]
