"""``adapt``."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from typer import BadParameter

from ladderize.adapt.methods import ALIGN, BLOCKS, CONVERTED, FULL, LORA, Attention, Method, ScheduleKind, Write
from ladderize.choices import (
    AS_JSON,
    DEVICE,
    NO_VERIFY,
    OPTION,
    OVERWRITE,
    REVISION,
    SEQ_LEN,
    THREADS,
    DeviceName,
    Dtype,
    argument,
    check_options,
    described,
    flag,
    option,
    parameter_name,
    split_names,
)
from ladderize.commands.builder import (
    DATA,
    MEMORY,
    METHOD,
    MODELS,
    OPTIMISATION,
    OUTPUT,
    VALIDATION,
    GivenOptions,
    command,
)
from ladderize.commands.next_steps import command_line, retrain_command, scoring_file, show_next
from ladderize.commands.options import (
    COMPUTE_DTYPE,
    LOADING,
    TRAINING_SEED,
    WORK_DIR,
    memory_limit,
    start_training_on,
)
from ladderize.console import Console
from ladderize.errors import UsageError
from ladderize.runtime.schedule import ScheduleName

if TYPE_CHECKING:
    from ladderize.adapt.blockwise.options import WindowOptions
    from ladderize.adapt.blockwise.rewrite import RewrittenLayers
    from ladderize.adapt.retrain.options import RetrainOptions

RETRAINING, WINDOWED, NOT_ALIGN = (FULL, LORA), (BLOCKS, ALIGN), (FULL, LORA, BLOCKS)  # the methods that heed an option
SHOWN_ROWS = 4  # of --show-data
PRESETS: dict[str, dict[str, Any]] = {
    # Ladder Residual, arXiv 2501.06589, section 4: supervised fine-tuning of Llama-3.1-8B-Instruct
    "ladder-paper": {"lr": 5e-6, "warmup_steps": 200, "lr_schedule": "cosine", "max_tokens": "3B"},
}


def schedule_name(text: str) -> str:
    """The value of --schedule; raises typer's BadParameter. The learning rate's schedule was called so before."""
    if text in get_args(ScheduleKind):
        raise BadParameter(f"{text!r} is a schedule of the learning rate; write --lr-schedule {text}")
    if text not in get_args(ScheduleName):
        raise BadParameter(f"{text!r} is not one of {', '.join(map(repr, get_args(ScheduleName)))}.")
    return text


@dataclass(frozen=True)
class AdaptArguments:
    """None: the default of the method's options, which are in modules that import torch."""

    model: str = argument(
        "MODEL", "A converted checkpoint, or with --train a dense one: folder or hub id. It is never changed."
    )
    data: tuple[str, ...] = option(
        "jsonl, parquet, txt, npy, npz:array, a glob of one kind, or hub:OWNER/NAME:SPLIT. Give it several times to mix"
        " sources.",
        ...,
        metavar="FILE[=WEIGHT]",
    )
    out: str | None = argument("OUT", "The folder to write. It appears whole or not at all.", None)
    method: Method = option(
        "full: train all weights of the chosen layers. lora: train LoRA adapters. blocks: train each block alone on the"
        " dense block's outputs. align: solve the projections anew by least squares, without training; seconds to"
        " minutes, and a good start for the others.",
        FULL,
        metavar="NAME",
    )
    distill_from: str | None = option(
        "The dense model that MODEL was converted from. Its predictions are the training target.",
        flags="--distill-from --teacher",
        metavar="DENSE",
    )
    train: str | None = option(
        "Layers to train: converted, all (with full: embedding and LM head too), or ranges like 16:32,40.",
        metavar="LAYERS",
        shown="converted; align: every layer from the first converted one on",
    )
    preset: Literal["ladder-paper"] | None = option(
        "Values of a paper for options not given: lr 5e-6, 200 warm-up steps, cosine, 3B tokens.", only=RETRAINING
    )
    distill_weight: float | None = option(
        "Weight of the KL term (0 to 1). Cross-entropy gets the rest.",
        min=0.0,
        max=1.0,
        shown="1",
        needs="distill_from",
        only=RETRAINING,
    )
    hidden_weight: float | None = option(
        "Weight of the hidden error: how far what attention and MLP of the converted layers add to the stream is from"
        " the dense model's, as a relative mean squared error.",
        shown="0",
        needs="distill_from",
        only=RETRAINING,
    )
    temperature: float | None = option(
        "Temperature of both models in the KL term.", shown="1", needs="distill_from", only=RETRAINING
    )
    align: bool = option(
        "full, lora: align first (as --method align does, briefly, on the first --data) and train from there. The"
        " aligned checkpoint stays in OUT-aligned.",
        False,
        only=RETRAINING,
    )
    ridge: float | None = option(
        "align: how strongly weights are held where they are, as a share of the mean square of a projection's inputs.",
        shown="chosen for each projection on held-out windows, from 10 to 1e-5",
        only=(ALIGN,),
    )
    random_share: float | None = option(
        "align: windows of random tokens that are added, for each window of the data, so that text of other kinds gets"
        " no worse.",
        shown="0.25",
        only=(ALIGN,),
    )
    lora_rank: int | None = option("lora: rank.", min=1, shown="16", only=(LORA,))
    lora_alpha: float | None = option(
        "lora: alpha; adapters are scaled by alpha / rank.", shown="twice the rank", only=(LORA,)
    )
    lora_dropout: float | None = option(
        "lora: dropout of the adapters' input.", min=0.0, max=0.99, shown="0", only=(LORA,)
    )
    lora_targets: str | None = option(
        "lora: projections that get adapters.", metavar="A,B", shown="all seven of a layer", only=(LORA,)
    )
    seq_len: int | None = option(SEQ_LEN)
    packing: bool = option(
        "One example per row, padded, instead of packing.", True, flags="--no-packing", only=RETRAINING
    )
    skip_bad_rows: bool = option("Skip and count rows that cannot be read.", False, only=RETRAINING)
    show_data: bool = option("Print the first rows of the first batch, decoded, and stop.", False, only=RETRAINING)
    show_data_rows: int | None = option(
        "Rows that --show-data prints.", min=1, shown=str(SHOWN_ROWS), needs="show_data", only=RETRAINING
    )
    samples: int | None = option(
        "blocks, align: windows to train on.",
        min=1,
        shown="what the data give, up to 1024; align: up to 131,072 tokens",
        only=WINDOWED,
    )
    seed: int = option(TRAINING_SEED, 0)
    max_tokens: str | None = option("How many tokens to train on, such as 20M or 3B.", metavar="COUNT", only=RETRAINING)
    max_steps: int | None = option("How many steps to train, instead of --max-tokens.", min=1, only=RETRAINING)
    batch_size: int | None = option(
        "Rows per optimizer step, over all processes.",
        min=1,
        shown="2048 to 65536 tokens: a 2000th of --max-tokens; blocks: 2048 tokens",
        only=NOT_ALIGN,
    )
    lr: float | None = option(
        "Peak learning rate.",
        shown="full 2e-5, lora 1e-4, blocks 5e-5; times 4096 / hidden size; less after align",
        only=NOT_ALIGN,
    )
    lr_schedule: ScheduleKind | None = option(
        "Learning-rate schedule. wsd: constant, then linear to the end over the last fifth.",
        shown="cosine",
        only=RETRAINING,
    )
    warmup_steps: int | None = option(
        "Steps of linear warm-up.",
        min=0,
        shown="5 % of all, at most 200; after align at least 10, or 20 %",
        only=RETRAINING,
    )
    min_lr: float | None = option(
        "Final learning rate, as a fraction of the peak.", min=0.0, max=1.0, shown="0", only=RETRAINING
    )
    weight_decay: float | None = option("AdamW's weight decay, of matrices only.", min=0.0, shown="0", only=RETRAINING)
    max_gradient: float | None = option("Clip the gradient's norm to this.", shown="1", only=RETRAINING)
    epochs: int | None = option("blocks: most epochs per block.", min=1, shown="10", only=(BLOCKS,))
    patience: int | None = option(
        "blocks: stop a block after this many epochs without a better held-out loss.",
        min=1,
        shown="2",
        only=(BLOCKS,),
    )
    eval_data: tuple[str, ...] = option(
        "Data to validate on.", (), metavar="FILE", shown="rows held out of --data", only=RETRAINING
    )
    heldout: int | None = option(
        "Rows to hold out of each --data for validation.",
        min=0,
        shown="a hundredth, up to 256; blocks, align: a tenth of the windows",
    )
    eval_every: int | None = option(
        "Steps between validations.", min=1, shown="a tenth of all, at most 500", only=RETRAINING
    )
    save_every: int | None = option(
        "Steps between checkpoints.", min=1, shown="a tenth of all, at most 500", only=RETRAINING
    )
    keep: int | None = option(
        "Number of recent checkpoints to keep, besides the best weights.", min=1, shown="2", only=RETRAINING
    )
    write: Write | None = option(
        "Which weights become OUT. best: lowest held-out perplexity; nothing is written if training never lowered it."
        " last: the last ones.",
        shown="best",
    )
    resume: Literal["auto", "no"] | None = option(
        "auto: go on with unfinished work. no: start again.", shown="auto", only=RETRAINING
    )
    micro_batch_size: int | None = option(
        "Rows computed at once on one device. It decides the memory, not the result.",
        min=1,
        shown="8192 tokens",
        only=RETRAINING,
    )
    gradient_checkpointing: bool = option("Recompute activations instead of keeping them.", False, only=RETRAINING)
    tp_size: int = option(
        "full, lora: processes that share one copy of the model (tensor parallelism). Started here, or by a launcher"
        " that starts N, or a multiple for data parallelism.",
        1,
        min=1,
        only=RETRAINING,
    )
    schedule: str | None = option(
        "When sub-modules run, with --tp-size: sequential, or domino, which cuts a micro-batch into parts and runs"
        " one's all-reduces under the others' compute. The result is the same (with --lora-dropout: other masks).",
        metavar="NAME",
        parser=schedule_name,
        shown="sequential",
        only=RETRAINING,
    )
    domino_chunks: int | None = option(
        "Domino: parts of a micro-batch: of its rows, or of the tokens of its one row.",
        min=2,
        shown="2",
        only=RETRAINING,
    )
    domino_columns: int | None = option(
        "Domino: parts of each sub-module's output, every one with an all-reduce of its own.",
        min=1,
        shown="1",
        only=RETRAINING,
    )
    attention: Attention | None = option(
        "sdpa, eager, flash_attention_2 or flex_attention, as in transformers.",
        metavar="NAME",
        shown="sdpa",
        only=RETRAINING,
    )
    max_memory: str | None = option(
        "blocks, align: memory for the models' states, per process. What is beyond it goes to disk.",
        metavar="SIZE",
        shown="8GB",
        only=WINDOWED,
    )
    dtype: Dtype = option(COMPUTE_DTYPE, "auto")
    device: DeviceName | None = option(DEVICE)
    threads: int | None = option(THREADS)
    log_with: str | None = option(
        "Trackers beside metrics.jsonl: tensorboard, wandb, trackio.", metavar="A,B", only=RETRAINING
    )
    log_dir: Path | None = option("Folder of the trackers.", metavar="DIR", shown="OUT-logs", only=RETRAINING)
    plot: Path | None = option("Draw the training curves: STEM.png and STEM.svg.", metavar="STEM")
    work_dir: Path | None = option(WORK_DIR)
    overwrite: bool = option(OVERWRITE, False, help="Replace OUT if it is a checkpoint (lora: an adapter).")
    verify: bool = option(NO_VERIFY, True)
    revision: str | None = option(REVISION)
    as_json: bool = option(AS_JSON, False)


