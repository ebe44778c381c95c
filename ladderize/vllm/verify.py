"""The refusals of settings that a layout cannot have in vLLM, or was not tested with, before workers exist."""

from typing import TYPE_CHECKING, Any

from vllm.config.model import _check_valid_dtype
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from ladderize.checkpoint.config import check_config
from ladderize.errors import UserError
from ladderize.families.base import Decoder
from ladderize.families.registry import decoder_of, family_of, find_family, is_ladderized
from ladderize.layout import Layout
from ladderize.runtime.shards import Shape, cached_heads, check_activation, check_runnable, virtual_ranks
from ladderize.vllm.environment import BACKEND_VARIABLE, MessageBackend, architecture, is_newer, not_known

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, VllmConfig

# The compiled graph is cut at these operators. So pieces keep the order of the program, and no piece that becomes a
# CUDA graph of its own has a start without its wait.
OPERATORS = ("ladderize::start", "ladderize::wait_in_place")
QUANTISED = ("quantization_config", "compression_config")  # keys that vLLM itself reads
KV_CACHE_UPDATES = ("vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update")


class VerifyLadderized(VerifyAndUpdateConfig):
    """vLLM's hook for an architecture's own rules."""

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        """Raise ValueError, which vLLM shows as it is, for settings that this layout cannot have."""
        from vllm.platforms import current_platform

        layout = layout_of(vllm_config)
        # vLLM knows by model_type which families are unstable in float16
        _check_valid_dtype(family_of(_config(vllm_config)).model_type, vllm_config.model_config.dtype)
        backend = MessageBackend.from_environment()
        # messages are in flight while something computes; on CPUs the graph stays whole
        sends = layout.hides or backend.link is not None
        graphs = sends and current_platform.is_cuda_alike() and not vllm_config.model_config.enforce_eager
        problem = problem_with(layout, vllm_config, backend, graphs=graphs)
        if problem is not None:
            raise ValueError(problem)
        if is_newer():
            init_logger("vllm.ladderize").warning_once(f"{not_known()}: it has what they touch, but was not tried")
        if graphs:
            cut_at_messages(vllm_config.compilation_config)


class VerifyStock(VerifyAndUpdateConfig):
    """The check of vLLM's own models, which read a converted checkpoint's weights but do not know its layout."""

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        """Raise ValueError if a layout would be ignored silently."""
        config = vllm_config.model_config.hf_config
        family = find_family({"model_type": config.model_type})
        if family and is_ladderized({"model_type": config.model_type}) and not layout_of(vllm_config).is_dense:
            raise ValueError(
                f"{vllm_config.model_config.model} is a ladderized {family.class_prefix}, and"
                f" {vllm_config.model_config.architecture} would compute a dense one; its architectures must be"
                f" {architecture(family)}"
            )


def layout_of(vllm_config: "VllmConfig") -> Layout:
    """Return the layout that a checkpoint's config names."""
    config = _config(vllm_config)
    try:
        check_config(config)
        check_activation(config)
        layout = Layout.from_config(config)
        layout.check_model(config)
        check_runnable(config, layout, vllm_config.parallel_config.tensor_parallel_size, name="--tensor-parallel-size")
    except UserError as error:
        raise ValueError(f"{vllm_config.model_config.model}: {error}") from None
    return layout


def decoder_of_model(vllm_config: "VllmConfig") -> Decoder:
    """Return the decoder of the model's family: its differences from a Llama."""
    return decoder_of(_config(vllm_config))


def _config(vllm_config: "VllmConfig") -> dict[str, Any]:
    """Return config.json as vLLM has read it, without the keys that vLLM itself reads."""
    model = vllm_config.model_config
    config = {key: value for key, value in model.hf_config.to_dict().items() if key not in QUANTISED}
    # --disable-sliding-window takes the window out of the config, and texts are no longer than it then. Layers with a
    # window may rotate otherwise, so here they keep one
    return config | {"sliding_window": model.max_model_len} if model.disable_sliding_window else config


