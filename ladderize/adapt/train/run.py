"""``ladderize adapt --method full`` and ``lora``: retrain a whole checkpoint, and write a checkpoint or an adapter."""

import importlib.util
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import parse_flag_from_env

from ladderize.adapt.layers.align import Aligning
from ladderize.adapt.layers.align_options import AlignOptions, short_tokens
from ladderize.adapt.layers.rewrite import rewrite
from ladderize.adapt.lora import ADAPTATION
from ladderize.adapt.train.loop import Loop, Order
from ladderize.adapt.train.memory import check_disk, estimate
from ladderize.adapt.train.options import Budget, RetrainOptions, TrainOptions
from ladderize.adapt.train.outcome import Adaptation, check_out, chosen_step, write_outcome
from ladderize.adapt.train.states import TrainingFolder, cut_metrics
from ladderize.adapt.train.student import make_student, make_teacher, open_model
from ladderize.adapt.train.task import Launch, RetrainJob, Task, open_task, result_digest, run_identity, sharding_asked
from ladderize.adapt.train.tensor_parallel import build_tensor_parallel
from ladderize.adapt.train.training_model import HFTraining, TrainingModel
from ladderize.blocks import open_checkpoint
from ladderize.checkpoint.reading import Checkpoint
from ladderize.console import SILENT, Console, human_count
from ladderize.convert.retraining import ALIGNMENT, read_retrainings
from ladderize.errors import UsageError, UserError
from ladderize.files import output
from ladderize.files.documents import read_own
from ladderize.files.regular import resolved
from ladderize.files.work import ABOUT, RUN, work_folder
from ladderize.layout import Layout, format_ranges
from ladderize.memory import tcmalloc_advice
from ladderize.modeling import load_tokenizer
from ladderize.ranks.environment import already_started, launched
from ladderize.ranks.group import TRAINING_TIMEOUT, Ranks, join_ranks
from ladderize.runtime.launch import check_group_size, run

if TYPE_CHECKING:
    from ladderize.adapt.data.training_data import TrainingData


def adapt_checkpoint(
    model: str | Path,
    out: str | Path,
    options: RetrainOptions,
    *,
    overwrite: bool = False,
    verify: bool = True,
    revision: str | None = None,
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
    job = RetrainJob(str(model), str(out), options, overwrite, verify, revision)
    options.check()
    options.budget.check()
    options.check_data()
    check_trackers(options.log_with)
    if options.align:
        job = start_aligned(job, console)
    if options.tp_size > 1 and not already_started():
        check_group_size(options.tp_size, options.device)
        # errors of the task are raised before ranks are started
        open_task(job.model, options, Launch(options.device, options.tp_size), job.revision)
        console.note(f"starting {options.tp_size} ranks")
        document: Adaptation | None = run(
            retrain,
            job,
            console,
            tp_size=options.tp_size,
            device=options.device,
            timeout=TRAINING_TIMEOUT,
            stoppable=True,
        )
        return document
    return retrain(join_ranks(options.device), job, console)


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError for a tracker that is not installed: Accelerate would ignore it."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--log-with {name} needs the package {name}, which is not installed (pip install {name})")


def aligned_path(out: str) -> str:
    """Return the path of the aligned checkpoint beside OUT that retraining starts from."""
    out = out if Path(out).name not in ("", "..") else str(resolved(out))  # beside ``.`` and not in it
    return f"{out.rstrip('/')}-aligned"


def start_aligned(job: RetrainJob, console: Console) -> RetrainJob:
    """Align the job's model on the first data of the retraining, unless an earlier run of the same command did.

    Returns the job with the aligned checkpoint beside OUT as its model. That checkpoint stays: an adapter belongs to
    it.
    Raises UserError where there is nothing to align, or the training would fail.
    """
    model, out, options = job.model, job.out, job.options
    assert options.distill_from is not None  # options.check()
    checkpoint = open_checkpoint(model, job.revision)
    if Layout.from_config(checkpoint.config).is_dense:
        raise UserError(f"{model} is dense; there is nothing to align; leave --align out")
    if found := read_retrainings(checkpoint.folder):
        raise UserError(
            f"--align: {model} was retrained already ({found[-1].method}); align before that, or leave --align out"
        )
    data = options.data[0].text
    if options.data[0].is_streamed:
        raise UsageError(f"--align reads --data {data} whole, which is streamed; put a file first, or align beforehand")
    asked = AlignOptions(
        data,
        seq_len=options.seq_len,
        tokens=short_tokens(checkpoint.config),
        seed=options.seed,
        dtype=options.dtype,
        device=options.device,
        write=options.write,
    )
    folder = work_folder(out, options.work_dir, checkpoint.folder)
    if job.overwrite or RUN not in read_own(resolved(out) / ADAPTATION):
        check_out(job, [checkpoint, open_checkpoint(options.distill_from)])
        place = launched()  # errors of the training are raised before the alignment
        open_task(model, options, Launch(options.device, max(place.size, options.tp_size)), job.revision)
    beside = aligned_path(out)
    # a training that was begun belongs to the aligned checkpoint that is there
    begun = options.resume and read_own(folder / ABOUT).get("command") == TrainingFolder.COMMAND
    ranks = join_ranks(options.device)
    if ranks.broadcast(begun and read_own(Path(beside) / ALIGNMENT).get("model") == model):
        console.note(f"going on from {beside}, which an earlier run has aligned")
        return replace(job, model=beside, revision=None)
    console.note(f"aligning first; the result stays in {beside}")
    rewrite(
        Aligning(),
        model,
        beside,
        options.distill_from,
        asked,
        overwrite=job.overwrite,
        verify=job.verify,
        revision=job.revision,
        console=console,
    )
    ranks.barrier()  # rank 0 alone writes
    return replace(job, model=beside, revision=None)


