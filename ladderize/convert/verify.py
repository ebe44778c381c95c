"""Proves that a written checkpoint loads in plain transformers, in a child process that cannot import ladderize."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ladderize.checkpoint.quantised import Quantisation
from ladderize.errors import UserError
from ladderize.files.records import Record
from ladderize.files.temporaries import temporary_folder

FORWARD_LIMIT = 1_000_000_000  # bytes of weights up to which a forward pass is computed too
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Verification(Record):
    """The result of a verification.

    forward: "finite"; None where no forward pass was run.
    """

    model_class: str
    tensors: int
    forward: str | None


def what_is_verified(quantisation: Quantisation | None) -> str:
    """Return a description of what ``verify`` will do."""
    if quantisation is None or (problem := quantisation.not_run) is None:
        return "loading the output in plain transformers"
    return f"the model's class and tensors; the weights are not run, since {problem}"


def verify(folder: Path, weight_bytes: int, quantisation: Quantisation | None = None) -> Verification:
    """Load ``folder`` as a stranger would; raises UserError if that fails.

    Keys and shapes are compared on the meta device. Up to ``FORWARD_LIMIT`` bytes of weights a forward pass is run, of
    quantised weights only in a format that runs here.
    """
    runnable = quantisation is None or quantisation.not_run is None
    mode = "run" if weight_bytes <= FORWARD_LIMIT and runnable else "meta"
    script = Path(__file__).with_name("verify_child.py")
    with temporary_folder("verify") as modules:
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": str(modules),
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, str(script), str(folder), mode, "floats" if quantisation is None else "quantised"]
        try:
            child = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                f"verification of the output took more than {_TIMEOUT_S:.0f} s and was stopped; nothing was written"
            ) from None
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"the output does not load in plain transformers, so nothing was written: {last}")
    return Verification.from_dict(json.loads(child.stdout.strip().splitlines()[-1]), "the verification's result")
