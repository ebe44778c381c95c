"""The curves of a training, from what it wrote: metrics.jsonl of retraining, the reports of distilled blocks, those of
aligned layers; and their picture. Imports no torch.

A folder may be OUT, or unfinished work, whose metrics.jsonl is still growing.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from ladderize.adapt.align.reports import GROUPS, LayerReport
from ladderize.adapt.methods import METRICS
from ladderize.adapt.retrain.options import Objective
from ladderize.errors import UserError
from ladderize.figure import (
    PlotPanel,
    Spec,
    level,
    line_look,
    lines,
    looks,
    make_spec,
    marks,
    nominal,
    picture_spec,
    quantitative,
    save_pictures,
)
from ladderize.files.documents import read_document
from ladderize.files.parsing import parse_json
from ladderize.files.records import Record
from ladderize.files.regular import read_lines

# where the weight of the teacher's predictions stands, in OUT and in unfinished work
OBJECTIVE_OF = {"adaptation.json": ("options", "objective"), "run.json": ("objective",)}
# where reports stand: the key of their list, and that of a report in its entries (None: the entry is it)
ALIGNED_IN = {"alignment.json": ("layers", None), "spd.json": ("blocks", "alignment")}
DISTILLED_IN = {"distillation.json": ("blocks", None), "spd.json": ("blocks", "distillation")}
SMOOTHED_POINTS = 20  # about as many points does a smoothed loss have


@dataclass(frozen=True)
class Curves:
    """One run."""

    name: str  # of its folder
    label: str = "loss"  # what the training loss is
    loss: list[tuple[int, float]] = field(default_factory=list)  # of each step
    heldout: list[tuple[int, float]] = field(default_factory=list)  # step, perplexity of held-out text
    dense: float | None = None  # the teacher's perplexity
    blocks: dict[int, list[tuple[int, float]]] = field(default_factory=dict)  # of each the held-out loss by step
    aligned: list[LayerReport] = field(default_factory=list)


@dataclass(frozen=True)
class _Metrics(Record):
    """A line of metrics.jsonl, as far as it is drawn. What was no number is null there."""

    KEYS: ClassVar = {"dense": "dense_heldout_perplexity", "heldout": "heldout_perplexity"}

    step: int
    loss: float | None = None
    heldout: float | None = None
    dense: float | None = None


@dataclass(frozen=True)
class _Block(Record):
    block: int
    curve: list[tuple[int, float]]


def read_curves(folder: Path) -> Curves:
    """The curves of what was trained in, or written to, a folder: of every step that left its document there. Raises
    UserError where there are none."""
    folder = folder.expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name the output of adapt or spd, or unfinished work")
    distilled = [_Block.from_dict(*found) for found in _reports(folder, DISTILLED_IN)]
    curves = Curves(
        folder.resolve().name,
        blocks={block.block: block.curve for block in distilled},
        aligned=[LayerReport.from_dict(*found) for found in _reports(folder, ALIGNED_IN)],
    )
    if (folder / METRICS).is_file():
        return _with_metrics(curves, folder)
    if not curves.blocks and not curves.aligned:
        raise UserError(
            f"{folder} has no {METRICS}, and no {', '.join({**ALIGNED_IN, **DISTILLED_IN})} with aligned layers or"
            " distilled blocks; name the output of adapt or spd, or unfinished work"
        )
    return curves


def _with_metrics(curves: Curves, folder: Path) -> Curves:
    path = folder / METRICS
    lines = []
    for number, text in enumerate(read_lines(path), 1):
        if not text.endswith(b"\n"):
            break  # being written, or cut off by a kill
        try:
            lines.append(_Metrics.from_dict(parse_json(text, constants=True), f"{path}, line {number}"))
        except ValueError:
            raise UserError(f"{path}, line {number} is not JSON; the file may be damaged") from None
    return replace(
        curves,
        label=_label(folder),
        loss=[(line.step, line.loss) for line in lines if line.loss is not None],
        heldout=[(line.step, line.heldout) for line in lines if line.heldout is not None],
        dense=next((line.dense for line in lines if line.dense is not None), None),
    )


def _label(folder: Path) -> str:
    for name, keys in OBJECTIVE_OF.items():
        if not (folder / name).is_file():
            continue
        value: Any = read_document(folder / name, name)
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, dict) and "distill_weight" in value:
            return f"loss ({Objective.from_dict(value, name).label})"
    return "loss"


def _reports(folder: Path, places: Mapping[str, tuple[str, str | None]]) -> Iterator[tuple[dict[str, Any], str]]:
    """Each report in the documents of a folder, and where it stands."""
    for name, (entries, key) in places.items():
        path = folder / name
        found = read_document(path, name).get(entries) if path.is_file() else None
        for number, entry in enumerate(found if isinstance(found, list) else []):
            report = entry.get(key) if key is not None and isinstance(entry, dict) else entry
            if report is not None:
                yield report, f"{path}: {entries}[{number}]"


# ---- the picture ----


def draw_curves(runs: Sequence[Curves], stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns their paths."""
    retrained = [run for run in runs if run.loss or run.heldout or not (run.aligned or run.blocks)]
    panels = [_layers_panel(run) for run in runs if run.aligned] + [_blocks_panel(run) for run in runs if run.blocks]
    if retrained:
        panels += [_loss_panel(retrained), heldout_panel(retrained)]
    return save_pictures(picture_spec(panels, columns=len(panels), width=360), stem)


