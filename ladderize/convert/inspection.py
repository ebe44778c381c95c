"""What a checkpoint's layout means for communication, from its config and headers alone."""

from typing import Any

from ladderize.console import UserError
from ladderize.convert.checkpoint import DTYPE_BYTES, FLOAT_DTYPES, read_config, read_tensors, resolve_json
from ladderize.convert.llama import check_config, parameter_count
from ladderize.convert.weights import DTYPES
from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED, Layout, check_split, fitting_ranks

DEFAULT_TP_SIZE = 8


def communication(layout: Layout, hidden_size: int, dtype_bytes: int, tp_size: int) -> dict[str, int]:
    """All-reduces and bytes of one token on one of ``tp_size`` ranks.

    An all-reduce sums one hidden state (hidden_size * dtype_bytes); in a ring each rank sends 2 (N-1)/N times that.
    ``exposed_sent_bytes``: those of blocking all-reduces, which nothing hides. The vocabulary's collectives are not
    counted: they are the same for every layout.
    """
    message = hidden_size * dtype_bytes
    ring = 2 * (tp_size - 1) * message // tp_size
    blocking, overlapped = layout.count(BLOCKING), layout.count(OVERLAPPED)
    return {
        "blocking": blocking,
        "overlapped": overlapped,
        "dropped": layout.count(DROPPED),
        "reduced_bytes": (blocking + overlapped) * message,
        "sent_bytes": (blocking + overlapped) * ring,
        "exposed_sent_bytes": blocking * ring,
    }


def inspect_checkpoint(model: str, *, revision: str | None = None, tp_size: int | None = None) -> dict[str, Any]:
    """Layout, parameters, and sync points and bytes per token before and after; reads no weights.

    ``tp_size`` defaults to the layout's sync_tp_size, else to 8 or the most below it that the model can be split into;
    another that it cannot be split into is refused.
    """
    folder, is_local = resolve_json(model, revision)
    config = read_config(folder)
    check_config(config)
    layout = Layout.from_config(config)
    layout.check_model(config)
    ranks = tp_size or layout.sync_tp_size or max(n for n in fitting_ranks(config) if n <= DEFAULT_TP_SIZE)
    if tp_size is not None:
        check_split(config, tp_size, name="--tp-size")
        if layout.sync_tp_size is not None and layout.sync_tp_size % tp_size:
            raise UserError(
                f"--tp-size {tp_size} does not divide sync_tp_size {layout.sync_tp_size}, so no such group can run this"
                " layout"
            )
    dtype, parameters = (
        str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        parameter_count(config),
    )
    if is_local:
        tensors = read_tensors(folder)
        dtype = FLOAT_DTYPES.get(tensors["model.norm.weight"].dtype, dtype) if "model.norm.weight" in tensors else dtype
        parameters = sum(tensor.numel for tensor in tensors.values())
    width = DTYPE_BYTES[DTYPES.get(dtype, "F32")]
    sizes = (config["hidden_size"], width, ranks)
    return {
        "model": model,
        "model_type": config["model_type"],
        "layout": str(layout),
        **layout.to_config(),
        "layers": layout.table(),
        "parameters": parameters,
        "dtype": dtype,
        "tp_size": ranks,
        "dense": communication(Layout.dense(layout.num_layers), *sizes),
        "this": communication(layout, *sizes),
    }
