"""``ladderize adapt --method full`` and ``lora``: retrain a checkpoint as a whole, and write a checkpoint or an
adapter."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ladderize.adapt.align.align import Aligning
from ladderize.adapt.align.options import AlignOptions, short_tokens
from ladderize.adapt.blockwise.rewrite import rewrite
from ladderize.adapt.data.packing import PackedRow, batch_document, show_batch
from ladderize.adapt.data.stream import Stream, StreamOptions, fixed_rows
from ladderize.adapt.lora import ADAPTATION
from ladderize.adapt.methods import LORA
from ladderize.adapt.retrain.engine import Engine
from ladderize.adapt.retrain.forecast import TrainingForecast, forecast_training
from ladderize.adapt.retrain.hf_model import HFEngine, ModelSetup, build_student, build_teacher
from ladderize.adapt.retrain.memory_estimate import CUT, Cut, check_disk, fit_memory
from ladderize.adapt.retrain.options import Budget, RetrainOptions, TrainOptions
from ladderize.adapt.retrain.outcome import Adaptation, check_out, write_outcome
from ladderize.adapt.retrain.state import TrainingFolder, cut_metrics
from ladderize.adapt.retrain.task import RetrainJob, Task, check_length, open_task, result_digest, run_identity
from ladderize.adapt.retrain.tensor_parallel import build_tp_engine
from ladderize.adapt.retrain.trainer import Trainer, probe_seconds
from ladderize.blocks import open_checkpoint
from ladderize.checkpoint.reading import Checkpoint
from ladderize.console import SILENT, Console, human_bytes, human_count, human_seconds
from ladderize.convert.retraining import read_retrainings
from ladderize.errors import UsageError, UserError
from ladderize.files.regular import resolved
from ladderize.files.work import EarlierRun, work_folder
from ladderize.layout import Layout, format_ranges
from ladderize.memory import tcmalloc_advice
from ladderize.modeling import load_tokenizer
from ladderize.ranks.environment import already_started
from ladderize.ranks.group import TRAINING_TIMEOUT, Ranks, join_ranks
from ladderize.ranks.threads import set_threads
from ladderize.ranks.training import accelerate_settings
from ladderize.runtime.launch import check_group_size, run


def aligned_path(out: str) -> str:
    """The checkpoint beside OUT that retraining starts from."""
    out = out if Path(out).name not in ("", "..") else str(resolved(out))  # beside ``.`` and not in it
    return f"{out.rstrip('/')}-aligned"


def check_before_aligning(forecast: TrainingForecast) -> None:
    """Raise UserError where the training that follows an alignment would not fit: now, and not after it."""
    asked = forecast.ways[0]
    if asked.fits is False:
        raise UserError(
            f"this needs about {human_bytes(asked.memory_bytes)} for each process, with {asked.cut}, and"
            f" {human_bytes(forecast.device_memory_bytes or 0)} are free; --dry-run shows what would fit"
        )


def start_aligned(job: RetrainJob, console: Console) -> RetrainJob:
    """Align the job's model on the first data of the retraining, unless an earlier run of the same command did; returns
    the job from there on, with the aligned checkpoint beside OUT as its model. That stays: an adapter belongs to it."""
    model, out, options = job.model, job.out, job.options
    assert options.distill_from is not None  # options.check()
    checkpoint = open_checkpoint(model, job.revision)
    if Layout.from_config(checkpoint.config).is_dense:
        raise UserError(f"{model} is dense; there is nothing to align; leave --align out")
    if found := read_retrainings(checkpoint.folder):
        raise UserError(
            f"--align: {model} was retrained already ({found[-1].method}); align before that, or leave --align out"
        )
    data, seq_len = options.data[0].text, options.seq_len
    if options.data[0].is_streamed:
        raise UsageError(f"--align reads --data {data} whole, which is streamed; put a file first, or align beforehand")
    tokens = short_tokens(checkpoint.config)
    asked = AlignOptions(
        data,
        seq_len=seq_len,
        tokens=tokens,
        seed=options.seed,
        dtype=options.dtype,
        device=options.device,
        write=options.write,
        skipping=options.skip_bad_rows,
    )
    folder = work_folder(out, options.work_dir, checkpoint.folder)
    if not EarlierRun(resolved(out), ADAPTATION, folder, overwrite=job.overwrite).may_have_finished():
        check_out(job, [checkpoint, open_checkpoint(options.distill_from)])
        check_before_aligning(forecast_training(model, options, revision=job.revision))
    beside = aligned_path(out)
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
        before_training=True,
    )
    join_ranks(options.device).barrier()  # rank 0 alone writes
    return replace(job, model=beside, revision=None)


TRACKERS = ("tensorboard", "wandb", "trackio")  # also the names of their packages


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError for a tracker that is not known or not installed: Accelerate would leave it out."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"--log-with {name} is not one of {', '.join(TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--log-with {name} needs the package {name}, which is not installed (pip install {name})")


def check_log_dir(out: str, folder: Path | None) -> None:
    """Raise UserError for a folder of the trackers that would fill OUT before it is written."""
    if folder is not None and resolved(out) in (place := resolved(folder, "--log-dir "), *place.parents):
        raise UserError(f"--log-dir {folder} is OUT or lies inside it, which must be empty until the end; name another")


class Trackers:
    """On the main process those in ``names``; nothing where there are none. folder: for what they write to disk."""

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, Any], ranks: Ranks) -> None:
        self.accelerator: Any = None
        if names:
            from accelerate import Accelerator

            on_cpu = ranks.device.type == "cpu"
            self.accelerator = Accelerator(
                log_with=list(names), project_dir=str(folder), mixed_precision="no", cpu=on_cpu
            )
            plain = {key: value for key, value in config.items() if isinstance(value, int | float | str | bool)}
            kwargs = {"wandb": {"dir": str(folder)}} if "wandb" in names else {}
            folder.mkdir(parents=True, exist_ok=True)
            self.accelerator.init_trackers("ladderize", config=plain, init_kwargs=kwargs)

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self.accelerator is not None:
            self.accelerator.log(dict(values), step=step)

    def close(self) -> None:
        """Not Accelerate's ``end_training``, which would end the process group too."""
        for tracker in self.accelerator.trackers if self.accelerator is not None else ():
            tracker.finish()


