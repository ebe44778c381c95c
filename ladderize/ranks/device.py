"""What there is to compute on; torch is imported when it is asked."""

import os

from ladderize.choices import DeviceName
from ladderize.errors import UserError


def default_device() -> DeviceName:
    """A GPU where torch sees one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Raise UserError for a GPU where there is none."""
    if device.partition(":")[0] == "cuda" and default_device() != "cuda":
        raise UserError(f"--device {device}, but torch sees no GPU here")


def visible_gpus() -> list[str]:
    """The GPUs that torch sees, each as ``CUDA_VISIBLE_DEVICES`` names it."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return (
        [name.strip() for name in named[:count]]
        if len(named) >= count > 0 and named[0]
        else list(map(str, range(count)))
    )
