"""What training steps will at least hold in memory, from the models' shapes, before anything is allocated."""

from ladderize.checkpoint.reading import read_checkpoint
from ladderize.console import human_bytes
from ladderize.errors import UserError
from ladderize.memory import available_bytes
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.rank_bytes import weight_bytes
from ladderize.runtime.bench.training.plan import TrainingBenchPlan
from ladderize.runtime.loader import files_identity
from ladderize.runtime.shards import Shape, virtual_ranks
from ladderize.runtime.spec import ModelSpec


def check_training_memory(plan: TrainingBenchPlan, group: Ranks) -> None:
    """Raise UserError if the ranks of this machine cannot hold the models. All ranks call it.

    On a CPU the ranks of a machine share its memory; each GPU has its own.
    """
    free = available_bytes(group.device)
    if free is None:
        return
    sharing = group.local_size if group.device.type == "cpu" else 1
    where = f" on each of {sharing} ranks" if sharing > 1 else ""
    weights, work = training_bytes(plan)
    if sharing * (weights + work) > free:
        raise UserError(
            f"{plan.specs[0].name}: weights take {human_bytes(weights)}, and a step {human_bytes(work)} of memory"
            f"{where}, and {human_bytes(free)} are free; choose a smaller model or --batch-size, a shorter --seq-len,"
            " fewer layers or models, or more ranks"
        )


def training_bytes(plan: TrainingBenchPlan) -> tuple[int, int]:
    """One rank's weights, those that layouts share counted once, and at the end of a forward pass of the largest batch
    what is kept for the backward pass and its gradients; what is not known is left out."""
    options = plan.options
    tokens = max(options.batch_sizes) * options.seq_len
    weights: dict[object, int] = {}
    work = 0
    for spec in plan.specs:
        shape = Shape.from_config(spec.config, tp_size=options.ranks, rank=0)
        weights[weights_key(spec, shape)] = weight_bytes(shape, 4, packed=False)
        width = spec.torch_dtype.itemsize
        converted = weight_bytes(shape, width, packed=False) if width < 4 else 0
        heads = (shape.own_heads + 2 * shape.own_kv_heads) * shape.head_dim
        # of a layer: both streams and what their norms give; q, k and v in fp32; what the MLP's products read and give
        token = shape.layers * (width * (4 * shape.hidden + 4 * shape.own_inner) + 4 * heads)
        token += (4 + width) * shape.own_vocab
        work = max(work, weight_bytes(shape, 4, packed=False) + converted + tokens * token)
    return sum(weights.values()), work


def weights_key(spec: ModelSpec, shape: Shape) -> tuple[object, ...]:
    """Equal for models that share their weights: the same tensors, cut into the same pieces."""
    apart = tuple(virtual_ranks(spec.layout, layer, shape.tp_size) for layer in range(shape.layers))
    # where a sum is dropped, ranks know only parts of the gradient of its bias
    dropped = spec.layout.attention_sync if shape.attention_bias else ()
    files = None if spec.folder is None else files_identity(read_checkpoint(spec.folder))
    return files, shape, apart, dropped, spec.dtype
