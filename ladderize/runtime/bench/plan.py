"""From the options of ``ladderize bench`` to checked models: everything that can be wrong is found before any process
starts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from ladderize.checkpoint.config import check_config, parameter_count
from ladderize.console import human_bytes
from ladderize.errors import UsageError, UserError
from ladderize.memory import available_bytes
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.cost_model import MemoryNeed, cache_bytes, prefill_bytes, weight_bytes
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
from ladderize.runtime.shards import Shape, dense_config, read_shape, with_layers
from ladderize.runtime.spec import ModelSpec, checkpoint_spec, shape_spec

Asked = TypeVar("Asked", bound=GroupOptions)


@dataclass(frozen=True)
class BenchPlan(Generic[Asked]):
    """Checked models, how to time them, and the link that stands for the others of an emulated group.

    longest_message: bytes of the longest message that is sent. in_flight: how many a rank may have sent before it waits
    for the first of them.
    """

    specs: list[ModelSpec]
    options: Asked
    link: Link | None
    longest_message: int
    in_flight: int = 1


def plan_bench(choice: ModelChoice, options: BenchOptions, link: str | None = None) -> BenchPlan[BenchOptions]:
    """Raises UsageError for what argv alone decides, UserError or LayoutError for the rest. link: as --link has it."""
    check_bench_usage(choice, options, link)
    parsed = parsed_link(options, link)
    specs, schedule, batch = chosen_models(choice, options), options.prefill_schedule, max(options.batch_sizes)
    for spec in specs:
        check_positions(spec, options.prompt_len, options.output_len)
        check_cuts(spec, schedule, options, options.prompt_len, "--prompt-len")
        if parsed is not None:  # refuses what the link's time is not known for
            width = spec.torch_dtype.itemsize
            parsed.seconds(width * spec.config["hidden_size"] * batch * options.prompt_len)
            if not options.replicate_vocab:
                parsed.seconds(width * spec.config["vocab_size"] * batch)
    if "parallel" in options.baselines and not specs[0].layout.is_dense:
        raise UserError(f"--baselines parallel needs a dense model as the first one, and {specs[0].name} is not dense")
    make_profile_folder(options.profile)
    hidden, vocab = (max(int(spec.config[key]) for spec in specs) for key in ("hidden_size", "vocab_size"))
    longest = max(hidden * batch * options.prompt_len, vocab * batch)
    if checked := checked_specs(specs, options):
        longest = max(longest, longest_checked(checked, options.prompt_len))
    return BenchPlan(specs, options, parsed, 4 * longest, schedule.in_flight)


def parsed_link(options: GroupOptions, link: str | None) -> Link | None:
    """The link of an emulated group. Raises UsageError or UserError for what is none, and for ranks that are not
    there."""
    if link is not None:
        return parse_link(link, options.ranks)
    check_group_size(options.tp_size, options.device)
    return None


def check_cuts(spec: ModelSpec, schedule: Schedule, options: GroupOptions, tokens: int, tokens_name: str) -> None:
    """Raise UserError unless the schedule can cut every batch. tokens_name: the option that says how many in a row."""
    for rows in options.batch_sizes:
        schedule.check(rows, tokens, int(spec.config["hidden_size"]), rows_name="--batch-size", tokens_name=tokens_name)


def make_profile_folder(folder: Path | None) -> None:
    """Where ``--profile`` writes to, if it was given; raises UserError for what is no folder."""
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--profile {folder} is not a folder")
        folder.mkdir(parents=True, exist_ok=True)


def check_positions(spec: ModelSpec, prompt_len: int, output_len: int) -> None:
    """Raise UserError for more tokens than the model handles."""
    tokens = prompt_len + output_len
    if tokens > spec.positions:
        raise UserError(
            f"{spec.name}: --prompt-len and --output-len make {tokens} tokens, over the model's {spec.positions}"
            " positions"
        )


def chosen_models(choice: ModelChoice, options: GroupOptions) -> list[ModelSpec]:
    """The checked models that ``choice`` names, split over the ranks of ``options``."""
    ranks, asked_by = options.ranks, options.ranks_option
    if choice.random_weights is None:
        return [
            checkpoint_spec(model, tp_size=ranks, dtype=choice.dtype, revision=choice.revision, option=asked_by)
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
        shape_spec(config, layout, name=name, tp_size=ranks, dtype=choice.dtype, option=asked_by)
        for name, layout in layouts
    ]


# ---- memory ----


def memory_need(specs: Iterable[ModelSpec], options: BenchOptions, device: torch.device) -> MemoryNeed:
    """Of the largest batch. Weights that layouts share are counted once; what is not known is left out."""
    weights: dict[object, int] = {}
    cache = prefill = 0
    batch, columns = max(options.batch_sizes), options.prompt_len + options.output_len
    for spec in specs:
        shape = Shape.from_config(spec.config, tp_size=options.ranks, rank=0, replicate_vocab=options.replicate_vocab)
        width = spec.torch_dtype.itemsize
        weights[spec.weights_key(shape)] = weight_bytes(shape, width, packed=device.type == "cpu")
        stored = 4 if device.type == "cpu" else width  # see KVCache
        cache = max(cache, cache_bytes(shape, batch, columns, stored))
        prefill = max(prefill, prefill_bytes(shape, batch, options.prompt_len, width))
    return MemoryNeed(sum(weights.values()), cache, prefill)


def check_bench_memory(specs: list[ModelSpec], options: BenchOptions, group: Ranks) -> None:
    """Raise UserError if the ranks of this machine cannot hold the models. All ranks call it."""
    need = memory_need(specs, options, group.device)
    parts = {"weights take": need.weights, "the KV cache": need.kv_cache, "the prefill": need.prefill}
    free = check_ranks_memory(specs[0].name, parts, "--prompt-len", group)
    if free is None or not options.check or options.emulate_tp is None:
        return
    for spec in (spec for spec in specs if spec.folder is not None):
        whole = parameter_count(spec.config) * spec.torch_dtype.itemsize
        if whole > free:  # under emulation the reference check loads all of a model, not one rank's part
            raise UserError(
                f"{spec.name}: the correctness check runs the whole model, which takes {human_bytes(whole)}, and"
                f" {human_bytes(free)} are free; --no-check skips it and labels the results unchecked"
            )


def check_ranks_memory(name: str, parts: Mapping[str, int], length: str, group: Ranks) -> int | None:
    """Raise UserError if the ranks of this machine cannot hold ``parts``, the bytes of each rank by what they are for;
    returns the free bytes, None where the system does not say.

    On a CPU the ranks of a machine share its memory; each GPU has its own. length: the option that makes rows shorter.
    """
    free = available_bytes(group.device)
    sharing = group.local_size if group.device.type == "cpu" else 1
    if free is not None and sharing * sum(parts.values()) > free:
        texts = [f"{what} {human_bytes(count)}" for what, count in parts.items()]
        raise UserError(
            f"{name}: {', '.join(texts[:-1])} and {texts[-1]} of memory"
            f"{f' on each of {sharing} ranks' if sharing > 1 else ''}, and {human_bytes(free)} are free; choose a"
            f" smaller model or --batch-size, a shorter {length}, fewer layers or models, or more ranks"
        )
    return free