@command(
    AdaptArguments,
    panels={
        DATA: "data seq_len no_packing skip_bad_rows show_data show_data_rows samples seed",
        METHOD: "method distill_from train preset distill_weight hidden_weight temperature align ridge random_share"
        " lora_rank lora_alpha lora_dropout lora_targets",
        OPTIMISATION: "max_tokens max_steps batch_size lr lr_schedule warmup_steps min_lr weight_decay max_gradient"
        " epochs patience",
        VALIDATION: "eval_data heldout eval_every save_every keep write resume",
        MEMORY: "micro_batch_size gradient_checkpointing tp_size schedule domino_chunks domino_columns attention"
        " max_memory dtype device threads",
        OUTPUT: "log_with log_dir plot work_dir overwrite no_verify json",
        MODELS: "revision",
    },
    short="data seq_len show_data method distill_from train hidden_weight align lora_rank max_tokens max_steps lr"
    " eval_data resume micro_batch_size gradient_checkpointing tp_size dtype device plot overwrite json config",
)
def adapt(given: GivenOptions) -> None:
    """Retrain a converted checkpoint to win back accuracy, on text and on the dense model's predictions."""
    own = given.fill(AdaptArguments)
    if own.out is None and not own.show_data:
        raise UsageError("OUT is missing: name the folder to write")
    console = Console(own.as_json)
    with console.stage(LOADING):
        check_effect(own.method, given)
        home = {BLOCKS: "blockwise.distill", ALIGN: "align.align"}.get(own.method, "retrain.run")
        importlib.import_module(f"ladderize.adapt.{home}")
    if own.plot is not None:
        from ladderize.figure import check_plot

        check_plot(own.plot)
    run = _retrain if own.method in RETRAINING else _rewrite
    run(given, own, console)


