"""``ladderize adapt --method full`` and ``lora``: retrain a converted checkpoint as a whole, and write a checkpoint or an adapter."""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ladderize.adapt.blockwise.distill import trainable_layers
from ladderize.adapt.blockwise.folder import work_folder
from ladderize.adapt.blockwise.run import check_pair
from ladderize.adapt.data.chunks import StreamOptions
from ladderize.adapt.data.packing import PackedRow
from ladderize.adapt.data.show import document as batch_document
from ladderize.adapt.data.show import show
from ladderize.adapt.data.sources import identity as data_identity
from ladderize.adapt.data.stream import Stream, fixed_rows
from ladderize.adapt.lora.write import LoraOptions, check_adapter_target, lora_config
from ladderize.adapt.ranks import Ranks, join_ranks
from ladderize.adapt.retrain.engine import Engine, check_attention, compute_name, reshards, wants_fsdp
from ladderize.adapt.retrain.memory_estimate import Demand, what_would_fit
from ladderize.adapt.retrain.models import EMBEDDING, HEAD, Build, build_student, build_teacher, trained_parameters, trained_tensors
from ladderize.adapt.retrain.options import LORA, RetrainOptions
from ladderize.adapt.retrain.outcome import write_outcome
from ladderize.adapt.retrain.schedule import Budget
from ladderize.adapt.retrain.state import STATE_BYTES, WEIGHT_BYTES, TrainingFolder
from ladderize.adapt.retrain.trackers import Trackers, check_trackers
from ladderize.adapt.retrain.trainer import Trainer, TrainOptions, probe_seconds
from ladderize.blocks import Blocks, open_checkpoint, stored_dtype
from ladderize.console import Console, UserError, human_bytes, human_seconds
from ladderize.convert.checkpoint import Checkpoint, fingerprint
from ladderize.convert.llama import expected_tensors
from ladderize.files import output
from ladderize.layout import Layout, format_ranges, parse_ranges
from ladderize.memory import available_bytes, tcmalloc_advice
from ladderize.modeling import load_tokenizer


@dataclass(frozen=True)
class Task:
    """What is retrained and how, opened and checked; nothing is loaded yet. everything: embedding, norm and LM head too."""

    model: str
    checkpoint: Checkpoint
    teacher: Checkpoint | None
    layout: Layout
    layers: tuple[int, ...]
    everything: bool
    options: RetrainOptions
    how: TrainOptions
    compute: torch.dtype
    sharded: bool

    @property
    def tied(self) -> bool:
        return bool(self.checkpoint.config.get("tie_word_embeddings"))

    @property
    def sources(self) -> list[Checkpoint]:
        return [self.checkpoint] if self.teacher is None else [self.checkpoint, self.teacher]

    @property
    def trained(self) -> frozenset[str]:
        """Tensors that full retraining changes."""
        if self.options.method == LORA:
            return frozenset()
        return trained_tensors(self.checkpoint.tensors, self.layers, self.everything, tied=self.tied)

    @property
    def lora(self) -> Any:
        return lora_config(self.checkpoint.config, self.layers, self.options.lora) if self.options.method == LORA else None

    def demand(self, ranks: int) -> Demand:
        if self.options.method == LORA:
            count = lora_numbers(self.checkpoint.config, self.layers, self.options.lora)
        else:
            count = sum(self.checkpoint.tensors[name].numel for name in self.trained)
        return Demand(
            config=self.checkpoint.config, layout=self.layout, trained=count, adapters=self.options.method == LORA,
            compute=self.compute.itemsize, rows=self.how.micro_batch_size, seq_len=self.how.seq_len, teacher=self.teacher is not None,
            shared_teacher=not self.sharded, gradient_checkpointing=self.options.gradient_checkpointing,
            shards=ranks if self.sharded else 1,
        )  # fmt: skip


def open_task(model: str, options: RetrainOptions, ranks: Ranks, revision: str | None) -> Task:
    """Check models and options against each other; raises UserError or LayoutError."""
    checkpoint = open_checkpoint(model, revision)
    layout = Layout.from_config(checkpoint.config)
    if layout.is_dense:
        raise UserError(f"{model} is dense; there is nothing to win back. Convert it first")
    teacher = None
    if options.distill_from is not None:
        teacher = open_checkpoint(options.distill_from)
        check_pair(checkpoint, teacher, model, options.distill_from)
    if (teacher is None) != (options.objective.distill_weight == 0):
        raise UserError("a teacher (distill_from) and a weight of its predictions (distill_weight) go together")
    check_tied(checkpoint, model)
    compute = compute_name(options.dtype, stored_dtype(checkpoint))
    check_attention(options.attention, ranks.device.type, compute)
    return Task(
        model=model, checkpoint=checkpoint, teacher=teacher, layout=layout, layers=chosen_layers(layout, options.train), options=options,
        everything=options.train == "all", how=options.resolve(checkpoint.config, ranks.size), compute=getattr(torch, compute),
        sharded=wants_fsdp(ranks.size),
    )  # fmt: skip


