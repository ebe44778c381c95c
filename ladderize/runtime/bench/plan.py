"""The step from the options of ``ladderize bench`` to checked models. All that can be wrong is found before any process
starts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ladderize.checkpoint.config import check_config
from ladderize.errors import UsageError, UserError
from ladderize.layout import APART
from ladderize.memory import check_room
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.options import (
    BenchOptions,
    ModelChoice,
    check_bench_usage,
    layout_names,
    named_layout,
)
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
    """Checked models, and the options for timing them.

    interconnect: of an emulated group.
    longest_message: bytes of the longest message that is sent.
    """

    specs: list[ModelSpec]
    options: BenchOptions
    interconnect: Interconnect | None
    longest_message: int

    @property
    def link(self) -> Link | None:
        """The link of all ranks of an emulated group."""
        return None if self.interconnect is None else self.interconnect.at(self.options.ranks)


def plan_bench(choice: ModelChoice, options: BenchOptions, link: str | None = None) -> BenchPlan:
    """Return the checked plan. Raises UsageError for faults of the arguments alone, UserError or LayoutError for
    others.

    link: as --link has it.
    """
    check_bench_usage(choice, options, link)
    if link is None:
        check_group_size(options.tp_size, options.device)
    specs = chosen_models(choice, options)
    interconnect = None if link is None else chosen_link(link, options, specs)
    for spec in specs:
        check_positions(spec, options)
        if options.train:
            check_runnable(spec.config, spec.layout, options.ranks, name=options.ranks_option)
        if options.train and spec.dtype == "float16":
            raise UserError(f"{spec.name}: float16 has too small a range for training; give --dtype bfloat16")
    if "parallel" in options.baselines:
        check_dense("parallel", specs[0])
    if options.profile is not None:
        options.profile.mkdir(parents=True, exist_ok=True)
    rows = max(options.batch_sizes)
    hidden, vocab = (max(int(spec.config[key]) for spec in specs) for key in ("hidden_size", "vocab_size"))
    width = max(spec.torch_dtype.itemsize for spec in specs)
    # the stream of all rows; the logits, or in training what the losses exchange for each token
    of_token = max(width * hidden, STATISTICS_BYTES if options.train else 0)
    longest = max(of_token * rows * options.prompt_len, 0 if options.train else width * vocab * rows)
    if interconnect is not None:
        interconnect.at(options.ranks)  # raises for ranks that are no groups
    if checked := checked_specs(specs, options):
        longest = max(longest, width * longest_checked(checked, options.prompt_len))
    return BenchPlan(specs, options, interconnect, longest)


def chosen_link(link: str, options: BenchOptions, specs: Sequence[ModelSpec]) -> Interconnect:
    """Return the link of an emulated group. Raises UsageError where --outer-link joins no groups, or unlike ones."""
    found = read_interconnect(link)
    if options.outer_link is None:
        return found
    sizes = {group_size(spec.layout.sync_tp_size, options.ranks) for spec in specs} - {1}
    if len(sizes) != 1:
        raise UsageError(
            f"--outer-link joins groups of ranks: --emulate-tp {options.ranks} must be a multiple of the models'"
            " sync_tp_size, and that the same of all"
        )
    return found.joined_by(read_interconnect(options.outer_link, "--outer-link"), sizes.pop())


def chosen_models(choice: ModelChoice, options: BenchOptions) -> list[ModelSpec]:
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
    if choice.sync_tp_size is not None and all(layout.sync_tp_size is None for _, layout in layouts):
        raise UsageError("--sync-tp-size has no effect: none of --layout delays or drops a sync point")
    return [
        shape_spec(config, layout, name=name, tp_size=ranks, dtype=choice.dtype, option=option)
        for name, layout in layouts
    ]


def check_positions(spec: ModelSpec, options: BenchOptions) -> None:
    """Raise UserError if a text has more tokens than the model handles."""
    if options.columns > spec.positions:
        names = "--prompt-len" if options.train else "--prompt-len and --output-len"
        raise UserError(
            f"{spec.name}: {names} make {options.columns} tokens, over the model's {spec.positions} positions"
        )


def check_dense(baseline: str, spec: ModelSpec) -> None:
    """Raise UserError for a baseline of a model that is not dense."""
    if not spec.layout.is_dense:
        raise UserError(f"--baselines {baseline} needs a dense model as the first one, and {spec.name} is not dense")


def check_bench_memory(specs: list[ModelSpec], options: BenchOptions, group: Ranks) -> None:
    """Raise UserError if the ranks of this machine cannot hold what is checked, and then what is timed. All ranks call
    it.

    Otherwise the system would start to kill processes.
    """
    device, processes = group.device, group.local_size
    advice = "choose fewer or smaller models, fewer layers, a smaller --batch-size, or more ranks"
    check_room(needed_bytes(specs, options, device), device, "what is timed", advice, processes=processes)
    advice = "check fewer models at once, or none (--no-check)"
    check_room(whole_bytes(specs, options, device), device, "the check of whole models", advice)


def needed_bytes(specs: Sequence[ModelSpec], options: BenchOptions, device: torch.device) -> int:
    """Return the bytes of one rank's weights, and of the largest batch's KV caches or one model's gradients.

    Weights, and caches of one size, that layouts share count once. One model has gradients at a time.
    """
    weights, caches, on_cpu = {}, set(), device.type == "cpu"
    for spec in specs:
        shape = Shape.from_config(spec.config, tp_size=options.ranks, rank=0, replicate_vocab=options.replicate_vocab)
        width = 4 if options.train else spec.torch_dtype.itemsize
        own = weight_bytes(shape, width, packed=on_cpu and not options.train)
        weights[weights_key(spec, shape, train=options.train)] = own
        numbers = 4 if on_cpu else width  # see KVCache
        caches.add(cache_bytes(shape, spec.layout, max(options.batch_sizes), options.columns, numbers))
    return sum(weights.values()) + (max(weights.values()) if options.train else sum(caches))


def whole_bytes(specs: list[ModelSpec], options: BenchOptions, device: torch.device) -> int:
    """Return the bytes of the models that an emulated rank is checked with: it has no other ranks, and checks them
    whole."""
    weights = {}
    for spec in checked_specs(specs, options) if options.emulate_tp is not None else ():
        shape = Shape.from_config(spec.config, tp_size=1, rank=0)
        own = weight_bytes(shape, spec.torch_dtype.itemsize, packed=device.type == "cpu")
        weights[spec.weights_key(shape)] = own
    return sum(weights.values())


def weights_key(spec: ModelSpec, shape: Shape, *, train: bool) -> tuple[object, ...]:
    """Return a key that is equal for models that share their weights, and in training how gradients are summed."""
    # where a sum is delayed or dropped, each rank knows only a part of the gradient of its bias
    decoder, layout = shape.decoder, spec.layout
    biased = (decoder.o_bias, layout.attention_sync), (decoder.mlp_bias, layout.mlp_sync)
    apart = tuple(mode in APART for has_bias, modes in biased if train and has_bias for mode in modes)
    return *spec.weights_key(shape), apart
