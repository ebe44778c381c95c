"""``adapt``."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ladderize.adapt.methods import ALIGN, BLOCKS, CONVERTED, FULL, LORA, Attention, Method, Write
from ladderize.adapt.retrain.schedule import ScheduleKind
from ladderize.commands.config_file import Config, PrintConfig
from ladderize.commands.next_steps import command, retrain_command, scoring_file, show_next
from ladderize.commands.options import (
    DATA,
    LOADING,
    MEMORY,
    METHOD,
    OPTIMISATION,
    OUTPUT,
    VALIDATION,
    AsJson,
    Device,
    NoVerify,
    Revision,
    SeqLen,
    Threads,
    given_options,
    options_from,
)
from ladderize.commands.retraining import check_effect, check_windowed, preset_filled_in, retrain_options, schedule_name
from ladderize.commands.training import ComputeDtype, TrainingSeed, WorkDir, memory_limit, start_training_on
from ladderize.console import Console
from ladderize.errors import UsageError

if TYPE_CHECKING:
    from ladderize.adapt.blockwise.documents import RewrittenLayers
    from ladderize.adapt.blockwise.options import WindowOptions

SHOWN_ROWS = 4  # of --show-data


def adapt(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A converted checkpoint, or with --train a dense one: folder or hub id. It is never changed.",
        ),
    ],
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            metavar="FILE[=WEIGHT]",
            help=(
                "jsonl, parquet, txt, npy, npz:array, a glob of one kind, or hub:OWNER/NAME:SPLIT. Give it"
                " several times to mix sources."
            ),
            rich_help_panel=DATA,
        ),
    ],
    out: Annotated[
        str | None, typer.Argument(metavar="OUT", help="The folder to write. It appears whole or not at all.")
    ] = None,
    method: Annotated[
        Method,
        typer.Option(
            metavar="NAME",
            help=(
                "full: train all weights of the chosen layers. lora: train LoRA adapters. blocks: train each block"
                " alone on the dense block's outputs. align: solve the projections anew by least squares, without"
                " training; seconds to minutes, and a good start for the others."
            ),
            rich_help_panel=METHOD,
        ),
    ] = FULL,
    distill_from: Annotated[
        str | None,
        typer.Option(
            "--distill-from",
            "--teacher",
            metavar="DENSE",
            help="The dense model that MODEL was converted from. Its predictions are the training target.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(
            metavar="LAYERS",
            help="Layers to train: converted, all (with full: embedding and LM head too), or ranges like 16:32,40.",
            show_default="converted; align: every layer from the first converted one on",
            rich_help_panel=METHOD,
        ),
    ] = None,
    preset: Annotated[
        Literal["ladder-paper"] | None,
        typer.Option(
            help="Values of a paper for options not given: lr 5e-6, 200 warm-up steps, cosine, 3B tokens.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    distill_weight: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            max=1.0,
            help="Weight of the KL term (0 to 1). Cross-entropy gets the rest.",
            show_default="1",
            rich_help_panel=METHOD,
        ),
    ] = None,
    hidden_weight: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help=(
                "Weight of the hidden error: how far what attention and MLP of the converted layers add to the stream"
                " is from the dense model's, as a relative mean squared error."
            ),
            show_default="0",
            rich_help_panel=METHOD,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Temperature of both models in the KL term.", show_default="1", rich_help_panel=METHOD
        ),
    ] = None,
    align: Annotated[
        bool,
        typer.Option(
            "--align",
            help=(
                "full, lora: align first (as --method align does, briefly, on the first --data) and train from there."
                " The aligned checkpoint stays in OUT-aligned."
            ),
            rich_help_panel=METHOD,
        ),
    ] = False,
    ridge: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help=(
                "align: how strongly weights are held where they are, as a share of the mean square of a projection's"
                " inputs."
            ),
            show_default="chosen for each projection on held-out windows, from 10 to 1e-5",
            rich_help_panel=METHOD,
        ),
    ] = None,
    random_share: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help=(
                "align: windows of random tokens that are added, for each window of the data, so that text of other"
                " kinds gets no worse."
            ),
            show_default="0.25",
            rich_help_panel=METHOD,
        ),
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="lora: rank.", show_default="16", rich_help_panel=METHOD)
    ] = None,
    lora_alpha: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="lora: alpha; adapters are scaled by alpha / rank.",
            show_default="twice the rank",
            rich_help_panel=METHOD,
        ),
    ] = None,
    lora_dropout: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            max=0.99,
            help="lora: dropout of the adapters' input.",
            show_default="0",
            rich_help_panel=METHOD,
        ),
    ] = None,
    lora_targets: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="lora: projections that get adapters.",
            show_default="all seven of a layer",
            rich_help_panel=METHOD,
        ),
    ] = None,
    seq_len: SeqLen = None,
    no_packing: Annotated[
        bool,
        typer.Option("--no-packing", help="One example per row, padded, instead of packing.", rich_help_panel=DATA),
    ] = False,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Skip and count rows that cannot be read.", rich_help_panel=DATA)
    ] = False,
    show_data: Annotated[
        bool,
        typer.Option(
            "--show-data", help="Print the first rows of the first batch, decoded, and stop.", rich_help_panel=DATA
        ),
    ] = False,
    show_data_rows: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Rows that --show-data prints.", show_default="4", rich_help_panel=DATA),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="blocks, align: windows to train on.",
            show_default="what the data give, up to 1024; align: up to 131,072 tokens",
            rich_help_panel=DATA,
        ),
    ] = None,
    seed: TrainingSeed = 0,
    max_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="COUNT", help="How many tokens to train on, such as 20M or 3B.", rich_help_panel=OPTIMISATION
        ),
    ] = None,
    max_steps: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="How many steps to train, instead of --max-tokens.", rich_help_panel=OPTIMISATION
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Rows per optimizer step, over all processes.",
            show_default="2048 to 65536 tokens: a 2000th of --max-tokens; blocks: 2048 tokens",
            rich_help_panel=OPTIMISATION,
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            "--lr",
            metavar="X",
            help="Peak learning rate.",
            show_default="full 2e-5, lora 1e-4, blocks 5e-5; times 4096 / hidden size; less after align",
            rich_help_panel=OPTIMISATION,
        ),
    ] = None,
    lr_schedule: Annotated[
        ScheduleKind | None,
        typer.Option(
            help="Learning-rate schedule. wsd: constant, then linear to the end over the last fifth.",
            show_default="cosine",
            rich_help_panel=OPTIMISATION,
        ),
    ] = None,
    warmup_steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Steps of linear warm-up.",
            show_default="5 % of all, at most 200; after align at least 10, or 20 %",
            rich_help_panel=OPTIMISATION,
        ),
    ] = None,
    min_lr: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            max=1.0,
            help="Final learning rate, as a fraction of the peak.",
            show_default="0",
            rich_help_panel=OPTIMISATION,
        ),
    ] = None,
    weight_decay: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            help="AdamW's weight decay, of matrices only.",
            show_default="0",
            rich_help_panel=OPTIMISATION,
        ),
    ] = None,
    max_gradient: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Clip the gradient's norm to this.", show_default="1", rich_help_panel=OPTIMISATION
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="blocks: most epochs per block.", show_default="10", rich_help_panel=OPTIMISATION
        ),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="blocks: stop a block after this many epochs without a better held-out loss.",
            show_default="2",
            rich_help_panel=OPTIMISATION,
        ),
    ] = None,
    eval_data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Data to validate on.",
            show_default="rows held out of --data",
            rich_help_panel=VALIDATION,
        ),
    ] = None,
    heldout: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Rows to hold out of each --data for validation.",
            show_default="a hundredth, up to 256; blocks, align: a tenth of the windows",
            rich_help_panel=VALIDATION,
        ),
    ] = None,
    eval_every: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Steps between validations.",
            show_default="a tenth of all, at most 500",
            rich_help_panel=VALIDATION,
        ),
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Steps between checkpoints.",
            show_default="a tenth of all, at most 500",
            rich_help_panel=VALIDATION,
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of recent checkpoints to keep, besides the best weights.",
            show_default="2",
            rich_help_panel=VALIDATION,
        ),
    ] = None,
    write: Annotated[
        Write | None,
        typer.Option(
            help=(
                "Which weights become OUT. best: lowest held-out perplexity; nothing is written if training never"
                " lowered it. last: the last ones."
            ),
            show_default="best",
            rich_help_panel=VALIDATION,
        ),
    ] = None,
    resume: Annotated[
        Literal["auto", "no"] | None,
        typer.Option(
            help="auto: go on with unfinished work. no: start again.", show_default="auto", rich_help_panel=VALIDATION
        ),
    ] = None,
    micro_batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Rows computed at once on one device. It decides the memory, not the result.",
            show_default="8192 tokens",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing", help="Recompute activations instead of keeping them.", rich_help_panel=MEMORY
        ),
    ] = False,
    tp_size: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help=(
                "full, lora: processes that share one copy of the model (tensor parallelism). Started here, or by a"
                " launcher that starts N, or a multiple for data parallelism."
            ),
            rich_help_panel=MEMORY,
        ),
    ] = 1,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            parser=schedule_name,
            help=(
                "When sub-modules run, with --tp-size: sequential, or domino, which cuts a micro-batch into parts and"
                " runs one's all-reduces under the others' compute. The result is the same (with --lora-dropout:"
                " other masks)."
            ),
            show_default="sequential",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    domino_chunks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="Domino: parts of a micro-batch: of its rows, or of the tokens of its one row.",
            show_default="2",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    domino_columns: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Domino: parts of each sub-module's output, every one with an all-reduce of its own.",
            show_default="1",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    attention: Annotated[
        Attention | None,
        typer.Option(
            metavar="NAME",
            help="sdpa, eager, flash_attention_2 or flex_attention, as in transformers.",
            show_default="sdpa",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="blocks, align: memory for the models' states, per process. What is beyond it goes to disk.",
            show_default="8GB",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    dtype: ComputeDtype = "auto",
    device: Device = None,
    threads: Threads = None,
    log_with: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Trackers beside metrics.jsonl: tensorboard, wandb, trackio.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the trackers.", show_default="OUT-logs", rich_help_panel=OUTPUT),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="STEM", help="Draw the training curves: STEM.png and STEM.svg.", rich_help_panel=OUTPUT),
    ] = None,
    work_dir: WorkDir = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace OUT if it is a checkpoint (lora: an adapter).", rich_help_panel=OUTPUT
        ),
    ] = False,
    no_verify: NoVerify = False,
    revision: Revision = None,
    as_json: AsJson = False,
    config: Config = None,
    print_config: PrintConfig = False,
) -> None:
    """Retrain a converted checkpoint to win back accuracy, on text and on the dense model's predictions."""
    if out is None and not show_data:
        raise UsageError("OUT is missing: name the folder to write")
    console = Console(as_json)
    with console.stage(LOADING):
        check_effect(method, given_options(ctx))
        room = {BLOCKS: "blockwise", ALIGN: "align"}.get(method, "retrain")
        importlib.import_module(f"ladderize.adapt.{room}.run")
    if plot is not None:
        from ladderize.figure import check_plot

        check_plot(plot)
    run = _retrain if method in (FULL, LORA) else _rewrite
    run(model, out, preset_filled_in(ctx.params), console)