def check_effect(method: str, given: GivenOptions) -> None:
    """Raise UsageError for options that were given and have no effect on this method."""
    for field in described(AdaptArguments):
        name, only = parameter_name(field), field.metadata[OPTION].only
        if name in given.names and only and method not in only:
            raise UsageError(f"{flag(name)} has no effect with --method {method}")
    if method == LORA and "no_verify" in given.names:
        raise UsageError("--no-verify has no effect with --method lora: an adapter cannot be loaded alone")


def adapt_options(given: GivenOptions) -> "RetrainOptions | WindowOptions":
    """The options of the method, checked as far as they alone decide. Raises UsageError."""
    own = given.fill(AdaptArguments)
    check_effect(own.method, given)
    return retrain_options(given) if own.method in RETRAINING else _window_options(given, own)


def _window_options(given: GivenOptions, own: AdaptArguments) -> "WindowOptions":
    """Of methods that work layer by layer, on windows of data."""
    if own.distill_from is None:
        raise UsageError(
            f"--method {own.method} needs --distill-from DENSE, the checkpoint that MODEL was converted from"
        )
    if len(own.data) > 1:
        raise UsageError(f"--method {own.method} reads one --data file, not {len(own.data)}")
    max_memory = memory_limit(own.max_memory)
    if own.method == ALIGN:
        from ladderize.adapt.align.options import AlignOptions

        return given.fill(AlignOptions, data=own.data[0], layers=own.train, max_memory=max_memory)
    from ladderize.adapt.blockwise.options import BlockwiseOptions, DistillOptions

    layers = own.train if own.train != CONVERTED else None
    distill = given.fill(DistillOptions, max_memory=max_memory)
    return given.fill(BlockwiseOptions, data=own.data[0], layers=layers, distill=distill)


