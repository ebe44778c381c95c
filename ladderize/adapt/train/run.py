"""``ladderize adapt --method full`` and ``lora``: retrain a whole checkpoint, and write a checkpoint or an adapter."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import get_available_trackers
from safetensors.torch import load_file

from ladderize.adapt.layers.options import AlignOptions, start_tokens
from ladderize.adapt.layers.rewrite import adapt_layers
from ladderize.adapt.lora import ADAPTATION, AdapterBase, not_an_adapter, write_adapter
from ladderize.adapt.options import FULL, LORA, METRICS, AdaptOptions, Objective
from ladderize.adapt.teacher import check_improved, target_text
from ladderize.adapt.train.loop import STATES, TRAINING_COMMAND, Loop, Progress, TrainingFolder, read_metrics
from ladderize.adapt.train.task import Launch, Task, open_task, sharding_asked
from ladderize.adapt.train.teacher_cache import check_apart, with_answers
from ladderize.adapt.train.tensor_parallel import build_tensor_parallel
from ladderize.adapt.train.training_model import HFTraining, TrainingModel, make_student, make_teacher, open_model
from ladderize.adapt.training_data import open_data
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.checkpoint.tensors import fingerprint, locate_tensors
from ladderize.console import SILENT, Console, code_span, human_count, human_seconds, to_json
from ladderize.convert.inspection import ALIGNMENT, read_retrainings
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.plan import Changes
from ladderize.convert.recipe import Recipe
from ladderize.data.files import split_weight
from ladderize.errors import UsageError, UserError
from ladderize.files import output
from ladderize.files.documents import read_own
from ladderize.files.records import Record
from ladderize.files.regular import resolved
from ladderize.files.unfinished import RUN_SHA256, finished_before, run_digest, work_folder
from ladderize.layout import Layout, format_ranges
from ladderize.memory import release
from ladderize.modeling import load_tokenizer
from ladderize.ranks.device import avoid_cudnn_attention, default_device
from ladderize.ranks.environment import already_started
from ladderize.ranks.group import TRAINING_TIMEOUT, Ranks, join_ranks
from ladderize.runtime.launch import run


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


def adapt_checkpoint(options: AdaptOptions, *, console: Console = SILENT) -> Adaptation | None:
    """Retrain ``options.model`` as a whole and write ``options.out``: a checkpoint, or with method ``lora`` an adapter.

    Returns the document of adaptation.json; None on other ranks than 0. The processes are those of accelerate launch or
    torchrun; without such a launcher ``options.tp_size`` are started here. A killed run resumes from its last state.
    """
    if options.method not in (FULL, LORA) or options.out is None:
        raise UsageError(f"--method {options.method} is not a training, or OUT is missing; see adapt_layers")
    installed = sorted(str(tracker) for tracker in get_available_trackers())
    for name in options.log_with:
        if name not in installed:  # Accelerate would silently leave it out
            raise UserError(
                f"--log-with {name} is no tracker of Accelerate that is installed here; install its package, or take"
                f" one of: {', '.join(installed) or 'none'}"
            )
    device = options.device or default_device()
    options = replace(options, device=device)
    if options.tp_size == 1 or already_started():
        return retrain(join_ranks(device), options, console)
    return run(
        retrain, options, console, tp_size=options.tp_size, device=device, timeout=TRAINING_TIMEOUT, stoppable=True
    )


# ---- one rank's part ----


def retrain(ranks: Ranks, options: AdaptOptions, console: Console) -> Adaptation | None:
    """Do one rank's part of the training, with Accelerate's state made for it; returns as ``train`` does."""
    reset_accelerate()
    try:
        accelerator = open_accelerator(options)
        launch = Launch.of(accelerator)
        if sharding_asked() and not launch.sharded:
            raise UserError("accelerate launch asks for FSDP or DeepSpeed, which Accelerate runs on GPUs only")
        if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
            raise UserError("accelerate launch asks for FSDP of version 1; set fsdp_version: 2 in its configuration")
        task = open_task(options, launch)
        precision = "bf16" if task.compute == torch.bfloat16 else "no"
        if launch.precision != precision and options.tp_size == 1:
            AcceleratorState._reset_state()
            accelerator = open_accelerator(options, precision)
        return train(task, accelerator, ranks, console)
    finally:
        reset_accelerate()


def open_accelerator(options: AdaptOptions, precision: str | None = None) -> Accelerator:
    """Return an Accelerator as the launcher's environment configures it."""
    avoid_cudnn_attention()
    return Accelerator(
        cpu=options.device == "cpu",
        mixed_precision=precision,
        log_with=list(options.log_with) or None,
        project_dir=f"{resolved(str(options.out))}-logs" if options.log_with else None,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )


