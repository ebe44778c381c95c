"""What there is to compute on; torch is imported when it is asked."""

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
