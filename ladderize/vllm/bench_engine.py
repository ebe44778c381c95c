"""One rank's part of ``ladderize bench --engine vllm``: vLLM's engines of all rows side by side, timed in turn.

A change from one to the next costs nothing, and no idle processes disturb the engine that is timed.
"""

import atexit
import functools
import hashlib
import itertools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.distributed.parallel_state import get_tp_group
from vllm.sampling_params import RequestOutputKind

from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.ranks.environment import GLOO_INTERFACE
from ladderize.ranks.group import Ranks, host_id
from ladderize.runtime.bench.document import BASELINE_ROW, MODEL_ROW, BenchDocument, environment
from ladderize.runtime.bench.inference import random_prompts
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.rounds import Variant, measure
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.shards import Shape, cache_bytes
from ladderize.vllm.engine import ends_of
from ladderize.vllm.environment import MessageBackend, installed_version
from ladderize.vllm.messages import Messages
from ladderize.vllm.plugin import register_plugin
from ladderize.vllm.served import Served, VllmPlan

KV_BLOCK = 128  # tokens: vLLM's blocks on a CPU; those of GPUs are smaller
NETWORK = "/proc/self/ns/net"  # a link, whose target names the network namespace


def measure_engines(ranks: Ranks, plan: VllmPlan, console: Console) -> BenchDocument:
    """Start the engines of all rows and time them. All ranks call it. Raises UserError for a model that vLLM refuses.

    Engines live as long as the process: vLLM ends the group of all when one is deleted.
    """
    options, link = plan.options, MessageBackend.from_environment(os.environ).link
    register_plugin()  # also where ladderize runs from a source tree, whose entry points are not installed
    if ranks.device.type == "cpu":
        name_segments(ranks, plan.starter)
    engines: list[LLM] = []
    atexit.register(engines.clear)
    for number, served in enumerate(plan.served, start=1):
        with console.stage(f"starting vLLM, {number} of {len(plan.served)}: {served.name}"):
            engines.append(start_engine(served, options, ranks, len(plan.served)))
    # vLLM's own class has no messages in flight
    senders = [messages_of(engine) or SimpleNamespace(collectives=Collectives()) for engine in engines]
    carriers = {sender.collectives.name for sender in senders if isinstance(sender, Messages)}
    machine = environment(ranks, settings=("VLLM_", "LADDERIZE_"), vllm=installed_version() or "unknown")
    document = BenchDocument(False, options, communicator(), machine, link, engine="vllm")
    document.messages = ", ".join(sorted(carriers)) or None
    numbers = itertools.count()

    def open_variants(batch: int) -> list[Variant]:
        variants = []
        for served, engine, sender in zip(plan.served, engines, senders, strict=True):
            vocab = int(served.spec.config["vocab_size"])
            prompts = random_prompts(vocab, batch, options.prompt_len, options.seed)
            run = functools.partial(serve_batch, served.name, engine.llm_engine, prompts, numbers)
            kind = BASELINE_ROW if served.is_baseline else MODEL_ROW
            variants.append(Variant(served.name, served.spec, sender, run, kind=kind, architecture=served.architecture))
        return variants

    return measure(document, open_variants, ranks, console)