def reset_accelerate() -> None:
    """Let the next training in this process choose another precision: Accelerate keeps one per process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(task: Task, accelerator: Accelerator, ranks: Ranks, console: Console) -> Adaptation | None:
    """Train and write OUT, unless this run wrote it before; returns the document, None on other ranks than 0."""
    options, pace, folder = task.options, task.pace, work_folder(str(task.options.out))
    identity = task.identity() if ranks.is_main else {}
    digest, earlier = run_digest({"identity": identity, "options": task.resolved_options}), dict[str, Any]()
    if ranks.is_main:
        earlier = finished_before(
            task.out, ADAPTATION, digest, TRAINING_COMMAND, identity, overwrite=options.overwrite, console=console
        )
    if earlier := ranks.broadcast(earlier):
        return Adaptation.from_dict(earlier, ADAPTATION) if ranks.is_main else None
    sources = [task.checkpoint] if task.teacher is None else [task.checkpoint, task.teacher]
    for source in sources:
        foreign = not_an_adapter if task.is_lora else output.not_a_checkpoint
        output.check_target(task.out, source.folder, overwrite=options.overwrite, foreign=foreign)
    if options.teacher_cache is not None:
        check_apart(options.teacher_cache, [task.out, folder, task.aligned, *(source.folder for source in sources)])
    with console.stage("reading the data"), ranks.main_first():
        rows, heldout, counts = open_data(
            options.data,
            load_tokenizer(task.checkpoint.folder),
            seq_len=pace.seq_len,
            vocab_size=task.checkpoint.config["vocab_size"],
            seed=options.seed,
            heldout=options.heldout,
            eval_names=options.eval_data,
            console=console,
        )
    if hasattr(rows, "__len__") and len(rows) < pace.batch_size:
        raise UserError(
            f"the data give only {len(rows)} rows of {pace.seq_len} tokens, fewer than --batch-size"
            f" {pace.batch_size}; give more data or lower --batch-size"
        )
    with ranks.main_first():
        work = TrainingFolder(folder, TRAINING_COMMAND, identity, pieces=STATES, main=ranks.is_main, console=console)
    if not folder.is_dir():
        raise UserError(f"{folder} is visible to the main process only; name an OUT that all machines can see")
    with work:
        # Only the main process looks: another machine may see an older state of the folder.
        step: int = ranks.broadcast((work.latest() if ranks.is_main else None) or 0)
        if options.align:
            task = align_first(task, step, ranks, console)
        try:
            if options.teacher_cache is not None:
                rows, heldout = with_answers(task, rows, heldout, identity, accelerator, ranks, console)
            model = make_model(task, accelerator, ranks, console)
            loop = Loop(model, rows, heldout, task.pace, work, console)
            loop.progress.model = fingerprint(task.checkpoint)
            if step:
                resume(loop, step, task, ranks)
            if ranks.is_main:  # a killed run has written to it after its last state
                work.metrics.touch()
                os.truncate(work.metrics, min(work.metrics.stat().st_size, loop.progress.metrics_bytes))
            announce(task, model, accelerator, console)
            progress = loop.run()
        except torch.OutOfMemoryError:
            raise UserError(
                "out of GPU memory: run the same command again to resume, with a smaller --micro-batch-size or"
                " --gradient-checkpointing, or shared by several GPUs (--tp-size, or FSDP2 by accelerate launch)"
            ) from None
        chosen = chosen_step(task, progress, work)
        if chosen != progress.kept_step:
            work.save_weights(chosen, model)
        model.close()
        document = None
        if ranks.is_main:
            document = write_outcome(task, progress, work, chosen, counts, identity, digest, console)
        for tracker in accelerator.trackers:  # ``end_training`` would end the process group too, which is not ours
            tracker.finish()
    return document


def align_first(task: Task, step: int, ranks: Ranks, console: Console) -> Task:
    """Return the task from the aligned model on, whose checkpoint stays beside OUT: an adapter, or a training that has
    reached a ``step``, belongs to it."""
    options, aligned = task.options, task.aligned
    assert options.distill_from is not None
    if ranks.broadcast(step > 0 and read_own(aligned / ALIGNMENT).get("model") == options.model):
        console.note(f"going on from {aligned}, which an earlier run has aligned")
    else:
        console.note(f"aligning first; the result stays in {aligned}")
        windows = AlignOptions(
            split_weight(options.data[0])[0],
            samples=options.samples,
            seq_len=options.seq_len,
            tokens=start_tokens(task.checkpoint.config, options.max_tokens),
            seed=options.seed,
            dtype=options.dtype,
            device=str(options.device),
            write=options.write,
            spare=0 if options.eval_data else options.heldout,
        )
        adapt_layers(
            options.model,
            aligned,
            options.distill_from,
            windows,
            overwrite=options.overwrite,
            verify=options.verify and task.is_lora,  # else OUT, which has the same code and config, is verified
            console=console,
        )
        release(ranks.device)
        ranks.barrier()  # rank 0 alone writes
    left = read_retrainings(aligned)[-1].left_by_alignment
    pace = task.pace if left is None else task.pace.after_alignment(left)
    return replace(task, model=str(aligned), checkpoint=open_checkpoint(str(aligned)), pace=pace)


def make_model(task: Task, accelerator: Accelerator, ranks: Ranks, console: Console) -> TrainingModel:
    options, pace, is_sharded = task.options, task.pace, task.launch.sharded
    rows_of_rank = pace.batch_size // (task.launch.processes // options.tp_size)
    accelerator.gradient_accumulation_steps = rows_of_rank // pace.micro_batch_size
    if options.tp_size > 1:
        return build_tensor_parallel(task, accelerator, ranks, console)
    device = None if is_sharded else accelerator.device
    with console.stage("loading the models" if task.loads_teacher else "loading the model"):
        widest = reduce(torch.promote_types, task.stored.values(), task.compute)
        student = make_student(
            open_model(task.checkpoint, task.layout, device, widest),
            task.compute,
            trained=task.trained,
            lora=task.lora,
            seed=options.seed,
            gradient_checkpointing=options.gradient_checkpointing,
        )
        teacher = None
        if task.teacher is not None and task.loads_teacher:
            dense = open_model(task.teacher, Layout.dense(task.layout.num_layers), device, task.compute)
            teacher = make_teacher(dense, task.compute, None if is_sharded else student)
    return HFTraining(
        accelerator,
        student,
        teacher,
        task.stored,
        weight_decay=options.weight_decay,
        micro_batch_size=pace.micro_batch_size,
        max_grad_norm=options.max_grad_norm,
    )


def resume(loop: Loop, step: int, task: Task, ranks: Ranks) -> None:
    """Load the state of a step. All ranks call it."""
    work, progress = loop.folder, loop.folder.load(step, loop.model)
    check_unchanged(loop.progress.model, task, progress, work)
    kept = progress.kept_step
    if not ranks.broadcast(kept is None or work.weights(kept).exists()):  # they went with a later state
        progress.kept_step, progress.best = None, progress.before
    loop.progress = progress
    loop.console.note(f"resuming after step {step}, saved in {work.folder}")


def announce(task: Task, model: TrainingModel, accelerator: Accelerator, console: Console) -> None:
    """Tell people and trackers what is trained, and how."""
    options, processes = task.options, task.launch.processes
    numbers = sum(math.prod(shape) for shape in model.shapes.values())
    shared = f", {options.tp_size} for each copy of the model, schedule {options.schedule}"
    console.note(
        f"trainable parameters: {human_count(numbers)} ({options.method}, layers {format_ranges(task.layers)}) on"
        f" {processes} process{'es' if processes > 1 else ''}{shared if options.tp_size > 1 else ''};"
        f" {task.pace.in_words}, peak learning rate {task.pace.lr:.3g}"
    )
    if accelerator.log_with:
        folder = Path(accelerator.project_dir)
        folder.mkdir(parents=True, exist_ok=True)
        asked = task.resolved_options
        config = {key: value for key, value in asked.items() if isinstance(value, int | float | str)}
        accelerator.init_trackers("ladderize", config=config, init_kwargs={"wandb": {"dir": str(folder)}})


# ---- the result ----


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