def chosen_layers(layout: Layout, train: str) -> tuple[int, ...]:
    """The layers that ``--train`` names."""
    if train == "converted":
        return tuple(trainable_layers(layout))
    return tuple(range(layout.num_layers)) if train == "all" else tuple(parse_ranges(train, layout.num_layers, option="--train"))


def check_tied(checkpoint: Checkpoint, model: str) -> None:
    """Raise UserError where config.json ties embedding and LM head, but the file has two different ones."""
    if checkpoint.config.get("tie_word_embeddings") and HEAD in checkpoint.tensors:
        embedding, head = Blocks(checkpoint, torch.float32, torch.device("cpu")).read([EMBEDDING, HEAD])
        if not torch.equal(embedding, head):
            raise UserError(f"{model} has an {HEAD} of its own, although its config.json ties it to the embedding; repair config.json")


def lora_numbers(config: Mapping[str, Any], layers: Sequence[int], options: LoraOptions) -> int:
    """How many numbers LoRA trains."""
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    return sum(
        options.rank * sum(shape) for name, shape in expected_tensors(config).items()
        if name.startswith(prefixes) and name.endswith(".weight") and name.split(".")[-2] in options.targets
    )  # fmt: skip


def check_disk(task: Task, folder: Path) -> None:
    """Refuse to begin what cannot be saved: ``keep`` states and the one being written, and the best one's weights."""
    trained = task.demand(1).trained
    needed = trained * (STATE_BYTES * (task.how.keep + 1) + WEIGHT_BYTES)
    free = shutil.disk_usage(output.existing_parent(folder)).free
    if needed > free:
        raise UserError(
            f"{folder} needs {human_bytes(needed)} for the states of the training, but only {human_bytes(free)} are free there; choose "
            "another --work-dir, or a lower --keep"
        )


def check_memory(task: Task, ranks: Ranks, console: Console) -> None:
    """Say what it takes, and refuse what cannot fit."""
    demand, available = task.demand(ranks.size), available_bytes(ranks.device)
    parts = ", ".join(f"{name} {human_bytes(value)}" for name, value in demand.parts().items() if value)
    console.note(f"memory of each process: about {human_bytes(demand.total)} ({parts})")
    if ranks.device.type == "cpu" and available is not None:
        available //= ranks.local_size  # the processes of a machine share its memory
    if available is not None and demand.total > available:
        lora = lora_numbers(task.checkpoint.config, task.layers, task.options.lora) if task.options.method != LORA else None
        raise UserError(
            f"this needs about {human_bytes(demand.total)} for each process, and {human_bytes(available)} are free: "
            f"{what_would_fit(demand, available, lora_trained=lora, on_gpu=ranks.device.type == 'cuda')}"
        )


def open_stream(checkpoint: Checkpoint, options: RetrainOptions, how: TrainOptions) -> tuple[Stream, list[PackedRow]]:
    """The stream to train on, and the rows to validate on."""
    tokenizer = load_tokenizer(checkpoint.folder)
    asked = StreamOptions(
        seq_len=how.seq_len, vocab_size=checkpoint.config["vocab_size"], seed=how.seed, packing=options.packing,
        heldout=0 if options.eval_data else options.heldout, skip_bad_rows=options.skip_bad_rows, min_rows=how.batch_size,
    )  # fmt: skip
    stream = Stream(options.data, tokenizer, asked)
    return stream, fixed_rows(options.eval_data, tokenizer, asked) if options.eval_data else stream.heldout_rows


