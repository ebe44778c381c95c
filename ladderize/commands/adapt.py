"""``adapt``."""

import importlib
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ladderize.adapt.layers.align_options import AlignOptions
from ladderize.adapt.layers.options import BlockwiseOptions, DistillOptions, WindowOptions
from ladderize.adapt.lora import LoraOptions
from ladderize.adapt.methods import ALIGN, BLOCKS, CONVERTED, FULL, LORA, Method
from ladderize.adapt.train.options import Budget, Objective, RetrainOptions
from ladderize.choices import AS_JSON, NO_VERIFY, OVERWRITE, DeviceName, argument, check_options, flag, option
from ladderize.commands.builder import (
    DATA,
    MEMORY,
    METHOD,
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
from ladderize.errors import UsageError
from ladderize.runtime.schedule import Schedule, ScheduleName

if TYPE_CHECKING:
    from ladderize.adapt.layers.rewrite import LayerMethod

SHOWN_ROWS = 4  # of --show-data


@dataclass(frozen=True)
class AdaptArguments:
    """The options of every method. Those without a description are described at RetrainOptions."""

    model: str = argument(
        "MODEL", "A converted checkpoint, or with --train a dense one: folder or hub id. It is never changed."
    )
    out: str | None = argument("OUT", "The folder to write. It appears whole or not at all.", None)
    method: Method = FULL
    train: str | None = None
    distill_from: str | None = None
    device: DeviceName | None = None
    dry_run: bool = option("Show what it would take (memory, disk), and stop. No weights are read.", False)
    overwrite: bool = option(OVERWRITE, False, help="Replace OUT if it is a checkpoint (lora: an adapter).")
    verify: bool = option(NO_VERIFY, True)
    as_json: bool = option(AS_JSON, False)

    @property
    def writing(self) -> dict[str, Any]:
        """The arguments of every function that writes OUT."""
        return {"overwrite": self.overwrite, "verify": self.verify}


@dataclass(frozen=True)
class RetrainArguments:
    """The options of retraining alone."""

    show_data: bool = option(f"Print the first {SHOWN_ROWS} rows of the data, decoded, and stop.", False)
    schedule: ScheduleName = option(
        "When sub-modules run, with --tp-size: sequential, or domino, which cuts a micro-batch in two and runs"
        " one half's all-reduces under the other's compute. The result is the same.",
        Schedule.name,
        shown=Schedule.name,
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
        DATA: "data seq_len samples show_data seed",
        METHOD: "method distill_from train distill_weight hidden_weight align lora_rank lora_alpha lora_dropout"
        " lora_targets",
        OPTIMISATION: "max_tokens max_steps batch_size lr lr_schedule warmup_steps weight_decay max_grad_norm",
        VALIDATION: "eval_data heldout eval_every write resume",
        MEMORY: "dry_run micro_batch_size gradient_checkpointing tp_size schedule attention dtype device",
        OUTPUT: "log_with overwrite no_verify json",
    },
    left_out="ridge random_share max_memory epochs patience work_dir",
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
        home = {BLOCKS: "layers.distill", ALIGN: "layers.align"}.get(own.method, "train.run")
        importlib.import_module(f"ladderize.adapt.{home}")
    if own.dry_run:
        _estimate(given, own, console)
    elif own.method in (FULL, LORA):
        _retrain(given, own, console)
    else:
        _rewrite(given, own, console)


def check_effect(method: Method, given: GivenOptions) -> None:
    """Raise UsageError for options that were given and have no effect on this method."""
    heeded = {name for kind in (AdaptArguments, *OPTIONS[method]) for name in names_of(kind)}
    known = {name for kinds in OPTIONS.values() for kind in kinds for name in names_of(kind)}
    for name in given.names:
        if name in known - heeded:
            raise UsageError(f"{flag(name)} has no effect with --method {method}")
    if method in (ALIGN, BLOCKS) and "dry_run" in given.names:
        raise UsageError(f"--dry-run has no effect with --method {method}, which says what it takes as it begins")
    if method == LORA and "no_verify" in given.names:
        raise UsageError("--no-verify has no effect with --method lora: an adapter cannot be loaded alone")


def adapt_options(given: GivenOptions) -> RetrainOptions | WindowOptions:
    """Return the options of the method after all checks that need nothing else. Raises UsageError."""
    own = given.fill(AdaptArguments)
    check_effect(own.method, given)
    return retrain_options(given) if own.method in (FULL, LORA) else _window_options(given, own)


def _window_options(given: GivenOptions, own: AdaptArguments) -> WindowOptions:
    """Return the options of a method that works layer by layer, on windows of data. Raises UsageError."""
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


def _estimate(given: GivenOptions, own: AdaptArguments, console: Console) -> None:
    """Show the estimate of --dry-run."""
    from ladderize.adapt.train.memory import estimate_training

    options = adapt_options(given)
    assert isinstance(options, RetrainOptions)
    estimate = estimate_training(own.model, options)
    console.document(estimate.to_dict())
    console.prose(estimate.text())


def _layer_method(method: Method) -> "LayerMethod[Any, Any]":
    if method == ALIGN:
        from ladderize.adapt.layers.align import Aligning

        return Aligning()
    from ladderize.adapt.layers.distill import Distilling

    return Distilling()


def _rewrite(given: GivenOptions, own: AdaptArguments, console: Console) -> None:
    out, dense = own.out, own.distill_from
    options = adapt_options(given)
    assert isinstance(options, WindowOptions)
    assert out is not None
    assert dense is not None
    start_on(own.device, None)
    from ladderize.adapt.layers.rewrite import perplexity_rows, rewrite

    method = _layer_method(own.method)
    document = rewrite(method, own.model, out, dense, options, console=console, revision=None, **own.writing)
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
    adapted = f"{out.rstrip('/')}-adapted"
    retrain = retrain_command(out, adapted, dense, given.params["data"][0], align=False)
    steps = [("retrain from there", retrain)] if own.method == ALIGN else []
    show_next(console, *steps, _measure(given, own, out))


def _retrain(given: GivenOptions, own: AdaptArguments, console: Console) -> None:
    options = retrain_options(given)
    start_on(own.device, None)
    from ladderize.adapt.train.run import adapt_checkpoint, show_data_of

    if given.params["show_data"]:
        text, document = show_data_of(own.model, options, None, SHOWN_ROWS)
        console.document(document)
        console.result(text)
        return
    out = own.out
    assert out is not None
    adaptation = adapt_checkpoint(own.model, out, options, console=console, **own.writing)
    if adaptation is not None:
        console.document(adaptation.to_dict())
        console.result("\n".join(adaptation.summary()))
        console.result(f"wrote {out}{' (an adapter)' if options.method == LORA else ''}")
        if options.method == LORA:
            show_next(console, ("make a checkpoint of it", command_line("merge", out, f"{out.rstrip('/')}-merged")))
        else:
            show_next(console, _measure(given, own, out))


def retrain_options(given: GivenOptions) -> RetrainOptions:
    """Return the options of retraining, checked. Raises UsageError."""
    _check_retraining(given)
    more = given.fill(RetrainArguments)
    check_options(more)
    objective = given.fill(Objective)
    if given.params["distill_from"] is not None and "distill_weight" not in given.names:
        objective = replace(objective, distill_weight=1.0)
    budget = given.fill(Budget)
    if not more.show_data:
        budget.check()
    options = given.fill(
        RetrainOptions,
        objective=objective,
        lora=given.fill(LoraOptions),
        budget=budget,
        schedule=Schedule(more.schedule),
    )
    options.check()
    return options


def _check_retraining(given: GivenOptions) -> None:
    """Raise UsageError for options that were given and take no effect together, whatever their values."""
    params = given.params
    for name in given.names:
        if name in names_of(Objective) and params["distill_from"] is None:
            raise UsageError(f"{flag(name)} has no effect without --distill-from")
        if name == "write" and params["heldout"] == 0:
            raise UsageError(f"{flag(name)} has no effect with --heldout 0, where nothing is validated on")


def _measure(given: GivenOptions, own: AdaptArguments, out: str) -> tuple[str, str]:
    models = dict.fromkeys(name for name in (own.distill_from, own.model, out) if name is not None)
    return "measure it", command_line("eval", *models, "--perplexity", scoring_file(given.params["eval_data"] or ()))
