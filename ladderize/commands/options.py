"""Options and checks that several commands share."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar

import typer

from ladderize.console import UsageError, UserError

MAX_SEED = 2**32 - 1
RANGES = "half-open and comma-separated like 16:32, :8, -16:, 4,8:12 or all"
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit, for a model from the hub.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.  [default: cuda if there is one]")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of each process.  [default: cores / processes]")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is a checkpoint.")]
NoVerify = Annotated[
    bool, typer.Option("--no-verify", help="Do not load the output in plain transformers before it appears.")
]
Data = Annotated[
    str, typer.Option("--data", metavar="FILE", help="Text (.txt, .jsonl) or token ids (.npy, .npz, file.npz:array).")
]
SeqLen = Annotated[
    int | None, typer.Option(min=2, help="Tokens of a window.  [default: rows of ids, else 2048 or the model's limit]")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto (as stored), float32, bfloat16 or float16.")]


Options = TypeVar("Options")


def options_from(kind: type[Options], given: Mapping[str, Any], *, prefix: str = "", **more: Any) -> Options:
    """The dataclass of a command's options, field by field from what the command was given (``typer.Context.params``).

    An option that is None was not said, so the dataclass's own default holds: no default is written down twice. prefix:
    of the options' names, such as ``lora_``. more: fields that no option of the same name and type gives; they win.
    """
    names = [field.name for field in fields(kind) if field.name not in more]  # type: ignore[arg-type]
    return kind(**{name: given[prefix + name] for name in names if given.get(prefix + name) is not None}, **more)


def names_of(kind: type, prefix: str = "") -> set[str]:
    """The options that fill this dataclass."""
    return {prefix + field.name for field in fields(kind)}


def said(ctx: typer.Context) -> list[str]:
    """The parameters that the user gave, in the command's order, also where the value is the default."""
    names = [parameter.name for parameter in ctx.command.params if parameter.name is not None]
    return [name for name in names if (source := ctx.get_parameter_source(name)) and source.name != "DEFAULT"]


def check_dtype(dtype: str) -> None:
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise UsageError(f"--dtype {dtype} is not one of auto, float32, bfloat16, float16")


def check_taus(tau1: float | None, tau2: float) -> None:
    for option, value in (("--tau1", tau1), ("--tau2", tau2)):
        if value is not None and not math.isfinite(value):
            raise UsageError(f"{option} must be finite, not {value}")
    if tau1 is not None and tau1 > tau2:
        raise UsageError(f"--tau1 {tau1:g} is above --tau2 {tau2:g}")


def compute_options(device: str | None, dtype: str, threads: int | None) -> str:
    """Check where and how to compute; returns the device."""
    from ladderize.ranks.group import default_device
    from ladderize.ranks.threads import cores

    check_dtype(dtype)
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"--device {device} is not cpu or cuda")
    if device == "cuda" and default_device() != "cuda":
        raise UserError("--device cuda, but torch sees no GPU here")
    if threads is not None and threads > len(cores()):
        raise UserError(f"--threads {threads} is more than the {len(cores())} cores that this process may use")
    return device or default_device()


ReplicateVocab = Annotated[
    bool,
    typer.Option(
        "--replicate-vocab", help="Every rank holds the whole embedding and LM head, which need no all-reduce then."
    ),
]


Compile = Annotated[
    bool, typer.Option("--compile", help="Run what lies between two all-reduces through torch.compile.")
]


Backend = Annotated[
    str,
    typer.Option(help="auto, nccl, symm_mem, gloo, shm, or none (no communication: for timing, results are wrong)."),
]


def _runtime_options(device: str | None, backend: str, dtype: str, threads: int | None, ranks: int) -> str:
    """Check what the runtime's commands share; returns the device."""
    from ladderize.runtime.collectives.choose import check_backend

    device = compute_options(device, dtype, threads)
    check_backend(backend, ranks, device)
    return device