def retrain(
    model: str, out: str, options: RetrainOptions, *, console: Console, overwrite: bool = False, verify: bool = True,
    revision: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Retrain ``model`` and write the result to ``out``; returns the document of adaptation.json.

    One process, or those of accelerate launch or torchrun. A killed run goes on where its last state was saved. Raises UserError.
    """
    check_trackers(options.log_with)
    ranks = join_ranks(options.device)
    task = open_task(model, options, ranks, revision)
    for source in task.sources:
        if options.method == LORA:
            check_adapter_target(Path(out), source, overwrite=overwrite)
        else:
            output.check_target(Path(out), source.folder, overwrite=overwrite)
    folder = work_folder(out, options.work_dir, *task.sources)
    check_memory(task, ranks, console)
    stream, heldout = open_stream(task.checkpoint, options, task.how)
    with stream:
        identity = what_it_is(task, stream) if ranks.is_main else {}  # it reads all data
        with ranks.main_first():
            if ranks.is_main and not options.resume:
                TrainingFolder.discard(folder)
            work = TrainingFolder(folder, identity, main=ranks.is_main)
        if not folder.is_dir():
            raise UserError(f"{folder} is there for the main process only; name a --work-dir that all machines see")
        with work:
            trackers = Trackers(
                options.log_with,
                options.log_dir or Path(f"{Path(out).expanduser().resolve()}-logs"),
                {**options.record(task.how), **options.settings(task.how)},
                ranks,
            )
            try:
                trainer = prepare(task, ranks, stream, heldout, work, console, trackers)
                announce(trainer, task, console)
                trainer.run()
            except torch.OutOfMemoryError:
                raise UserError(
                    "out of GPU memory: the same command goes on with a smaller --micro-batch-size or --gradient-checkpointing, or sharded "
                    "over several GPUs"
                ) from None
            finally:
                trackers.close()
            document = write_outcome(
                trainer, task, out, identity, console=console, overwrite=overwrite, verify=verify, revision=revision
            )  # fmt: skip
            if ranks.is_main:
                work.remove()
    return document


def prepare(
    task: Task, ranks: Ranks, stream: Stream, heldout: Sequence[PackedRow], work: TrainingFolder, console: Console, trackers: Trackers
) -> Trainer:
    """Build the models, and go on from a state if there is one."""
    options, how = task.options, task.how
    build = Build(
        ranks.device, task.compute, attention=options.attention, gradient_checkpointing=options.gradient_checkpointing,
        mesh=ranks.mesh() if task.sharded else None, reshard=reshards(),
    )  # fmt: skip
    student = build_student(
        task.checkpoint, task.layout, build, trained=task.trained, lora=task.lora, seed=how.seed, temperature=how.objective.temperature
    )
    teacher = build_teacher(task.teacher, build, student) if task.teacher is not None else None
    parameters = dict(trained_parameters(student))
    engine = Engine(
        student, list(parameters.values()), ranks, compute=task.compute, sharded=task.sharded, weight_decay=how.weight_decay,
        teacher=teacher,
    )  # fmt: skip
    trainer = Trainer(engine, parameters, stream, heldout, how, work, console, trackers.log)
    # the main process chooses: another machine may see the folder as it was
    latest = work.latest() if ranks.is_main else None
    step = int(engine.sum(torch.tensor(int(latest.name[-8:]) if latest is not None else 0, device=ranks.device)))
    if not step:
        if ranks.is_main:
            check_disk(task, work.folder)
        trainer.begin()
    else:
        if not work.state_path(step).is_dir():
            raise UserError(f"{work.state_path(step)} is there for the main process only; name a --work-dir that all machines see")
        trainer.resume(work.state_path(step))
        before, settings = trainer.progress.settings, json.loads(json.dumps(options.settings(how)))
        other = " and ".join(key for key in settings if before.get(key) != settings[key])
        console.note(f"going on after step {step}, which {work.folder} holds" + (f", with another {other} from here on" if other else ""))
    trainer.progress.settings = options.settings(how)
    return trainer


def what_it_is(task: Task, stream: Stream) -> dict[str, Any]:
    """What a run has to have in common with the one that it goes on with."""
    return {
        "model": fingerprint(task.checkpoint), "layout": task.layout.to_config(),
        "teacher": fingerprint(task.teacher) if task.teacher is not None else None,
        "tokenizer": tokenizer_hash(task.checkpoint.folder), "data": stream.identity(),
        "eval_data": [data_identity(spec) for spec in task.options.eval_data],
        "dtype": str(task.compute).removeprefix("torch."), **task.options.record(task.how),
    }  # fmt: skip


def tokenizer_hash(folder: Path) -> str:
    """Of everything that decides how text becomes ids."""
    digest = hashlib.sha256()
    for pattern in ("tokenizer*", "chat_template*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"):
        for path in sorted(path for path in folder.glob(pattern) if path.is_file()):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def announce(trainer: Trainer, task: Task, console: Console) -> None:
    """What is trained, and how long it will take: measured with two micro-batches of held-out rows, if there are any."""
    how, ranks = task.how, trainer.engine.ranks
    numbers = sum(parameter.numel() for parameter in trainer.parameters.values())
    text = (
        f"training {numbers:,} numbers ({task.options.method}, layers {format_ranges(task.layers)}"
        f"{', embedding and head' if task.everything and task.options.method != LORA else ''}) on {ranks.size} "
        f"process{'es' if ranks.size > 1 else ''}: {'about ' if how.budget.tokens else ''}{how.about_steps:,} steps of {how.batch_size} "
        f"rows of {how.seq_len} tokens, peak learning rate {how.schedule.peak:g}"
    )
    if rows := trainer.heldout[: how.micro_batch_size]:
        per_token = probe_seconds(trainer.engine, rows, how) / sum(len(row) for row in rows)
        left = 1 - how.budget.share(trainer.progress.step, trainer.progress.tokens)
        seconds = left * how.about_steps * how.batch_size * how.seq_len * per_token / ranks.size
        text += f", about {human_seconds(seconds)} on {ranks.device.type}"
    console.note(text)
    if ranks.device.type == "cpu" and (advice := tcmalloc_advice()):
        console.note(advice)


def show_data_of(model: str, options: RetrainOptions, revision: str | None) -> tuple[str, dict[str, Any]]:
    """The first batch as text and as a document; nothing is trained."""
    checkpoint = open_checkpoint(model, revision)
    options = replace(options, budget=options.budget if options.budget.tokens else Budget(steps=options.budget.steps or 1))
    stream, _ = open_stream(checkpoint, options, how := options.resolve(checkpoint.config, 1))
    with stream:
        rows = stream.take(how.batch_size)
    tokenizer = load_tokenizer(checkpoint.folder)
    return show(rows, tokenizer), {"model": model, "rows": batch_document(rows, tokenizer)}
