"""What vLLM can be asked that a layout cannot do, or was not tested with."""

from typing import TYPE_CHECKING

from ladderize.layout import OVERLAPPED, Layout
from ladderize.serving.vllm.backends import BACKEND_VARIABLE, MessageBackend

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def sends(layout: Layout, backend: MessageBackend) -> bool:
    """Whether messages are in flight while something computes."""
    return OVERLAPPED in layout.attention_sync + layout.mlp_sync or backend.link is not None


def problem_with(layout: Layout, vllm_config: "VllmConfig", backend: MessageBackend) -> str | None:
    """Why this layout cannot be served so, in one sentence that says what to do, or None."""
    parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
    offload = vllm_config.offload_config
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
            not layout.is_dense
            and max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
            "context parallelism was not tested with overlapped or dropped sync points; leave out"
            " --decode-context-parallel-size and --prefill-context-parallel-size",
        ),
        (
            not layout.is_dense and (offload.offload_backend == "prefetch" or offload.prefetch.offload_group_size > 0),
            "prefetch offloading of weights was not tested with overlapped or dropped sync points; leave it out",
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
    from vllm import envs
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    cpu, cuda = current_platform.is_cpu(), current_platform.is_cuda_alike()
    mode = vllm_config.compilation_config.mode
    # on GPUs the order of the program rests on the cuts in the graph, which only vLLM's own compilation makes
    untested = {CompilationMode.STOCK_TORCH_COMPILE} | (set() if cpu else {CompilationMode.DYNAMO_TRACE_ONCE})
    graphs = cuda and sends(layout, backend) and not vllm_config.model_config.enforce_eager
    compilation = vllm_config.compilation_config
    return (
        (
            graphs and (envs.VLLM_USE_BREAKABLE_CUDAGRAPH or envs.VLLM_BATCH_INVARIANT),
            "CUDA graphs that break at attention (VLLM_USE_BREAKABLE_CUDAGRAPH, VLLM_BATCH_INVARIANT) would cut a"
            " message in flight from its wait; unset these variables, or use --enforce-eager",
        ),
        (
            graphs and compilation.splitting_ops is not None and not compilation.splitting_ops_contain_attention(),
            "splitting_ops without vLLM's attention operators were not tested with messages in flight; leave them out",
        ),
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