def _rewrite(model: str, out: str | None, params: Mapping[str, Any], console: Console) -> None:
    """Methods that work layer by layer."""
    assert out is not None
    method, layers = params["method"], params["train"]
    check_windowed(method, params)
    device = start_training_on(params["device"], params["dtype"], params["threads"], params["lr"])
    max_memory = memory_limit(params["max_memory"])
    given: dict[str, Any] = {"data": params["data"][0], "device": device}
    from ladderize.adapt.blockwise.documents import perplexity_rows

    run: Callable[..., RewrittenLayers | None]
    options: WindowOptions
    if method == ALIGN:
        from ladderize.adapt.align.options import AlignOptions
        from ladderize.adapt.align.run import align_checkpoint as run

        options = options_from(AlignOptions, params, layers=layers, max_memory=max_memory, **given)
    else:
        from ladderize.adapt.blockwise.options import BlockwiseOptions, DistillOptions
        from ladderize.adapt.blockwise.run import adapt_blocks as run

        given["layers"] = layers if layers != CONVERTED else None
        distill = options_from(DistillOptions, params, max_memory=max_memory)
        options = options_from(BlockwiseOptions, params, distill=distill, **given)
    document = run(
        model,
        out,
        params["distill_from"],
        options,
        console=console,
        overwrite=params["overwrite"],
        verify=not params["no_verify"],
        revision=params["revision"],
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
    _draw(document.out, params["plot"], console)
    adapted = f"{out.rstrip('/')}-adapted"
    retrain = retrain_command(out, adapted, params["distill_from"], params["data"][0], align=False)
    steps = [("retrain from there", retrain)] if method == ALIGN else []
    show_next(console, *steps, _measure(params, out))


def _retrain(model: str, out: str | None, params: Mapping[str, Any], console: Console) -> None:
    options = retrain_options(params)
    from ladderize.adapt.retrain.run import adapt_checkpoint, show_data_of

    if params["show_data"]:
        rows = params["show_data_rows"] or SHOWN_ROWS
        text, document = show_data_of(model, options, params["revision"], rows)
        console.document(document)
        console.result(text)
        return
    assert out is not None
    adaptation = adapt_checkpoint(
        model,
        out,
        options,
        console=console,
        overwrite=params["overwrite"],
        verify=not params["no_verify"],
        revision=params["revision"],
    )
    if adaptation is not None:
        console.document(adaptation.to_dict())
        console.result(adaptation.summary())
        console.result(f"wrote {out}{' (an adapter)' if options.method == LORA else ''}")
        _draw(out, params["plot"], console)
        if options.method == LORA:
            show_next(console, ("make a checkpoint of it", command("merge", out, f"{out.rstrip('/')}-merged")))
        else:
            show_next(console, _measure(params, out))


def _draw(out: str, stem: Path | None, console: Console) -> None:
    if stem is not None:
        from ladderize.adapt.curves.draw import draw_curves
        from ladderize.adapt.curves.read import read_curves

        console.note(f"wrote {' and '.join(map(str, draw_curves([read_curves(Path(out))], stem)))}")


def _measure(params: Mapping[str, Any], out: str) -> tuple[str, str]:
    models = dict.fromkeys(name for name in (params["distill_from"], params["model"], out) if name is not None)
    file = scoring_file(params["eval_data"] or [])
    return "measure it", command("eval", *models, "--perplexity", file)
