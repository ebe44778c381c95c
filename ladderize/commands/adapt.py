"""``adapt``."""

import importlib
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from typer import BadParameter

from ladderize.adapt.align.options import AlignOptions
from ladderize.adapt.blockwise.options import BlockwiseOptions, DistillOptions, WindowOptions
from ladderize.adapt.lora import LoraOptions
from ladderize.adapt.methods import ALIGN, BLOCKS, CONVERTED, FULL, LORA, Method, ScheduleKind
from ladderize.adapt.retrain.options import Budget, Objective, RetrainOptions
from ladderize.choices import AS_JSON, NO_VERIFY, OVERWRITE, REVISION, DeviceName, argument, check_options, flag, option
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
    names_of,
)
from ladderize.commands.shared import (
    LOADING,
    command_line,
    retrain_command,
    scoring_file,
    show_next,
    start_on,
    start_server,
)
from ladderize.console import Console
from ladderize.convert.weights import parse_size
from ladderize.errors import UsageError
from ladderize.runtime.schedule import Schedule, ScheduleName

if TYPE_CHECKING:
    from ladderize.adapt.blockwise.rewrite import LayerMethod

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
    """What every method heeds besides its own options. Those without a description are described at RetrainOptions."""

    model: str = argument(
        "MODEL", "A converted checkpoint, or with --train a dense one: folder or hub id. It is never changed."
    )
    out: str | None = argument("OUT", "The folder to write. It appears whole or not at all.", None)
    method: Method = FULL
    train: str | None = None
    distill_from: str | None = None
    device: DeviceName | None = None
    threads: int | None = None
    dry_run: bool = option(
        "Show what it would take (memory of each process, disk, time), and what would take less, and stop. No weights"
        " are read.",
        False,
    )
    device_memory: int | None = option(
        "Memory of a device, such as 80GB, that --dry-run compares with.",
        metavar="SIZE",
        parse=partial(parse_size, option="--device-memory"),
        shown="what is free here",
        needs="dry_run",
    )
    plot: Path | None = option("Draw the training curves: STEM.png and STEM.svg.", metavar="STEM")
    overwrite: bool = option(OVERWRITE, False, help="Replace OUT if it is a checkpoint (lora: an adapter).")
    verify: bool = option(NO_VERIFY, True)
    revision: str | None = option(REVISION)
    as_json: bool = option(AS_JSON, False)

    @property
    def writing(self) -> dict[str, Any]:
        """What every function that writes OUT is asked besides."""
        return {"overwrite": self.overwrite, "verify": self.verify, "revision": self.revision}


@dataclass(frozen=True)
class RetrainArguments:
    """What retraining heeds besides."""

    preset: Literal["ladder-paper"] | None = option(
        "Values of a paper for options not given: lr 5e-6, 200 warm-up steps, cosine, 3B tokens."
    )
    show_data: bool = option("Print the first rows of the first batch, decoded, and stop.", False)
    show_data_rows: int | None = option(
        "Rows that --show-data prints.", min=1, shown=str(SHOWN_ROWS), needs="show_data"
    )
    schedule: ScheduleName = option(
        "When sub-modules run, with --tp-size: sequential, or domino, which cuts a micro-batch into parts and runs"
        " one's all-reduces under the others' compute. The result is the same (with --lora-dropout: other masks).",
        Schedule.name,
        metavar="NAME",
        kind=str,
        parser=schedule_name,
        shown=Schedule.name,
    )
    domino_chunks: int | None = option(
        "Domino: parts of a micro-batch: of its rows, or of the tokens of its one row.",
        min=2,
        shown=str(Schedule.chunks),
    )
    domino_columns: int | None = option(
        "Domino: parts of each sub-module's output, every one with an all-reduce of its own.",
        min=1,
        shown=str(Schedule.columns),
    )


RETRAINING = (RetrainOptions, Objective, Budget, RetrainArguments)
OPTIONS: dict[Method, tuple[type, ...]] = {
    FULL: RETRAINING,
    LORA: (*RETRAINING, LoraOptions),
    ALIGN: (AlignOptions,),
    BLOCKS: (BlockwiseOptions, DistillOptions),
}