def _rewrite(given: GivenOptions, own: AdaptArguments, console: Console) -> None:
    out, dense = own.out, own.distill_from
    options = adapt_options(given)
    assert out is not None
    assert dense is not None
    start_training_on(own.device, own.threads)
    from ladderize.adapt.blockwise.rewrite import perplexity_rows

    run: Callable[..., RewrittenLayers | None]
    if own.method == ALIGN:
        from ladderize.adapt.align.align import align_checkpoint as run
    else:
        from ladderize.adapt.blockwise.distill import adapt_blocks as run
    document = run(
        own.model,
        out,
        dense,
        options,
        console=console,
        overwrite=own.overwrite,
        verify=own.verify,
        revision=own.revision,
    )
    if document is None:
        return
    console.document(document.to_dict())
    rows = document.rows()
    console.table(rows, right=[next(iter(rows[0]))])
    console.result("")
    measured = perplexity_rows(document.heldout_perplexity, document.heldout_divergence)
    console.table(measured, right=["perplexity", "stderr", "difference", "KL to dense"])
    console.prose(document.MEANING)
    console.prose(document.target)
    console.result(f"wrote {document.out}")
    _draw(document.out, own.plot, console)
    adapted = f"{out.rstrip('/')}-adapted"
    retrain = retrain_command(out, adapted, dense, own.data[0], align=False)
    steps = [("retrain from there", retrain)] if own.method == ALIGN else []
    show_next(console, *steps, _measure(own, out))


