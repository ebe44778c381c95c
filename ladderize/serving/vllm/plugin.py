"""What vLLM calls in each of its processes before it reads a model."""

from typing import Any


def register_plugin() -> None:
    """Tell vLLM and transformers about ladderized Llamas; vLLM then needs no ``--trust-remote-code`` for them.

    vLLM's entry point of the group ``vllm.general_plugins``. It may be called several times, and touches no GPU: the
    model class is named, not imported. In a version of vLLM that was not tested, only ladderized checkpoints are
    refused; every other model loads as before.
    """
    from transformers import AutoConfig

    from ladderize.modeling import MODEL_TYPE
    from ladderize.serving.vllm.environment import (
        ARCHITECTURE,
        STOCK,
        STOCK_ALIASES,
        installed_version,
        version_problem,
    )

    problem = version_problem(installed_version())
    if problem is not None:
        AutoConfig.register(MODEL_TYPE, _refusing(problem), exist_ok=True)
        return

    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from ladderize.convert.remote_code.configuration_ladderized_llama import LadderizedLlamaConfig
    from ladderize.serving.vllm.verify import VerifyLadderizedLlama, VerifyLlama

    AutoConfig.register(MODEL_TYPE, LadderizedLlamaConfig, exist_ok=True)
    MODELS_CONFIG_MAP[ARCHITECTURE] = VerifyLadderizedLlama
    for name in (STOCK, *STOCK_ALIASES):
        MODELS_CONFIG_MAP.setdefault(name, VerifyLlama)
    if ARCHITECTURE not in ModelRegistry.models:
        ModelRegistry.register_model(ARCHITECTURE, f"ladderize.serving.vllm.model:{ARCHITECTURE}")


def _refusing(problem: str) -> type:
    """A config class that raises ValueError(problem) when a checkpoint's config is read: before any worker exists."""
    from ladderize.convert.remote_code.configuration_ladderized_llama import LadderizedLlamaConfig

    class RefusedConfig(LadderizedLlamaConfig):
        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
            raise ValueError(problem)

    return RefusedConfig
