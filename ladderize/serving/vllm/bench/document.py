"""bench.json of ``--engine vllm``, described in docs/files.md, and what a person sees of it."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ladderize.console import Console
from ladderize.figure import PlotPanel, picture_spec, save_pictures
from ladderize.runtime.bench.document import TimedDocument
from ladderize.runtime.bench.harness import TimedVariant
from ladderize.runtime.bench.report import (
    TABLE_TITLES,
    bar_panel,
    bounds_text,
    labelled,
    rounds_text,
    short_ms,
    show_document,
)
from ladderize.runtime.bench.rows import PHASES, InferenceRow, few_rounds, inference_figures, quartiles
from ladderize.runtime.bench.trace import Overlap
from ladderize.serving.vllm.bench.options import VllmBenchOptions

ENGINE = "vllm"


@dataclass(frozen=True)
class VllmBenchRow(InferenceRow):
    """One model at one batch size. By phase: ``prefill`` and ``decode``; samples are of every counted round.

    architecture: vLLM's model class. tp_size: ranks of one replica, where there are two. ratios: time over the first
    model's of the same round, the median of the rounds; quartiles: the first and the third. A speed-up is the first
    model's median over this one's. overlap: what a trace showed, None without --profile. all_reduce: vLLM's own for
    blocking sums of each phase's size, None where that is the document's ``backend``. fused_norm: whether vLLM was
    configured to fuse norms into all-reduces.
    """

    LEFT_OUT: ClassVar = ("overlap", "all_reduce", "fused_norm")

    architecture: str
    ratio_prefill: float
    ratio_decode: float
    ratio_prefill_quartiles: list[float]
    ratio_decode_quartiles: list[float]
    quartiles_ms: dict[str, list[float]]
    samples_ms: dict[str, list[float]]
    overlap: dict[str, Overlap] | None = None
    all_reduce: dict[str, str] | None = None
    fused_norm: bool | None = None

    def ratio(self, phase: str) -> float:
        """Time over the first model's."""
        return self.ratio_prefill if phase == "prefill" else self.ratio_decode

    def ratio_quartiles(self, phase: str) -> list[float]:
        """The first and the third, of the rounds."""
        return self.ratio_prefill_quartiles if phase == "prefill" else self.ratio_decode_quartiles


@dataclass
class ServedVariant(TimedVariant):
    """architecture: vLLM's model class, its own or the plugin's. replicas: that share ranks and batch."""

    architecture: str
    all_reduce: dict[str, str] | None = field(default=None, kw_only=True)
    fused_norm: bool | None = field(default=None, kw_only=True)
    replicas: int = field(default=1, kw_only=True)


