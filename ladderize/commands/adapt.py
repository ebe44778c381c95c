"""``adapt``."""

import math
from collections.abc import Mapping, Sequence
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
    names_of,
    options_from,
    said,
)
from ladderize.commands.training import MAX_LR, ComputeDtype, TrainingSeed, WorkDir, memory_limit, start_training_on
from ladderize.console import Console, UsageError, table

if TYPE_CHECKING:
    from ladderize.adapt.retrain.options import RetrainOptions

# options of retraining that no field of its dataclasses is called after
ONLY_RETRAINING = {"preset", "no_packing", "show_data"}
PRESETS: dict[str, dict[str, Any]] = {
    # Ladder Residual, arXiv 2501.06589, section 4: supervised fine-tuning of Llama-3.1-8B-Instruct
    "ladder-paper": {"lr": 5e-6, "warmup_steps": 200, "schedule": "cosine", "max_tokens": "3B"},
}


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


def check_effect(method: str, given: Sequence[str]) -> None:
    """Raise UsageError for options that were given and have no effect on this method."""
    from ladderize.adapt.blockwise.options import BlockwiseOptions, DistillOptions
    from ladderize.adapt.lora.config import LoraOptions
    from ladderize.adapt.retrain.losses import Objective
    from ladderize.adapt.retrain.options import RetrainOptions
    from ladderize.adapt.retrain.schedule import Budget

    lora = names_of(LoraOptions, "lora_")
    retraining = names_of(RetrainOptions) | names_of(Objective) | names_of(Budget, "max_") | ONLY_RETRAINING
    blocks = names_of(BlockwiseOptions) | names_of(DistillOptions) | {"train", "method", "distill_from"}
    for name in given:
        elsewhere = (name in lora and method != LORA) or (
            name in retraining - blocks if method == BLOCKS else name in blocks - retraining
        )
        if elsewhere:
            raise UsageError(f"--{name.replace('_', '-')} has no effect with --method {method}")
    if method == LORA and "no_verify" in given:
        raise UsageError(
            "--no-verify has no effect with --method lora: an adapter is no checkpoint that could be loaded alone"
        )


def preset_filled_in(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with the preset's values where the user said nothing."""
    values = dict(PRESETS.get(params["preset"] or "", {}))
    if params["max_steps"] is not None:
        values.pop("max_tokens", None)
    return {**params, **{name: value for name, value in values.items() if params[name] is None}}


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
        console.result(table(distillation_rows(distillation.blocks), right=["block"]) + "\n")
        rows = perplexity_rows(distillation.heldout_perplexity)
        console.result(table(rows, right=["perplexity", "stderr", "difference"]))
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


def retrain_options(params: Mapping[str, Any]) -> "RetrainOptions":
    """The options of retraining, checked."""
    from ladderize.adapt.data.sources import parse_specs
    from ladderize.adapt.lora.config import LoraOptions
    from ladderize.adapt.retrain.losses import Objective
    from ladderize.adapt.retrain.options import RetrainOptions
    from ladderize.adapt.retrain.schedule import Budget, parse_count

    given = {name: value for name, value in params.items() if value is not None}
    check_retraining(given)
    tokens = parse_count(given["max_tokens"], option="--max-tokens") if "max_tokens" in given else None
    steps = given.get("max_steps")
    if steps is not None and tokens is not None:
        raise UsageError("--max-tokens and --max-steps both say how long to train; give one of them")
    if steps is None and tokens is None and not given["show_data"]:
        raise UsageError("say how long to train: --max-tokens, such as 20M, or --max-steps")
    trackers = split_names(given.get("log_with", ""))
    if "log_with" in given and not trackers:
        raise UsageError("--log-with names no tracker; write for example tensorboard")
    if "log_dir" in given and not {"tensorboard", "wandb"} & set(trackers):
        raise UsageError("--log-dir has no effect without --log-with tensorboard or wandb")
    device = start_training_on(params["device"], params["dtype"], params["threads"], None)
    distill_weight = given.get("distill_weight", 1.0) if "distill_from" in given else 0.0
    targets = {"targets": split_names(given["lora_targets"])} if "lora_targets" in given else {}
    return options_from(
        RetrainOptions,
        params,
        data=tuple(parse_specs(given["data"])),
        eval_data=tuple(parse_specs(given.get("eval_data") or [], "--eval-data")),
        objective=options_from(Objective, params, distill_weight=distill_weight),
        lora=options_from(LoraOptions, params, prefix="lora_", **targets),
        packing=not given["no_packing"],
        budget=Budget(tokens, steps),
        resume=given.get("resume") != "no",
        device=device,
        log_with=trackers,
    )


def check_retraining(given: Mapping[str, Any]) -> None:
    """Raise UsageError for values that no retraining can have, and for options that take no effect together."""
    from ladderize.adapt.retrain.schedule import SCHEDULES

    for name, allowed in (
        ("schedule", SCHEDULES),
        ("write", ("best", "last")),
        ("resume", ("auto", "no")),
        ("attention", ("sdpa", "eager", "flash_attention_2", "flex_attention")),
    ):
        if name in given and given[name] not in allowed:
            raise UsageError(f"--{name} {given[name]} is not one of {', '.join(allowed)}")
    for name, most in (("lr", MAX_LR), ("temperature", 100.0), ("max_gradient", math.inf), ("lora_alpha", math.inf)):
        if name in given and not 0 < given[name] <= most:
            raise UsageError(
                f"--{name.replace('_', '-')} must be above 0{f' and at most {most:g}' if most < math.inf else ''}, not"
                f" {given[name]:g}"
            )
    for name in ("distill_weight", "temperature"):
        if name in given and "distill_from" not in given:
            raise UsageError(f"--{name.replace('_', '-')} has no effect without --distill-from")
    if "distill_from" in given and given.get("distill_weight", 1.0) == 0:
        raise UsageError("--distill-weight 0 makes --distill-from useless; leave both out")
    if "heldout" in given and "eval_data" in given:
        raise UsageError("--heldout has no effect with --eval-data")
    for name in ("write", "eval_every"):
        if name in given and given.get("heldout") == 0:
            raise UsageError(
                f"--{name.replace('_', '-')} has no effect with --heldout 0, where nothing is validated on"
            )
    if "min_lr" in given and given.get("schedule") == "constant":
        raise UsageError("--min-lr has no effect with --schedule constant")


def split_names(text: str) -> tuple[str, ...]:
    """``a, b`` -> (a, b)."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
