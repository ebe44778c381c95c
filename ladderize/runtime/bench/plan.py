"""The step from the options of ``ladderize bench`` to checked models. All that can be wrong is found before any process
starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from ladderize.checkpoint.config import check_config
from ladderize.errors import UsageError, UserError
from ladderize.memory import check_room
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.options import (
    BenchOptions,
    GroupOptions,
    ModelChoice,
    check_bench_usage,
    layout_names,
    named_layout,
)
from ladderize.runtime.bench.reference_check import checked_specs, longest_checked
from ladderize.runtime.collectives.links import Link, parse_link
from ladderize.runtime.launch import check_group_size
from ladderize.runtime.schedule import Schedule
from ladderize.runtime.shards import Shape, cache_bytes, dense_config, read_shape, weight_bytes, with_layers
from ladderize.runtime.spec import ModelSpec, checkpoint_spec, shape_spec

SomeOptions = TypeVar("SomeOptions", bound=GroupOptions)


@dataclass(frozen=True)
class BenchPlan(Generic[SomeOptions]):
    """Checked models, the options for timing them, and the link of an emulated group.

    longest_message: bytes of the longest message that is sent.
    in_flight: messages that a rank may have sent before it waits for the first of them.
    """

    specs: list[ModelSpec]
    options: SomeOptions
    link: Link | None
    longest_message: int
    in_flight: int = 1


def plan_bench(choice: ModelChoice, options: BenchOptions, link: str | None = None) -> BenchPlan[BenchOptions]:
    """Return the checked plan. Raises UsageError for faults of the arguments alone, UserError or LayoutError for
    others.

    link: as --link has it.
    """
    check_bench_usage(choice, options, link)
    parsed = parsed_link(options, link)
    specs, schedule, batch = chosen_models(choice, options), options.prefill_schedule, max(options.batch_sizes)
    for spec in specs:
        check_positions(spec, options)
        check_cuts(spec, schedule, options, options.prompt_len, "--prompt-len")
    if "parallel" in options.baselines:
        check_dense("parallel", specs[0])
    make_profile_folder(options.profile)
    hidden, vocab = (max(int(spec.config[key]) for spec in specs) for key in ("hidden_size", "vocab_size"))
    longest = max(hidden * batch * options.prompt_len, vocab * batch)
    if parsed is not None:
        parsed.seconds(4 * longest)  # raises for a size that the link's time is not known for
    if checked := checked_specs(specs, options):
        longest = max(longest, longest_checked(checked, options.prompt_len))
    return BenchPlan(specs, options, parsed, 4 * longest, schedule.in_flight)


def chosen_models(choice: ModelChoice, options: GroupOptions) -> list[ModelSpec]:
    """Return the checked models that ``choice`` names, split over the ranks of ``options``."""
    ranks, option = options.ranks, options.ranks_option
    if choice.random_weights is None:
        return [
            checkpoint_spec(model, tp_size=ranks, dtype=choice.dtype, revision=choice.revision, option=option)
            for model in choice.models
        ]
    config = read_shape(choice.random_weights)
    check_config(config)
    if choice.num_layers is not None:
        config = with_layers(config, choice.num_layers)
        check_config(config)
    config = dense_config(config)
    virtual = choice.sync_tp_size or ranks
    layouts = [(name, named_layout(name, config["num_hidden_layers"], virtual)) for name in layout_names(choice.layout)]
    if choice.sync_tp_size is not None and not any(layout.spd_layers for _, layout in layouts):
        raise UsageError("--sync-tp-size has no effect: none of --layout drops a sync point")
    return [
        shape_spec(config, layout, name=name, tp_size=ranks, dtype=choice.dtype, option=option)
        for name, layout in layouts
    ]


def parsed_link(options: GroupOptions, link: str | None) -> Link | None:
    """Return the link of an emulated group. Raises UsageError or UserError for a bad link, or for too few devices."""
    if link is not None:
        return parse_link(link, options.ranks)
    check_group_size(options.tp_size, options.device)
    return None


def check_cuts(spec: ModelSpec, schedule: Schedule, options: GroupOptions, tokens: int, tokens_name: str) -> None:
    """Raise UserError unless the schedule can cut every batch.

    tokens_name: the option that gives a row's tokens.
    """
    for rows in options.batch_sizes:
        schedule.check(rows, tokens, int(spec.config["hidden_size"]), rows_name="--batch-size", tokens_name=tokens_name)


def check_positions(spec: ModelSpec, options: BenchOptions) -> None:
    """Raise UserError if prompt and output have more tokens than the model handles."""
    tokens = options.prompt_len + options.output_len
    if tokens > spec.positions:
        raise UserError(
            f"{spec.name}: --prompt-len and --output-len make {tokens} tokens, over the model's {spec.positions}"
            " positions"
        )


def check_dense(baseline: str, spec: ModelSpec) -> None:
    """Raise UserError for a baseline of a model that is not dense."""
    if not spec.layout.is_dense:
        raise UserError(f"--baselines {baseline} needs a dense model as the first one, and {spec.name} is not dense")


def make_profile_folder(folder: Path | None) -> None:
    """Make the folder that ``--profile`` names, if it was given. Raises UserError if it is a file."""
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--profile {folder} is not a folder")
        folder.mkdir(parents=True, exist_ok=True)


def needed_bytes(specs: Sequence[ModelSpec], options: BenchOptions, device: torch.device) -> tuple[int, int]:
    """Return the bytes of one rank's weights and of the largest batch's KV cache.

    Weights that layouts share count once. One model has a cache at a time.
    """
    weights, caches = {}, []
    for spec in specs:
        shape = Shape.from_config(spec.config, tp_size=options.ranks, rank=0, replicate_vocab=options.replicate_vocab)
        width, on_cpu = spec.torch_dtype.itemsize, device.type == "cpu"
        weights[spec.weights_key(shape)] = weight_bytes(shape, width, packed=on_cpu)
        columns = options.prompt_len + options.output_len
        caches.append(cache_bytes(shape, max(options.batch_sizes), columns, 4 if on_cpu else width))  # see KVCache
    return sum(weights.values()), max(caches)


def check_bench_memory(needed: int, group: Ranks) -> None:
    """Raise UserError if the ranks of this machine cannot hold ``needed`` bytes each. All ranks call it.

    Otherwise the system would start to kill processes.
    """
    advice = "choose fewer or smaller models, fewer layers, a smaller --batch-size, or more ranks"
    check_room(needed, group.device, "what is timed", advice, processes=group.local_size)
