"""The step from the options of ``ladderize bench`` to checked models, before any process starts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ladderize.checkpoint.config import check_config
from ladderize.errors import UsageError, UserError
from ladderize.layout import APART
from ladderize.memory import check_room
from ladderize.ranks.device import default_device
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.options import BenchOptions, layout_names, named_layout
from ladderize.runtime.bench.reference_check import checked_specs, longest_checked
from ladderize.runtime.collectives.links import Interconnect, Link, read_interconnect
from ladderize.runtime.launch import check_group_size
from ladderize.runtime.shards import (
    Shape,
    cache_bytes,
    check_runnable,
    dense_config,
    group_size,
    read_shape,
    weight_bytes,
    with_layers,
)
from ladderize.runtime.spec import ModelSpec, checkpoint_spec, shape_spec
from ladderize.runtime.training.vocab_losses import STATISTICS_BYTES


@dataclass(frozen=True)
class BenchPlan:
    specs: list[ModelSpec]
    options: BenchOptions
    interconnect: Interconnect | None  # of an emulated group
    longest_message: int  # bytes

    @property
    def link(self) -> Link | None:
        """The link of all ranks of an emulated group."""
        return None if self.interconnect is None else self.interconnect.at(self.options.ranks)


def plan_bench(options: BenchOptions) -> BenchPlan:
    """Return the checked plan. Raises UsageError for faults of the arguments alone, else UserError or LayoutError."""
    specs = chosen_models(options, options.device or default_device())
    interconnect = chosen_link(options, specs)
    for spec in specs if options.train else ():
        check_runnable(spec.config, spec.layout, options.ranks, name=options.ranks_option)
        if spec.dtype == "float16":
            raise UserError(f"{spec.name}: float16 has too small a range for training; give --dtype bfloat16")
    if "parallel" in options.baselines:
        check_dense("parallel", specs[0])
    rows, width = max(options.batch_sizes), max(spec.torch_dtype.itemsize for spec in specs)
    hidden = max(int(spec.config["hidden_size"]) for spec in specs)
    vocab = max(int(spec.config["vocab_size"]) for spec in specs)
    stream = hidden * rows * options.prompt_len
    if options.train:  # in float32 where it is checked; the losses exchange some numbers for each token
        longest = max(4 * stream, STATISTICS_BYTES * rows * options.prompt_len)
    else:
        longest = width * max(stream, vocab * rows, longest_checked(checked_specs(specs, options), options.prompt_len))
    return BenchPlan(specs, options, interconnect, longest)


def chosen_link(options: BenchOptions, specs: Sequence[ModelSpec]) -> Interconnect | None:
    """Return the link of an emulated group. Raises UsageError where --outer-link joins no groups, or unlike ones."""
    if options.link is None:
        return None
    link = read_interconnect(options.link)
    if options.outer_link is not None:
        sizes = {group_size(spec.layout.sync_tp_size, options.ranks) for spec in specs} - {1}
        if len(sizes) != 1:
            raise UsageError(
                f"--outer-link joins groups of ranks: --emulate-tp {options.ranks} must be a multiple of the models'"
                " sync_tp_size, and that the same of all"
            )
        link = link.joined_by(read_interconnect(options.outer_link, "--outer-link"), sizes.pop())
    link.at(options.ranks)  # raises for ranks that are no groups
    return link


def chosen_models(options: BenchOptions, device: str) -> list[ModelSpec]:
    """Return the checked models that the options name, split over the ranks. Makes the folder of --profile."""
    options.check_named()
    check_group_size(options.tp_size, device)
    ranks, option = options.ranks, options.ranks_option
    if options.random_weights is None:
        specs = [checkpoint_spec(model, tp_size=ranks, dtype=options.dtype, option=option) for model in options.models]
    else:
        config = read_shape(options.random_weights)
        check_config(config)
        if options.num_layers is not None:
            config = with_layers(config, options.num_layers)
            check_config(config)
        config, virtual, specs = dense_config(config), options.sync_tp_size or ranks, []
        for name in layout_names(options.layout):
            layout = named_layout(name, config["num_hidden_layers"], virtual)
            specs.append(shape_spec(config, layout, name=name, tp_size=ranks, dtype=options.dtype, option=option))
        if options.sync_tp_size is not None and all(spec.layout.sync_tp_size is None for spec in specs):
            raise UsageError("--sync-tp-size has no effect: none of --layout delays or drops a sync point")
    for spec in specs:
        if options.columns > spec.positions:
            names = "--prompt-len" if options.train else "--prompt-len and --output-len"
            raise UserError(
                f"{spec.name}: {names} make {options.columns} tokens, over the model's {spec.positions} positions"
            )
    if options.profile is not None:
        options.profile.mkdir(parents=True, exist_ok=True)
    return specs


def check_dense(baseline: str, spec: ModelSpec) -> None:
    if not spec.layout.is_dense:
        raise UserError(f"--baselines {baseline} needs a dense model as the first one, and {spec.name} is not dense")


def check_bench_memory(specs: list[ModelSpec], options: BenchOptions, group: Ranks) -> None:
    """Raise UserError if the ranks of this machine cannot hold what is checked and timed. All ranks call it. Otherwise
    the system would start to kill processes."""
    advice = "choose fewer or smaller models, fewer layers, a smaller --batch-size, or more ranks"
    advice += "; with --no-check no whole model is needed"
    needed = needed_bytes(specs, options, group.device)
    check_room(needed, group.device, "what is checked and timed", advice, processes=group.local_size)


def needed_bytes(specs: list[ModelSpec], options: BenchOptions, device: torch.device) -> int:
    """Return the bytes of one rank's weights, and of the largest batch's KV caches or one model's gradients. Weights,
    and caches of one size, that layouts share count once. One model has gradients at a time. An emulated rank has no
    others to be checked with, so before that it holds whole models."""
    weights, whole, caches, on_cpu = {}, {}, set(), device.type == "cpu"
    checked = checked_specs(specs, options) if options.emulate_tp is not None else []
    for spec in specs:
        shape = Shape.from_config(spec.config, tp_size=options.ranks, rank=0, replicate_vocab=options.replicate_vocab)
        width = 4 if options.train else spec.torch_dtype.itemsize
        key = weights_key(spec, shape, train=options.train)
        weights[key] = weight_bytes(shape, width, packed=on_cpu and not options.train)
        numbers = 4 if on_cpu else width  # see KVCache
        caches.add(cache_bytes(shape, spec.layout, max(options.batch_sizes), options.columns, numbers))
        if spec in checked:
            shape = Shape.from_config(spec.config, tp_size=1, rank=0)
            whole[spec.weights_key(shape)] = weight_bytes(shape, width, packed=on_cpu)
    timed = sum(weights.values()) + (max(weights.values()) if options.train else sum(caches))
    return max(timed, sum(whole.values()))


def weights_key(spec: ModelSpec, shape: Shape, *, train: bool) -> tuple[object, ...]:
    """Return a key that is equal for models that share their weights, and in training how gradients are summed."""
    # where a sum is delayed or dropped, each rank knows only a part of the gradient of its bias
    layout, apart = spec.layout, []
    for has_bias, modes in ((shape.decoder.o_bias, layout.attention_sync), (shape.decoder.mlp_bias, layout.mlp_sync)):
        if train and has_bias:
            apart += [mode in APART for mode in modes]
    return *spec.weights_key(shape), tuple(apart)
