"""What an alignment takes, said before it starts."""

from collections.abc import Mapping
from typing import Any

import torch

from ladderize.adapt.align.align import TOKENS_AT_ONCE, with_random
from ladderize.adapt.align.options import AlignSettings, widest_input
from ladderize.adapt.align.ridge import OUTPUTS_AT_ONCE
from ladderize.adapt.align.streams import heads_width
from ladderize.adapt.blockwise.block_trainer import StudentBlocks
from ladderize.adapt.blockwise.windows import Windows
from ladderize.blocks import Blocks, layer_seconds, timed
from ladderize.console import Console, human_bytes, human_seconds
from ladderize.layout import Layout
from ladderize.memory import check_room
from ladderize.ranks.group import Ranks

FLOAT, DOUBLE = 4, 8
FORWARDS = 3  # passes of a layer for each window: both models', and the converted one's products again
PROBE = 768  # width of the matrices that are multiplied and factorised to see how fast that is


def announce_alignment(
    teacher: Blocks,
    student: StudentBlocks,
    windows: Windows,
    settings: AlignSettings,
    max_memory: int,
    ranks: Ranks,
    console: Console,
) -> None:
    """Say time, memory and disk, and where the data are few; raises UserError where a layer has no room."""
    config, tokens = teacher.config, windows.train.numel()
    weights, products = layer_bytes(teacher, student.layout.sync_tp_size)
    check_room(
        weights + products,
        teacher.device,
        f"aligning one layer ({human_bytes(weights)} of weights, {human_bytes(products)} of products)",
        "choose a machine with more",
    )
    all_windows = with_random(windows, config, settings)
    states = states_bytes(teacher, all_windows, ranks)
    seconds = alignment_seconds(teacher, student, all_windows, settings, ranks)
    place = "in memory" if states <= max_memory else f"on disk (beyond {human_bytes(max_memory)})"
    console.note(
        f"aligning {len(student.layers)} layers on {tokens:,} tokens ({len(windows.train)} windows of"
        f" {windows.train.shape[1]}), {len(windows.heldout)} windows held out: about {human_seconds(seconds)} on"
        f" {teacher.device}; for each process {human_bytes(weights + products)} for a layer and its products,"
        f" {human_bytes(states)} of states {place}"
    )
    warn_of_few(tokens, config, "--samples", console)


def warn_of_few(tokens: int, config: Mapping[str, Any], option: str, console: Console) -> None:
    """Where there are fewer tokens than a projection has inputs. option: that gives more."""
    if tokens < widest_input(config):
        console.warn(
            f"{tokens:,} tokens are fewer than the {widest_input(config):,} inputs of the widest projection: where"
            f" they say nothing the weights stay as they are; more {option} or data align better"
        )


def layer_bytes(teacher: Blocks, sync_tp_size: int | None) -> tuple[int, int]:
    """Of one layer: both models' weights, and the most that products and solving take."""
    infos = teacher.checkpoint.tensors
    numbers = sum(info.numel for name, info in infos.items() if name.startswith("model.layers.0."))
    hidden, inner = int(teacher.config["hidden_size"]), int(teacher.config["intermediate_size"])
    parts = sync_tp_size or 1
    # gram, cross, and weights as they were, as solved and as rounded in float32; the factor and sides of the system in
    # float64
    most = max(
        count * FLOAT * width * (width + hidden)
        + 3 * FLOAT * width * outputs
        + DOUBLE * width * (width + 3 * min(outputs, OUTPUTS_AT_ONCE))
        for width, outputs, count in ((hidden, 2 * inner, parts), (inner, hidden, 1))
    )
    return 2 * numbers * teacher.dtype.itemsize, most


def states_bytes(teacher: Blocks, windows: Windows, ranks: Ranks) -> int:
    """Of one process: three streams in float32, and the inputs of o_proj."""
    tokens = -(-windows.all.numel() // ranks.size)
    return tokens * (3 * FLOAT * int(teacher.config["hidden_size"]) + teacher.dtype.itemsize * heads_width(teacher))


def alignment_seconds(
    teacher: Blocks, student: StudentBlocks, windows: Windows, settings: AlignSettings, ranks: Ranks
) -> float:
    """From a layer, a product and a factorisation timed here and now."""
    forward, solved = seconds_of_a_layer(teacher, student.layout.sync_tp_size, windows, settings, ranks)
    return FORWARDS * forward * (student.layers[-1] + 1) + solved * len(student.layers)


def seconds_of_a_layer(
    teacher: Blocks, sync_tp_size: int | None, windows: Windows, settings: AlignSettings, ranks: Ranks
) -> tuple[float, float]:
    """What one pass of this rank's windows through a layer takes, and what solving a layer takes besides passes."""
    batch = windows.train[: max(1, min(len(windows.train), TOKENS_AT_ONCE // windows.train.shape[1]))]
    dense = teacher.layer(0, Layout.dense(teacher.num_layers))
    forward = layer_seconds(teacher, dense, batch) / batch.numel()  # of a token
    multiply, factorise = rates(teacher.device)
    own = -(-windows.train.numel() // ranks.size), -(-windows.heldout.numel() // ranks.size)
    products, errors, solving = operations(teacher.config, sync_tp_size or 1)
    tries = 1 + len(settings.ridges)
    solved = (
        own[0] * products / multiply + own[1] * tries * errors / multiply + len(settings.ridges) * solving / factorise
    )
    return forward * sum(own), solved


def operations(config: Mapping[str, Any], parts: int) -> tuple[float, float, float]:
    """Floating-point operations of a layer: of the products of a token, of judging one set of weights on a token, and
    of solving for one ridge."""
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    reads = 2.0 * 2 * hidden * hidden  # gram and cross of what two projections read
    products = reads * (1 + parts) + 2 * (hidden + inner) * (inner + hidden)
    errors = 2.0 * hidden * (3 * hidden + hidden + 3 * inner)
    solving = sum(
        count * (width**3 / 3 + 2.0 * width * width * outputs / count)
        for width, outputs, count in (
            (hidden, 3 * hidden, 1),
            (hidden, hidden, 1),
            (hidden, 2 * inner, parts),
            (inner, hidden, 1),
        )
    )
    return products, errors, solving


def rates(device: torch.device) -> tuple[float, float]:
    """Operations a second here and now: of float32 products, and of float64 factorisation and solution."""
    matrix = torch.eye(PROBE, device=device) + 1e-3 * torch.rand(PROBE, PROBE, device=device)
    system = (matrix @ matrix.T).double()
    multiply = min(timed(lambda: matrix @ matrix, device) for _ in range(3))
    factorise = min(
        timed(lambda: torch.cholesky_solve(system, torch.linalg.cholesky(system)), device) for _ in range(3)
    )
    return 2 * PROBE**3 / multiply, (PROBE**3 / 3 + 2 * PROBE**3) / factorise
