"""``ladderize adapt --method full`` and ``lora``: retrain a whole checkpoint, and write a checkpoint or an adapter."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import get_available_trackers
from torch import Tensor

from ladderize.adapt.data.training_data import open_data
from ladderize.adapt.layers.options import AlignOptions, start_tokens
from ladderize.adapt.layers.rewrite import adapt_layers
from ladderize.adapt.lora import ADAPTATION
from ladderize.adapt.train.loop import Loop
from ladderize.adapt.train.options import RetrainOptions, TrainOptions
from ladderize.adapt.train.outcome import Adaptation, check_out, chosen_step, result_digest, write_outcome
from ladderize.adapt.train.states import STATE, STEP, TRAINING_COMMAND, TrainingFolder, latest_step
from ladderize.adapt.train.student import make_student, make_teacher, open_model
from ladderize.adapt.train.task import Launch, RetrainJob, Task, open_task, run_identity, sharding_asked
from ladderize.adapt.train.teacher_cache import with_answers
from ladderize.adapt.train.tensor_parallel import build_tensor_parallel
from ladderize.adapt.train.training_model import HFTraining, TrainingModel, place_teacher
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.console import SILENT, Console, human_count
from ladderize.convert.inspection import ALIGNMENT, read_retrainings
from ladderize.data.files import split_weight
from ladderize.errors import UserError
from ladderize.files import output
from ladderize.files.documents import read_own
from ladderize.files.regular import resolved
from ladderize.files.unfinished import RUN_FILE, RUN_SHA256, is_written_by, tidy, work_folder
from ladderize.layout import Layout, format_ranges
from ladderize.memory import release
from ladderize.modeling import load_tokenizer
from ladderize.ranks.device import avoid_cudnn_attention
from ladderize.ranks.environment import already_started, launched
from ladderize.ranks.group import TRAINING_TIMEOUT, Ranks, join_ranks
from ladderize.runtime.launch import check_group_size, run
from ladderize.runtime.training.batch import Batch


def adapt_checkpoint(
    model: str | Path,
    out: str | Path,
    options: RetrainOptions,
    *,
    overwrite: bool = False,
    verify: bool = True,
    console: Console = SILENT,
) -> Adaptation | None:
    """Retrain ``model`` as a whole and write ``out``: a checkpoint, or with method ``lora`` an adapter.

    Returns the document of adaptation.json; None on other ranks than 0. The processes are those of accelerate launch or
    torchrun. Without such a launcher, an ``options.tp_size`` above 1 starts that many on this host; they end with this
    one, and SIGTERM and Ctrl-C let them save first. A killed run resumes from its last saved state.

    model: a folder or a hub id of a converted checkpoint, or, with layers named by ``options.train``, of a dense one (a
    control).
    Raises UserError; UsageError for options that do not go together.
    """
    job = RetrainJob(str(model), str(out), options, overwrite, verify)
    options.check()
    check_trackers(options.log_with)
    starts_ranks = options.tp_size > 1 and not already_started()
    if starts_ranks:
        check_group_size(options.tp_size, options.device)
    if options.align or starts_ranks:  # faults are told before an alignment takes minutes, and ranks are started
        open_task(job.model, options, Launch(max(launched().size, options.tp_size), sharded=sharding_asked()))
    if options.align:
        job = start_aligned(job, console)
    if not starts_ranks:
        return retrain(join_ranks(options.device), job, console)
    return run(
        retrain,
        job,
        console,
        tp_size=options.tp_size,
        device=options.device,
        timeout=TRAINING_TIMEOUT,
        stoppable=True,
    )


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError for a tracker that Accelerate would silently leave out."""
    installed = sorted(str(tracker) for tracker in get_available_trackers())
    if missing := [name for name in names if name not in installed]:
        raise UserError(
            f"--log-with {missing[0]} is no tracker of Accelerate that is installed here; install its package, or take"
            f" one of: {', '.join(installed) or 'none'}"
        )


# ---- --align ----


def start_aligned(job: RetrainJob, console: Console) -> RetrainJob:
    """Align the job's model on the first data of the retraining, unless an earlier run of the same command did.

    Returns the job with the aligned checkpoint beside OUT as its model. That checkpoint stays: an adapter belongs to
    it.
    Raises UserError where there is nothing to align, or OUT may not be written.
    """
    model, options, out = job.model, job.options, resolved(job.out)
    assert options.distill_from is not None  # options.check()
    checkpoint, beside = open_checkpoint(model), job.aligned
    history = read_retrainings(checkpoint.folder)
    if history or Layout.from_config(checkpoint.config).is_dense:
        what = f"was retrained already ({history[-1].method})" if history else "is dense"
        raise UserError(f"{model} {what}; --align aligns converted weights that were not trained yet; leave it out")
    if job.overwrite or RUN_SHA256 not in read_own(out / ADAPTATION):
        check_out(job, [checkpoint, open_checkpoint(options.distill_from)])
    folder = work_folder(job.out)
    # a training that was begun belongs to the aligned checkpoint that is there
    begun = read_own(folder / RUN_FILE).get("command") == TRAINING_COMMAND and latest_step(folder) is not None
    ranks = join_ranks(options.device)
    if ranks.broadcast(begun and read_own(beside / ALIGNMENT).get("model") == model):
        console.note(f"going on from {beside}, which an earlier run has aligned")
    else:
        console.note(f"aligning first; the result stays in {beside}")
        asked = AlignOptions(
            split_weight(options.data[0])[0],
            samples=options.samples,
            seq_len=options.seq_len,
            tokens=start_tokens(checkpoint.config, options.max_tokens),
            seed=options.seed,
            dtype=options.dtype,
            device=options.device,
            write=options.write,
            spare=0 if options.eval_data else options.heldout,
        )
        how: dict[str, Any] = {"overwrite": job.overwrite, "verify": job.verify}
        adapt_layers(model, beside, options.distill_from, asked, console=console, **how)
        release(ranks.device)  # with --tp-size a rank that is started later trains on the same GPU
        ranks.barrier()  # rank 0 alone writes
    return replace(job, model=str(beside))


