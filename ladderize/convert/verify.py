"""Proves that a written checkpoint loads in plain transformers, in a child process that cannot import ladderize."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ladderize.checkpoint.quantised import Quantisation
from ladderize.errors import UserError
from ladderize.files.output import temporary_folder

FORWARD_LIMIT = 1_000_000_000  # bytes of weights up to which a forward pass is computed too


def verify(folder: Path, weight_bytes: int, quantisation: Quantisation | None = None) -> dict[str, Any]:
    """Load ``folder`` as a stranger would, and return what was seen; raises UserError if that fails. Keys and shapes
    are compared on the meta device. Up to ``FORWARD_LIMIT`` bytes a forward pass is run, of quantised weights in a
    format that runs here."""
    runs = weight_bytes <= FORWARD_LIMIT and (quantisation is None or quantisation.not_run is None)
    script = f"{inspect.getsource(load_as_a_stranger)}\nload_as_a_stranger()"
    options = ["run" if runs else "meta", "floats" if quantisation is None else "quantised"]
    with temporary_folder("verify") as modules:
        offline = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(modules), "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-c", script, str(folder), *options]
        child = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, check=False)
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"the output does not load in plain transformers, so nothing was written: {last}")
    result: dict[str, Any] = json.loads(child.stdout.strip().splitlines()[-1])
    return result


def load_as_a_stranger() -> None:
    """Load a checkpoint and print its class, and what was compared; exit with a sentence where that fails. The child
    runs the source of this. Its argv: the folder; "run": a forward pass too; "quantised": projections may lack a
    weight."""
    import json
    import sys
    from pathlib import Path
    from typing import Any

    folder, run = Path(sys.argv[1]), sys.argv[2] == "run"
    sys.modules["ladderize"] = None  # type: ignore[assignment]  # an import of it now fails
    sys.path.pop(0)  # the current folder

    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    wanted = {name: list(value.shape) for name, value in model.state_dict().items()}
    stored: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            stored |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
    if sys.argv[3] == "quantised":
        modules = {name.rpartition(".")[0] for name in stored.keys() - wanted.keys()}
        wanted = {name: shape for name, shape in wanted.items() if name.rpartition(".")[0] not in modules}
    for name, shape in wanted.items():
        if stored.get(name) != shape:
            sys.exit(f"the written checkpoint has {name} as {stored.get(name)}, the model wants {shape}")
    result = {"model_class": type(model).__name__, "tensors": len(stored), "forward": None}
    if run:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, dtype="auto", output_loading_info=True
        )
        model, info = loaded
        if info["missing_keys"]:
            sys.exit(f"the written checkpoint lacks {sorted(info['missing_keys'])}")
        with torch.inference_mode():
            logits = model(torch.arange(4)[None] % config.vocab_size).logits
        if not torch.isfinite(logits).all():
            sys.exit("a forward pass of the written checkpoint gives NaN or infinity; check the source's weights")
        result["forward"] = "finite"
    print(json.dumps(result))
