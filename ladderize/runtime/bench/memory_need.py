"""What a benchmark will at least hold in memory, from the models' shapes, before anything is allocated."""

from collections.abc import Iterable

import torch

from ladderize.checkpoint.llama import parameter_count
from ladderize.console import human_bytes
from ladderize.errors import UserError
from ladderize.memory import available_bytes
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.rank_bytes import MemoryNeed, cache_bytes, prefill_bytes, weight_bytes
from ladderize.runtime.shards import Shape, virtual_ranks
from ladderize.runtime.spec import ModelSpec


def memory_need(specs: Iterable[ModelSpec], options: BenchOptions, device: torch.device) -> MemoryNeed:
    """Of the largest batch. Weights that layouts share are counted once; what is not known is left out."""
    weights: dict[object, int] = {}
    cache = prefill = 0
    batch, columns = max(options.batch_sizes), options.prompt_len + options.output_len
    for spec in specs:
        shape = Shape.from_config(spec.config, tp_size=options.ranks, rank=0, replicate_vocab=options.replicate_vocab)
        width = spec.torch_dtype.itemsize
        apart = tuple(virtual_ranks(spec.layout, layer, options.ranks) for layer in range(shape.layers))
        weights[spec.folder, apart, spec.dtype] = weight_bytes(shape, width, packed=device.type == "cpu")
        stored = 4 if device.type == "cpu" else width  # see KVCache
        cache = max(cache, cache_bytes(shape, batch, columns, stored))
        prefill = max(prefill, prefill_bytes(shape, batch, options.prompt_len, width))
    return MemoryNeed(sum(weights.values()), cache, prefill)


def check_bench_memory(specs: list[ModelSpec], options: BenchOptions, group: Ranks) -> None:
    """Raise UserError if the ranks of this machine cannot hold the models. All ranks call it.

    On a CPU the ranks of a machine share its memory; each GPU has its own.
    """
    free = available_bytes(group.device)
    if free is None:
        return
    sharing = group.local_size if group.device.type == "cpu" else 1
    where = f" on each of {sharing} ranks" if sharing > 1 else ""
    need = memory_need(specs, options, group.device)
    if sharing * need.total > free:
        raise UserError(
            f"{specs[0].name}: weights take {human_bytes(need.weights)}, the KV cache {human_bytes(need.kv_cache)} and"
            f" the prefill {human_bytes(need.prefill)} of memory{where}, and {human_bytes(free)} are free; choose a"
            " smaller model or --batch-size, a shorter --prompt-len, fewer layers or models, or more ranks"
        )
    if options.check and options.emulate_tp is not None:
        _check_whole_models(specs, free)


def _check_whole_models(specs: list[ModelSpec], free: int) -> None:
    """Under emulation the reference check loads all of a model, not one rank's part."""
    for spec in (spec for spec in specs if spec.folder is not None):
        need = parameter_count(spec.config) * spec.torch_dtype.itemsize
        if need > free:
            raise UserError(
                f"{spec.name}: the correctness check runs the whole model, which takes {human_bytes(need)}, and"
                f" {human_bytes(free)} are free; --no-check skips it and labels the results unchecked"
            )