def open_data(
    checkpoint: Checkpoint, options: RetrainOptions, training: TrainOptions
) -> tuple[Stream, list[PackedRow]]:
    """The stream to train on, and the rows to validate on."""
    tokenizer = load_tokenizer(checkpoint.folder)
    asked = StreamOptions(
        seq_len=training.seq_len,
        vocab_size=checkpoint.config["vocab_size"],
        seed=training.seed,
        packing=options.packing,
        heldout=0 if options.eval_data else options.heldout,
        skip_bad_rows=options.skip_bad_rows,
        min_rows=training.batch_size,
    )
    stream = Stream(options.data, tokenizer, asked)
    return stream, fixed_rows(options.eval_data, tokenizer, asked) if options.eval_data else stream.heldout_rows


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
    """Retrain ``model`` as a whole and write ``out``: a checkpoint, or with method ``lora`` an adapter; returns the
    document of adaptation.json, on other ranks than 0 None.

    model: a folder or a hub id, of a converted checkpoint, or, with ``options.train`` naming layers, of a dense one (a
    control). One process, or those of accelerate launch or torchrun; without such a launcher, an
    ``options.tp_size`` above 1 starts that many processes on this host, which end with this one, and SIGTERM and Ctrl-C
    let them save first. A killed run goes on where its last state was saved. Raises UserError, UsageError for options
    that do not go together.
    """
    job = RetrainJob(str(model), str(out), options, overwrite, verify, revision)
    options.check()
    options.budget.check()
    check_trackers(options.log_with)
    check_log_dir(job.out, options.log_dir)
    options.check_data()
    if options.align:
        job = start_aligned(job, console)
    if options.tp_size > 1 and not already_started():
        check_group_size(options.tp_size, options.device)
        # what is wrong with the task is said before ranks are started
        open_task(job.model, options, Ranks(0, options.tp_size, torch.device(options.device)), job.revision)
        console.note(f"starting {options.tp_size} ranks")
        document: Adaptation | None = run(
            retrain,
            job,
            console,
            tp_size=options.tp_size,
            device=options.device,
            threads=options.threads,
            timeout=TRAINING_TIMEOUT,
            stoppable=True,
        )
        return document
    ranks = join_ranks(options.device)
    if options.threads is not None:
        set_threads(options.threads, ranks.local_size)
    return retrain(ranks, job, console)


