"""The memory that an alignment takes, and a warning where its data are few."""

from collections.abc import Mapping
from typing import Any

from ladderize.adapt.layers.align_layer import heads_width
from ladderize.adapt.layers.align_options import widest_input
from ladderize.adapt.layers.ridge import OUTPUTS_AT_ONCE
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks
from ladderize.console import Console
from ladderize.ranks.group import Ranks

TOKENS_AT_ONCE = 8192
FLOAT, DOUBLE = 4, 8


def warn_of_few(tokens: int, config: Mapping[str, Any], option: str, console: Console) -> None:
    """Warn where there are fewer tokens than a projection has inputs.

    option: the one that gives more.
    """
    if tokens < widest_input(config):
        console.warn(
            f"{tokens:,} tokens are fewer than the {widest_input(config):,} inputs of the widest projection: where"
            f" they say nothing the weights stay as they are; more {option} or data align better"
        )


def layer_bytes(teacher: Blocks, sync_tp_size: int | None) -> int:
    """Return the bytes that one layer takes: both models' weights, and the peak of products and solving."""
    infos, hidden = teacher.checkpoint.tensors, int(teacher.config["hidden_size"])
    numbers = sum(info.numel for name, info in infos.items() if name.startswith("model.layers.0."))
    inner, parts = int(teacher.config["intermediate_size"]), sync_tp_size or 1
    # Inputs, outputs and number of the systems that are solved together: q, k, v; o; gate and up of each rank; down.
    systems = (hidden, 3 * hidden, 1), (hidden, hidden, 1), (hidden, 2 * inner // parts, parts), (inner, hidden, 1)
    # gram, cross, and the old, solved and rounded weights in float32; the factor and both sides of the system in
    # float64.
    most = max(
        count * FLOAT * width * (width + hidden + 3 * outputs)
        + DOUBLE * width * (width + 3 * min(outputs, OUTPUTS_AT_ONCE))
        for width, outputs, count in systems
    )
    return 2 * numbers * teacher.dtype.itemsize + most


def states_bytes(teacher: Blocks, windows: Windows, ranks: Ranks) -> int:
    """Return the bytes of one process's states: three streams in float32, and the inputs of o_proj."""
    tokens = -(-windows.all.numel() // ranks.size)
    return tokens * (3 * FLOAT * int(teacher.config["hidden_size"]) + teacher.dtype.itemsize * heads_width(teacher))
