"""One of vLLM's engines in this process, which is one rank of it."""

import hashlib
import os
import time
from typing import Any

import torch
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind

from ladderize.errors import UserError
from ladderize.ranks.group import Ranks, host_id
from ladderize.runtime.shards import Shape
from ladderize.serving.vllm.bench.options import VllmBenchOptions
from ladderize.serving.vllm.bench.served import Served
from ladderize.serving.vllm.bench.worker import IDENTITY
from ladderize.serving.vllm.messages import Messages

KV_BLOCK = 128  # tokens: vLLM's blocks on a CPU; those of GPUs are smaller
NETWORK = "/proc/self/ns/net"  # a link, whose target names the network namespace


class TimedEngine:
    """vLLM serving one row of the benchmark. All ranks make it, and call the same methods in the same order."""

    def __init__(self, served: Served, options: VllmBenchOptions, ranks: Ranks, sharing: int, config: Any) -> None:
        """sharing: engines in this process, which share a GPU's memory. config: of the model, as ``Shape`` takes it."""
        self.name = served.name
        length, batch = options.prompt_len + options.output_len, max(options.batch_sizes)
        placement: dict[str, Any] = {"distributed_executor_backend": "uni"}
        if ranks.size > 1:
            placement = {"distributed_executor_backend": "external_launcher"}
            if ranks.device.type == "cpu":
                placement["worker_cls"] = "ladderize.serving.vllm.bench.worker.IdentifiedWorker"
        self.llm = LLM(
            model=str(served.folder),
            tensor_parallel_size=ranks.size,
            dtype=served.dtype,
            load_format="dummy" if served.weights is None else "auto",
            skip_tokenizer_init=True,
            seed=options.seed,
            max_model_len=length,
            max_num_seqs=batch,
            # one step takes the whole batch's prompts
            max_num_batched_tokens=max(batch * options.prompt_len, length),
            enable_prefix_caching=False,
            disable_log_stats=True,
            kv_cache_memory_bytes=_kv_bytes(served, options, config),
            gpu_memory_utilization=0.9 / (sharing + 1),
            **placement,
        )
        found = self.llm.apply_model(_class_name)[0]
        if found != served.architecture:
            raise UserError(f"{served.name}: vLLM runs it as {found}, and not as {served.architecture}")
        self.sampling = SamplingParams(
            temperature=0.0,
            max_tokens=options.output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.counted = 0
        self.made: dict[str, list[int]] = {}

    @property
    def messages(self) -> Messages | None:
        """What carries this model's messages in flight, or None in vLLM's own class."""
        contexts = self.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        return next((found for found in contexts.values() if isinstance(found, Messages)), None)

    @property
    def dtype(self) -> torch.dtype:
        """That it computes in."""
        found: torch.dtype = self.llm.llm_engine.vllm_config.model_config.dtype
        return found

    def time_pass(self, prompts: list[list[int]], output_len: int) -> tuple[float, float]:
        """Seconds until every request has its first token, and from then on per token of each.

        Raises UserError where vLLM did not prefill all prompts in one step: what it took would not be a prefill.
        """
        begin = time.perf_counter()
        self.prefill(prompts, output_len)
        middle = time.perf_counter()
        self.decode()
        return middle - begin, (time.perf_counter() - middle) / max(1, output_len - 1)

    def prefill(self, prompts: list[list[int]], output_len: int) -> None:
        """Ask for ``output_len`` greedy tokens after each prompt, and go on until each has its first."""
        sampling = self.sampling.clone()
        sampling.max_tokens = output_len
        self.made = {}
        for prompt in prompts:
            self.counted += 1
            name = str(self.counted)
            self.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)
            self.made[name] = []
        while not all(self.made.values()):
            self._step()
        if max(map(len, self.made.values())) > 1:
            raise UserError(
                f"{self.name}: vLLM prefilled {len(prompts)} prompts in several steps; raise the KV cache's memory"
                " (VLLM_CPU_KVCACHE_SPACE), or lower --batch-size"
            )

    def decode(self) -> None:
        """Go on to the end of every request; ``made`` then has their tokens, by the request's name."""
        while self.llm.llm_engine.has_unfinished_requests():
            self._step()

    def _step(self) -> None:
        for output in self.llm.llm_engine.step():
            self.made[output.request_id] += output.outputs[0].token_ids


def communicator() -> str:
    """What carries vLLM's own all-reduces between the ranks of this process's group."""
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
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    return "gloo" + (f" over {interface}" if interface else "")


def identify(ranks: Ranks) -> None:
    """Let vLLM see which ranks share memory (``IdentifiedWorker``). Rank 0's starter removes what has these names."""
    namespace = os.readlink(NETWORK) if os.path.islink(NETWORK) else ""
    os.environ[IDENTITY] = ranks.broadcast(f"ladderize-{os.getppid()}") + "-" + _digest(host_id() + namespace)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _class_name(model: Any) -> str:
    return type(model).__name__


def _kv_bytes(served: Served, options: VllmBenchOptions, config: Any) -> int:
    """Of one rank: every request of the largest batch to its end, and blocks to spare."""
    shape = Shape.from_config(config, tp_size=options.tp_size, rank=0, replicate_vocab=False)
    tokens = KV_BLOCK * (-(-(options.prompt_len + options.output_len) // KV_BLOCK) + 1)
    width = getattr(torch, served.dtype).itemsize
    return (max(options.batch_sizes) + 2) * tokens * 2 * shape.layers * shape.own_kv_heads * shape.head_dim * width