def retrain(ranks: Ranks, job: RetrainJob, console: Console) -> Adaptation | None:
    """One rank's part; returns the document on the main rank, None on the others."""
    out, options = job.out, job.options
    task = open_task(job.model, options, ranks, job.revision)
    folder = work_folder(out, options.work_dir, *(source.folder for source in task.sources))
    earlier = EarlierRun(resolved(out), ADAPTATION, folder, overwrite=job.overwrite)
    done, document = written_before(task, ranks, earlier, console)
    if done:
        return document
    check_out(job, task.sources)
    check_length(task, folder)
    task = fit_memory(task, ranks, folder, console)
    with console.stage("reading the data"):
        stream, heldout = open_data(task.checkpoint, options, task.training)
        identity = run_identity(task, stream) if ranks.is_main else {}  # it reads all data
    with stream:
        with ranks.main_first():
            if ranks.is_main and not options.resume:
                TrainingFolder.discard(folder)
            work = TrainingFolder(folder, identity, main=ranks.is_main)
        if not folder.is_dir():
            raise UserError(
                f"{folder} is visible to the main process only; choose a --work-dir that all machines can see"
            )
        with work:
            cut = Cut.of(task).to_dict()
            if ranks.is_main and work.about.get(CUT) != cut:
                work.write_about(**{CUT: cut})
            trackers = Trackers(
                options.log_with,
                options.log_dir or Path(f"{resolved(out)}-logs"),
                task.training.deciding().to_dict(),
                ranks,
            )
            try:
                trainer = make_trainer(task, ranks, stream, heldout, work, console, trackers)
                announce_training(trainer, task, console)
                trainer.run()
            except torch.OutOfMemoryError:
                raise UserError(
                    "out of GPU memory: run the same command again to resume, with a smaller --micro-batch-size or"
                    " --gradient-checkpointing, or shared by several GPUs (--tp-size)"
                ) from None
            finally:
                trackers.close()
            document = write_outcome(trainer, task, job, identity, console)
            if ranks.is_main:
                work.remove()
    return document


def written_before(task: Task, ranks: Ranks, earlier: EarlierRun, console: Console) -> tuple[bool, Adaptation | None]:
    """Whether this very run has written OUT already, and, on the main process, the document of it.

    A run may be killed after its output appeared; what is left of its unfinished work is removed.
    """
    options, document = task.options, None
    if ranks.is_main and earlier.may_have_finished() and (options.resume or not earlier.overwrite):
        written = Adaptation.from_dict(earlier.read(), earlier.out / ADAPTATION)
        if written.options == task.training.deciding():  # else there is no need to read all data
            stream, _ = open_data(task.checkpoint, options, task.training)
            with stream:
                identity = run_identity(task, stream)
            if earlier.finished(result_digest(task, identity)):
                earlier.tidy(TrainingFolder, identity, console)
                document = written
    return ranks.broadcast(document is not None), document


def make_trainer(
    task: Task,
    ranks: Ranks,
    stream: Stream,
    heldout: Sequence[PackedRow],
    work: TrainingFolder,
    console: Console,
    trackers: Trackers,
) -> Trainer:
    """Build the models, and go on from a state if there is one."""
    training = task.training
    engine = make_engine(task, ranks, console)
    trainer = Trainer(engine, stream, heldout, training, work, console, trackers.log)
    # the main process chooses: another machine may see the folder as it was
    latest = work.latest() if ranks.is_main else None
    step: int = ranks.broadcast(int(latest.name[-8:]) if latest is not None else 0)
    if not step:
        if ranks.is_main:
            check_disk(task, work.folder)
            cut_metrics(work.metrics, -1)  # of a run that was killed before its first state
    else:
        if not work.state_path(step).is_dir():
            raise UserError(
                f"{work.state_path(step)} is visible to the main process only; choose a --work-dir that all machines"
                " can see"
            )
        trainer.resume(work.state_path(step))
        before = trainer.progress.settings or {}
        other = " and ".join(key for key, value in training.settings().items() if before.get(key) != value)
        console.note(
            f"resuming after step {step}, saved in {work.folder}"
            + (f", with a new {other} from here on" if other else "")
        )
    trainer.progress.settings = training.settings()
    return trainer


