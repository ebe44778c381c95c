"""The start of vLLM's engine: its environment, and the settings that a checkpoint decides. Imports no vLLM."""

import os
from collections.abc import Mapping
from typing import Any

from ladderize.checkpoint.config import is_tied
from ladderize.families.registry import find_family
from ladderize.ranks.device import cores, default_device
from ladderize.vllm.environment import BOUND_CORES, configuration_refusal

ENGINE_VARIABLES = {
    # our process has threads of torch, which a fork would copy in the middle of something
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # A text may be one token longer than the model's positions: its last token is predicted, and never read.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout holds the one document of --json
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def engine_variables(ranks: int) -> dict[str, str]:
    """Return the environment variables of an engine that the user has not set."""
    return {key: value for key, value in {**ENGINE_VARIABLES, **cores_of_ranks(ranks)}.items() if key not in os.environ}


def cores_of_ranks(ranks: int) -> dict[str, str]:
    """Return the variable with each rank's share of the cores, on CPUs.

    vLLM itself gives each rank a NUMA node, and does not start with more ranks than nodes.
    """
    free = sorted(cores())
    share = len(free) // ranks
    if ranks == 1 or share == 0 or default_device() != "cpu":
        return {}
    return {BOUND_CORES: "|".join(",".join(map(str, free[r * share : (r + 1) * share])) for r in range(ranks))}


def ends_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument of vLLM's ``LLM`` that ties embedding and LM head as the weights do: vLLM relies on
    config.json."""
    return {"hf_overrides": {"tie_word_embeddings": is_tied(config)}} if find_family(config) is not None else {}


def reason_of(error: BaseException) -> str:
    """Return the reason of vLLM's failure in one sentence."""
    return configuration_refusal(error) or " ".join(str(error).split())[:600].rstrip(".") or type(error).__name__
