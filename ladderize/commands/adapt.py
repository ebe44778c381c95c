"""``adapt``."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ladderize.adapt.methods import BLOCKS, FULL, LORA
from ladderize.commands.options import (
    AsJson,
    Device,
    NoVerify,
    Revision,
    SeqLen,
    Threads,
    options_from,
    said,
)
from ladderize.commands.retraining import PRESETS, check_effect, preset_filled_in, retrain_options
from ladderize.commands.training import ComputeDtype, TrainingSeed, WorkDir, memory_limit, start_training_on
from ladderize.console import Console, UsageError

if TYPE_CHECKING:
    pass


def adapt(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A converted checkpoint folder or hub id; it is never touched.")
    ],
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            metavar="FILE[=WEIGHT]",
            help=(
                "jsonl, parquet, txt, npy, npz:array, a glob of one kind, or hub:OWNER/NAME[:CONFIG]:SPLIT; several are"
                " mixed."
            ),
        ),
    ],
    out: Annotated[
        str | None, typer.Argument(metavar="OUT", help="The folder to write; it appears whole or not at all.")
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help=(
                "full: all weights of the layers; lora: adapters; blocks: every block alone learns to answer as"
                " DENSE's."
            )
        ),
    ] = FULL,
    distill_from: Annotated[
        str | None,
        typer.Option(
            "--distill-from",
            "--teacher",
            metavar="DENSE",
            help="Learn its predictions, too: what MODEL was converted from.",
        ),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(
            metavar="LAYERS",
            help="converted, all (full: embedding and LM head too), or ranges such as 16:32,40.  [default: converted]",
        ),
    ] = None,
    max_tokens: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Train on so many tokens, such as 20M or 3B.")
    ] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Train for so many steps instead.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="ladder-paper: learning rate 5e-6, 200 warm-up steps, cosine, 3B tokens, where not said otherwise."
        ),
    ] = None,
    seq_len: SeqLen = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Rows of a step, over all processes.  [default: 2048 to 65536 tokens, a 2000th of --max-tokens; blocks:"
                " 2048]"
            ),
        ),
    ] = None,
    micro_batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Rows at once on one device; decides memory, not the result.  [default: 8192 tokens]"),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            "--lr",
            help="Peak learning rate.  [default: at width 4096 full 2e-5, lora 1e-4, blocks 5e-5; times 4096/width]",
        ),
    ] = None,
    schedule: Annotated[str | None, typer.Option(help="cosine, wsd or constant.  [default: cosine]")] = None,
    warmup_steps: Annotated[
        int | None, typer.Option(min=0, help="Steps of rising learning rate.  [default: 5 %, at most 200]")
    ] = None,
    min_lr: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Where the rate ends, as part of the peak.  [default: 0]")
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(min=0.0, help="AdamW's, of matrices.  [default: 0]")] = None,
    max_gradient: Annotated[float | None, typer.Option(help="Clip the gradient's norm.  [default: 1]")] = None,
    distill_weight: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Of the teacher's predictions; the rest is the text's.  [default: 1]"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of teacher and student in the divergence.  [default: 1]")
    ] = None,
    lora_rank: Annotated[int | None, typer.Option(min=1, help="lora: of the adapters.  [default: 16]")] = None,
    lora_alpha: Annotated[
        float | None, typer.Option(help="lora: adapters are scaled by alpha / rank.  [default: twice the rank]")
    ] = None,
    lora_dropout: Annotated[
        float | None, typer.Option(min=0.0, max=0.99, help="lora: of what enters them.  [default: 0]")
    ] = None,
    lora_targets: Annotated[
        str | None, typer.Option(metavar="A,B", help="lora: projections.  [default: all seven of a layer]")
    ] = None,
    eval_data: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="To validate on.  [default: rows of --data that are set aside]"),
    ] = None,
    heldout: Annotated[
        int | None,
        typer.Option(
            min=0, help="Rows of each --data to set aside.  [default: a hundredth, up to 256; blocks: a tenth, 64]"
        ),
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(min=1, help="Steps.  [default: a tenth of all, at most 500]")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Steps.  [default: a tenth of all, at most 500]")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="So many last states on disk, and the best one's weights.  [default: 2]")
    ] = None,
    write: Annotated[
        str | None, typer.Option(help="best (by held-out perplexity) or last: what becomes OUT.  [default: best]")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="auto: go on from unfinished work; no: begin anew.  [default: auto]")
    ] = None,
    no_packing: Annotated[bool, typer.Option("--no-packing", help="One example a row, padded.")] = False,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Leave out rows that cannot be read, and count them.")
    ] = False,
    show_data: Annotated[bool, typer.Option("--show-data", help="Print the first batch, decoded, and stop.")] = False,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Compute activations twice instead of keeping them.")
    ] = False,
    attention: Annotated[
        str | None, typer.Option(help="sdpa, eager, flash_attention_2 or flex_attention.  [default: sdpa]")
    ] = None,
    log_with: Annotated[
        str | None, typer.Option(metavar="A,B", help="tensorboard, wandb, trackio, beside metrics.jsonl.")
    ] = None,
    log_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Of --log-with.  [default: OUT-logs]")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="blocks: windows.  [default: what the data give, up to 1024]")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="blocks: at most so many.  [default: 10]")] = None,
    patience: Annotated[
        int | None, typer.Option(min=1, help="blocks: epochs without a better held-out loss.  [default: 2]")
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="blocks: teacher states beyond this, of each process, lie on disk.  [default: 8GB]"
        ),
    ] = None,
    seed: TrainingSeed = 0,
    dtype: ComputeDtype = "auto",
    device: Device = None,
    threads: Threads = None,
    work_dir: WorkDir = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it is a checkpoint (lora: an adapter).")
    ] = False,
    no_verify: NoVerify = False,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Win back accuracy: retrain a converted checkpoint, whole or block by block, on text and on the dense model's
    answers."""
    if method not in (FULL, LORA, BLOCKS):
        raise UsageError(f"--method {method} is not one of full, lora, blocks")
    if preset not in (None, *PRESETS):
        raise UsageError(f"--preset {preset} is not one of {', '.join(PRESETS)}")
    check_effect(method, said(ctx))
    if out is None and not show_data:
        raise UsageError("OUT is missing: name the folder to write")
    console = Console(as_json)
    run = _adapt_blocks if method == BLOCKS else _retrain
    run(model, out, preset_filled_in(ctx.params), console)


