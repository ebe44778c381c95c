"""The devices to compute on. Torch is imported inside of functions."""

from ladderize.choices import DeviceName
from ladderize.errors import UserError


def default_device() -> DeviceName:
    """Return ``cuda`` where torch sees a GPU, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Raise UserError for a word that names no device, or a device that is not here."""
    import torch

    try:
        asked = torch.device(device)
    except RuntimeError:
        asked = torch.device("meta")
    if asked.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"--device {device[:80]!r} is nothing to compute on; give cpu, cuda or cuda:0")
    gpus = torch.cuda.device_count() if default_device() == "cuda" else 0
    if asked.type == "cuda" and (asked.index or 0) >= gpus:
        raise UserError(f"--device {device}, but torch sees {gpus or 'no'} GPUs here")


def avoid_cudnn_attention() -> None:
    """Take cuDNN out of the kernels that PyTorch's attention chooses from; without effect on a CPU.

    Its gradients may be NaN with a mask (pytorch/pytorch#196678), and it plans anew for each length of a text, which
    takes hundreds of milliseconds.
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