def vllm_rows(variants: Sequence[ServedVariant], options: VllmBenchOptions, batch: int) -> list[VllmBenchRow]:
    """Rows of one batch size; the first is what the others are compared with."""
    first, rows = variants[0].timed.seconds, []
    for variant in variants:
        seconds = variant.timed.seconds
        ratios = {phase: [a / b for a, b in zip(seconds[phase], first[phase], strict=True)] for phase in PHASES}
        rows.append(
            VllmBenchRow(
                **variant.model_figures(options.tp_size // variant.replicas, batch),
                **inference_figures(seconds, first, options.decode_steps, batch),
                kind=variant.kind,
                architecture=variant.architecture,
                ratio_prefill=statistics.median(ratios["prefill"]),
                ratio_decode=statistics.median(ratios["decode"]),
                ratio_prefill_quartiles=quartiles(ratios["prefill"]),
                ratio_decode_quartiles=quartiles(ratios["decode"]),
                quartiles_ms={phase: [1e3 * s for s in quartiles(seconds[phase])] for phase in PHASES},
                samples_ms=variant.timed.samples_ms(),
                overlap=variant.overlap,
                all_reduce=variant.all_reduce,
                fused_norm=variant.fused_norm,
            )
        )
    return rows


@dataclass(frozen=True)
class VllmBenchDocument(TimedDocument):
    """Of vLLM. Keys mean what they mean in the runtime's bench.json.

    engine: ``vllm``, which no document of the runtime has. backend: what carries blocking all-reduces in vLLM.
    messages: what carries those in flight, as LADDERIZE_VLLM_BACKEND chose; None where no row is in the plugin's class.
    """

    engine: str
    vllm: str
    messages: str | None
    options: VllmBenchOptions
    rows: list[VllmBenchRow]

    @property
    def group_text(self) -> str:
        """Which engine, on how many ranks, over what; says whether messages are emulated."""
        ranks = self.options.tp_size
        in_flight = "" if self.messages is None else f", messages in flight by {self.messages}"
        over = "" if ranks == 1 else f", {self.backend}{in_flight}"
        emulated = f", EMULATED messages: {self.messages}" if self.emulated else ""
        return f"vLLM {self.vllm}, {ranks} rank{'s' * (ranks > 1)}{over}{emulated}"


def show_vllm_bench(document: VllmBenchDocument, console: Console) -> None:
    """Print the result of ``ladderize bench --engine vllm``."""
    options, rows = document.options, labelled(document.rows)
    show_document(
        document,
        console,
        heading=f"{document.group_text}; prompt {options.prompt_len}, output {options.output_len},"
        f" {rounds_text(options, complete=document.complete)}",
        tables={
            title: [_line(row, label, phase, document) for row, label in rows] for phase, title in TABLE_TITLES.items()
        },
        explanations=_explanations(document),
        warnings=list(filter(None, [few_rounds(options.repeat)])),
    )


def _line(row: VllmBenchRow, label: str, phase: str, document: VllmBenchDocument) -> dict[str, str]:
    line = {
        "model": label,
        "class": row.architecture.removesuffix("ForCausalLM"),
        "batch": str(row.batch_size),
        "ms": short_ms(row.total_ms(phase)),
    }
    if phase == "decode":
        line["tokens/s"] = f"{row.output_tokens_per_s:.1f}"
    spread = bounds_text(row.ratio_quartiles(phase), digits=3) if document.has_interval(row) else ""
    return line | {"of first": f"{row.ratio(phase):.3f}x", "quartiles": spread}


def _explanations(document: VllmBenchDocument) -> Iterator[str]:
    yield "of first: time over the first model's in the same round, the median of the rounds; then quartiles."
    shares = [
        f"{label} {phase} {overlap.share:.0%} (batch {row.batch_size})"
        for row, label in labelled(document.rows)
        for phase, overlap in (row.overlap or {}).items()
        if overlap.in_flight_ms
    ]
    if shares:
        yield f"Of the messages' time in flight, under compute in the traces: {', '.join(shares)}."
    names = dict.fromkeys(name for row in document.rows for name in (row.all_reduce or {}).values())
    if names:
        yield f"vLLM's blocking all-reduces: {', '.join(names)}, by the size of the message."
    fused = [label for row, label in labelled(document.rows) if row.fused_norm]
    if document.options.tp_size > 1:
        yield (
            f"Norms are fused into the all-reduces before them in: {', '.join(dict.fromkeys(fused)) or 'no row'}."
            " An overlapped sum is not fused."
        )
    if any(row.tp_size < document.options.tp_size for row in document.rows):
        yield "2 replicas: on half of the ranks each, at the same time, each with half of the batch."


BAR_COLOURS = {"reference": "waited", "others": "compute"}


def plot_vllm_bench(document: VllmBenchDocument, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns their paths."""
    batches = sorted({row.batch_size for row in document.rows})
    # batch sizes differ too much in time to share an axis
    panels = [_panel(document, phase, batch) for batch in batches for phase in PHASES]
    about = f"{document.group_text}; medians of {document.options.repeat} interleaved rounds"
    return save_pictures(picture_spec(panels, title=about, columns=2, width=420), stem)


def _panel(document: VllmBenchDocument, phase: str, batch: int) -> PlotPanel:
    bars: list[dict[str, Any]] = []
    for row, label in labelled(document.rows):
        if row.batch_size == batch:
            median = row.total_ms(phase)
            part, ratio = ("others", f", {row.ratio(phase):.2f}x") if bars else ("reference", "")
            spread = (median, *row.quartiles_ms[phase])
            text = f"{median:.3g} ms{ratio}"
            bars.append({"row": label, "parts": [(part, 0.0, median)], "spread": spread, "text": text})
    what = "prefill" if phase == "prefill" else "decode, per step"
    return bar_panel(f"{what}, batch {batch}", bars, BAR_COLOURS)
