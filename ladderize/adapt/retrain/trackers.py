"""Accelerate's trackers: the same metrics as metrics.jsonl, for those who look at them elsewhere."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ladderize.errors import UserError
from ladderize.ranks.group import Ranks

TRACKERS = ("tensorboard", "wandb", "trackio")  # also the names of their packages


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError for a tracker that is not known or not installed: Accelerate would leave it out."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"--log-with {name} is not one of {', '.join(TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--log-with {name} needs the package {name}, which is not installed (pip install {name})")


class Trackers:
    """On the main process those in ``names``; nothing where there are none. folder: for what they write to disk."""

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, Any], ranks: Ranks) -> None:
        self.accelerator: Any = None
        if names:
            from accelerate import Accelerator

            on_cpu = ranks.device.type == "cpu"
            self.accelerator = Accelerator(
                log_with=list(names), project_dir=str(folder), mixed_precision="no", cpu=on_cpu
            )
            plain = {key: value for key, value in config.items() if isinstance(value, int | float | str | bool)}
            kwargs = {"wandb": {"dir": str(folder)}} if "wandb" in names else {}
            folder.mkdir(parents=True, exist_ok=True)
            self.accelerator.init_trackers("ladderize", config=plain, init_kwargs=kwargs)

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self.accelerator is not None:
            self.accelerator.log(dict(values), step=step)

    def close(self) -> None:
        """Not Accelerate's ``end_training``, which would end the process group too."""
        for tracker in self.accelerator.trackers if self.accelerator is not None else ():
            tracker.finish()
