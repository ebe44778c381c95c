"""What a launcher asks of a training: sharding and the dtype to compute in. One policy for all methods of ``adapt``."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ladderize.errors import UserError

WIDE = ("float32", "float64")
_PARALLEL = ("dp_replicate", "dp_shard", "tp", "cp", "sp")  # what accelerate's parallelism config sizes


@dataclass(frozen=True)
class AccelerateSettings:
    """What ``accelerate launch`` was told, as its variables hold it; empty or False where it was not.

    reshard: of --fsdp_reshard_after_forward; None where nothing was said. parallelism: the sizes of
    --use_parallelism_config, such as ``tp`` and ``dp_shard``; empty without it.
    """

    mixed_precision: str
    deepspeed: bool
    accumulation_steps: str
    fsdp: bool
    fsdp_version: str
    offload: bool
    activation_checkpointing: bool
    reshard: bool | None
    parallelism: Mapping[str, str]


def accelerate_settings() -> AccelerateSettings:
    def variable(name: str) -> str:
        return os.environ.get(name, "").lower()

    reshard = variable("FSDP_RESHARD_AFTER_FORWARD")
    return AccelerateSettings(
        mixed_precision=variable("ACCELERATE_MIXED_PRECISION"),
        deepspeed=variable("ACCELERATE_USE_DEEPSPEED") == "true",
        accumulation_steps=variable("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
        fsdp=variable("ACCELERATE_USE_FSDP") == "true",
        fsdp_version=variable("FSDP_VERSION"),
        offload=variable("FSDP_OFFLOAD_PARAMS") == "true",
        activation_checkpointing=variable("FSDP_ACTIVATION_CHECKPOINTING") == "true",
        reshard=False if reshard == "false" else None,
        parallelism={name: variable(f"PARALLELISM_CONFIG_{name}_SIZE".upper()) or "1" for name in _PARALLEL}
        if variable("ACCELERATE_USE_PARALLELISM_CONFIG") == "true"
        else {},
    )


def compute_dtype(asked: str, stored: str) -> torch.dtype:
    """The dtype to train in, for weights that are stored as ``stored``.

    asked: a dtype's name, or auto, which takes what accelerate launch was told, else float32 where weights are stored
    so, else bfloat16. Raises UserError for a launcher's precision that is too narrow.
    """
    dtype: torch.dtype = getattr(torch, asked if asked != "auto" else _launched_dtype(stored))
    return dtype


def _launched_dtype(stored: str) -> str:
    launched = accelerate_settings().mixed_precision  # the launcher sets "no" where it was not asked
    if launched == "bf16":
        return "bfloat16"
    if launched not in ("", "no"):
        raise UserError(
            f"accelerate launch asks for mixed_precision {launched}, whose range is too small for training; take"
            " bf16 or no"
        )
    return "float32" if stored in WIDE else "bfloat16"


def check_launch_of_blocks() -> None:
    """Raise UserError for what a launcher may ask for that has no effect where every process works on whole blocks."""
    _refuse_common()
    if accelerate_settings().fsdp:
        raise UserError(
            "accelerate launch asks for FSDP, which has no effect on the methods blocks and align: every process works"
            " on whole blocks; leave it out"
        )


def check_launch_of_measuring(command: str) -> None:
    """Raise UserError for what ``accelerate launch`` may ask for that has no effect where nothing is trained."""
    settings = accelerate_settings()
    precision = settings.mixed_precision
    for asked, what, instead in (
        (settings.deepspeed, "DeepSpeed", ""),
        (settings.fsdp, "FSDP", ""),
        (precision not in ("", "no"), f"mixed_precision {precision}", ", and say --dtype instead"),
    ):
        if asked:
            raise UserError(
                f"accelerate launch asks for {what}, which has no effect on {command}; leave it out{instead}"
            )


def wants_fsdp(ranks: int, tp_size: int = 1) -> bool:
    """Whether the launcher asked for FSDP2; raises UserError for what it may ask for that is not here.

    ranks: all processes, of which ``tp_size`` share each model.
    """
    _refuse_common()
    settings = accelerate_settings()
    if settings.parallelism:
        _check_parallelism(settings.parallelism, ranks, tp_size)
    if not settings.fsdp:
        if int(settings.parallelism.get("dp_shard", "1")) > 1:
            raise UserError(
                "accelerate's --parallelism_config_dp_shard_size has no effect without FSDP; add --use_fsdp"
                " --fsdp_version 2, or leave it out"
            )
        return False
    if ranks == tp_size:
        raise UserError(
            "accelerate launch asks for FSDP with one process, which shards nothing; start several, or leave it out"
            if tp_size == 1
            else f"accelerate launch asks for FSDP, but --tp-size {tp_size} takes all processes for one copy of the"
            f" model, so there is nothing left to shard; start a multiple of {tp_size}, or leave FSDP out"
        )
    if settings.fsdp_version != "2":
        raise UserError("accelerate launch asks for FSDP 1; adapt supports FSDP 2: add --fsdp_version 2")
    for told, option in (
        (settings.offload, "--fsdp_offload_params"),
        (settings.activation_checkpointing, "--fsdp_activation_checkpointing"),
    ):
        if told:
            raise UserError(
                f"accelerate's {option} has no effect on adapt; leave it out (adapt has --gradient-checkpointing)"
            )
    return True


def _refuse_common() -> None:
    settings = accelerate_settings()
    if settings.deepspeed:
        raise UserError(
            "accelerate launch asks for DeepSpeed, which adapt does not support; FSDP2 shards the same: --use_fsdp"
            " --fsdp_version 2"
        )
    if settings.accumulation_steps not in ("", "1"):
        raise UserError(
            "accelerate's --gradient_accumulation_steps has no effect on adapt; it follows from --batch-size and"
            " --micro-batch-size"
        )


def _check_parallelism(sizes: Mapping[str, str], ranks: int, tp_size: int) -> None:
    """Raise UserError unless accelerate's parallelism config says what --tp-size and the processes say."""
    option = "--parallelism_config_{}_size".format
    for name, text in sizes.items():
        if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
            raise UserError(f"accelerate's {option(name)} is {text!r}, but must be a whole number of at least 1")
    size = {name: int(text) for name, text in sizes.items()}
    for name in ("cp", "sp"):
        if size[name] > 1:
            raise UserError(f"accelerate's {option(name)} {size[name]} has no effect on adapt; leave it out")
    if size["tp"] != tp_size:
        raise UserError(
            f"accelerate launch asks for {option('tp')} {size['tp']}, and adapt for --tp-size {tp_size}; make them"
            " equal"
        )
    if size["dp_replicate"] > 1:
        raise UserError(
            f"accelerate's {option('dp_replicate')} {size['dp_replicate']} is not supported: adapt shards over all"
            f" processes that read different data; leave it out, and raise {option('dp_shard')}"
        )
    if size["dp_shard"] * tp_size != ranks:
        raise UserError(
            f"{option('dp_shard')} {size['dp_shard']} times --tp-size {tp_size} is {size['dp_shard'] * tp_size}, but"
            f" accelerate launch started {ranks} processes; make them equal"
        )