def heldout_panel(runs: Sequence[Curves]) -> PlotPanel:
    """Held-out perplexity by step, beside the dense model's."""
    rows: list[dict[str, Any]] = [
        {"name": run.name, "step": step, "y": value, "words": f"{run.name}: step {step}, perplexity {value:.4g}"}
        for run in runs
        for step, value in finite_heldout(run)
    ]
    dense = dense_perplexities(runs)
    values = [row["y"] for row in rows]
    # a log scale has no zero to leave out
    wide = bool(values) and 0 < 4 * min(values) < max(values)
    scale: Spec = {"type": "log", "nice": False} if wide else {"zero": False}
    y = quantitative("y", "held-out perplexity", scale=scale, axis={"format": "~g", "tickCount": 6})
    encoding = {"x": _steps(), "y": y}
    look = looks("name", {name: line_look(number) for number, name in enumerate(dict.fromkeys(r.name for r in runs))})
    layers = [
        *(level("y", value, dashed=True) for value in dense),
        lines({**encoding, "color": look["color"]}),
        marks({**encoding, **look}, 55),
    ]
    known = f"; dashed: the dense model, {', '.join(f'{value:.4g}' for value in dense)}" if dense else ""
    title = f"Held-out perplexity{known if rows else ': nothing was held out'}"
    return PlotPanel(make_spec("Held-out perplexity by step", 280, rows, layers), picture_title=title)


def finite_heldout(run: Curves) -> list[tuple[int, float]]:
    """Without values that are no numbers, as of a training that broke down."""
    return [(step, value) for step, value in run.heldout if math.isfinite(value)]


def dense_perplexities(runs: Sequence[Curves]) -> list[float]:
    return sorted({round(run.dense, 6) for run in runs if run.dense is not None and math.isfinite(run.dense)})


def smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Means of consecutive points, about ``SMOOTHED_POINTS`` of them; fewer points than twice that stay as they are."""
    width = max(1, len(points) // SMOOTHED_POINTS)
    if width < 2:
        return [(float(step), value) for step, value in points]
    parts = [points[begin : begin + width] for begin in range(0, len(points), width)]
    return [(sum(s for s, _ in part) / len(part), sum(v for _, v in part) / len(part)) for part in parts]


def _steps() -> Spec:
    return quantitative("step", "step", axis={"tickCount": 6, "tickMinStep": 1})


def _loss_panel(runs: Sequence[Curves]) -> PlotPanel:
    """The loss of every step, faint, and its course."""
    labels = sorted({run.label for run in runs})
    names = [run.name if len(labels) == 1 else f"{run.name}: {run.label}" for run in runs]
    rows = [
        {"name": name, "step": step, "y": value, "course": course}
        for name, run in zip(names, runs, strict=True)
        for course, points in ((False, run.loss), (True, smoothed(run.loss)))
        for step, value in points
        if math.isfinite(value)
    ]
    colours = {name: line_look(number)[0] for number, name in enumerate(dict.fromkeys(names))}
    title = f"training {labels[0] if len(labels) == 1 else 'loss'}, nats per token"
    y = quantitative("y", title, scale={"zero": False})
    encoding = {"x": _steps(), "y": y, "color": nominal("name", colours, colours=True)}
    layers = [
        {**lines(encoding, **look), "transform": [{"filter": f"{'' if course else '!'}datum.course"}]}
        for course, look in ((False, {"strokeWidth": 0.6, "opacity": 0.35}), (True, {}))
    ]
    return PlotPanel(make_spec("Training loss by step", 280, rows, layers), picture_title="Training loss")


def _blocks_panel(run: Curves) -> PlotPanel:
    """Every block's held-out loss as a share of what it was before."""
    rows = [
        {"block": block, "step": step, "y": value / (curve[0][1] or 1.0)}
        for block, curve in run.blocks.items()
        for step, value in curve
    ]
    blocks = sorted(run.blocks)
    legend = {"values": [blocks[0], blocks[-1]] if len(blocks) > 10 else blocks, "labelExpr": "'block ' + datum.label"}
    colour = {"field": "block", "type": "ordinal", "scale": {"scheme": "viridis"}, "legend": legend}
    y = quantitative("y", "held-out block loss (MSE), of that before", scale={"zero": True})
    layers = [lines({"x": _steps(), "y": y, "color": colour})]
    title = f"{run.name}: distilled blocks"
    return PlotPanel(make_spec("Held-out loss of each block by step", 280, rows, layers), picture_title=title)


def _layers_panel(run: Curves) -> PlotPanel:
    """The error of every layer's reads and writes, before its alignment and after it."""
    rows = [
        {"name": name, "layer": report.layer, "y": 100 * error, "when": when}
        for report in run.aligned
        for name in GROUPS
        if (errors := report.errors(name)) is not None
        for when, error in zip(("before", "after"), errors, strict=True)
    ]
    colours = {name: line_look(number)[0] for number, name in enumerate(GROUPS)}
    encoding = {
        "x": quantitative("layer", "layer", scale={"zero": False}, axis={"tickMinStep": 1, "format": "d"}),
        "y": quantitative("y", "held-out squared error, % of the target's", scale={"zero": True}),
        "color": nominal("name", colours, colours=True),
    }
    dashes = {"field": "when", "type": "nominal", "scale": {"domain": ["before", "after"], "range": [[2, 3], [1, 0]]}}
    layers = [lines({**encoding, "strokeDash": dashes}), {"mark": {"type": "point", "size": 20}, "encoding": encoding}]
    layers[1]["encoding"] = {**encoding, "detail": {"field": "when"}}
    title = f"{run.name}: aligned layers"
    return PlotPanel(make_spec("Errors of each aligned layer", 280, rows, layers), picture_title=title)
