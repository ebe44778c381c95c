"""The result of a retraining: a checkpoint or an adapter, with its record, adaptation.json."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import load_file

from ladderize.adapt.lora import ADAPTATION, AdapterBase, adapter_base, not_an_adapter, write_adapter
from ladderize.adapt.methods import LORA, METRICS
from ladderize.adapt.teacher import check_improved, target_text
from ladderize.adapt.train.options import TrainOptions
from ladderize.adapt.train.states import Progress, TrainingFolder, read_metrics
from ladderize.adapt.train.task import RetrainJob, Task
from ladderize.adapt.train.teacher_cache import check_place
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import fingerprint, locate_tensors
from ladderize.console import Console, code_span, human_seconds, to_json
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.plan import Changes
from ladderize.convert.recipe import Recipe
from ladderize.errors import UserError
from ladderize.files import output
from ladderize.files.records import Record
from ladderize.files.regular import resolved
from ladderize.files.unfinished import RUN_SHA256, run_digest, work_folder
from ladderize.layout import format_ranges


@dataclass(frozen=True)
class Adaptation(Record):
    """The content of adaptation.json; docs/files.md explains the keys.

    heldout_perplexity: before, after (with the weights as stored), of the dense teacher, and the tokens scored.
    criterion: the measure that decided which weights are best, with its values; None: nothing was held out.
    base: an adapter's.
    """

    LEFT_OUT: ClassVar = ("base",)

    model: str
    out: str
    method: str
    layout: str
    layers: list[int]
    distill_from: str | None
    data: list[str]
    steps: int
    tokens: int
    scored_tokens: int
    written_step: int
    training_seconds: float
    loss: dict[str, float]
    heldout_perplexity: dict[str, Any] | None
    data_counts: dict[str, int]
    options: TrainOptions
    dtype: str
    fingerprints: dict[str, str | None]
    criterion: dict[str, Any] | None
    base: AdapterBase | None = None

    def summary(self) -> list[str]:
        """Return the results in a few lines, for people."""
        objective, criterion, heldout = self.options.objective, self.criterion, self.heldout_perplexity
        lines = [
            f"{self.steps:,} steps, {self.tokens:,} tokens in {human_seconds(self.training_seconds)}; loss"
            f" ({objective.label}) {self.loss['first']:.4f} to {self.loss['last']:.4f}"
        ]
        if criterion and objective.distill_weight:
            lines.append("held-out {name} {before:.4g} before, {after:.4g} after".format(**criterion))
        if heldout:
            perplexity = "held-out perplexity {before:.4f} before, {after:.4f} after".format(**heldout)
            lines.append(f"{perplexity} (step {self.written_step}, as stored)")
            if "dense" in heldout:
                lines.append(target_text(heldout["before"], heldout["after"], heldout["dense"]))
        return lines

    def card_note(self) -> str:
        taught = f", taught by {code_span(self.distill_from)}" if self.distill_from else ""
        return (
            f"**Retraining.** Layers {format_ranges(self.layers)} were retrained (`{self.method}`) on"
            f" {' and '.join(map(code_span, self.data))}{taught}: {'; '.join(self.summary())}."
            " `adaptation.json` and `metrics.jsonl` say more."
        )


def check_out(job: RetrainJob, sources: Collection[Checkpoint]) -> None:
    """Raise UserError unless the job may write its ``out``, which must be none of its sources, and a folder of answers
    apart from all of these."""
    more: dict[str, Any] = {"foreign": not_an_adapter} if job.options.method == LORA else {}
    for source in sources:
        output.check_target(Path(job.out), source.folder, overwrite=job.overwrite, **more)
    if job.options.teacher_cache is not None:
        made = [resolved(job.out), work_folder(job.out), job.aligned]
        check_place(job.options.teacher_cache, [*made, *(source.folder for source in sources)])


def result_digest(task: Task, identity: Mapping[str, Any]) -> str:
    return run_digest({"identity": identity, "options": task.options.to_dict()})


def chosen_step(task: Task, progress: Progress, work: TrainingFolder) -> int:
    """Return the step whose weights become OUT. Raises UserError where training never lowered the held-out criterion,
    unless the last weights were asked for."""
    objective = task.options.objective
    if task.options.write == "last" or progress.before is None or progress.last is None:
        return progress.step
    if progress.kept_step is None:
        before, last = (scores.criterion(objective) for scores in (progress.before, progress.last))
        advice = "delete it and train with a lower --lr or on other data"
        check_improved(objective.label, before, last, work=work.folder, advice=advice)
    return progress.kept_step or progress.step


def write_outcome(
    task: Task,
    job: RetrainJob,
    progress: Progress,
    work: TrainingFolder,
    chosen: int,
    counts: dict[str, int],
    identity: Mapping[str, Any],
    console: Console,
) -> Adaptation:
    """Write the weights of the ``chosen`` step and return the document. Only the main process calls it.

    identity: as ``run_identity`` returns it.
    Raises UserError where the model has changed since the training began, or OUT cannot be written.
    """
    if fingerprint(open_checkpoint(task.model)) != identity["model"]:
        raise UserError(
            f"{task.model} has changed since the training began, and {work.folder} holds its retrained weights; restore"
            " the model"
        )
    losses = read_metrics(work.metrics, "loss")
    heldout, criterion, options = None, None, task.options
    before, after = progress.before, progress.best if chosen == progress.kept_step else progress.last
    if before is not None and after is not None:
        heldout = {"before": before.perplexity, "after": after.perplexity, "tokens": before.tokens}
        if progress.dense_perplexity is not None:
            heldout["dense"] = progress.dense_perplexity
        scores = {"before": before.criterion(options.objective), "after": after.criterion(options.objective)}
        criterion = {"name": options.objective.label, **scores}
    adaptation = Adaptation(
        model=task.model,
        out=job.out,
        method=options.method,
        layout=str(task.layout),
        layers=list(task.layers),
        distill_from=options.distill_from,
        data=list(options.data),
        steps=progress.step,
        tokens=progress.tokens,
        scored_tokens=progress.scored,
        written_step=chosen,
        training_seconds=progress.seconds,
        loss={"first": losses[0], "last": losses[-1]},
        heldout_perplexity=heldout,
        data_counts=counts,
        options=options,
        dtype=identity["dtype"],
        fingerprints={name: identity[name] for name in ("model", "teacher")},
        criterion=criterion,
        base=adapter_base(task.checkpoint, task.model) if task.is_lora else None,
    )
    weights, content = work.weights(chosen), {**adaptation.to_dict(), RUN_SHA256: result_digest(task, identity)}
    files = {ADAPTATION: to_json(content) + "\n", METRICS: work.metrics.read_text()}
    if adaptation.base is not None:
        write_adapter(Path(job.out), task.lora, load_file(weights), adaptation.base, files, overwrite=job.overwrite)
        return adaptation
    convert_checkpoint(
        task.model,
        job.out,
        Recipe(),
        overwrite=job.overwrite,
        verify=job.verify,
        console=console,
        changes=Changes(replace=locate_tensors(weights), extra_files=files, note=adaptation.card_note()),
    )
    return adaptation
