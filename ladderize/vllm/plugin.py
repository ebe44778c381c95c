"""The entry point that vLLM calls in each of its processes before it reads a model."""

from typing import Any


def register_plugin() -> None:
    """Register converted models with vLLM and transformers. vLLM then needs no ``--trust-remote-code`` for them. It may
    be called several times, and touches no GPU: the model class is named, not imported. In a version of vLLM that
    cannot run them, only ladderized checkpoints are refused."""
    from transformers import AutoConfig

    from ladderize.families.supported import SUPPORTED
    from ladderize.modeling import ladderized_class
    from ladderize.vllm.environment import architecture, stock, version_problem

    problem = version_problem()
    for family in SUPPORTED:
        config = ladderized_class(family, "Config")
        config_class = config if problem is None else _refusing(config, problem)
        AutoConfig.register(family.ladderized_type, config_class, exist_ok=True)
    if problem is not None:
        return

    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from ladderize.vllm.verify import VerifyLadderized, VerifyStock

    for family in SUPPORTED:
        MODELS_CONFIG_MAP.setdefault(stock(family), VerifyStock)
        MODELS_CONFIG_MAP[architecture(family)] = VerifyLadderized
        if architecture(family) not in ModelRegistry.models:
            ModelRegistry.register_model(architecture(family), "ladderize.vllm.model:LadderizedForCausalLM")


def _refusing(base: Any, problem: str) -> type:
    """Return a config class that raises ValueError(problem) when a checkpoint's config is read, before any worker
    exists."""

    class RefusedConfig(base):  # type: ignore[misc]
        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
            raise ValueError(problem)

    return RefusedConfig
