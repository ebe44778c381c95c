"""From the options of ``ladderize bench`` to checked models: everything that can be wrong is found before any process
starts."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.checkpoint.llama import check_config
from ladderize.errors import UsageError, UserError
from ladderize.runtime.bench.options import (
    BenchOptions,
    GroupOptions,
    ModelChoice,
    check_bench_usage,
    layout_names,
    named_layout,
)
from ladderize.runtime.collectives.links import Link, parse_link
from ladderize.runtime.launch import check_group_size
from ladderize.runtime.shards import read_shape
from ladderize.runtime.spec import ModelSpec, checkpoint_spec, shape_spec


@dataclass(frozen=True)
class BenchPlan:
    """Checked models, how to time them, and the link that stands for the others of an emulated group."""

    specs: list[ModelSpec]
    options: BenchOptions
    link: Link | None = None


def plan_bench(choice: ModelChoice, options: BenchOptions, link: str | None = None) -> BenchPlan:
    """Raises UsageError for what argv alone decides, UserError or LayoutError for the rest. link: as --link has it."""
    check_bench_usage(choice, options, link)
    parsed = parse_link(link, options.ranks) if link is not None else None
    if options.emulate_tp is None:
        check_group_size(options.tp_size, options.device)
    specs = chosen_models(choice, options)
    for spec in specs:
        check_positions(spec, options.prompt_len, options.output_len)
        for batch in options.batch_sizes:
            options.prefill_schedule.check(
                batch,
                options.prompt_len,
                spec.config["hidden_size"],
                rows_name="--batch-size",
                tokens_name="--prompt-len",
            )
        if parsed is not None:
            _check_messages(spec, options, parsed)
    if "parallel" in options.baselines and not specs[0].layout.is_dense:
        raise UserError(f"--baselines parallel needs a dense model as the first one, and {specs[0].name} is not dense")
    make_profile_folder(options.profile)
    return BenchPlan(specs, options, parsed)


def make_profile_folder(folder: Path | None) -> None:
    """Where ``--profile`` writes to, if it was given; raises UserError for what is no folder."""
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--profile {folder} is not a folder")
        folder.mkdir(parents=True, exist_ok=True)


def chosen_models(choice: ModelChoice, options: GroupOptions) -> list[ModelSpec]:
    """The checked models that ``choice`` names, split over the ranks of ``options``."""
    return _checkpoints(choice, options) if choice.random_weights is None else _random(choice, options)


def check_positions(spec: ModelSpec, prompt_len: int, output_len: int) -> None:
    """Raise UserError for more tokens than the model handles."""
    tokens = prompt_len + output_len
    if tokens > spec.positions:
        raise UserError(
            f"{spec.name}: --prompt-len and --output-len make {tokens} tokens, over the model's {spec.positions}"
            " positions"
        )


def _check_messages(spec: ModelSpec, options: BenchOptions, link: Link) -> None:
    """Raise UserError if the link's time for the longest messages is not known."""
    width, batch = spec.torch_dtype.itemsize, max(options.batch_sizes)
    link.seconds(width * spec.config["hidden_size"] * batch * options.prompt_len)
    if not options.replicate_vocab:
        link.seconds(width * spec.config["vocab_size"] * batch)


def _checkpoints(choice: ModelChoice, options: GroupOptions) -> list[ModelSpec]:
    return [
        checkpoint_spec(
            model, tp_size=options.ranks, dtype=choice.dtype, revision=choice.revision, option=options.ranks_option
        )
        for model in choice.models
    ]


def _random(choice: ModelChoice, options: GroupOptions) -> list[ModelSpec]:
    assert choice.random_weights is not None
    config = dict(read_shape(choice.random_weights))
    check_config(config)
    if choice.num_layers is not None:
        config["num_hidden_layers"] = choice.num_layers
        check_config(config)
    for key in ("attention_sync", "mlp_sync", "sync_tp_size"):
        config.pop(key, None)
    config["model_type"] = "llama"
    virtual = choice.sync_tp_size or options.ranks
    layouts = [(name, named_layout(name, config["num_hidden_layers"], virtual)) for name in layout_names(choice.layout)]
    if choice.sync_tp_size is not None and not any(layout.spd_layers for _, layout in layouts):
        raise UsageError("--sync-tp-size has no effect: none of --layout drops a sync point")
    return [
        shape_spec(config, layout, name=name, tp_size=options.ranks, dtype=choice.dtype, option=options.ranks_option)
        for name, layout in layouts
    ]
