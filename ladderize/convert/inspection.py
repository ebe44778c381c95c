"""A checkpoint's layout, its communication and its history, from config, headers and documents alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ladderize.checkpoint.config import check_config, check_quantised, kv_head_count, parameter_count, stored_dtype
from ladderize.checkpoint.opening import find_source, read_checkpoint
from ladderize.checkpoint.quantised import plain_config, quantisation_of
from ladderize.checkpoint.reading import DTYPE_BYTES, STORED_NAMES
from ladderize.errors import UserError
from ladderize.files.documents import read_json
from ladderize.files.records import Record
from ladderize.layout import MODES, Layout, check_split, format_ranges, runnable_sizes, usual_ranks

# ---- its history: documents that adapt and spd write beside the weights, and that conversions carry along ----
ALIGNMENT, DISTILLATION = "alignment.json", "distillation.json"
DOCUMENTS = (ALIGNMENT, DISTILLATION, "adaptation.json")  # in their usual order


@dataclass(frozen=True)
class Retraining(Record):
    """One retraining of a checkpoint's weights, those of ``model``; left_by_alignment: the held-out divergence from the
    dense model, in nats per token."""

    method: str
    model: str
    teacher: str | None
    layout: str
    layers: list[int]
    data: list[str]
    left_by_alignment: float | None

    def summary(self) -> str:
        """Return the retraining in words."""
        taught = f", taught by {self.teacher}" if self.teacher else ""
        return f"{self.method}: layers {format_ranges(self.layers)} of {self.model}, on {', '.join(self.data)}{taught}"


def read_retrainings(folder: Path) -> list[Retraining]:
    """Return the retrainings of the weights in a checkpoint's folder, in order. A file of such a name that is not
    ladderize's is ignored; one of ours that is damaged is a UserError."""
    retrainings = []
    for name in DOCUMENTS:
        path = folder / name
        content = read_json(path, advice="restore it, or remove it") if path.is_file() else {}
        if not {"ladderize_version", "model"} <= content.keys():
            continue  # another tool's, or an adapter's that names only its base
        try:
            data, divergences = content["data"], content.get("heldout_divergence") or {}
            layers = [entry["layer"] if isinstance(entry, dict) else entry for entry in content["layers"]]
            fields = {
                **{key: content[key] for key in ("method", "model", "layout")},
                "teacher": content.get("teacher", content.get("distill_from")),
                "layers": layers,
                "data": data if isinstance(data, list) else [data["file"]],
                "left_by_alignment": divergences.get("after") if name == ALIGNMENT else None,
            }
        except (KeyError, TypeError, AttributeError):
            raise UserError(f"{path} is damaged; restore it, or remove it") from None
        if layers:
            retrainings.append(Retraining.from_dict(fields, path))
    return retrainings


# ---- what it communicates ----


@dataclass(frozen=True)
class TokenCommunication(Record):
    """The sync points, by mode, and the bytes of one token on one rank. A ring sends 2 (N-1)/N of what is reduced;
    exposed are those of blocking all-reduces, which nothing hides."""

    blocking: int
    overlapped: int
    delayed: int
    dropped: int
    reduced_bytes: int
    sent_bytes: int
    exposed_sent_bytes: int

    @classmethod
    def of(cls, layout: Layout, message: int, tp_size: int) -> "TokenCommunication":
        """Return the communication of one token on one rank, whose hidden state has ``message`` bytes. The vocabulary's
        collectives are not counted: they are the same for every layout."""
        ring = 2 * (tp_size - 1) * message // tp_size
        counts = {name: layout.count(name) for name in MODES}
        sent = sum(counts[name] for name, mode in MODES.items() if mode.sends)
        exposed = sum(counts[name] for name, mode in MODES.items() if mode.sends and not mode.hides)
        return cls(**counts, reduced_bytes=sent * message, sent_bytes=sent * ring, exposed_sent_bytes=exposed * ring)


@dataclass(frozen=True)
class InspectionReport(Record):
    """The document of ``ladderize inspect``.

    tp_sizes: all that can run it. tp_size: the ranks that bytes are counted for.
    quantisation: the stored format of weights that are not floats; dtype is then that of the embedding.
    refusal: the reason for which a conversion would refuse the tensors.
    """

    LEFT_OUT: ClassVar = ("quantisation", "refusal")

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
    quantisation: str | None = None
    refusal: str | None = None

    def lines(self) -> list[str]:
        """Return the model and its history for people, line by line."""
        sizes = ", ".join(map(str, self.tp_sizes))
        if self.sync_tp_size is not None:
            sizes += f"; in groups, on ladderize's runtime, multiples of {self.sync_tp_size}"
        return [
            f"model       {self.model} ({self.model_type})",
            f"layout      {self.layout}",
            f"parameters  {self.parameters:,} stored as {self.dtype}",
            f"heads       {self.num_attention_heads}, KV heads {self.num_key_value_heads}; TP sizes {sizes}",
            *([f"quantised   {self.quantisation}"] if self.quantisation else []),
            *(f"retrained   {retraining.summary()}" for retraining in self.retrainings),
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of a table of what a token sends, beside the dense model's."""
        keys = {f"{name} {'all-reduces' if mode.sends else 'sync points'}": name for name, mode in MODES.items()}
        keys |= {"bytes reduced": "reduced_bytes", "bytes sent (ring)": "sent_bytes"}
        keys["of these, waited for"] = "exposed_sent_bytes"
        dense, this = self.dense.to_dict(), self.this.to_dict()
        return [{"": name, "dense": dense[key], "this layout": this[key]} for name, key in keys.items()]


def inspect_checkpoint(model: str | Path, *, tp_size: int | None = None) -> InspectionReport:
    """Return the layout, parameters, and sync points and bytes per token of a checkpoint (a folder or a hub id) and of
    the dense model. No weights are read. tp_size: None: ``usual_ranks``."""
    source = find_source(model)
    folder, config = source.folder, source.config
    check_config(plain_config(config))
    quantisation, layout = quantisation_of(config, folder), Layout.from_config(config)
    layout.check_model(config)
    ranks, sizes = tp_size or usual_ranks(config, layout), runnable_sizes(config, layout)
    check_split(config, ranks, name="--tp-size")
    if ranks not in sizes:
        raise UserError(
            f"--tp-size {ranks} does not divide sync_tp_size {layout.sync_tp_size}; messages of groups of ranks are not"
            " counted here"
        )
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    parameters, refusal = parameter_count(config), None
    if source.is_local:
        checkpoint = read_checkpoint(folder)
        try:
            check_quantised(checkpoint)
        except UserError as error:
            refusal = str(error)
        dtype = stored_dtype(checkpoint, dtype)
        if quantisation is None:
            parameters = sum(tensor.numel for tensor in checkpoint.tensors.values())
    message = config["hidden_size"] * DTYPE_BYTES[STORED_NAMES.get(dtype, "F32")]
    return InspectionReport(
        model=str(model),
        model_type=config["model_type"],
        layout=str(layout),
        **layout.to_config(),
        layers=layout.table(),
        parameters=parameters,
        dtype=dtype,
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=kv_head_count(config),
        tp_sizes=sizes,
        tp_size=ranks,
        dense=TokenCommunication.of(Layout.dense(layout.num_layers), message, ranks),
        this=TokenCommunication.of(layout, message, ranks),
        retrainings=read_retrainings(folder),
        quantisation=quantisation.words if quantisation is not None else None,
        refusal=refusal,
    )