def start_engine(served: Served, options: BenchOptions, ranks: Ranks, sharing: int) -> LLM:
    """Start vLLM for one row. All ranks call it. Raises UserError if vLLM takes another class for the model.

    sharing: the number of engines in this process, which share a GPU's memory.
    """
    spec, length, batch = served.spec, options.columns, max(options.batch_sizes)
    shape = Shape.from_config(spec.config, tp_size=ranks.size, rank=0)
    cached = KV_BLOCK * (-(-length // KV_BLOCK) + 1)  # tokens of a request to its end, and a spare block
    engine = LLM(
        model=str(served.folder),
        tensor_parallel_size=ranks.size,
        dtype=spec.dtype,
        load_format="dummy" if spec.folder is None else "auto",
        skip_tokenizer_init=True,
        seed=options.seed,
        max_model_len=length,
        max_num_seqs=batch,
        max_num_batched_tokens=max(batch * options.prompt_len, length),  # one step takes the whole batch's prompts
        enable_prefix_caching=False,
        disable_log_stats=True,
        kv_cache_memory_bytes=cache_bytes(shape, spec.layout, batch + 2, cached, spec.torch_dtype.itemsize),
        gpu_memory_utilization=0.9 / (sharing + 1),
        distributed_executor_backend="external_launcher" if ranks.size > 1 else "uni",
        **ends_of(spec.config),
    )
    # without the plugin, vLLM takes a class for models of transformers
    resolved = engine.llm_engine.vllm_config.model_config.architecture
    if resolved != served.architecture:
        raise UserError(f"{served.name}: vLLM runs it as {resolved}, and not as {served.architecture}")
    return engine


def messages_of(engine: LLM) -> Messages | None:
    """Return the messages of an engine's model; None in vLLM's own class."""
    contexts = engine.llm_engine.vllm_config.compilation_config.static_forward_context
    return next((layer for layer in contexts.values() if isinstance(layer, Messages)), None)


def serve_batch(name: str, engine: Any, prompts: list[list[int]], numbers: Iterator[int], steps: int) -> Iterator[None]:
    """Run a batch of requests until each has its first token, and to their ends, as ``Variant.run`` does.

    Tokens that vLLM has handed out are computed, and on a GPU it computes the next ones by then: nothing to wait for.
    Raises UserError if vLLM did not prefill all prompts in one step: the time would not be that of a prefill.

    name: the row's.
    numbers: gives each request a number of its own.
    """
    yield
    sampling = SamplingParams(
        temperature=0.0, max_tokens=steps + 1, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    made: dict[str, int] = {}  # tokens of each request

    def step() -> None:
        for output in engine.step():
            made[output.request_id] += len(output.outputs[0].token_ids)

    for prompt in prompts:
        number = str(next(numbers))
        engine.add_request(number, TokensPrompt(prompt_token_ids=prompt), sampling)
        made[number] = 0
    while not all(made.values()):
        step()
    if max(made.values()) > 1:
        raise UserError(
            f"{name}: vLLM prefilled {len(made)} prompts in several steps; raise the KV cache's memory"
            " (VLLM_CPU_KVCACHE_SPACE), or lower --batch-size"
        )
    yield
    while engine.has_unfinished_requests():
        step()
    yield


# ---- groups of ranks ----


def communicator() -> str:
    """Return the name of the backend of vLLM's own all-reduces in this process's group."""
    group = get_tp_group()
    if group.world_size == 1:
        return "none: one rank"
    module = getattr(group.device_communicator, "dist_module", None)
    if module is None:
        return type(group.device_communicator).__name__
    if isinstance(module, _CPUSHMDistributed):
        return "vLLM's shared memory"
    interface = os.environ.get(GLOO_INTERFACE)
    return "gloo" + (f" over {interface}" if interface else "")


def name_segments(ranks: Ranks, starter: int) -> None:
    """Name vLLM's shared memory after this rank's host and network namespace.

    vLLM gives ranks that others start one name, wherever they are. Then it sums over memory that they do not share, or
    in place of a link. With a name for each host and namespace, vLLM's own check finds this, and takes gloo.

    starter: the process that removes segments with its number in their names (``remove_segments``).
    """
    namespace = os.readlink(NETWORK) if os.path.islink(NETWORK) else ""
    host = hashlib.sha256((host_id() + namespace).encode()).hexdigest()[:12]
    prefix = f"ladderize-{ranks.broadcast(starter)}-{host}"

    def name_of(communicator: Any) -> str:
        return f"{prefix}-{communicator.unique_name.replace(':', '-')}"

    _CPUSHMDistributed.make_group_name = staticmethod(name_of)
