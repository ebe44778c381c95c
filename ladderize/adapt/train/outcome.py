"""The result of a retraining: a checkpoint or an adapter, with its record, adaptation.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from safetensors.torch import load_file

from ladderize.adapt.lora import ADAPTATION, AdapterBase, not_an_adapter, write_adapter
from ladderize.adapt.options import METRICS, Objective
from ladderize.adapt.teacher import check_improved, target_text
from ladderize.adapt.train.states import Progress, TrainingFolder, read_metrics
from ladderize.adapt.train.task import Task
from ladderize.adapt.train.teacher_cache import check_apart
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.checkpoint.tensors import fingerprint, locate_tensors
from ladderize.console import Console, code_span, human_seconds, to_json
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.plan import Changes
from ladderize.convert.recipe import Recipe
from ladderize.errors import UserError
from ladderize.files import output
from ladderize.files.records import Record
from ladderize.files.unfinished import RUN_SHA256, work_folder
from ladderize.layout import format_ranges


@dataclass(frozen=True)
class Adaptation(Record):
    """The content of adaptation.json; docs/files.md explains the keys."""

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
    options: dict[str, Any]
    dtype: str
    fingerprints: dict[str, str | None]
    criterion: dict[str, Any] | None
    base: AdapterBase | None = None

    def summary(self) -> list[str]:
        criterion, heldout = self.criterion, self.heldout_perplexity
        objective = Objective.of(self.distill_from, self.options.get("distill_weight"))
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


def check_out(task: Task) -> None:
    """Raise UserError unless the task may write its ``out``, and a folder of answers apart from that and sources."""
    options, foreign = task.options, not_an_adapter if task.is_lora else output.not_a_checkpoint
    sources = [task.checkpoint] if task.teacher is None else [task.checkpoint, task.teacher]
    for source in sources:
        output.check_target(task.out, source.folder, overwrite=options.overwrite, foreign=foreign)
    if options.teacher_cache is not None:
        made = [task.out, work_folder(str(options.out)), task.aligned]
        check_apart(options.teacher_cache, [*made, *(source.folder for source in sources)])


def check_unchanged(model: str, task: Task, progress: Progress, work: TrainingFolder) -> None:
    """Raise UserError unless the model, by its fingerprint, is the trained one: OUT has its frozen weights."""
    if model != progress.model:
        raise UserError(
            f"{task.model} has changed since the training began, and {work.folder} holds its retrained weights; restore"
            " the model"
        )


def chosen_step(task: Task, progress: Progress, work: TrainingFolder) -> int:
    """Return the step whose weights become OUT; UserError where none lowered the held-out criterion."""
    objective = task.options.objective
    if task.options.write == "last" or progress.before is None or progress.last is None:
        return progress.step
    if progress.kept_step is None:
        before, last = progress.before.criterion(objective), progress.last.criterion(objective)
        advice = "delete it and train with a lower --lr or on other data"
        check_improved(objective.label, before, last, work=work.folder, advice=advice)
    return progress.kept_step or progress.step


def write_outcome(
    task: Task,
    progress: Progress,
    work: TrainingFolder,
    chosen: int,
    counts: dict[str, int],
    identity: Mapping[str, Any],
    digest: str,
    console: Console,
) -> Adaptation:
    """Write the weights of the ``chosen`` step and return the document. Only the main process calls it."""
    check_unchanged(fingerprint(open_checkpoint(task.model)), task, progress, work)
    losses, options, objective = read_metrics(work.metrics, "loss"), task.options, task.options.objective
    heldout, criterion = None, None
    before, after = progress.before, progress.best if chosen == progress.kept_step else progress.last
    if before is not None and after is not None:
        heldout = {"before": before.perplexity, "after": after.perplexity, "tokens": before.tokens}
        if progress.dense_perplexity is not None:
            heldout["dense"] = progress.dense_perplexity
        scores = {"before": before.criterion(objective), "after": after.criterion(objective)}
        criterion = {"name": objective.label, **scores}
    adaptation = Adaptation(
        model=task.model,
        out=str(options.out),
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
        options=task.resolved_options,
        dtype=identity["dtype"],
        fingerprints={"model": progress.model, "teacher": identity["teacher"]},
        criterion=criterion,
        base=AdapterBase.of(task.checkpoint, task.model) if task.is_lora else None,
    )
    weights, document = work.weights(chosen), {**adaptation.to_dict(), RUN_SHA256: digest}
    files = {ADAPTATION: to_json(document) + "\n", METRICS: work.metrics.read_text()}
    overwrite, verify = options.overwrite, options.verify
    if adaptation.base is not None:
        write_adapter(task.out, task.lora, load_file(weights), adaptation.base, files, overwrite=overwrite)
    else:
        changes = Changes(replace=locate_tensors(weights), extra_files=files, note=adaptation.card_note())
        out = str(options.out)
        convert_checkpoint(task.model, out, Recipe(), changes, overwrite=overwrite, verify=verify, console=console)
    return adaptation