@command(
    AdaptArguments,
    *chain.from_iterable(OPTIONS.values()),
    panels={
        DATA: "data seq_len no_packing skip_bad_rows show_data show_data_rows samples seed",
        METHOD: "method distill_from train preset distill_weight hidden_weight temperature align ridge random_share"
        " lora_rank lora_alpha lora_dropout lora_targets",
        OPTIMISATION: "max_tokens max_steps batch_size lr lr_schedule warmup_steps min_lr weight_decay max_gradient"
        " epochs patience",
        VALIDATION: "eval_data heldout eval_every save_every keep write resume",
        MEMORY: "dry_run device_memory micro_batch_size gradient_checkpointing tp_size schedule domino_chunks"
        " domino_columns attention max_memory dtype device threads",
        OUTPUT: "log_with log_dir plot work_dir overwrite no_verify json",
        MODELS: "revision",
    },
    short="data seq_len show_data dry_run method distill_from train hidden_weight align lora_rank max_tokens max_steps"
    " lr eval_data resume micro_batch_size gradient_checkpointing tp_size dtype device plot overwrite json config",
)
def adapt(given: GivenOptions) -> None:
    """Retrain a converted checkpoint to win back accuracy, on text and on the dense model's predictions."""
    own = given.fill(AdaptArguments)
    check_options(own)
    if own.out is None and not (given.params["show_data"] or own.dry_run):
        raise UsageError("OUT is missing: name the folder to write")
    console = Console(own.as_json)
    with console.stage(LOADING):
        check_effect(own.method, given)
        start_server(1 if own.dry_run else given.params["tp_size"])
        home = {BLOCKS: "blockwise.distill", ALIGN: "align.align"}.get(own.method, "retrain.run")
        importlib.import_module(f"ladderize.adapt.{home}")
    if own.dry_run:
        _forecast(given, own, console)
        return
    if own.plot is not None:
        from ladderize.figure import check_plot

        check_plot(own.plot)
    run = _retrain if own.method in (FULL, LORA) else _rewrite
    run(given, own, console)


def check_effect(method: Method, given: GivenOptions) -> None:
    """Raise UsageError for options that were given and have no effect on this method."""
    heeded = {name for kind in (AdaptArguments, *OPTIONS[method]) for name in names_of(kind)}
    known = {name for kinds in OPTIONS.values() for kind in kinds for name in names_of(kind)}
    for name in given.names:
        if name in known - heeded:
            raise UsageError(f"{flag(name)} has no effect with --method {method}")
    if method == LORA and "no_verify" in given.names:
        raise UsageError("--no-verify has no effect with --method lora: an adapter cannot be loaded alone")


def adapt_options(given: GivenOptions) -> RetrainOptions | WindowOptions:
    """The options of the method, checked as far as they alone decide. Raises UsageError."""
    own = given.fill(AdaptArguments)
    check_effect(own.method, given)
    return retrain_options(given) if own.method in (FULL, LORA) else _window_options(given, own)


def _window_options(given: GivenOptions, own: AdaptArguments) -> WindowOptions:
    """Of methods that work layer by layer, on windows of data."""
    if own.distill_from is None:
        raise UsageError(
            f"--method {own.method} needs --distill-from DENSE, the checkpoint that MODEL was converted from"
        )
    data = given.params["data"]
    if len(data) > 1:
        raise UsageError(f"--method {own.method} reads one --data file, not {len(data)}")
    if own.method == ALIGN:
        return given.fill(AlignOptions, data=data[0], layers=own.train)
    layers = own.train if own.train != CONVERTED else None
    return given.fill(BlockwiseOptions, data=data[0], layers=layers, distill=given.fill(DistillOptions))


def _forecast(given: GivenOptions, own: AdaptArguments, console: Console) -> None:
    """--dry-run."""
    from ladderize.adapt.blockwise.rewrite import LayerForecast, forecast_layers
    from ladderize.adapt.retrain.forecast import TrainingForecast, forecast_training

    options = adapt_options(given)
    about: dict[str, Any] = {"device_memory": own.device_memory, "revision": own.revision}
    found: TrainingForecast | LayerForecast
    if isinstance(options, RetrainOptions):
        found = forecast_training(own.model, options, **about)
    else:
        found = forecast_layers(_layer_method(own.method), own.model, own.distill_from or "", options, **about)
    console.document(found.to_dict())
    console.prose(found.text())
    if isinstance(found, TrainingForecast):
        console.result("")
        console.table(found.rows(), right=["rows at once", "memory of each process", "time"])


