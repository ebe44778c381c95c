"""The model to run: a checkpoint or a bare shape, checked as a whole before any process starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ladderize.checkpoint.config import check_config, expected_tensors, most_positions, stored_dtype
from ladderize.checkpoint.opening import find_source, read_checkpoint
from ladderize.errors import UserError
from ladderize.families.registry import known_family
from ladderize.files.documents import read_json
from ladderize.layout import Layout
from ladderize.ranks.device import avoid_cudnn_attention
from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.cpu_operations import CpuOperations
from ladderize.runtime.decode import Generator, rope_table
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.layers import Weights
from ladderize.runtime.loader import CheckpointSource, RandomSource, Read, load_weights
from ladderize.runtime.model import TPLlama
from ladderize.runtime.native.library import TYPES, agreed_kernels, why_no_triton
from ladderize.runtime.operations import Operations
from ladderize.runtime.shards import Shape, cached_heads, check_activation, check_runnable, virtual_ranks

RUN_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelSpec:
    """One model to run, computed in ``dtype``; without a folder it has random weights."""

    name: str
    folder: Path | None
    config: dict[str, Any]
    layout: Layout
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def positions(self) -> int:
        """The longest text, prompt and new tokens together, that the config promises to handle."""
        return most_positions(self.config)

    def weights_key(self, shape: Shape) -> tuple[object, ...]:
        """Return a key that is equal for models that share the weights of a rank of this shape. They have the same
        files (or random numbers), cut into the same pieces, and the same dtype."""
        apart = tuple(virtual_ranks(self.layout, layer, shape.tp_size) for layer in range(shape.layers))
        files: list[tuple[int, int]] = []  # those that ``convert`` hard-links are the same
        if self.folder is not None:
            stats = [(self.folder / name).stat() for name in read_checkpoint(self.folder).weight_files]
            files = [(stat.st_dev, stat.st_ino) for stat in stats]
        return tuple(files), shape, apart, self.dtype

    def reader(self, dtype: torch.dtype, device: torch.device) -> Read:
        """Return the function that reads slices of its weights."""
        if self.folder is None:
            return RandomSource(expected_tensors(self.config), dtype, device).read
        return CheckpointSource(read_checkpoint(self.folder), dtype, device).read


def checkpoint_spec(model: str, *, tp_size: int, dtype: str = "auto", option: str = "--tp-size") -> ModelSpec:
    """Return a checkpoint's specification after all checks that need no weights."""
    source = find_source(model)
    layout = _check(model, source.config, tp_size, option)  # before anything is downloaded
    checkpoint = source.open()
    dtype = stored_dtype(checkpoint) if dtype == "auto" else dtype
    return ModelSpec(model, checkpoint.folder, checkpoint.config, layout, _dtype(dtype))


def shape_spec(
    config: dict[str, Any], layout: Layout, *, name: str, tp_size: int, dtype: str = "auto", option: str = "--tp-size"
) -> ModelSpec:
    """Return a model's specification with random weights."""
    full = {**config, **layout.to_config(), "model_type": known_family(config).ladderized_type}
    _check(name, full, tp_size, option)
    return ModelSpec(name, None, config, layout, _dtype("bfloat16" if dtype == "auto" else dtype))


def _check(name: str, config: dict[str, Any], tp_size: int, option: str) -> Layout:
    check_config(config, name)
    check_activation(config)
    layout = Layout.from_config(config)
    layout.check_model(config)
    check_runnable(config, layout, tp_size, name=option, in_groups=True)
    return layout


def _dtype(dtype: str) -> str:
    if dtype not in RUN_DTYPES:
        raise UserError(f"weights of {dtype} cannot be run as they are; give --dtype {' or '.join(RUN_DTYPES)}")
    return dtype


def eos_ids(spec: ModelSpec) -> tuple[int, ...]:
    """Return every token that ends a text: of generation_config.json, else of config.json."""
    value = spec.config.get("eos_token_id")
    path = (spec.folder or Path()) / "generation_config.json"
    if spec.folder is not None and path.exists():
        value = read_json(path, advice="repair or delete it").get("eos_token_id", value)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):
        raise UserError(f"eos_token_id is {value!r}, neither a token id nor a list of them")
    return tuple(ids)


class WeightCache:
    """Weights of one rank, loaded once for all models that share them."""

    def __init__(
        self,
        device: torch.device,
        *,
        pack: bool,
        replicate_vocab: bool = False,
        advance: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.device, self.pack, self.replicate_vocab, self.advance = device, pack, replicate_vocab, advance
        self.loaded: dict[Any, Weights] = {}

    def get(self, spec: ModelSpec, tp_size: int, rank: int) -> tuple[Shape, Weights]:
        shape = Shape.from_config(spec.config, tp_size=tp_size, rank=rank, replicate_vocab=self.replicate_vocab)
        key = spec.weights_key(shape)
        if key not in self.loaded:
            read = spec.reader(spec.torch_dtype, self.device)
            self.loaded[key] = load_weights(read, shape, spec.layout, pack=self.pack, advance=self.advance)
        return shape, self.loaded[key]


def choose_operations(group: Ranks, dtype: torch.dtype) -> Operations:
    """Return a rank's operations: by our own kernels where all ranks, which call this, have them, else by PyTorch."""
    if group.device.type == "cuda":
        problem = next(filter(None, group.gather(why_no_triton())), None)
        if problem is not None:
            return Operations(f"slower than it could be: {problem}")
        from ladderize.runtime.gpu_operations import GpuOperations

        # two programs for each multiprocessor
        return GpuOperations(2 * torch.cuda.get_device_properties(group.device).multi_processor_count)
    if group.device.type != "cpu" or dtype not in TYPES:
        return Operations()
    kernels = agreed_kernels(group)
    return Operations(f"slower than it could be: {kernels}") if isinstance(kernels, str) else CpuOperations(kernels)


def open_generator(
    spec: ModelSpec,
    collectives: Collectives,
    weights: WeightCache,
    group: Ranks,
    batch: int,
    columns: int,
    *,
    model_class: type[TPLlama] = TPLlama,
    caches: Sequence[KVCache] = (),
) -> Generator:
    """Return one rank of a checked model with a KV cache for ``batch`` rows of ``columns`` tokens. ``caches``: one that
    fits is used again."""
    avoid_cudnn_attention()
    dtype, device = spec.torch_dtype, group.device
    shape, loaded = weights.get(spec, collectives.ranks, group.rank)
    model = model_class(shape, spec.layout, loaded, collectives, choose_operations(group, dtype))
    kv_heads, processes = cached_heads(shape, spec.layout), group.local_size
    cache = KVCache.allocate(shape, batch, columns, dtype, device, kv_heads, again=caches, processes=processes)
    return Generator(model, rope_table(spec.config, columns, device), cache, graphs=device.type == "cuda")
