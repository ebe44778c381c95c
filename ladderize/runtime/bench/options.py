"""From the arguments of ``ladderize bench`` to checked models and options: everything that can be wrong is found
here."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.console import UsageError, UserError
from ladderize.convert.llama import check_config
from ladderize.layout import Layout, LayoutError, parse_ranges
from ladderize.runtime.collectives.emulated import Link, parse_link
from ladderize.runtime.launch import check_group_size
from ladderize.runtime.spec import ModelSpec, checkpoint_spec, read_shape, shape_spec


@dataclass(frozen=True)
class BenchOptions:
    """See ``ladderize bench --help``. emulate_tp: ranks of a group that is not there, over ``link``."""

    tp_size: int = 1
    batch_sizes: tuple[int, ...] = (1,)
    prompt_len: int = 128
    output_len: int = 32
    backend: str = "auto"
    warmup: int = 2
    repeat: int = 7
    baselines: tuple[str, ...] = ()
    emulate_tp: int | None = None
    link: Link | None = None
    replicate_vocab: bool = False
    compile: bool = False
    check: bool = True
    profile: Path | None = None
    device: str = "cpu"
    threads: int | None = None
    seed: int = 0

    @property
    def ranks(self) -> int:
        """Ranks that the model is split over, real or emulated."""
        return self.emulate_tp or self.tp_size


LAYOUT_NAMES = {"dense": (), "ladder": ("ladder",), "spd": ("spd",), "spd+ladder": ("spd", "ladder")}
BASELINES = ("parallel", "no-comm")


@dataclass(frozen=True)
class BenchArguments:
    """What was said on the command line; None is what was not said."""

    models: tuple[str, ...] = ()
    random_weights: str | None = None
    layout: str | None = None
    num_layers: int | None = None
    sync_tp_size: int | None = None
    tp_size: int = 1
    emulate_tp: int | None = None
    link: str | None = None
    batch_size: str = "1"
    prompt_len: int = 128
    output_len: int = 33
    dtype: str = "auto"
    backend: str = "auto"
    warmup: int = 2
    repeat: int = 7
    baselines: str = ""
    profile: Path | None = None
    check: bool = True
    replicate_vocab: bool = False
    compile: bool = False
    device: str = "cpu"
    threads: int | None = None
    seed: int = 0
    revision: str | None = None


def plan(arguments: BenchArguments) -> tuple[list[ModelSpec], BenchOptions]:
    """Raises UsageError for what argv alone decides, UserError or LayoutError for the rest."""
    _check_usage(arguments)
    batch_sizes = _numbers(arguments.batch_size, "--batch-size")
    baselines = tuple(name.strip() for name in arguments.baselines.split(",") if name.strip())
    if unknown := [name for name in baselines if name not in BASELINES]:
        raise UsageError(f"--baselines {unknown[0]} is not one of {', '.join(BASELINES)}")
    ranks = arguments.emulate_tp or arguments.tp_size
    link = parse_link(arguments.link, ranks) if arguments.link is not None else None
    if arguments.emulate_tp is None:
        check_group_size(arguments.tp_size, arguments.device)
    option = "--tp-size" if arguments.emulate_tp is None else "--emulate-tp"
    specs = (
        _random(arguments, ranks, option)
        if arguments.random_weights is not None
        else _checkpoints(arguments, ranks, option)
    )
    tokens = arguments.prompt_len + arguments.output_len
    for spec in specs:
        if tokens > spec.positions:
            raise UserError(
                f"{spec.name}: --prompt-len and --output-len make {tokens} tokens, over the model's {spec.positions}"
                " positions"
            )
        if "parallel" in baselines and not specs[0].layout.is_dense:
            raise UserError(
                f"--baselines parallel needs a dense model in the first place, and {specs[0].name} is not dense"
            )
        if link is not None:
            width = {"float32": 4}.get(spec.dtype, 2) * spec.config["hidden_size"]
            link.seconds(width * max(batch_sizes) * arguments.prompt_len)
            if not arguments.replicate_vocab:
                link.seconds(spec.config["vocab_size"] * max(batch_sizes) * (width // spec.config["hidden_size"]))
    if arguments.profile is not None:
        if arguments.profile.exists() and not arguments.profile.is_dir():
            raise UserError(f"--profile {arguments.profile} is not a folder")
        arguments.profile.mkdir(parents=True, exist_ok=True)
    options = BenchOptions(
        tp_size=arguments.tp_size,
        batch_sizes=batch_sizes,
        prompt_len=arguments.prompt_len,
        output_len=arguments.output_len,
        backend=arguments.backend,
        warmup=arguments.warmup,
        repeat=arguments.repeat,
        baselines=baselines,
        emulate_tp=arguments.emulate_tp,
        link=link,
        replicate_vocab=arguments.replicate_vocab,
        compile=arguments.compile,
        check=arguments.check,
        profile=arguments.profile,
        device=arguments.device,
        threads=arguments.threads,
        seed=arguments.seed,
    )
    return specs, options


def _check_usage(arguments: BenchArguments) -> None:
    if bool(arguments.models) == (arguments.random_weights is not None):
        raise UsageError("name checkpoints, or a shape with --random-weights, and not both")
    for name in ("layout", "num_layers", "sync_tp_size"):
        if arguments.models and getattr(arguments, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} goes with --random-weights; a checkpoint has its own layout and layers"
            )
    if (arguments.emulate_tp is None) != (arguments.link is None):
        raise UsageError("--emulate-tp and --link go together: how many ranks, and what their all-reduce takes")
    if arguments.emulate_tp is not None and arguments.tp_size != 1:
        raise UsageError("--emulate-tp is one process that stands for a group; leave --tp-size out")
    if arguments.emulate_tp is not None and arguments.backend != "auto":
        raise UsageError("--backend has no effect with --emulate-tp")
    if arguments.replicate_vocab and (arguments.emulate_tp or arguments.tp_size) == 1:
        raise UsageError("--replicate-vocab has no effect with one rank")
    if not arguments.check and arguments.random_weights is not None:
        raise UsageError("--no-check has no effect with --random-weights: there is nothing to check")
    if arguments.backend == "none" and not arguments.check:
        raise UsageError("--no-check has no effect with --backend none, which sums nothing and is never checked")
    if arguments.profile is not None and arguments.backend == "none":
        raise UsageError("--profile shows what communication runs under; with --backend none there is none")
    if arguments.profile is not None and (arguments.emulate_tp or arguments.tp_size) == 1:
        raise UsageError("--profile shows what communication runs under; with one rank there is none")


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise UsageError(f"{option} {text!r} is not a comma-separated list of positive integers")
    return numbers


def _checkpoints(arguments: BenchArguments, ranks: int, option: str) -> list[ModelSpec]:
    if len(set(arguments.models)) < len(arguments.models):
        raise UsageError("a model is named twice; every variant is timed once")
    return [
        checkpoint_spec(model, tp_size=ranks, dtype=arguments.dtype, revision=arguments.revision, option=option)
        for model in arguments.models
    ]


def _random(arguments: BenchArguments, ranks: int, option: str) -> list[ModelSpec]:
    assert arguments.random_weights is not None
    config = dict(read_shape(arguments.random_weights))
    check_config(config)
    if arguments.num_layers is not None:
        config["num_hidden_layers"] = arguments.num_layers
    for key in ("attention_sync", "mlp_sync", "sync_tp_size"):
        config.pop(key, None)
    config["model_type"] = "llama"
    text = ",".join(LAYOUT_NAMES) if arguments.layout is None else arguments.layout
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"--layout {text!r} names no layout, or one twice")
    virtual = arguments.sync_tp_size or ranks
    layouts = [(name, named_layout(name, config["num_hidden_layers"], virtual)) for name in names]
    if arguments.sync_tp_size is not None and not any(layout.spd_layers for _, layout in layouts):
        raise UsageError("--sync-tp-size has no effect: none of --layout drops a sync point")
    return [
        shape_spec(config, layout, name=name, tp_size=ranks, dtype=arguments.dtype, option=option)
        for name, layout in layouts
    ]


def named_layout(text: str, num_layers: int, sync_tp_size: int) -> Layout:
    """``ladder`` is all layers, ``ladder=16:32`` some; likewise dense, spd and spd+ladder."""
    name, equals, ranges = text.partition("=")
    if name not in LAYOUT_NAMES or (equals and name == "dense"):
        raise UsageError(
            f"--layout {text} is not one of {', '.join(LAYOUT_NAMES)}, or such a name with a range of layers,"
            " ladder=16:32"
        )
    try:
        layers = parse_ranges(ranges, num_layers, option="--layout") if equals else list(range(num_layers))
    except LayoutError as error:
        raise UserError(str(error)) from None
    kinds = LAYOUT_NAMES[name]
    return Layout.from_layers(
        num_layers,
        ladder=layers if "ladder" in kinds else (),
        spd=layers if "spd" in kinds else (),
        sync_tp_size=sync_tp_size if "spd" in kinds else None,
    )
