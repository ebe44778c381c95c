"""The model of ``ladderize eval --engine vllm``: lm-eval's own vLLM model, whose engine has our plugin."""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from ladderize.checkpoint.config import most_positions, parameter_count, stated_ropes, stored_dtype
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.reading import Checkpoint
from ladderize.errors import UserError
from ladderize.eval.model import Advance
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import EvaluatedModel
from ladderize.eval.text import KeptPredictions, WindowScore
from ladderize.families.registry import find_family
from ladderize.layout import Layout
from ladderize.modeling import load_tokenizer
from ladderize.ranks.device import cores, default_device
from ladderize.ranks.environment import environment_with
from ladderize.runtime.shards import check_runnable
from ladderize.vllm.environment import check_vllm, configuration_refusal, ends_of

REQUESTS_PER_SEQUENCE = 32  # lm-eval hands over so many: answers have Python objects for every token
WINDOWS_AT_ONCE = 16
ENGINE_VARIABLES = {
    # our process has threads of torch, which a fork would copy in the middle of something
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # A text may be one token longer than the model's positions: its last token is predicted, and never read.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout holds the one document of --json
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def open_vllm(name: str, folder: Path, options: EvalOptions, **more: Any) -> "VLLMModel":
    """Open a checked model, dense or converted, which the user called ``name``, for ``ladderize.evaluate``; ``more``:
    arguments of vLLM's ``LLM``. Raises UserError or LayoutError where vLLM cannot run it."""
    check_vllm()
    from lm_eval.models.vllm_causallms import VLLM  # imports vLLM, which takes seconds

    checkpoint = read_checkpoint(folder)
    config = checkpoint.config
    if find_family(config) is not None:
        check_runnable(config, Layout.from_config(config), options.tp_size)
    positions = most_positions(config)
    if options.max_length is not None and options.max_length > positions:
        raise UserError(f"--max-length {options.max_length} is more than the {positions} positions of {name}")
    if load_tokenizer(folder) is None:
        raise UserError(f"{name} has no tokenizer, which lm-eval's vLLM model needs; use --engine transformers")
    longest: int | None = (options.max_length or positions) + 1  # its last token is scored, and never read
    if options.max_length is None and any(rope["rope_type"] == "longrope" for rope in stated_ropes(config)):
        longest = None  # vLLM's own choice: with more than the first length it rotates short texts as long ones
    arguments = {
        "pretrained": str(folder),
        "tensor_parallel_size": options.tp_size,
        # our "auto" is the stored dtype; vLLM's takes 16 bits for a checkpoint in 32
        "dtype": stored_dtype(checkpoint) if options.dtype == "auto" else options.dtype,
        "max_model_len": longest,
        "max_num_seqs": options.batch_size,
        "batch_size": REQUESTS_PER_SEQUENCE * options.batch_size,
        "seed": options.seed,
        "disable_log_stats": True,
        **ends_of(config),
        **more,
    }
    try:
        variables = ENGINE_VARIABLES | cores_of_ranks(options.tp_size)
        with environment_with({key: value for key, value in variables.items() if key not in os.environ}):
            engine = VLLM(**arguments)
    except Exception as error:
        reason = configuration_refusal(error) or " ".join(str(error).split())[:600].rstrip(".") or type(error).__name__
        advice = "; here that is --max-length" if "max_model_len" in str(error) else ""
        raise UserError(f"vLLM cannot run {name}: {reason}{advice}") from error
    return VLLMModel(name, checkpoint, options, engine)


def cores_of_ranks(ranks: int) -> dict[str, str]:
    """Return the variable with each rank's share of the cores, on CPUs. vLLM itself gives each rank a NUMA node, and
    does not start with more ranks than nodes."""
    free = sorted(cores())
    share = len(free) // ranks
    if ranks == 1 or share == 0 or default_device() != "cpu":
        return {}
    slices = [",".join(map(str, free[rank * share : (rank + 1) * share])) for rank in range(ranks)]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(slices)}


class VLLMModel:
    def __init__(self, name: str, checkpoint: Checkpoint, options: EvalOptions, engine: Any) -> None:
        from vllm.platforms import current_platform

        served, config = engine.model.llm_engine.model_config, checkpoint.config
        stored = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
        layout = Layout.from_config(config)
        self.engine, self.tokenizer = engine, engine.tokenizer
        self.vocab_size, self.positions = served.get_vocab_size(), served.max_model_len - 1
        self.described = EvaluatedModel(
            model=name,
            layout=str(layout),
            **layout.to_config(),
            parameters=parameter_count(config) if find_family(config) is not None else stored,
            dtype=str(served.dtype).removeprefix("torch."),
            device=current_platform.device_type,
            torch_version=torch.__version__,
            transformers_version=transformers.__version__,
            backend="vllm",
            tp_size=options.tp_size,
        )

    def score(
        self,
        windows: list[np.ndarray],
        advance: Advance,
        keep: KeptPredictions | None = None,
        reference: KeptPredictions | None = None,
    ) -> list[WindowScore]:
        scores: list[WindowScore] = []
        for first in range(0, len(windows), WINDOWS_AT_ONCE):
            batch = [window.tolist() for window in windows[first : first + WINDOWS_AT_ONCE]]
            requests = [(None, ids[:1], ids[1:]) for ids in batch]
            totals = self.engine._loglikelihood_tokens(requests, disable_tqdm=True)
            scores += [WindowScore(-float(total)) for total, _ in totals]
            advance(len(batch))
        return scores

    def harness(self) -> Any:
        return self.engine

    def close(self) -> None:
        self.engine.model.llm_engine.engine_core.shutdown()
