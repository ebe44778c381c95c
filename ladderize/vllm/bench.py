"""``ladderize bench --engine vllm``: vLLM's engines of all rows side by side in each rank, timed in turn.

A change from one to the next costs nothing, and no idle processes disturb the engine that is timed. Only the ranks
import vLLM.
"""

import atexit
import hashlib
import itertools
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.families.registry import known_family
from ladderize.files.output import temporary_folder
from ladderize.layout import CONFIG_KEYS
from ladderize.ranks.environment import GLOO_INTERFACE
from ladderize.ranks.group import Ranks, host_id
from ladderize.runtime.bench.document import BenchDocument, environment
from ladderize.runtime.bench.inference import check_dense, chosen_models, random_prompts, run_and_show
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.rounds import Benchmark, Variant, measure
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.shm import remove_segments
from ladderize.runtime.shards import Shape, cache_bytes, check_runnable
from ladderize.runtime.spec import ModelSpec
from ladderize.vllm.environment import (
    MessageBackend,
    architecture,
    check_vllm,
    configuration_refusal,
    ends_of,
    installed_version,
    is_newer,
    not_known,
    stock,
)
from ladderize.vllm.plugin import register_plugin

# variables of a rank: the engine runs in the rank itself, which reports errors
VARIABLES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
KV_BLOCK = 128  # tokens: vLLM's blocks on a CPU; those of GPUs are smaller
NETWORK = "/proc/self/ns/net"  # a link, whose target names the network namespace


@dataclass(frozen=True)
class Served:
    """A row: a folder that vLLM opens, and the model in it. Weights are random where the model has no folder.
    ``architecture``: vLLM's model class, its own or the plugin's."""

    name: str
    spec: ModelSpec
    folder: Path
    architecture: str


def bench_vllm(options: BenchOptions, *, console: Console = SILENT) -> BenchDocument:
    """Time the models in vLLM against each other, and return the result; a console that speaks shows it. A dense model
    runs in vLLM's own class, unless messages are emulated; others in ladderize's. Raises UsageError or UserError for
    what cannot be measured."""
    check_vllm()
    if is_newer():
        console.warn(f"{not_known()}: it was not tried")
    try:
        emulated = MessageBackend.from_environment().link is not None
    except ValueError as error:
        raise UserError(str(error)) from None
    options = replace(options, engine="vllm")
    specs = chosen_models(options)
    for spec in specs:
        check_runnable(spec.config, spec.layout, options.tp_size)
        if spec.config["vocab_size"] != specs[0].config["vocab_size"]:
            raise UserError(f"{spec.name} has another vocabulary than {specs[0].name}; compare them apart")
    with temporary_folder("vllm") as work:
        served = served_models(specs, options, work, emulated=emulated)
        try:
            return run_and_show(options, console, partial(measure_vllm, os.getpid()), served)
        finally:  # also where a launcher started the ranks: vLLM's, by the names that ``name_segments`` gives
            remove_segments(os.getpid())


def served_models(specs: list[ModelSpec], options: BenchOptions, work: Path, *, emulated: bool = False) -> list[Served]:
    """Make a folder for each row under ``work``, and return the rows. Checkpoints' files are linked; only configs are
    written. ``emulated``: a delay stands for each all-reduce. vLLM's own class has none, so dense models run in the
    plugin's, too."""
    rows = [(spec.name, spec, emulated or not spec.layout.is_dense) for spec in specs]
    if "plugin" in options.baselines:
        check_dense("plugin", specs[0])
        rows.insert(1, ("plugin's dense", specs[0], True))
    served = []
    for number, (name, spec, by_plugin) in enumerate(rows):
        folder, family = work / str(number), known_family(spec.config)
        folder.mkdir()
        for path in spec.folder.resolve().iterdir() if spec.folder is not None else ():
            if path.name != "config.json":
                (folder / path.name).symlink_to(path)
        config = {key: value for key, value in spec.config.items() if key not in {*CONFIG_KEYS, "auto_map"}}
        config |= {"model_type": family.model_type, "architectures": [stock(family)]}
        if by_plugin:  # its class runs dense layouts, too
            config |= {"model_type": family.ladderized_type, "architectures": [architecture(family)]}
            config |= spec.layout.to_config()
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        served.append(Served(name, spec, folder, config["architectures"][0]))
    return served


# ---- in each rank ----