def cut_at_messages(compilation: "CompilationConfig") -> None:
    """Add start and wait to the operators at which vLLM cuts a graph."""
    if compilation.splitting_ops is None:  # vLLM would choose this default after this hook
        compilation.splitting_ops = [*compilation._attention_ops, *KV_CACHE_UPDATES]
        if compilation.pass_config.fuse_attn_quant is None:
            compilation.pass_config.fuse_attn_quant = False  # it wants attention inside the pieces
    compilation.splitting_ops.extend(name for name in OPERATORS if name not in compilation.splitting_ops)


def problem_with(layout: Layout, vllm_config: "VllmConfig", backend: MessageBackend, *, graphs: bool) -> str | None:
    """Return the reason why this layout cannot be served so, in one sentence with advice, or None. ``graphs``: CUDA
    graphs hold messages in flight."""
    from vllm import envs
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    cuda, model = current_platform.is_cuda_alike(), vllm_config.model_config
    parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
    adapters, ranks = vllm_config.lora_config, parallel.tensor_parallel_size
    several = any(max(virtual_ranks(layout, layer, ranks)) > 1 for layer in range(layout.num_layers))
    shape = Shape.from_config(_config(vllm_config), tp_size=ranks, rank=0)
    # on GPUs the order of the program rests on the cuts in the graph, which only vLLM's own compilation makes
    modes = {CompilationMode.STOCK_TORCH_COMPILE, *([CompilationMode.DYNAMO_TRACE_ONCE] if cuda else [])}
    of_any_layout = {
        "a ladderized model has no pipeline stages; use --pipeline-parallel-size 1 and more --tensor-parallel-size": (
            parallel.pipeline_parallel_size > 1
        ),
        f"{BACKEND_VARIABLE}=emulated stands for ranks that are not there; use --tensor-parallel-size 1": (
            ranks > 1 and backend.link is not None
        ),
        f"{BACKEND_VARIABLE}={backend.name} is for CPUs; unset it: on a GPU vLLM's own all-reduces are used": (
            backend.name in ("shm", "gloo") and cuda
        ),
        "CUDA graphs that break at attention (VLLM_USE_BREAKABLE_CUDAGRAPH, VLLM_BATCH_INVARIANT) would cut a message"
        " in flight from its wait; unset these variables, or use --enforce-eager": (
            graphs and (envs.VLLM_USE_BREAKABLE_CUDAGRAPH or envs.VLLM_BATCH_INVARIANT)
        ),
        "splitting_ops without vLLM's attention operators were not tested with messages in flight; leave them out": (
            graphs and compilation.splitting_ops is not None and not compilation.splitting_ops_contain_attention()
        ),
    }
    of_sync_points = {
        "virtual ranks that share a key-value head read it apart behind a delayed MLP; use --tensor-parallel-size"
        f" {layout.sync_tp_size}": (several and cached_heads(shape, layout) > shape.own_kv_heads),
        "quantised weights and adapters need a process for each virtual rank; use --tensor-parallel-size"
        f" {layout.sync_tp_size}": several and (model.quantization is not None or adapters is not None),
        "--fully-sharded-loras sums inside each projection, beside the sync points of this layout; leave it out": (
            adapters is not None and adapters.fully_sharded_loras
        ),
        "--enable-dbo and --ubatch-size run batches side by side, whose messages would meet; leave them out for this"
        " layout": parallel.use_ubatching,
        "context parallelism and --runner pooling were not tested with this layout; leave them out": (
            max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1
            or model.runner_type == "pooling"
        ),
        "use_inductor_graph_partition, fuse_attn_quant and compilation modes 1 and 2 may change the order of messages;"
        " leave them out for this layout": (
            compilation.use_inductor_graph_partition
            or compilation.pass_config.fuse_attn_quant
            or compilation.mode in modes
        ),
    }
    problems = of_any_layout if layout.is_dense else of_any_layout | of_sync_points
    return next((sentence for sentence, wrong in problems.items() if wrong), None)