# ---- one rank's part ----


def open_accelerator(
    device: str, precision: str | None = None, *, log_with: Sequence[str] = (), logs: Path | None = None
) -> Accelerator:
    """Return an Accelerator as the launcher's environment configures it.

    precision: the mixed precision; None: the launcher's.
    logs: the folder of its trackers.
    """
    avoid_cudnn_attention()
    accelerator = Accelerator(
        cpu=device == "cpu",
        mixed_precision=precision,
        log_with=list(log_with) or None,
        project_dir=logs if log_with else None,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    accelerator.gradient_state.plugin_kwargs["sync_with_dataloader"] = False  # training reads rows without end
    return accelerator


def reset_accelerate() -> None:
    """Let the next training in this process choose another precision: Accelerate keeps one per process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def retrain(ranks: Ranks, job: RetrainJob, console: Console) -> Adaptation | None:
    """Do one rank's part of the job, with Accelerate's state made for it; returns as ``train`` does."""
    device = job.options.device
    trackers: dict[str, Any] = {"log_with": job.options.log_with, "logs": Path(f"{resolved(job.out)}-logs")}
    reset_accelerate()
    try:
        accelerator = open_accelerator(device, **trackers)
        launch = Launch(
            accelerator.num_processes,
            accelerator.mixed_precision,
            asked_accumulation(accelerator),
            accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED),
        )
        if sharding_asked() and not launch.sharded:
            raise UserError("accelerate launch asks for FSDP or DeepSpeed, which Accelerate runs on GPUs only")
        if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
            raise UserError("accelerate launch asks for FSDP of version 1; set fsdp_version: 2 in its configuration")
        task = open_task(job.model, job.options, launch)
        precision = "bf16" if task.compute == torch.bfloat16 else "no"
        if launch.precision != precision and task.options.tp_size == 1:
            AcceleratorState._reset_state()
            accelerator = open_accelerator(device, precision, **trackers)
        return train(task, accelerator, ranks, job, console)
    finally:
        reset_accelerate()


def asked_accumulation(accelerator: Accelerator) -> int:
    """Return the steps of gradient accumulation that the launcher, or a file of DeepSpeed, asks for; 1: none."""
    plugin = accelerator.state.deepspeed_plugin
    asked = plugin.get_value("gradient_accumulation_steps") if plugin is not None else "auto"
    return int(accelerator.gradient_accumulation_steps if asked in (None, "auto") else asked)


def start_trackers(accelerator: Accelerator, options: TrainOptions) -> None:
    if accelerator.log_with:
        folder = Path(accelerator.project_dir)
        folder.mkdir(parents=True, exist_ok=True)
        config = {key: value for key, value in options.to_dict().items() if isinstance(value, int | float | str)}
        accelerator.init_trackers("ladderize", config=config, init_kwargs={"wandb": {"dir": str(folder)}})


def train(task: Task, accelerator: Accelerator, ranks: Ranks, job: RetrainJob, console: Console) -> Adaptation | None:
    """Train and write OUT, unless this run wrote it before; returns the document, None on other ranks than 0."""
    options = task.options
    folder = work_folder(job.out)
    if ranks.is_main:
        output.clean_up(resolved(job.out))  # a killed swap may have set OUT aside
    earlier = {} if job.overwrite else read_own(resolved(job.out) / ADAPTATION)
    identity = run_identity(task) if ranks.is_main else {}  # it reads files
    # a run may be killed after its output appeared
    is_done = ranks.is_main and is_written_by(earlier, resolved(job.out), result_digest(task, identity))
    if ranks.broadcast(is_done):
        if not is_done:
            return None
        tidy(folder, TRAINING_COMMAND, identity, resolved(job.out), console)
        return Adaptation.from_dict(earlier, ADAPTATION)
    check_out(job, task.sources)
    with console.stage("reading the data"), ranks.main_first():
        rows, heldout, counts = open_data(
            options.data,
            load_tokenizer(task.checkpoint.folder),
            seq_len=options.seq_len,
            vocab_size=task.checkpoint.config["vocab_size"],
            seed=options.seed,
            heldout=options.heldout,
            eval_names=options.eval_data,
            console=console,
        )
    if hasattr(rows, "__len__") and len(rows) < options.batch_size:
        raise UserError(
            f"the data give only {len(rows)} rows of {options.seq_len} tokens, fewer than --batch-size"
            f" {options.batch_size}; give more data or lower --batch-size"
        )
    with ranks.main_first():
        work = TrainingFolder(
            folder, TRAINING_COMMAND, identity, pieces=f"{STEP}/{STATE}", main=ranks.is_main, console=console
        )
    if not folder.is_dir():
        raise UserError(f"{folder} is visible to the main process only; name an OUT that all machines can see")
    with work:
        start_trackers(accelerator, options)
        try:
            if options.teacher_cache is not None:
                rows, heldout = ask_teacher(task, accelerator, ranks, rows, heldout, identity, console)
            loop = make_loop(task, accelerator, ranks, rows, heldout, work, console)
            progress = loop.run()
        except torch.OutOfMemoryError:
            raise UserError(
                "out of GPU memory: run the same command again to resume, with a smaller --micro-batch-size or"
                " --gradient-checkpointing, or shared by several GPUs (--tp-size, or FSDP2 by accelerate launch)"
            ) from None
        chosen = chosen_step(task, progress, work)
        if chosen != progress.kept_step:
            work.save_weights(chosen, loop.model, task.stored)
        loop.model.close()
        document = None
        if ranks.is_main:
            document = write_outcome(task, job, progress, work, chosen, counts, identity, console)
        for tracker in accelerator.trackers:  # ``end_training`` would end the process group too, which is not ours
            tracker.finish()
    return document


def ask_teacher(
    task: Task,
    accelerator: Accelerator,
    ranks: Ranks,
    rows: Any,
    heldout: list[dict[str, Any]],
    identity: Mapping[str, Any],
    console: Console,
) -> tuple[Any, list[dict[str, Any]]]:
    """Return the rows with the dense model's answers, for which every process loads that model if some are missing."""
    dense, device = task.teacher, accelerator.device
    assert dense is not None

    def open_teacher() -> Callable[[Batch], Tensor]:
        with console.stage("loading the dense model"):
            model = open_model(dense, Layout.dense(task.layout.num_layers), device, task.compute)
            return place_teacher(make_teacher(model, task.compute, None), accelerator)

    try:
        answered = with_answers(rows, heldout, task.options, identity, open_teacher, ranks, device, console)
    except torch.OutOfMemoryError:
        raise UserError(
            "out of GPU memory while the dense model answers, which each process holds whole: run the same command"
            " again with a smaller --micro-batch-size, or begin anew without --teacher-cache"
        ) from None
    release(device)
    return answered


def make_loop(
    task: Task,
    accelerator: Accelerator,
    ranks: Ranks,
    rows: Any,
    heldout: list[dict[str, Any]],
    work: TrainingFolder,
    console: Console,
) -> Loop:
    """Return the training loop, with the models built and the last state, if there is one, loaded."""
    # Only the main process looks: another machine may see an older state of the folder.
    step: int = ranks.broadcast((work.latest() if ranks.is_main else None) or 0)
    model = make_model(task, accelerator, ranks, console)
    loop = Loop(model, rows, heldout, task.options, work, console, task.stored)
    if step:
        loop.progress = progress = work.load(step, model)
        kept = progress.kept_step
        if not ranks.broadcast(kept is None or work.weights(kept).exists()):  # they went with a later state
            progress.kept_step, progress.best = None, progress.before
        console.note(f"resuming after step {step}, saved in {work.folder}")
    work.cut_metrics(loop.progress)
    announce(task, model, console)
    return loop


def make_model(task: Task, accelerator: Accelerator, ranks: Ranks, console: Console) -> TrainingModel:
    options, is_sharded = task.options, task.launch.sharded
    rows_of_rank = options.batch_size // (task.launch.processes // options.tp_size)
    accelerator.gradient_accumulation_steps = rows_of_rank // options.micro_batch_size
    if options.tp_size > 1:
        return build_tensor_parallel(task, accelerator, ranks, console)
    device, stored = None if is_sharded else accelerator.device, task.stored.values()
    with console.stage("loading the models" if task.loads_teacher else "loading the model"):
        student = make_student(
            open_model(task.checkpoint, task.layout, device, reduce(torch.promote_types, stored, task.compute)),
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
        weight_decay=options.weight_decay,
        micro_batch_size=options.micro_batch_size,
        max_grad_norm=options.max_grad_norm,
    )


def announce(task: Task, model: TrainingModel, console: Console) -> None:
    options, processes = task.options, task.launch.processes
    numbers = sum(math.prod(shape) for shape in model.shapes.values())
    shared = f", {options.tp_size} for each copy of the model, schedule {options.schedule}"
    console.note(
        f"trainable parameters: {human_count(numbers)} ({options.method}, layers {format_ranges(task.layers)}) on"
        f" {processes} process{'es' if processes > 1 else ''}{shared if options.tp_size > 1 else ''};"
        f" {options.in_words}, peak learning rate {options.lr:.3g}"
    )
