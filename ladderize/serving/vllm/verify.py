"""What cannot be served is refused here: in the process that the user started, before workers exist."""

import os
from typing import TYPE_CHECKING

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from ladderize.checkpoint.llama import check_config
from ladderize.errors import UserError
from ladderize.layout import OVERLAPPED, Layout
from ladderize.modeling import MODEL_TYPE
from ladderize.runtime.shards import check_runnable
from ladderize.serving.vllm.backends import BACKEND_VARIABLE, MessageBackend
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
        layout = layout_of(vllm_config)
        backend = MessageBackend.from_environment(os.environ)
        problem = problem_with(layout, vllm_config, backend)
        if problem is not None:
            raise ValueError(problem)
        if OVERLAPPED in layout.attention_sync + layout.mlp_sync or backend.link is not None:
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


def problem_with(layout: Layout, vllm_config: "VllmConfig", backend: MessageBackend) -> str | None:
    """Why this layout cannot be served so, in one sentence that says what to do, or None."""
    parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
    tp_size, ranks = parallel.tensor_parallel_size, layout.sync_tp_size
    several = ranks is not None and ranks > tp_size
    checks: tuple[tuple[bool, str], ...] = (
        (
            parallel.pipeline_parallel_size > layout.num_layers,
            f"--pipeline-parallel-size {parallel.pipeline_parallel_size} is more than the {layout.num_layers} layers",
        ),
        (
            several and vllm_config.model_config.quantization is not None,
            f"quantised weights cannot be split into the {ranks} virtual ranks of this layout's dropped sync points;"
            f" use --tensor-parallel-size {ranks}, where each process is one, or weights that are not quantised",
        ),
        (
            not layout.is_dense and vllm_config.model_config.runner_type == "pooling",
            "--runner pooling was not tested with overlapped or dropped sync points; leave it out",
        ),
        (
            not layout.is_dense and vllm_config.lora_config is not None and vllm_config.lora_config.fully_sharded_loras,
            "--fully-sharded-loras sums inside each projection, beside the sync points of this layout; leave it out",
        ),
        (
            not layout.is_dense and parallel.use_ubatching,
            "--enable-dbo and --ubatch-size run batches side by side, whose messages would meet; leave them out for"
            " this layout",
        ),
        (
            not layout.is_dense and parallel.decode_context_parallel_size > 1,
            "--decode-context-parallel-size was not tested with overlapped or dropped sync points; leave it out",
        ),
        (
            not layout.is_dense and bool(compilation.use_inductor_graph_partition),
            "use_inductor_graph_partition was not tested with overlapped or dropped sync points; leave it out",
        ),
        (
            not layout.is_dense and bool(compilation.pass_config.fuse_attn_quant),
            "fuse_attn_quant was not tested with overlapped or dropped sync points; leave it out",
        ),
        (
            backend.name != "auto" and tp_size == 1 and backend.link is None,
            f"{BACKEND_VARIABLE}={backend.name} has no effect with one rank; unset it, or raise --tensor-parallel-size",
        ),
        (
            tp_size > 1 and backend.link is not None,
            f"{BACKEND_VARIABLE}=emulated stands for ranks that are not there; use --tensor-parallel-size 1",
        ),
        *_platform_checks(layout, vllm_config, backend),
    )
    return next((sentence for wrong, sentence in checks if wrong), None)


def _platform_checks(
    layout: Layout, vllm_config: "VllmConfig", backend: MessageBackend
) -> tuple[tuple[bool, str], ...]:
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    cpu, cuda = current_platform.is_cpu(), current_platform.is_cuda_alike()
    mode = vllm_config.compilation_config.mode
    # on GPUs the order of the program rests on the cuts in the graph, which only vLLM's own compilation makes
    untested = {CompilationMode.STOCK_TORCH_COMPILE} | (set() if cpu else {CompilationMode.DYNAMO_TRACE_ONCE})
    return (
        (not (cpu or cuda), f"ladderize's layers run in vLLM on GPUs and CPUs, not on {current_platform.device_type}"),
        (
            not layout.is_dense and mode in untested,
            f"compilation mode {mode} was not tested with overlapped or dropped sync points; leave it out",
        ),
        (
            backend.name in ("shm", "gloo") and not cpu,
            f"{BACKEND_VARIABLE}={backend.name} is for CPUs; unset it: on a GPU vLLM's own all-reduces are used",
        ),
    )


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
