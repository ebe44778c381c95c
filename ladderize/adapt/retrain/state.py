"""What training needs to go on exactly where it was: a folder per saved step, of safetensors and JSON; nothing is ever
unpickled.

Everything is stored whole under its own name, so a run may go on with another number of ranks, however they share the
model.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ladderize.adapt.data.stream import StreamPlace
from ladderize.adapt.methods import METRICS
from ladderize.adapt.retrain.engine import MOMENTS, WEIGHT, Engine
from ladderize.checkpoint.reading import TensorInfo, read_header
from ladderize.checkpoint.tensors import TensorReader, write_tensors
from ladderize.console import sentence, to_json
from ladderize.errors import UserError
from ladderize.files.documents import read_json
from ladderize.files.parsing import parse_json
from ladderize.files.records import Record
from ladderize.files.regular import read_lines
from ladderize.files.temporaries import fsync
from ladderize.files.work import WorkFolder

STATE_WEIGHTS, STATE_OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
WEIGHT_BYTES, STATE_BYTES = 4, 12  # per trained number, of a state's weights and of all of it
STEP = "step-" + 8 * "[0-9]"


@dataclass
class Progress(Record):
    """How far training is. stream: where the data stand. recent: losses of the last steps. seconds: spent in steps,
    over all runs. best_loss, before_loss: the criterion (``Objective.criterion``) of the held-out rows at the best step
    and before the first one. before_perplexity, dense_perplexity: theirs before the first step, and under the teacher,
    where there are such. settings: what may be changed on the way, such as the learning rate. It and stream are None
    until something is saved."""

    step: int = 0
    tokens: int = 0
    scored: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_loss: float | None = None
    before_loss: float | None = None
    before_perplexity: float | None = None
    dense_perplexity: float | None = None
    settings: dict[str, Any] | None = None
    stream: StreamPlace | None = None
    recent: list[float] = field(default_factory=list)


class TrainingFolder(WorkFolder):
    """Unfinished training: states named by their step, and metrics.jsonl."""

    COMMAND = "adapt --method full or lora"
    CONTENT = (*WorkFolder.CONTENT, STEP, f"{STEP}.part", METRICS)
    ADVICE = "give the old value again, start again with --resume no"

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, main: bool = True) -> None:
        super().__init__(folder, identity, main=main)
        if main:
            for path in folder.glob(f"{STEP}.part"):
                shutil.rmtree(path)  # a killed run was writing it

    def has_work(self) -> bool:
        return bool(self.saved_states())

    @classmethod
    def discard(cls, folder: Path) -> None:
        """Delete unfinished training; raises UserError if the folder holds anything else, or is in use."""
        if folder.exists():
            with cls(folder, {}) as work:
                work.remove()

    @property
    def metrics(self) -> Path:
        return self.folder / METRICS

    def saved_states(self) -> dict[int, Path]:
        """Complete states by their step, oldest first."""
        found = {}
        for path in self.folder.glob(STEP):
            if (path / STATE).is_file():
                found[int(path.name[5:])] = path
        return dict(sorted(found.items()))

    def latest(self) -> Path | None:
        """The last state that can be gone on from."""
        whole_ones = [path for path in self.saved_states().values() if (path / STATE_OPTIMIZER).is_file()]
        return whole_ones[-1] if whole_ones else None

    def state_path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, progress: Progress, engine: Engine, keep: int, *, weights_only: bool = False) -> None:
        """Write this step's state; of the others the last ``keep`` and the best one's weights stay. All ranks call it.

        weights_only: without what a run needs to go on from it.
        """
        path = self.state_path(progress.step)
        part = path.with_suffix(".part")
        main = engine.ranks.is_main
        if engine.ranks.broadcast(main and self.latest() == path):
            return  # of this very step: without it a run that is killed while it is written anew would have none
        if main:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
        try:
            self._write(part, progress, engine, weights_only)
        except BaseException:
            if main:
                shutil.rmtree(part, ignore_errors=True)
            raise
        if main:
            shutil.rmtree(path, ignore_errors=True)
            part.rename(path)
            fsync(self.folder)
            self._prune(progress, keep)
        engine.ranks.barrier()

    def _write(self, part: Path, progress: Progress, engine: Engine, weights_only: bool) -> None:
        main = engine.ranks.is_main
        _write(part / STATE_WEIGHTS, engine, {name: (name, WEIGHT) for name in engine.shapes})
        updated = [name for name in engine.shapes if engine.has_moments(name)]
        if not weights_only:
            moments = {_moment_name(moment, name): (name, moment) for moment in MOMENTS for name in updated}
            _write(part / STATE_OPTIMIZER, engine, moments)
        if main:
            if self.metrics.is_file():
                fsync(
                    self.metrics
                )  # what it says of the steps up to here must not be lost to a crash that the state survives
            (part / STATE).write_text(to_json(progress.to_dict()) + "\n")
            fsync(part / STATE)

    def _prune(self, progress: Progress, keep: int) -> None:
        states = self.saved_states()
        kept = [step for step, path in states.items() if (path / STATE_OPTIMIZER).is_file()][-keep:]
        for step, path in states.items():
            if step == progress.best_step and step not in kept:
                (path / STATE_OPTIMIZER).unlink(missing_ok=True)  # its weights are wanted, but no run goes on from it
            elif step not in kept:
                shutil.rmtree(path)

    def load(self, path: Path, engine: Engine) -> Progress:
        """Put a state back into the model and the optimizer."""
        try:
            progress = Progress.from_dict(read_json(path / STATE), STATE)
            if progress.stream is None or progress.settings is None or path != self.state_path(progress.step):
                raise UserError(f"{STATE} does not belong to this step")
            load_trained(path, engine)
            infos = read_header(path, STATE_OPTIMIZER)
            with TensorReader(path) as reader:
                for name, shape in engine.shapes.items():
                    if _moment_name(MOMENTS[0], name) in infos:
                        found = {moment: infos[_moment_name(moment, name)] for moment in MOMENTS}
                        moments = {moment: _read(reader, info, shape) for moment, info in found.items()}
                        engine.assign_moments(name, progress.step, moments)
        except (OSError, ValueError, KeyError, UserError) as error:
            raise UserError(
                f"{path} is damaged ({sentence(error)}); delete it to resume from the state before it"
            ) from None
        if progress.best_step and not self.weights(progress.best_step).is_file():
            progress.best_step = progress.best_loss = None  # a later state replaced it, and was deleted
        return progress

    def weights(self, step: int) -> Path:
        """Where the trained tensors of a state lie."""
        return self.state_path(step) / STATE_WEIGHTS


def load_trained(path: Path, engine: Engine) -> None:
    """The trained tensors of a state, one at a time."""
    infos = read_header(path, STATE_WEIGHTS)
    with TensorReader(path) as reader:
        for name, shape in engine.shapes.items():
            engine.assign(name, _read(reader, infos[name], shape))


def _moment_name(moment: str, name: str) -> str:
    return f"{moment}/{name}"


def _read(reader: TensorReader, info: TensorInfo, shape: tuple[int, ...]) -> Tensor:
    if info.shape != shape:
        raise UserError(f"{info.file}: {info.name} has shape {list(info.shape)} instead of {list(shape)}")
    return reader.read(info)


def _write(path: Path, engine: Engine, tensors: Mapping[str, tuple[str, str]]) -> None:
    """One tensor after the other, gathered from the ranks; those other than the main one only take part in that.

    tensors: by the name in the file, what the engine is asked for.
    """
    infos = {stored: (torch.float32, engine.shapes[name]) for stored, (name, _) in tensors.items()}
    if engine.ranks.is_main:
        write_tensors(path, infos, lambda stored: engine.gather(*tensors[stored]))
    else:
        for name, kept in tensors.values():
            engine.gather(name, kept)


def cut_metrics(path: Path, step: int) -> None:
    """Drop what was written after the state that training goes on from."""
    if not path.is_file():
        return
    kept = []
    for line in read_lines(path):
        try:
            if parse_json(line, constants=True)["step"] <= step:
                kept.append(line.rstrip(b"\n") + b"\n")
        except (ValueError, KeyError, TypeError):
            continue  # cut off by a kill
    temporary = path.with_name(f".{path.name}.json.part")
    temporary.write_bytes(b"".join(kept))
    os.replace(temporary, path)


def metric_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl, in order."""
    for text in read_lines(path):
        yield parse_json(text, constants=True)


def read_metrics(path: Path, key: str) -> list[float]:
    """The values of one metric, in order."""
    return [line[key] for line in metric_lines(path) if line.get(key) is not None]