def _adapt_blocks(model: str, out: str | None, params: Mapping[str, Any], console: Console) -> None:
    assert out is not None
    if params["distill_from"] is None:
        raise UsageError("--method blocks needs --distill-from DENSE, the checkpoint that MODEL was converted from")
    if len(params["data"]) > 1:
        raise UsageError("--method blocks reads one --data file")
    device = start_training_on(params["device"], params["dtype"], params["threads"], params["lr"])
    from ladderize.adapt.blockwise.documents import distillation_rows, perplexity_rows
    from ladderize.adapt.blockwise.options import BlockwiseOptions, DistillOptions
    from ladderize.adapt.blockwise.run import adapt_blocks

    distill = options_from(DistillOptions, params, max_memory=memory_limit(params["max_memory"]))
    options = options_from(
        BlockwiseOptions,
        params,
        data=params["data"][0],
        layers=params["train"] if params["train"] != "converted" else None,
        distill=distill,
        device=device,
    )
    distillation = adapt_blocks(
        model,
        out,
        params["distill_from"],
        options,
        console=console,
        overwrite=params["overwrite"],
        verify=not params["no_verify"],
        revision=params["revision"],
    )
    if distillation is not None:
        console.document(distillation.to_dict())
        console.table(distillation_rows(distillation.blocks), right=["block"])
        console.result("")
        rows = perplexity_rows(distillation.heldout_perplexity)
        console.table(rows, right=["perplexity", "stderr", "difference"])
        console.result(f"wrote {out}")


def _retrain(model: str, out: str | None, params: Mapping[str, Any], console: Console) -> None:
    options = retrain_options(params)
    from ladderize.adapt.retrain.run import retrain, show_data_of

    if params["show_data"]:
        text, document = show_data_of(model, options, params["revision"])
        console.document(document)
        console.result(text)
        return
    assert out is not None
    adaptation = retrain(
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
        merge = " (an adapter; `ladderize merge` makes a checkpoint of it)" if options.method == LORA else ""
        console.result(f"wrote {out}{merge}")
