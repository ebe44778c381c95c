"""List what ladderize sets and overrides in vLLM, which has no public interface for layers. Imports no vLLM itself.

Where one of these names is gone, vLLM would compute something else and say nothing. So in a vLLM that ladderize does
not know they are looked for before a model is loaded. Other names are imported or read, which fails by itself.
"""

import importlib
from types import FunctionType
from typing import Any

from ladderize.console import sentence
from ladderize.vllm.environment import REQUIREMENT, is_newer, not_known

IMPORTING = ("ladderize.vllm.model", "ladderize.vllm.verify")  # the modules that a server imports
# module -> class, or module within it -> its names
TOUCHED = {
    "vllm": {
        "envs": "VLLM_ENABLE_V1_MULTIPROCESSING VLLM_WORKER_MULTIPROC_METHOD VLLM_ALLOW_LONG_MAX_MODEL_LEN"
        " VLLM_CPU_OMP_THREADS_BIND"
    },
    "vllm.config": {"CompilationConfig": "splitting_ops", "PassConfig": "fuse_attn_quant"},
    "vllm.distributed.device_communicators.cpu_communicator": {"_CPUSHMDistributed": "make_group_name"},
    "vllm.distributed.device_communicators.custom_all_reduce": {"CustomAllreduce": "all_reduce custom_all_reduce"},
    "vllm.model_executor.layers.linear": {
        "UnquantizedLinearMethod": "process_weights_after_loading",
        "RowParallelLinear": "reduce_results skip_bias_add quant_method",
        "MergedColumnParallelLinear": "quant_method",
        "QKVParallelLinear": "quant_method",
    },
    "vllm.model_executor.models.config": {"VerifyAndUpdateConfig": "verify_and_update_config"},
    "vllm.model_executor.models.llama": {
        "LlamaAttention": "scaling",
        "LlamaForCausalLM": "_init_model logits_processor",
    },
}


def newer_problem() -> str | None:
    """Return why a vLLM does not go with ladderize that is newer than those that it knows, in one sentence, or None."""
    if not is_newer():
        return None
    try:
        for name in IMPORTING:
            importlib.import_module(name)
        missing = missing_names()
    except ImportError as error:
        missing = [sentence(error)]
    return f'{not_known()}, which lacks {", ".join(missing)}; pip install "{REQUIREMENT}"' if missing else None


def missing_names() -> list[str]:
    """Return the touched names that the installed vLLM lacks, such as ``LlamaForCausalLM._init_model``."""
    return [
        f"{owner}.{name}"
        for module, owners in TOUCHED.items()
        for owner, names in owners.items()
        for name in names.split()
        if not _has(getattr(importlib.import_module(module), owner, None), name)
    ]


def _has(owner: Any, name: str) -> bool:
    """Return True if a module or a class has an attribute, or if a class's instances probably do: it is a field, or a
    constructor has a variable or an attribute of that name."""
    if hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", ()):
        return True
    made = [vars(each).get("__init__") for each in getattr(owner, "__mro__", ())]
    codes = [each.__code__ for each in made if isinstance(each, FunctionType)]
    return any(name in (*code.co_names, *code.co_varnames) for code in codes)