def open_accelerator(options: RetrainOptions, logs: Path, precision: str | None = None) -> Accelerator:
    """Return an Accelerator as the launcher's environment configures it, on the device of the options.

    logs: the folder of trackers.
    precision: the mixed precision where the launcher was given none.
    Raises UserError where DeepSpeed is asked for but not installed.
    """
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED") and importlib.util.find_spec("deepspeed") is None:
        raise UserError("accelerate launch asks for DeepSpeed, which is not installed (pip install deepspeed)")
    accelerator = Accelerator(
        cpu=options.device == "cpu",
        mixed_precision=precision,
        log_with=list(options.log_with) or None,
        project_dir=str(logs) if options.log_with else None,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    accelerator.gradient_state.plugin_kwargs["sync_with_dataloader"] = False  # training reads rows without end
    return accelerator


def reset_accelerate() -> None:
    """Let the next training in this process choose another precision: Accelerate keeps one per process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def retrain(ranks: Ranks, job: RetrainJob, console: Console) -> Adaptation | None:
    """Do one rank's part of the job; returns the document on the main rank, None on the others."""
    logs = Path(f"{resolved(job.out)}-logs")
    reset_accelerate()
    try:
        accelerator = open_accelerator(job.options, logs)
        launch = Launch(
            ranks.device.type,
            accelerator.num_processes,
            accelerator.mixed_precision,
            accelerator.gradient_accumulation_steps,
            accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED),
        )
        if sharding_asked() and not launch.sharded:
            raise UserError("accelerate launch asks for FSDP or DeepSpeed, which Accelerate runs on GPUs only")
        task = open_task(job.model, job.options, launch, job.revision)
        if task.compute == torch.bfloat16 and launch.precision == "no" and task.options.tp_size == 1:
            AcceleratorState._reset_state()
            accelerator = open_accelerator(job.options, logs, "bf16")
        return train(task, accelerator, ranks, job, console)
    finally:
        reset_accelerate()


def train(task: Task, accelerator: Accelerator, ranks: Ranks, job: RetrainJob, console: Console) -> Adaptation | None:
    """Train and write OUT, unless this run wrote it before; returns the document, None on other ranks than 0.

    Raises UserError.
    """
    options = task.options
    folder = work_folder(job.out, options.work_dir, *(source.folder for source in task.sources))
    if ranks.is_main:
        output.clean_up(resolved(job.out))  # a killed swap may have set OUT aside
    earlier = {} if job.overwrite else read_own(resolved(job.out) / ADAPTATION)
    identity = run_identity(task) if ranks.is_main else {}  # it reads files
    # a run may be killed after its output appeared
    is_done = ranks.is_main and earlier.get(RUN) == result_digest(task, identity)
    if ranks.broadcast(is_done):
        if not is_done:
            return None
        TrainingFolder.tidy(folder, identity, resolved(job.out), console)
        return Adaptation.from_dict(earlier, ADAPTATION)
    check_out(job, task.sources)
    with console.stage("reading the data"), accelerator.main_process_first():
        data = read_data(task.checkpoint, options, task.training)
    if hasattr(data.train, "__len__") and len(data.train) < task.training.batch_size:
        raise UserError(
            f"the data give only {len(data.train)} rows of {task.training.seq_len} tokens, fewer than --batch-size"
            f" {task.training.batch_size}; give more data or lower --batch-size"
        )
    with ranks.main_first():
        if ranks.is_main and not options.resume:
            TrainingFolder.discard(folder)
        work = TrainingFolder(folder, identity, main=ranks.is_main)
    if not folder.is_dir():
        raise UserError(f"{folder} is visible to the main process only; name an OUT that all machines can see")
    with work:
        start_trackers(accelerator, task.training)
        try:
            loop = make_loop(task, accelerator, ranks, data, work, console)
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
            document = write_outcome(task, job, progress, work, chosen, data.counts, identity, console)
            work.remove()
        for tracker in accelerator.trackers:  # ``end_training`` would end the process group too, which is not ours
            tracker.finish()
    return document


def start_trackers(accelerator: Accelerator, training: TrainOptions) -> None:
    """Start Accelerate's trackers, if there are any, with the resolved options."""
    if not accelerator.log_with:
        return
    folder = Path(accelerator.project_dir)
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in training.to_dict().items() if isinstance(value, int | float | str | bool)}
    accelerator.init_trackers("ladderize", config=config, init_kwargs={"wandb": {"dir": str(folder)}})


