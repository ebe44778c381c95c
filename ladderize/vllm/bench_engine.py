"""One rank's part of ``ladderize bench --engine vllm``: vLLM's engines of all rows side by side, timed in turn.

A change from one to the next costs nothing, and no idle processes disturb the engine that is timed.
"""

import atexit
import hashlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.distributed.parallel_state import get_tp_group
from vllm.sampling_params import RequestOutputKind

from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.ranks.environment import GLOO_INTERFACE
from ladderize.ranks.group import Ranks, host_id
from ladderize.runtime.bench.document import (
    BASELINE_ROW,
    MODEL_ROW,
    PHASES,
    BenchDocument,
    environment,
)
from ladderize.runtime.bench.inference import random_prompts
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.rounds import Timed, Variant
from ladderize.runtime.bench.run import BenchRun
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.shards import cache_bytes
from ladderize.vllm.bench import Served, VllmPlan
from ladderize.vllm.engine import ends_of
from ladderize.vllm.environment import MessageBackend, installed_version
from ladderize.vllm.messages import Messages
from ladderize.vllm.plugin import register_plugin

KV_BLOCK = 128  # tokens: vLLM's blocks on a CPU; those of GPUs are smaller
NETWORK = "/proc/self/ns/net"  # a link, whose target names the network namespace


class VllmRun(BenchRun):
    """A run of requests to vLLM's engines, which live as long as the process: vLLM ends the group of all when one is
    deleted."""

    def __init__(self, ranks: Ranks, plan: VllmPlan, console: Console) -> None:
        """Start the engines of all rows. All ranks call it. Raises UserError for a model that vLLM refuses."""
        super().__init__(ranks, plan.options, console, MessageBackend.from_environment(os.environ).link)
        options = plan.options
        register_plugin()  # also where ladderize runs from a source tree, whose entry points are not installed
        if ranks.device.type == "cpu":
            name_segments(ranks, plan.starter)
        self.engines: list[ServingEngine] = []
        atexit.register(self.engines.clear)
        for number, served in enumerate(plan.served, start=1):
            with console.stage(f"starting vLLM, {number} of {len(plan.served)}: {served.name}"):
                self.engines.append(ServingEngine(served, options, ranks, len(plan.served)))
        self.environment = environment(ranks, settings=("VLLM_", "LADDERIZE_"), vllm=installed_version() or "unknown")
        self.backend = communicator()

    def open_variants(self, batch: int) -> list[Variant]:
        return [
            Variant(
                engine.served.name,
                engine.served.spec,
                TimedEngine(engine, self.options, batch),
                kind=BASELINE_ROW if engine.served.is_baseline else MODEL_ROW,
                architecture=engine.served.architecture,
            )
            for engine in self.engines
        ]

    def document(self, *, complete: bool, **more: Any) -> BenchDocument:
        carriers = {engine.messages.collectives.name for engine in self.engines if engine.messages is not None}
        messages = ", ".join(sorted(carriers)) or None
        return super().document(complete=complete, engine="vllm", messages=messages)


class ServingEngine:
    """vLLM serving one row of the benchmark. All ranks create it, and call the same methods in the same order."""

    def __init__(self, served: Served, options: BenchOptions, ranks: Ranks, sharing: int) -> None:
        """Start the engine. Raises UserError if vLLM takes another class for the model.

        sharing: the number of engines in this process, which share a GPU's memory.
        """
        self.served = served
        length, batch = options.prompt_len + options.output_len, max(options.batch_sizes)
        executor = "external_launcher" if ranks.size > 1 else "uni"
        self.llm = LLM(
            model=str(served.folder),
            tensor_parallel_size=ranks.size,
            dtype=served.spec.dtype,
            load_format="dummy" if served.spec.folder is None else "auto",
            skip_tokenizer_init=True,
            seed=options.seed,
            max_model_len=length,
            max_num_seqs=batch,
            # one step takes the whole batch's prompts
            max_num_batched_tokens=max(batch * options.prompt_len, length),
            enable_prefix_caching=False,
            disable_log_stats=True,
            kv_cache_memory_bytes=kv_cache_bytes(served, options),
            gpu_memory_utilization=0.9 / (sharing + 1),
            **ends_of(served.spec.config),
            distributed_executor_backend=executor,
        )
        self.config = self.llm.llm_engine.vllm_config
        # without the plugin, vLLM takes a class for models of transformers
        resolved = self.config.model_config.architecture
        if resolved != served.architecture:
            raise UserError(f"{served.name}: vLLM runs it as {resolved}, and not as {served.architecture}")
        self.sampling = SamplingParams(
            temperature=0.0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        self.requests = 0
        self.made: dict[str, list[int]] = {}

    @property
    def messages(self) -> Messages | None:
        """The messages of this model; None in vLLM's own class."""
        contexts = self.config.compilation_config.static_forward_context
        return next((found for found in contexts.values() if isinstance(found, Messages)), None)

    def prefill(self, prompts: list[list[int]], output_len: int) -> None:
        """Request ``output_len`` greedy tokens after each prompt, and run until each prompt has its first.

        Raises UserError if vLLM did not prefill all prompts in one step: the time would not be that of a prefill.
        """
        sampling = self.sampling.clone()
        sampling.max_tokens = output_len
        self.made = {}
        for prompt in prompts:
            self.requests += 1
            name = str(self.requests)
            self.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)
            self.made[name] = []
        while not all(self.made.values()):
            self._step()
        if max(map(len, self.made.values()), default=0) > 1:
            raise UserError(
                f"{self.served.name}: vLLM prefilled {len(prompts)} prompts in several steps; raise the KV cache's"
                " memory (VLLM_CPU_KVCACHE_SPACE), or lower --batch-size"
            )

    def decode(self) -> None:
        """Run to the end of every request. Then ``made`` has the tokens of each, by its name."""
        while self.llm.llm_engine.has_unfinished_requests():
            self._step()

    def _step(self) -> None:
        for output in self.llm.llm_engine.step():
            self.made[output.request_id] += output.outputs[0].token_ids


class TimedEngine(Timed):
    """A batch of requests: until each has its first token, and to their ends."""

    parts = PHASES

    def __init__(self, engine: ServingEngine, options: BenchOptions, batch: int) -> None:
        super().__init__(torch.device(options.device))
        # vLLM's own class has no messages in flight
        self.engine, self.model = engine, engine.messages or SimpleNamespace(collectives=Collectives())
        self.decode_steps = options.decode_steps
        vocab = int(engine.served.spec.config["vocab_size"])
        self.prompts = random_prompts(vocab, batch, options.prompt_len, options.seed)

    def run(self, passes: int | None = None) -> Iterator[int]:
        steps = min(self.decode_steps, passes or self.decode_steps)
        self.engine.prefill(self.prompts, steps + 1)
        yield 1
        self.engine.decode()
        yield steps


def kv_cache_bytes(served: Served, options: BenchOptions) -> int:
    """Return the bytes of one rank's KV cache, for every request of the largest batch to its end, and spare blocks."""
    tokens = KV_BLOCK * (-(-(options.prompt_len + options.output_len) // KV_BLOCK) + 1)
    return cache_bytes(
        served.shape(options.tp_size), max(options.batch_sizes) + 2, tokens, served.spec.torch_dtype.itemsize
    )


# ---- groups of ranks ----


def communicator() -> str:
    """Return the name of the backend of vLLM's own all-reduces in this process's group."""
    group = get_tp_group()
    if group.world_size == 1:
        return "none: one rank"
    found = group.device_communicator
    module = getattr(found, "dist_module", None)
    if module is None:
        return type(found).__name__
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
