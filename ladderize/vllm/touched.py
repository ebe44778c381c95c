"""List what ladderize touches of vLLM, which has no public interface for layers. Imports no vLLM by itself.

In a vLLM that ladderize does not know, all of it is looked for before a model is loaded.
"""

import importlib
from types import FunctionType
from typing import Any

from ladderize.vllm.environment import REQUIREMENT, is_newer, not_known

# module -> class, or "" for the module itself -> its names
TOUCHED = {
    "vllm": {"": "LLM SamplingParams TokensPrompt ModelRegistry"},
    "vllm.config": {
        "": "VllmConfig CompilationMode",
        "VllmConfig": "model_config parallel_config compilation_config scheduler_config lora_config additional_config",
        "ModelConfig": "hf_config dtype quantization enforce_eager disable_sliding_window runner architecture"
        " get_hidden_size get_vocab_size max_model_len",
        "ParallelConfig": "tensor_parallel_size pipeline_parallel_size decode_context_parallel_size"
        " prefill_context_parallel_size use_ubatching",
        "LoRAConfig": "fully_sharded_loras",
        "SchedulerConfig": "max_num_batched_tokens",
        "CompilationConfig": "mode static_forward_context splitting_ops _attention_ops splitting_ops_contain_attention"
        " pass_config use_inductor_graph_partition",
        "PassConfig": "fuse_attn_quant",
    },
    "vllm.distributed": {"": "get_tp_group", "GroupCoordinator": "all_reduce device device_communicator cpu_group"},
    "vllm.distributed.device_communicators.cpu_communicator": {"_CPUSHMDistributed": "make_group_name"},
    "vllm.distributed.device_communicators.cuda_communicator": {
        "CudaCommunicator": "all_reduce ca_comm symm_mem_comm pynccl_comm"
    },
    "vllm.distributed.device_communicators.custom_all_reduce": {"CustomAllreduce": "all_reduce custom_all_reduce"},
    "vllm.engine.arg_utils": {
        "EngineArgs": "model tensor_parallel_size dtype load_format skip_tokenizer_init seed max_model_len max_num_seqs"
        " max_num_batched_tokens enable_prefix_caching disable_log_stats kv_cache_memory_bytes hf_overrides"
        " gpu_memory_utilization distributed_executor_backend"
    },
    "vllm.envs": {
        "": "VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_BATCH_INVARIANT VLLM_ENABLE_V1_MULTIPROCESSING VLLM_LOGGING_LEVEL"
        " VLLM_LOGGING_STREAM VLLM_WORKER_MULTIPROC_METHOD VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_CPU_OMP_THREADS_BIND"
    },
    "vllm.forward_context": {"": "get_forward_context", "ForwardContext": "no_compile_layers"},
    "vllm.logger": {"": "init_logger"},
    "vllm.model_executor.layers.layernorm": {"RMSNorm": "weight forward"},
    "vllm.model_executor.layers.linear": {
        "UnquantizedLinearMethod": "process_weights_after_loading",
        "RowParallelLinear": "reduce_results skip_bias_add quant_method",
        "MergedColumnParallelLinear": "quant_method",
        "QKVParallelLinear": "quant_method",
    },
    "vllm.model_executor.layers.logits_processor": {"LogitsProcessor": "scale"},
    "vllm.model_executor.models.config": {
        "": "MODELS_CONFIG_MAP",
        "VerifyAndUpdateConfig": "verify_and_update_config",
    },
    "vllm.model_executor.models.llama": {
        "LlamaAttention": "qkv_proj o_proj attn q_size kv_size head_dim scaling bias_o_proj",
        "LlamaDecoderLayer": "self_attn mlp input_layernorm post_attention_layernorm attn_layer_type",
        "LlamaMLP": "gate_up_proj down_proj act_fn",
        "LlamaModel": "embed_input_ids aux_hidden_state_layers _maybe_add_hidden_state",
        "LlamaForCausalLM": "_init_model logits_processor",
    },
    "vllm.model_executor.models.utils": {"": "extract_layer_index"},
    "vllm.platforms": {"": "current_platform"},
    "vllm.platforms.interface": {"Platform": "is_cuda_alike"},
    "vllm.sampling_params": {"RequestOutputKind": "DELTA"},
    "vllm.sequence": {"": "IntermediateTensors"},
    "vllm.v1.engine.llm_engine": {"LLMEngine": "vllm_config engine_core step add_request has_unfinished_requests"},
}


def newer_problem() -> str | None:
    """Return what a vLLM lacks that is newer than those that ladderize knows, in one sentence, or None."""
    missing = missing_names() if is_newer() else []
    if not missing:
        return None
    return f'{not_known()}, which lacks {", ".join(missing)}; pip install "{REQUIREMENT}", or a newer ladderize'


def missing_names() -> list[str]:
    """Return the touched names that the installed vLLM lacks, with their modules: ``vllm.config:LoRAConfig``."""
    missing = []
    for name, owners in TOUCHED.items():
        try:
            module = importlib.import_module(name)
        except ImportError:
            missing.append(name)
            continue
        for owner, names in owners.items():
            holder = getattr(module, owner, None) if owner else module
            if holder is None:
                missing.append(f"{name}:{owner}")
            else:
                missing += [f"{name}:{owner and f'{owner}.'}{each}" for each in names.split() if not _has(holder, each)]
    return missing


def _has(owner: Any, name: str) -> bool:
    """Return True if a module or a class has an attribute, or if a class's instances probably do: it is a field, or a
    constructor has a variable or an attribute of that name."""
    if hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", ()):
        return True
    constructors = [vars(base).get("__init__") for base in getattr(owner, "__mro__", ())]
    codes = [function.__code__ for function in constructors if isinstance(function, FunctionType)]
    return any(name in (*code.co_names, *code.co_varnames) for code in codes)