def measure_vllm(
    starter: int, ranks: Ranks, served: list[Served], options: BenchOptions, console: Console
) -> BenchDocument:
    """Start the engines of all rows and time them. All ranks call it. Raises UserError for what vLLM refuses. Engines
    live as long as the process: vLLM ends the group of all when one is deleted."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")  # of vLLM and its imports
    from ladderize.vllm.messages import Messages

    register_plugin()  # also where ladderize runs from a source tree, whose entry points are not installed
    if ranks.device.type == "cpu":
        name_segments(ranks, starter)
    engines: list[Any] = []
    atexit.register(engines.clear)
    senders: list[Any] = []
    for number, row in enumerate(served, start=1):
        with console.stage(f"starting vLLM, {number} of {len(served)}: {row.name}"):
            engines.append(start_engine(row, options, ranks, len(served)))
        contexts = engines[-1].llm_engine.vllm_config.compilation_config.static_forward_context
        messages = [layer for layer in contexts.values() if isinstance(layer, Messages)]
        # vLLM's own class has no messages in flight
        senders.append(messages[0] if messages else SimpleNamespace(collectives=Collectives()))
    carriers = {sender.collectives.name for sender in senders if isinstance(sender, Messages)}
    machine = environment(ranks, settings=("VLLM_", "LADDERIZE_"), vllm=installed_version() or "unknown")
    link = MessageBackend.from_environment().link
    document = BenchDocument(False, options, communicator(), machine, link, engine="vllm")
    document.messages = ", ".join(sorted(carriers)) or None
    numbers = itertools.count()

    def open_variants(batch: int) -> list[Variant]:
        variants = []
        for row, engine, sender in zip(served, engines, senders, strict=True):
            prompts = random_prompts(row.spec.config["vocab_size"], batch, options.prompt_len, options.seed)
            run = partial(serve_batch, row.name, engine.llm_engine, prompts, numbers)
            variants.append(Variant(row.name, row.spec, sender, run, architecture=row.architecture))
        return variants

    return measure(Benchmark(document, ranks, console), open_variants)


def start_engine(served: Served, options: BenchOptions, ranks: Ranks, sharing: int) -> Any:
    """Start vLLM's engine for one row. All ranks call it. Raises UserError for what vLLM refuses, and if it takes
    another class for the model. ``sharing``: the number of engines in this process, which share a GPU's memory."""
    from vllm import LLM

    spec, length, batch = served.spec, options.columns, max(options.batch_sizes)
    shape = Shape.from_config(spec.config, tp_size=ranks.size, rank=0)
    cached = KV_BLOCK * (-(-length // KV_BLOCK) + 1)  # tokens of a request to its end, and a spare block
    arguments = {
        "model": str(served.folder),
        "tensor_parallel_size": ranks.size,
        "dtype": spec.dtype,
        "load_format": "dummy" if spec.folder is None else "auto",
        "skip_tokenizer_init": True,
        "seed": options.seed,
        "max_model_len": length,
        "max_num_seqs": batch,
        "max_num_batched_tokens": max(batch * options.prompt_len, length),  # one step takes the whole batch's prompts
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "kv_cache_memory_bytes": cache_bytes(shape, spec.layout, batch + 2, cached, spec.torch_dtype.itemsize),
        "gpu_memory_utilization": 0.9 / (sharing + 1),
        "distributed_executor_backend": "external_launcher" if ranks.size > 1 else "uni",
        **ends_of(spec.config),
    }
    try:
        engine = LLM(**arguments)
    except Exception as error:
        if refusal := configuration_refusal(error):
            raise UserError(refusal) from None
        raise
    # without the plugin, vLLM takes a class for models of transformers
    resolved = engine.llm_engine.vllm_config.model_config.architecture
    if resolved != served.architecture:
        raise UserError(f"{served.name}: vLLM runs it as {resolved}, and not as {served.architecture}")
    return engine


def serve_batch(name: str, engine: Any, prompts: list[list[int]], numbers: Iterator[int], steps: int) -> Iterator[None]:
    """Run a batch of requests until each has its first token, and to their ends, as ``Variant.run`` does.

    Tokens that vLLM has handed out are computed, and on a GPU it computes the next ones by then: nothing to wait for.
    ``numbers``: of the requests. Raises UserError if vLLM did not prefill all prompts in one step: the time would not
    be that of a prefill."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

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


def communicator() -> str:
    """Return the name of the backend of vLLM's own all-reduces in this process's group."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    from vllm.distributed.parallel_state import get_tp_group

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
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    namespace = os.readlink(NETWORK) if os.path.islink(NETWORK) else ""
    host = hashlib.sha256((host_id() + namespace).encode()).hexdigest()[:12]
    prefix = f"ladderize-{ranks.broadcast(starter)}-{host}"
    _CPUSHMDistributed.make_group_name = staticmethod(
        lambda communicator: f"{prefix}-{communicator.unique_name.replace(':', '-')}"
    )
