"""What cannot be served is refused here: in the process that the user started, before workers exist."""

import os
from typing import TYPE_CHECKING

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from ladderize.checkpoint.llama import check_config
from ladderize.errors import UserError
from ladderize.layout import Layout
from ladderize.modeling import MODEL_TYPE
from ladderize.runtime.shards import check_runnable
from ladderize.serving.vllm.backends import MessageBackend
from ladderize.serving.vllm.refusals import problem_with, sends
from ladderize.serving.vllm.versions import ARCHITECTURE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# The graph that is compiled is cut at these, so that pieces keep the order of the program, and no piece that becomes a
# CUDA graph of its own has a start without its wait.
OPERATORS = ("ladderize::start", "ladderize::wait_in_place")
QUANTISED = ("quantization_config", "compression_config")  # whatever vLLM itself makes of these
KV_CACHE_UPDATES = ("vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update")


class VerifyLadderizedLlama(VerifyAndUpdateConfig):
    """vLLM's hook for an architecture's own rules."""

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        """Raises ValueError, which vLLM shows as it is, for what this layout cannot do."""
        config = vllm_config.model_config.hf_config
        if config.model_type != MODEL_TYPE:
            raise ValueError(
                f"{vllm_config.model_config.model}: architectures names {ARCHITECTURE}, but model_type is"
                f" {config.model_type!r}; it must be {MODEL_TYPE!r}"
            )
        layout = layout_of(vllm_config)
        backend = MessageBackend.from_environment(os.environ)
        problem = problem_with(layout, vllm_config, backend)
        if problem is not None:
            raise ValueError(problem)
        if sends(layout, backend):
            _split_graph(vllm_config)


class VerifyLlama(VerifyAndUpdateConfig):
    """The same for vLLM's own Llama, which reads a ladderized checkpoint's weights but does not know its layout."""

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        """Raises ValueError where a layout would be lost without a word."""
        config = vllm_config.model_config.hf_config
        if config.model_type == MODEL_TYPE and not layout_of(vllm_config).is_dense:
            raise ValueError(
                f"{vllm_config.model_config.model} is a ladderized Llama, and {vllm_config.model_config.architecture}"
                f" would compute a dense one; its architectures must be {ARCHITECTURE}"
            )


def layout_of(vllm_config: "VllmConfig") -> Layout:
    """The layout that a checkpoint's config names. Raises ValueError where the sync points do not fit the model."""
    config = vllm_config.model_config.hf_config.to_dict()
    try:
        check_config({key: value for key, value in config.items() if key not in QUANTISED})
        layout = Layout.from_config(config)
        layout.check_model(config)
        check_runnable(config, layout, vllm_config.parallel_config.tensor_parallel_size, name="--tensor-parallel-size")
    except UserError as error:
        raise ValueError(f"{vllm_config.model_config.model}: {error}") from None
    return layout


def _split_graph(vllm_config: "VllmConfig") -> None:
    """Cut the graph that is compiled at start and wait, where vLLM cuts it: on GPUs. On CPUs it stays whole."""
    from vllm.platforms import current_platform

    compilation = vllm_config.compilation_config
    if not current_platform.is_cuda_alike() or vllm_config.model_config.enforce_eager:
        return
    if compilation.splitting_ops is None:  # as vLLM's own default, which it would choose after this hook
        compilation.splitting_ops = [*compilation._attention_ops, *KV_CACHE_UPDATES]
        if compilation.pass_config.fuse_attn_quant is None:
            compilation.pass_config.fuse_attn_quant = False  # it wants attention inside the pieces
    compilation.splitting_ops.extend(name for name in OPERATORS if name not in compilation.splitting_ops)
