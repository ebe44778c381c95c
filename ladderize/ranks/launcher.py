"""What torchrun or ``accelerate launch`` says to the processes that it starts: their places, and Accelerate's settings.

Imports no torch.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ladderize.ranks.environment import LOCAL_RANK, LOCAL_WORLD_SIZE, RANK, WORLD_SIZE, launch_variables

_PARALLEL = ("dp_replicate", "dp_shard", "tp", "cp", "sp")  # what accelerate's parallelism config sizes


@dataclass(frozen=True)
class Place:
    """This process's number among all and among those of its machine, and how many there are of both."""

    rank: int
    size: int
    local_rank: int
    local_size: int


ALONE = Place(rank=0, size=1, local_rank=0, local_size=1)


def launched_place() -> Place:
    """What the launcher says, or ``ALONE`` without one; raises ValueError, with one sentence, if it says nonsense."""
    variables = launch_variables()
    if not variables.is_group:
        return ALONE
    assert variables.rank is not None
    assert variables.world_size is not None
    return Place(
        rank=variables.rank,
        size=variables.world_size,
        local_rank=variables.local_rank or 0,
        local_size=variables.local_world_size or variables.world_size,
    )


def started_rank_variables(place: Place) -> dict[str, str]:
    """The variables that a rank which ladderize itself starts gets, as a launcher would set them."""
    return {
        RANK: str(place.rank),
        WORLD_SIZE: str(place.size),
        LOCAL_RANK: str(place.local_rank),
        LOCAL_WORLD_SIZE: str(place.local_size),
    }


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
