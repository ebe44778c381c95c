"""Options and checks that several commands share."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar

import typer

from ladderize.choices import BackendName, DeviceName, Dtype
from ladderize.errors import UserError

MAX_SEED = 2**32 - 1
LOADING = "loading torch and transformers"  # the first line of a command that computes
RANGES = "half-open, comma-separated: 16:32, :8, -16:, 4,8:12 or all"

# panels of the help, in the order in which they are shown
MODELS, LAYOUT, DATA, METHOD = "Model", "Layout", "Data", "Method"
OPTIMISATION, MEASUREMENT, VALIDATION = "Optimisation", "Measurement", "Validation and checkpoints"
MEMORY, OUTPUT, ADVANCED = "Memory and devices", "Output", "Advanced"

AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document on stdout and nothing else.", rich_help_panel=OUTPUT),
]
Revision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit of a model from the hub.", rich_help_panel=MODELS),
]
Device = Annotated[
    DeviceName | None,
    typer.Option(help="Where to compute.", show_default="cuda if there is one", rich_help_panel=MEMORY),
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="CPU threads of each process.",
        show_default="cores / processes",
        rich_help_panel=MEMORY,
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace OUT if it is a checkpoint.", rich_help_panel=OUTPUT)
]
NoVerify = Annotated[
    bool,
    typer.Option("--no-verify", help="Skip loading the output in plain transformers.", rich_help_panel=OUTPUT),
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="FILE",
        help="Text (.txt, .jsonl) or token ids (.npy, .npz, file.npz:array).",
        rich_help_panel=DATA,
    ),
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=2,
        help="Tokens per window.",
        show_default="the rows of ids, else 2048 or the model's limit",
        rich_help_panel=DATA,
    ),
]
Tau1 = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Sensitivity up to which a block is insensitive.",
        show_default="0.05; 0.02 from 30B parameters",
        rich_help_panel=MEASUREMENT,
    ),
]
Tau2 = Annotated[
    float,
    typer.Option(
        metavar="X", help="Sensitivity above which a block is extremely sensitive.", rich_help_panel=MEASUREMENT
    ),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        "--dtype", metavar="DTYPE", help="float32, bfloat16, float16, or auto: as stored.", rich_help_panel=MEMORY
    ),
]


Options = TypeVar("Options")


def options_from(kind: type[Options], given: Mapping[str, Any], *, prefix: str = "", **more: Any) -> Options:
    """The dataclass of a command's options, field by field from what the command was given (``typer.Context.params``).

    An option that is None was not given, so the dataclass's own default holds: no default is written twice. prefix:
    of the options' names, such as ``lora_``. more: fields that no option of the same name and type gives; they win.
    """
    names = [field.name for field in fields(kind) if field.name not in more]  # type: ignore[arg-type]
    return kind(**{name: given[prefix + name] for name in names if given.get(prefix + name) is not None}, **more)


def names_of(kind: type, prefix: str = "") -> set[str]:
    """The options that fill this dataclass."""
    return {prefix + field.name for field in fields(kind)}


def given_options(ctx: typer.Context) -> list[str]:
    """The parameters that the user gave, in the command's order, also where the value is the default."""
    names = [parameter.name for parameter in ctx.command.params if parameter.name is not None]
    return [name for name in names if (source := ctx.get_parameter_source(name)) and source.name != "DEFAULT"]


def compute_options(device: DeviceName | None, threads: int | None) -> DeviceName:
    """Check where and how to compute; returns the device."""
    from ladderize.ranks.device import check_device, default_device
    from ladderize.ranks.threads import cores

    if device is not None:
        check_device(device)
    if threads is not None and threads > len(cores()):
        raise UserError(f"--threads {threads} is more than the {len(cores())} cores that this process may use")
    return device or default_device()


ReplicateVocab = Annotated[
    bool,
    typer.Option(
        "--replicate-vocab",
        help="Keep the whole embedding and LM head on every rank. This saves their all-reduces.",
        rich_help_panel=ADVANCED,
    ),
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile", help="Compile the parts between two all-reduces with torch.compile.", rich_help_panel=ADVANCED
    ),
]
Backend = Annotated[
    BackendName,
    typer.Option(
        help="How ranks communicate. none: no communication, for timing only; results are wrong.",
        rich_help_panel=MEMORY,
    ),
]
TpSize = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        help="Tensor-parallel ranks (processes). Under torchrun: as many as it started.",
        rich_help_panel=MEMORY,
    ),
]


def _runtime_options(device: DeviceName | None, backend: BackendName, threads: int | None, ranks: int) -> DeviceName:
    """Check what the runtime's commands share; returns the device."""
    from ladderize.runtime.collectives.choose import check_backend

    device = compute_options(device, threads)
    check_backend(backend, ranks, device)
    return device
