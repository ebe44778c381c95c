"""Script for a child process: load a written checkpoint as a stranger would, without ladderize.

argv: the folder; "run" to run a forward pass too; "quantised" if projections may lack a plain weight. Prints one JSON
document; exits 1 with a sentence on failure.
"""

import ctypes
import json
import signal
import sys
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def load_as_a_stranger() -> None:
    folder, run = Path(sys.argv[1]), sys.argv[2] == "run"
    sys.modules["ladderize"] = None  # type: ignore[assignment]  # an import of it now fails
    sys.path.pop(0)  # this script's own folder

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
    found: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
    if sys.argv[3] == "quantised":
        modules = {name.rpartition(".")[0] for name in found.keys() - wanted.keys()}
        wanted = {name: shape for name, shape in wanted.items() if name.rpartition(".")[0] not in modules}
    for name, shape in wanted.items():
        if found.get(name) != shape:
            sys.exit(f"the written checkpoint has {name} as {found.get(name)}, the model wants {shape}")
    result = {"model_class": type(model).__name__, "tensors": len(found), "forward": None}
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


if __name__ == "__main__":
    if sys.platform == "linux":  # this process must end when its parent is killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    load_as_a_stranger()