def _retrain(given: GivenOptions, own: AdaptArguments, console: Console) -> None:
    options = retrain_options(given)
    start_training_on(own.device, own.threads)
    from ladderize.adapt.retrain.run import adapt_checkpoint, show_data_of

    if own.show_data:
        text, document = show_data_of(own.model, options, own.revision, own.show_data_rows or SHOWN_ROWS)
        console.document(document)
        console.result(text)
        return
    out = own.out
    assert out is not None
    adaptation = adapt_checkpoint(
        own.model,
        out,
        options,
        console=console,
        overwrite=own.overwrite,
        verify=own.verify,
        revision=own.revision,
    )
    if adaptation is not None:
        console.document(adaptation.to_dict())
        console.result(adaptation.summary())
        console.result(f"wrote {out}{' (an adapter)' if options.method == LORA else ''}")
        _draw(out, own.plot, console)
        if options.method == LORA:
            show_next(console, ("make a checkpoint of it", command_line("merge", out, f"{out.rstrip('/')}-merged")))
        else:
            show_next(console, _measure(own, out))


def retrain_options(given: GivenOptions) -> "RetrainOptions":
    """The options of retraining, checked, with the preset's values where none were given."""
    from ladderize.adapt.data.sources import parse_specs
    from ladderize.adapt.lora.config import LoraOptions
    from ladderize.adapt.retrain.options import Budget, Objective, RetrainOptions, parse_count
    from ladderize.runtime.schedule import Schedule

    for name, value in PRESETS.get(given.params["preset"], {}).items():
        is_budget = name == "max_tokens" and given.params["max_steps"] is not None
        if given.params[name] is None and not is_budget:
            given.params[name] = value
    own = given.fill(AdaptArguments)
    _check_retraining(own)
    tokens = parse_count(own.max_tokens, option="--max-tokens") if own.max_tokens is not None else None
    budget = Budget(tokens, own.max_steps)
    if not own.show_data:
        budget.check()
    trackers = split_names(own.log_with or "")
    if own.log_with is not None and not trackers:
        raise UsageError("--log-with names no tracker; write for example tensorboard")
    distill_weight = 1.0 if own.distill_weight is None else own.distill_weight
    targets = {"targets": split_names(own.lora_targets)} if own.lora_targets is not None else {}
    options = given.fill(
        RetrainOptions,
        data=tuple(parse_specs(own.data)),
        eval_data=tuple(parse_specs(own.eval_data, "--eval-data")),
        objective=given.fill(Objective, distill_weight=distill_weight if own.distill_from is not None else 0.0),
        lora=given.fill(LoraOptions, prefix="lora_", **targets),
        packing=own.packing,
        budget=budget,
        resume=own.resume != "no",
        log_with=trackers,
        schedule=given.fill(Schedule, prefix="domino_", name=own.schedule or "sequential"),
    )
    options.check()
    return options


def _check_retraining(own: AdaptArguments) -> None:
    """Raise UsageError for options that were given and take no effect together, whatever their values."""
    for name in ("domino_chunks", "domino_columns"):
        if getattr(own, name) is not None and own.schedule != "domino":
            raise UsageError(f"{flag(name)} has no effect without --schedule domino")
    check_options(own)
    if own.plot is not None and own.show_data:
        raise UsageError("--plot has no effect with --show-data, which trains nothing")
    for name in ("write", "eval_every"):
        if getattr(own, name) is not None and own.heldout == 0:
            raise UsageError(f"{flag(name)} has no effect with --heldout 0, where nothing is validated on")


def _draw(out: str, stem: Path | None, console: Console) -> None:
    if stem is not None:
        from ladderize.adapt.retrain.curves import draw_curves, read_curves

        console.note(f"wrote {' and '.join(map(str, draw_curves([read_curves(Path(out))], stem)))}")


def _measure(own: AdaptArguments, out: str) -> tuple[str, str]:
    models = dict.fromkeys(name for name in (own.distill_from, own.model, out) if name is not None)
    return "measure it", command_line("eval", *models, "--perplexity", scoring_file(own.eval_data))
