"""What a measurement was made on: enough to make it again."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

from ladderize.ranks.group import Ranks
from ladderize.ranks.threads import cores


def environment(group: Ranks, device: str) -> dict[str, Any]:
    """Machine, versions and settings; all ranks call it."""
    import transformers

    found: dict[str, Any] = {
        "device": device,
        "processor": _processor(),
        "cores": len(cores()),
        "threads_per_rank": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": f"{platform.system()} {platform.release()}",
        "hosts": len(set(group.gather(platform.node()))),
        "settings": {
            key: value
            for key, value in sorted(os.environ.items())
            if key.startswith(("NCCL_", "GLOO_", "OMP_", "TORCH_"))
        },
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(group.device)
        found |= {
            "gpus": group.gather(properties.name),
            "gpu_memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "link": _link(group),
        }
    return found


def _link(group: Ranks) -> str:
    if group.size == 1:
        return "none"
    if torch.cuda.device_count() < group.size:
        return "not known here"
    return "peer to peer" if torch.cuda.can_device_access_peer(0, 1) else "through the host"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