def make_engine(task: Task, ranks: Ranks, console: Console) -> Engine:
    """The models and the optimizer."""
    if task.tp_size > 1:
        return build_tp_engine(task, ranks, console)
    options, training = task.options, task.training
    setup = ModelSetup(
        ranks.device,
        task.compute,
        attention=options.attention,
        gradient_checkpointing=bool(options.gradient_checkpointing),
        mesh=ranks.mesh() if task.sharded else None,
        reshard=accelerate_settings().reshard,
        collecting=bool(task.compared),
    )
    with console.stage("loading the models" if task.teacher is not None else "loading the model"):
        student = build_student(
            task.checkpoint,
            task.layout,
            setup,
            trained=task.trained,
            lora=task.lora,
            seed=training.seed,
            temperature=training.objective.temperature,
        )
        teacher = build_teacher(task.teacher, setup, student) if task.teacher is not None else None
    return HFEngine(
        student,
        ranks,
        compute=task.compute,
        sharded=task.sharded,
        weight_decay=training.weight_decay,
        teacher=teacher,
        compared=task.compared,
    )


def announce_training(trainer: Trainer, task: Task, console: Console) -> None:
    """What is trained, and how long it will take: measured with two micro-batches of held-out rows, if there are
    any."""
    training, ranks = task.training, trainer.engine.ranks
    numbers = sum(math.prod(shape) for shape in trainer.engine.shapes.values())
    shared = ""
    if task.tp_size > 1:
        shared = f", {task.tp_size} for each copy of the model, schedule {task.schedule.name}"
    text = (
        f"trainable parameters: {human_count(numbers)} ({task.options.method}, layers"
        f" {format_ranges(task.layers)}"
        f"{', embedding and head' if task.everything and task.options.method != LORA else ''})"
        f" on {ranks.size} process{'es' if ranks.size > 1 else ''}{shared};"
        f" {'about ' if training.budget.tokens else ''}{training.about_steps:,} steps of {training.batch_size} rows"
        f" of {training.seq_len} tokens, peak learning rate {training.schedule.peak:.3g}"
    )
    if rows := trainer.heldout[: training.micro_batch_size]:
        probed = sum(len(row) for row in rows) * task.data_ranks
        step, scoring = (seconds / probed for seconds in probe_seconds(trainer.engine, rows, training))  # of a token
        left = 1 - training.budget.share(trainer.progress.step, trainer.progress.tokens)
        validating = validations_left(trainer) * sum(map(len, trainer.heldout)) * scoring
        seconds = left * training.about_steps * training.batch_size * training.seq_len * step + validating
        text += (
            f", about {human_seconds(seconds)} on {ranks.device.type}, of which {human_seconds(validating)} validating"
        )
    console.note(text)
    if ranks.device.type == "cpu" and (advice := tcmalloc_advice()):
        console.note(advice)


def validations_left(trainer: Trainer) -> int:
    """How often the held-out rows are scored from here on: before the first step (the dense model's loss too), every
    ``eval_every`` steps and after the last, and with the weights as they will be stored."""
    done, steps, every = trainer.progress.step, trainer.options.about_steps, trainer.options.eval_every
    first = 0 if done else 1 + trainer.engine.has_teacher
    return first + max(0, -(-steps // every) - done // every) + 1


def show_data_of(model: str, options: RetrainOptions, revision: str | None, rows: int) -> tuple[str, dict[str, Any]]:
    """The first ``rows`` rows of the training as text and as a document; nothing is trained."""
    checkpoint = open_checkpoint(model, revision)
    options = replace(
        options, budget=options.budget if options.budget.tokens else Budget(steps=options.budget.steps or 1)
    )
    stream, _ = open_data(checkpoint, options, training := options.resolve(checkpoint.config, 1))
    with stream:
        taken = stream.take(rows)
    tokenizer = load_tokenizer(checkpoint.folder)
    text = show_batch(taken, tokenizer)
    if rows < training.batch_size:
        text += f"\n\n{rows} of the {training.batch_size} rows of a step (--show-data-rows shows more)"
    return text, {"model": model, "rows": batch_document(taken, tokenizer)}
