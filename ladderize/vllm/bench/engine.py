"""vLLM's engine of one row of the benchmark, in a rank's process."""

import contextlib
import os
import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind

from ladderize.errors import UserError
from ladderize.ranks.environment import GLOO_INTERFACE
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import PHASES
from ladderize.runtime.bench.inference import random_prompts
from ladderize.runtime.bench.options import UNFUSED, BenchOptions
from ladderize.runtime.bench.rounds import Timed
from ladderize.runtime.shards import cache_bytes
from ladderize.vllm.bench.groups import ReplicaGroup
from ladderize.vllm.bench.served import Served
from ladderize.vllm.engine import ends_of
from ladderize.vllm.messages import Messages

KV_BLOCK = 128  # tokens: vLLM's blocks on a CPU; those of GPUs are smaller


class ServingEngine:
    """vLLM serving one row of the benchmark. All ranks create it, and call the same methods in the same order.

    replica: the group of this rank, where replicas of the model serve the row.
    """

    def __init__(self, served: Served, options: BenchOptions, ranks: Ranks, sharing: int) -> None:
        """Start the engine. Raises UserError if vLLM takes another class for the model.

        sharing: the number of engines in this process, which share a GPU's memory.
        """
        self.served = served
        self.replica = ReplicaGroup(ranks, served.replicas) if served.replicas > 1 else None
        length, batch = options.prompt_len + options.output_len, served.part(max(options.batch_sizes))
        placement: dict[str, Any] = {"distributed_executor_backend": "uni"}
        if ranks.size > 1:
            placement = {"distributed_executor_backend": "external_launcher"}
            if ranks.device.type == "cpu":
                placement["worker_cls"] = "ladderize.vllm.bench.worker.IdentifiedWorker"
        with self.group():
            self.llm = LLM(
                model=str(served.folder),
                tensor_parallel_size=ranks.size // served.replicas,
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
                **placement,
                **({"compilation_config": {"pass_config": {NORM_FUSION: False}}} if served.baseline == UNFUSED else {}),
            )
        # without the plugin, vLLM takes a class for models of transformers
        resolved = self.llm.llm_engine.vllm_config.model_config.architecture
        if resolved != served.architecture:
            raise UserError(f"{served.name}: vLLM runs it as {resolved}, and not as {served.architecture}")
        self.sampling = SamplingParams(
            temperature=0.0,
            max_tokens=options.output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.requests = 0
        self.made: dict[str, list[int]] = {}

    def group(self) -> AbstractContextManager[None]:
        """Return a context in which vLLM's tensor-parallel group is this engine's."""
        return contextlib.nullcontext() if self.replica is None else self.replica.entered()

    def share_of(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the prompts of a batch that this rank's replica serves. There may be none."""
        return prompts if self.replica is None else prompts[self.replica.number :: self.served.replicas]

    @property
    def messages(self) -> Messages | None:
        """The messages of this model; None in vLLM's own class."""
        contexts = self.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        return next((found for found in contexts.values() if isinstance(found, Messages)), None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it computes in."""
        dtype: torch.dtype = self.llm.llm_engine.vllm_config.model_config.dtype
        return dtype

    @property
    def fused_norm(self) -> bool:
        """True if vLLM was configured to fuse norms into the all-reduces before them."""
        return bool(getattr(self.llm.llm_engine.vllm_config.compilation_config.pass_config, NORM_FUSION))

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
        with self.group():
            while not all(self.made.values()):
                self._step()
        if max(map(len, self.made.values()), default=0) > 1:
            raise UserError(
                f"{self.served.name}: vLLM prefilled {len(prompts)} prompts in several steps; raise the KV cache's"
                " memory (VLLM_CPU_KVCACHE_SPACE), or lower --batch-size"
            )

    def decode(self) -> None:
        """Run to the end of every request. Then ``made`` has the tokens of each, by its name."""
        with self.group():
            while self.llm.llm_engine.has_unfinished_requests():
                self._step()

    def _step(self) -> None:
        for output in self.llm.llm_engine.step():
            self.made[output.request_id] += output.outputs[0].token_ids


NORM_FUSION = "fuse_allreduce_rms"  # of vLLM's PassConfig


def communicator() -> str:
    """Return the name of the backend of vLLM's own all-reduces in this process's group."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return "none: one rank"
    found = group.device_communicator
    module = getattr(found, "dist_module", None)
    if module is None:
        return type(found).__name__
    if type(module).__name__ == "_CPUSHMDistributed":
        return "vLLM's shared memory"
    interface = os.environ.get(GLOO_INTERFACE)
    return "gloo" + (f" over {interface}" if interface else "")


def kv_cache_bytes(served: Served, options: BenchOptions) -> int:
    """Return the bytes of one rank's KV cache, for every request of the largest batch to its end, and spare blocks."""
    tokens = KV_BLOCK * (-(-(options.prompt_len + options.output_len) // KV_BLOCK) + 1)
    texts = served.part(max(options.batch_sizes)) + 2
    return cache_bytes(served.shape(options.tp_size), texts, tokens, served.spec.torch_dtype.itemsize)


class TimedEngine(Timed):
    """The timing of a batch: the seconds until every request has its first token, and the seconds per further token."""

    parts = PHASES

    def __init__(self, engine: ServingEngine, options: BenchOptions, batch: int) -> None:
        super().__init__()
        self.engine, self.output_len, self.decode_steps = engine, options.output_len, options.decode_steps
        vocab = int(engine.served.spec.config["vocab_size"])
        self.prompts = engine.share_of(random_prompts(vocab, batch, options.prompt_len, options.seed))

    def sample(self) -> tuple[float, float]:
        begin = time.perf_counter()
        self.engine.prefill(self.prompts, self.output_len)
        middle = time.perf_counter()
        self.engine.decode()
        return middle - begin, (time.perf_counter() - middle) / self.decode_steps