def read_data(checkpoint: Checkpoint, options: RetrainOptions, training: TrainOptions) -> "TrainingData":
    """Return the rows to train and to validate on."""
    from ladderize.adapt.data.training_data import DataOptions, open_data

    asked = DataOptions(training.seq_len, checkpoint.config["vocab_size"], training.seed, heldout=training.heldout)
    return open_data(options.data, load_tokenizer(checkpoint.folder), asked, options.eval_data)


def make_loop(
    task: Task, accelerator: Accelerator, ranks: Ranks, data: Any, work: TrainingFolder, console: Console
) -> Loop:
    """Return the training loop, with the models built and the last state, if there is one, loaded."""
    training = task.training
    if ranks.is_main:
        memory = estimate(task)
        memory.warn_where_short(ranks.device, ranks.local_size, console)
    model = make_model(task, accelerator, ranks, console)
    loop = Loop(model, data.train, data.heldout, training, work, console, task.stored)
    # Only the main process looks: another machine may see an older state of the folder.
    step: int = ranks.broadcast((work.latest() if ranks.is_main else None) or 0)
    if not step:
        if ranks.is_main:
            check_disk(task, work.folder)
            cut_metrics(work.metrics, -1)  # of a run that was killed before its first state
    else:
        loop.progress = work.load(step, model)
        if ranks.is_main:
            cut_metrics(work.metrics, step)
        before = loop.progress.settings or {}
        other = " and ".join(key for key, value in training.settings().items() if before.get(key) != value)
        console.note(
            f"resuming after step {step}, saved in {work.folder}"
            + (f", with a new {other} from here on" if other else "")
        )
    loop.progress.settings = training.settings()
    announce(task, model, console)
    return loop


def make_model(task: Task, accelerator: Accelerator, ranks: Ranks, console: Console) -> TrainingModel:
    """Return the model in training: its weights, its teacher, and the optimizer."""
    options, training = task.options, task.training
    if options.tp_size > 1:
        return build_tensor_parallel(task, accelerator, ranks, console)
    collecting, device = bool(task.compared), None if task.launch.sharded else accelerator.device
    with console.stage("loading the models" if task.teacher is not None else "loading the model"):
        student = make_student(
            open_model(task.checkpoint, task.layout, options.attention, collecting=collecting, device=device),
            task.compute,
            trained=task.trained,
            lora=task.lora,
            seed=training.seed,
            temperature=training.objective.temperature,
            gradient_checkpointing=options.gradient_checkpointing,
        )
        teacher = None
        if task.teacher is not None:
            dense = Layout.dense(task.layout.num_layers)
            teacher = make_teacher(
                open_model(task.teacher, dense, options.attention, collecting=collecting, device=device),
                task.compute,
                None if task.launch.sharded else student,
            )
    return HFTraining(
        accelerator,
        student,
        teacher,
        compared=task.compared,
        weight_decay=training.weight_decay,
        micro_batch_size=training.micro_batch_size,
        max_grad_norm=training.max_grad_norm,
    )


def announce(task: Task, model: TrainingModel, console: Console) -> None:
    """Say which parameters are trained, on how many processes, for how long."""
    training, processes, tp_size = task.training, task.launch.processes, task.options.tp_size
    numbers = sum(math.prod(shape) for shape in model.shapes.values())
    shared = f", {tp_size} for each copy of the model, schedule {task.options.schedule.name}" if tp_size > 1 else ""
    console.note(
        f"trainable parameters: {human_count(numbers)} ({task.options.method}, layers"
        f" {format_ranges(task.layers)}"
        f"{', embedding and head' if task.everything and not task.is_lora else ''})"
        f" on {processes} process{'es' if processes > 1 else ''}{shared};"
        f" {'about ' if training.budget.tokens else ''}{training.about_steps:,} steps of {training.batch_size} rows"
        f" of {training.seq_len} tokens, peak learning rate {training.schedule.peak:.3g}"
    )
    if task.launch.device == "cpu" and (advice := tcmalloc_advice()):
        console.note(advice)


def show_data_of(model: str, options: RetrainOptions, revision: str | None, rows: int) -> tuple[str, dict[str, Any]]:
    """Return the first ``rows`` rows of the training, as text and as a document. Nothing is trained."""
    from ladderize.adapt.data.packing import show_batch

    checkpoint = open_checkpoint(model, revision)
    options = replace(
        options, budget=options.budget if options.budget.tokens else Budget(steps=options.budget.steps or 1)
    )
    training = options.resolve(checkpoint.config, 1)
    train = read_data(checkpoint, options, training).train
    numbers = Order(len(train), training.seed, 0) if hasattr(train, "__len__") else None
    source = iter(train) if numbers is None else (train[number] for number in numbers)
    taken = list(itertools.islice(source, rows))
    return show_batch(taken, load_tokenizer(checkpoint.folder)), {"model": model, "rows": taken}