def _layer_method(method: Method) -> "LayerMethod[Any, Any]":
    if method == ALIGN:
        from ladderize.adapt.align.align import Aligning

        return Aligning()
    from ladderize.adapt.blockwise.distill import Distilling

    return Distilling()


def _rewrite(given: GivenOptions, own: AdaptArguments, console: Console) -> None:
    out, dense = own.out, own.distill_from
    options = adapt_options(given)
    assert isinstance(options, WindowOptions)
    assert out is not None
    assert dense is not None
    start_on(own.device, own.threads)
    from ladderize.adapt.blockwise.rewrite import perplexity_rows, rewrite

    document = rewrite(_layer_method(own.method), own.model, out, dense, options, console=console, **own.writing)
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
    retrain = retrain_command(out, adapted, dense, given.params["data"][0], align=False)
    steps = [("retrain from there", retrain)] if own.method == ALIGN else []
    show_next(console, *steps, _measure(given, own, out))


def _retrain(given: GivenOptions, own: AdaptArguments, console: Console) -> None:
    options = retrain_options(given)
    start_on(own.device, own.threads)
    from ladderize.adapt.retrain.run import adapt_checkpoint, show_data_of

    if given.params["show_data"]:
        rows = given.params["show_data_rows"] or SHOWN_ROWS
        text, document = show_data_of(own.model, options, own.revision, rows)
        console.document(document)
        console.result(text)
        return
    out = own.out
    assert out is not None
    adaptation = adapt_checkpoint(own.model, out, options, console=console, **own.writing)
    if adaptation is not None:
        console.document(adaptation.to_dict())
        console.result(adaptation.summary())
        console.result(f"wrote {out}{' (an adapter)' if options.method == LORA else ''}")
        _draw(out, own.plot, console)
        if options.method == LORA:
            show_next(console, ("make a checkpoint of it", command_line("merge", out, f"{out.rstrip('/')}-merged")))
        else:
            show_next(console, _measure(given, own, out))


def retrain_options(given: GivenOptions) -> RetrainOptions:
    """The options of retraining, checked, with the preset's values where none were given."""
    for name, value in PRESETS.get(given.params["preset"], {}).items():
        is_budget = name == "max_tokens" and given.params["max_steps"] is not None
        if name not in given.names and not is_budget:
            given.params[name] = value
    _check_retraining(given)
    more = given.fill(RetrainArguments)
    check_options(more)
    is_taught = given.params["distill_from"] is not None
    objective = given.fill(Objective)
    if is_taught and "distill_weight" not in given.names:
        objective = replace(objective, distill_weight=1.0)
    budget = given.fill(Budget)
    if not more.show_data:
        budget.check()
    options = given.fill(
        RetrainOptions,
        objective=objective,
        lora=given.fill(LoraOptions),
        budget=budget,
        schedule=given.fill(Schedule, prefix="domino_", name=more.schedule),
    )
    options.check()
    return options


def _check_retraining(given: GivenOptions) -> None:
    """Raise UsageError for options that were given and take no effect together, whatever their values."""
    params = given.params
    for name in given.names:
        if name in ("domino_chunks", "domino_columns") and params["schedule"] != "domino":
            raise UsageError(f"{flag(name)} has no effect without --schedule domino")
        if name in names_of(Objective) and params["distill_from"] is None:
            raise UsageError(f"{flag(name)} has no effect without --distill-from")
        if name == "plot" and params["show_data"]:
            raise UsageError("--plot has no effect with --show-data, which trains nothing")
        if name in ("write", "eval_every") and params["heldout"] == 0:
            raise UsageError(f"{flag(name)} has no effect with --heldout 0, where nothing is validated on")


def _draw(out: str, stem: Path | None, console: Console) -> None:
    if stem is not None:
        from ladderize.adapt.retrain.curves import draw_curves, read_curves

        console.note(f"wrote {' and '.join(map(str, draw_curves([read_curves(Path(out))], stem)))}")


def _measure(given: GivenOptions, own: AdaptArguments, out: str) -> tuple[str, str]:
    models = dict.fromkeys(name for name in (own.distill_from, own.model, out) if name is not None)
    return "measure it", command_line("eval", *models, "--perplexity", scoring_file(given.params["eval_data"] or ()))
