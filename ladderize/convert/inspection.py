"""A checkpoint's layout and its communication, from config and headers alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ladderize.checkpoint.config import check_decoder, check_quantised, kv_head_count, parameter_count
from ladderize.checkpoint.opening import read_checkpoint, read_config
from ladderize.checkpoint.quantised import plain_config, quantisation_of
from ladderize.checkpoint.reading import DTYPE_BYTES, FLOAT_DTYPES, STORED_NAMES, resolve_json
from ladderize.convert.retraining import Retraining, read_retrainings
from ladderize.errors import UserError
from ladderize.files.records import Record
from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED, Layout, check_split, runnable_sizes, usual_ranks


@dataclass(frozen=True)
class TokenCommunication(Record):
    """The sync points, by mode, and the bytes of one token on one rank.

    reduced_bytes: one hidden state for each all-reduce.
    sent_bytes: a ring sends 2 (N-1)/N of that.
    exposed_sent_bytes: those of blocking all-reduces, which nothing hides.
    """

    blocking: int
    overlapped: int
    dropped: int
    reduced_bytes: int
    sent_bytes: int
    exposed_sent_bytes: int


@dataclass(frozen=True)
class InspectionReport(Record):
    """The document of ``ladderize inspect``.

    tp_sizes: all that can run it.
    tp_size: the ranks that bytes are counted for.
    dense, this: the communication of the dense model and of this layout.
    retrainings: in order.
    layers: rows of ``Layout.table``.
    remark: says of a family that is not converted how it is read.
    quantisation: the stored format of weights that are not floats; dtype is then that of the norms.
    refusal: the reason for which a conversion would refuse the tensors.
    """

    LEFT_OUT: ClassVar = ("remark", "quantisation", "refusal")

    model: str
    model_type: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    layers: list[dict[str, Any]]
    parameters: int
    dtype: str
    num_attention_heads: int
    num_key_value_heads: int
    tp_sizes: list[int]
    tp_size: int
    dense: TokenCommunication
    this: TokenCommunication
    retrainings: list[Retraining]
    remark: str | None = None
    quantisation: str | None = None
    refusal: str | None = None


def communication_per_token(layout: Layout, hidden_size: int, dtype_bytes: int, tp_size: int) -> TokenCommunication:
    """Return the all-reduces and bytes of one token on one of ``tp_size`` ranks.

    The vocabulary's collectives are not counted: they are the same for every layout.
    """
    message = hidden_size * dtype_bytes
    ring = 2 * (tp_size - 1) * message // tp_size
    blocking, overlapped = layout.count(BLOCKING), layout.count(OVERLAPPED)
    return TokenCommunication(
        blocking=blocking,
        overlapped=overlapped,
        dropped=layout.count(DROPPED),
        reduced_bytes=(blocking + overlapped) * message,
        sent_bytes=(blocking + overlapped) * ring,
        exposed_sent_bytes=blocking * ring,
    )


def inspect_checkpoint(
    model: str | Path, *, revision: str | None = None, tp_size: int | None = None
) -> InspectionReport:
    """Return the layout, parameters, and sync points and bytes per token of a checkpoint and of the dense model. No
    weights are read.

    model: a folder or a hub id.
    tp_size: None: the layout's sync_tp_size, else 8, or the largest size below it that the model can be split into.
    Raises UserError or LayoutError, also for a ``tp_size`` that the model cannot be split into.
    """
    model = str(model)
    folder, is_local = resolve_json(model, revision)
    config = read_config(folder)
    quantisation = quantisation_of(config, folder)
    remark = check_decoder(plain_config(config))
    layout = Layout.from_config(config)
    layout.check_model(config)
    ranks = tp_size or usual_ranks(config, layout)
    check_split(config, ranks, name="--tp-size")
    if layout.sync_tp_size is not None and layout.sync_tp_size % ranks:
        raise UserError(
            f"--tp-size {ranks} does not divide sync_tp_size {layout.sync_tp_size}, so it cannot run this layout"
        )
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    parameters, refusal = parameter_count(config), None
    if is_local:
        checkpoint = read_checkpoint(folder)
        tensors = checkpoint.tensors
        if remark is None:
            try:
                check_quantised(checkpoint)
            except UserError as error:
                refusal = str(error)
        dtype = FLOAT_DTYPES.get(tensors["model.norm.weight"].dtype, dtype) if "model.norm.weight" in tensors else dtype
        if quantisation is None:
            parameters = sum(tensor.numel for tensor in tensors.values())
    sizes = (config["hidden_size"], DTYPE_BYTES[STORED_NAMES.get(dtype, "F32")], ranks)
    return InspectionReport(
        model=model,
        model_type=config["model_type"],
        layout=str(layout),
        **layout.to_config(),
        layers=layout.table(),
        parameters=parameters,
        dtype=dtype,
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=kv_head_count(config),
        tp_sizes=runnable_sizes(config, layout),
        tp_size=ranks,
        dense=communication_per_token(Layout.dense(layout.num_layers), *sizes),
        this=communication_per_token(layout, *sizes),
        retrainings=read_retrainings(folder),
        remark=remark,
        quantisation=quantisation.words if quantisation is not None else None,
        refusal=refusal,
    )
