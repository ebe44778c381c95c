"""What an alignment takes, said before it starts."""

from collections.abc import Mapping
from typing import Any

import torch

from ladderize.adapt.layers.align_layer import heads_width
from ladderize.adapt.layers.align_options import AlignSettings, widest_input
from ladderize.adapt.layers.ridge import OUTPUTS_AT_ONCE
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks, layer_seconds, timed
from ladderize.console import Console
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks

TOKENS_AT_ONCE = 8192
FLOAT, DOUBLE = 4, 8
FORWARDS = 3  # passes of a layer for each window: both models', and the converted one's products again
PROBE = 768  # width of the matrices that are multiplied and factorised to see how fast that is


def warn_of_few(tokens: int, config: Mapping[str, Any], option: str, console: Console) -> None:
    """Where there are fewer tokens than a projection has inputs. option: that gives more."""
    if tokens < widest_input(config):
        console.warn(
            f"{tokens:,} tokens are fewer than the {widest_input(config):,} inputs of the widest projection: where"
            f" they say nothing the weights stay as they are; more {option} or data align better"
        )


def systems(config: Mapping[str, Any], sync_tp_size: int | None) -> list[tuple[int, int, int]]:
    """Inputs and outputs of what is solved together in a layer, and how often: q, k, v; o; gate and up of each virtual
    rank; down."""
    hidden, inner, parts = int(config["hidden_size"]), int(config["intermediate_size"]), sync_tp_size or 1
    return [(hidden, 3 * hidden, 1), (hidden, hidden, 1), (hidden, 2 * inner // parts, parts), (inner, hidden, 1)]


def layer_bytes(teacher: Blocks, sync_tp_size: int | None) -> tuple[int, int]:
    """Of one layer: both models' weights, and the most that products and solving take."""
    infos, hidden = teacher.checkpoint.tensors, int(teacher.config["hidden_size"])
    numbers = sum(info.numel for name, info in infos.items() if name.startswith("model.layers.0."))
    # gram, cross, and weights as they were, as solved and as rounded in float32; the factor and sides of the system in
    # float64
    most = max(
        count * FLOAT * width * (width + hidden + 3 * outputs)
        + DOUBLE * width * (width + 3 * min(outputs, OUTPUTS_AT_ONCE))
        for width, outputs, count in systems(teacher.config, sync_tp_size)
    )
    return 2 * numbers * teacher.dtype.itemsize, most


def states_bytes(teacher: Blocks, windows: Windows, ranks: Ranks) -> int:
    """Of one process: three streams in float32, and the inputs of o_proj."""
    tokens = -(-windows.all.numel() // ranks.size)
    return tokens * (3 * FLOAT * int(teacher.config["hidden_size"]) + teacher.dtype.itemsize * heads_width(teacher))


def seconds_of_a_layer(
    teacher: Blocks, sync_tp_size: int | None, windows: Windows, settings: AlignSettings, ranks: Ranks
) -> tuple[float, float]:
    """What one pass of this rank's windows through a layer takes, and what solving a layer takes besides passes; from a
    layer, a product and a factorisation timed here and now."""
    batch = windows.train[: max(1, min(len(windows.train), TOKENS_AT_ONCE // windows.train.shape[1]))]
    dense = teacher.layer(0, Layout.dense(teacher.num_layers))
    forward = layer_seconds(teacher, dense, batch) / batch.numel()  # of a token
    train, heldout = (-(-part.numel() // ranks.size) for part in (windows.train, windows.heldout))
    tries, hidden = len(settings.ridges), int(teacher.config["hidden_size"])
    multiplied = factorised = 0.0
    for width, outputs, count in systems(teacher.config, sync_tp_size):
        multiplied += 2.0 * count * width * ((width + hidden) * train + outputs * heldout * (1 + tries))
        factorised += count * tries * (width**3 / 3 + 2.0 * width * width * outputs)
    multiply, factorise = rates(teacher.device)
    return forward * (train + heldout), multiplied / multiply + factorised / factorise


def rates(device: torch.device) -> tuple[float, float]:
    """Operations a second here and now: of float32 products, and of float64 factorisation and solution."""
    matrix = torch.eye(PROBE, device=device) + 1e-3 * torch.rand(PROBE, PROBE, device=device)
    system = (matrix @ matrix.T).double()
    multiply = min(timed(lambda: matrix @ matrix, device) for _ in range(3))
    factorise = min(
        timed(lambda: torch.cholesky_solve(system, torch.linalg.cholesky(system)), device) for _ in range(3)
    )
    return 2 * PROBE**3 / multiply, (PROBE**3 / 3 + 2 * PROBE**3) / factorise
