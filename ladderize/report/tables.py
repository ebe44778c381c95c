"""The tables and lists of a report: models, layouts layer by layer, machines and versions."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ladderize.console import human_bytes
from ladderize.eval.words import margin_text
from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED, format_ranges
from ladderize.plan.hardware import DeviceSpec, EngineFacts
from ladderize.report.documents import FoundDocuments
from ladderize.report.join import ReportContent
from ladderize.report.subjects import (
    Setting,
    Subject,
    WithInterval,
    perplexity_text,
    points_text,
    speedup_text,
)
from ladderize.runtime.collectives.links import Interconnect, Link


@dataclass(frozen=True)
class TableCell:
    """A cell of a table, with the text that is shown.

    value: the number that it is sorted by; None: by the text.
    """

    text: str
    value: float | None = None


@dataclass(frozen=True)
class ReportTable:
    """A table. Each row has a cell for every column; the first cell of a row is its header.

    note: the text below it.
    """

    caption: str
    columns: list[str]
    rows: list[list[TableCell]]
    note: str = ""

    @property
    def numeric(self) -> list[bool]:
        """True for each column that holds numbers."""
        return [any(row[place].value is not None for row in self.rows) for place in range(len(self.columns))]


def make_table(caption: str, rows: Iterable[Mapping[str, str | TableCell]], note: str = "") -> ReportTable:
    """Return a table of rows that all have the same keys, which are the columns."""
    made = [{name: TableCell(cell) if isinstance(cell, str) else cell for name, cell in row.items()} for row in rows]
    return ReportTable(caption, list(made[0]) if made else [], [list(row.values()) for row in made], note)


def number_cell(value: float | None, shown: Callable[[float], str] | str) -> TableCell:
    """Return a cell with a number; it is empty where there is none.

    shown: a format string or a function.
    """
    if value is None:
        return TableCell("")
    return TableCell(shown.format(value) if isinstance(shown, str) else shown(value), float(value))


def percent_cell(share: float | None) -> TableCell:
    return number_cell(share, lambda value: f"{100 * value:.1f} %")


def estimate_cell(estimate: WithInterval | None, text: Callable[[WithInterval], str]) -> TableCell:
    """Return the text of a number with its interval, sorted by the number."""
    return TableCell("") if estimate is None else TableCell(text(estimate), estimate.value)


def interval_cell(estimate: WithInterval, digits: int, *, sign: bool = False) -> TableCell:
    return TableCell(estimate.interval_text(digits, sign=sign), estimate.low)


# ---- all models ----


def models_table(content: ReportContent, setting: Setting | None) -> ReportTable:
    """Return the table with a row for each model, without empty columns.

    setting: the setting of the times.
    """
    rows = [_model_row(one, setting, content.margin) for one in content.models]
    empty = {name for name in (rows[0] if rows else ()) if all(row[name] in ("", TableCell("")) for row in rows)}
    empty -= {"model", "layout"}
    shared: dict[str, list[str]] = {}
    for one in content.models:
        if one.timed_as is not None:
            shared.setdefault(one.timed_as.name, []).append(one.name)
    words = "; ".join(f"{', '.join(names)} those of {timed}" for timed, names in shared.items())
    note = (
        f"* Times of another model with the same layout and size, on which alone speed depends: {words}."
        if words
        else ""
    )
    return make_table("All models", [{key: row[key] for key in row if key not in empty} for row in rows], note)


def _model_row(one: Subject, setting: Setting | None, margin: float) -> dict[str, str | TableCell]:
    timing = one.timing(setting) if setting is not None else None
    row = timing.row if timing is not None else None
    kind = setting.kind if setting is not None else ""
    predictions = one.comparison.predictions if one.comparison is not None else None
    needed = one.samples_needed(margin)
    verdict = {"worse": "no: shown to be worse"}.get(one.verdict(margin), one.verdict(margin))
    star = " *" * (one.timed_as is not None)
    whole = timing.whole if timing is not None else None
    return {
        "model": one.name,
        "layout": one.layout_words,
        "adapted": one.adaptation,
        "points from dense (95 %)": estimate_cell(one.difference, points_text),
        "points from control (95 %)": estimate_cell(one.over_control, points_text),
        f"within {margin_text(margin)}": verdict + (f": {needed:,} samples needed" if needed else ""),
        f"speed-up (95 %), {kind}": estimate_cell(whole, lambda value: speedup_text(value) + star),
        "perplexity (95 %)": estimate_cell(one.perplexity, perplexity_text),
        "accuracy": percent_cell(one.accuracy),
        "KL to dense, nats": estimate_cell(one.divergence, lambda kl: f"{kl.value:.4f}"),
        "same top token": percent_cell(predictions.same_top_share if predictions is not None else None),
        f"prefill ms, {kind}": number_cell(row.prefill_ms if row is not None else None, "{:.2f}"),
        f"decode ms, {kind}": number_cell(row.decode_ms_per_token if row is not None else None, "{:.2f}"),
        "peak memory": number_cell(row.peak_memory_bytes if row is not None else None, human_bytes),
        "not promoted": one.not_promoted or "",
        "failed": one.failure or "",
    }


# ---- the layers of each layout, as two rows of sync points ----

LETTERS = {BLOCKING: "B", OVERLAPPED: "O", DROPPED: "D"}


def layout_strips(content: ReportContent) -> list[dict[str, Any]]:
    """Return a strip for each layout of the models, in their order; a model whose layout is not known has none.

    A strip has the layout, the models that have it, and two rows of a name, runs of layers of one mode, and a summary.
    """
    strips: dict[tuple[object, ...], dict[str, Any]] = {}
    for subject in content.models:
        if subject.attention_sync:
            rows = [_strip_row("attention", subject.attention_sync), _strip_row("MLP", subject.mlp_sync)]
            strip = strips.setdefault(subject.modes, {"layout": subject.layout_words, "models": [], "rows": rows})
            strip["models"].append(subject.name)
    return list(strips.values())


def _strip_row(name: str, modes: Sequence[str]) -> dict[str, Any]:
    runs, layer = [], 0
    for mode, same in groupby(modes):
        length = len(list(same))
        layers = format_ranges(range(layer, layer + length))
        runs.append({"mode": mode, "letter": LETTERS.get(mode, "?"), "length": length, "layers": layers})
        layer += length
    words = [f"{mode} {format_ranges([i for i, m in enumerate(modes) if m == mode])}" for mode in dict.fromkeys(modes)]
    return {"name": name, "runs": runs, "summary": f"{name}: {'; '.join(words)}"}


# ---- the machines and versions that made the numbers ----


def setup_facts(found: FoundDocuments) -> list[tuple[str, dict[str, str]]]:
    """Return the names of documents, and the facts of their making. Documents with the same facts are one entry."""
    together: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for path, facts in _facts(found):
        texts = {name: ", ".join(fact) if isinstance(fact, list) else str(fact) for name, fact in facts.items() if fact}
        known = tuple(texts.items())
        together.setdefault(known, []).append(f"{path.parent.name}/{path.name}")
    return [
        (", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3), dict(facts))
        for facts, names in together.items()
    ]


def _facts(found: FoundDocuments) -> Iterator[tuple[Path, dict[str, object]]]:
    """Yield the facts of each document's making: machine, versions, options."""
    facts: dict[str, object]
    for results in found.results:
        options, entry = results.document.options, results.document.models[0]
        facts = {"device": f"{entry.model.device}, {entry.model.dtype}", "torch": entry.model.torch_version}
        facts |= {"transformers": entry.model.transformers_version, "lm-eval": entry.harness.get("lm_eval_version")}
        facts |= {"tasks": ", ".join(options.tasks) or None, "samples for each task": options.limit or "all"}
        yield results.path, {"ladderize": results.version, **facts, "perplexity on": options.perplexity}
    for bench in found.benches:
        machine, rounds, link = bench.document.environment, bench.document.options, bench.document.link
        known = ("device", "processor", "cores", "threads_per_rank", "gpus", "link", "cuda", "nccl", "torch")
        facts = {name.replace("_", " "): getattr(machine, name) for name in (*known, "transformers", "vllm", "system")}
        facts |= {"communication": bench.document.backend if link is None else f"emulated link {_source(link)}"}
        facts |= {"rounds": f"{rounds.repeat}, after {rounds.warmup} to warm up"}
        yield bench.path, {"ladderize": bench.version, **facts}
    for plan in found.plans:
        parts = {"device": plan.document.device, "link": plan.document.link, "engine assumed": plan.document.engine}
        facts = {name: _source(part) for name, part in parts.items() if part is not None}
        yield plan.path, {"ladderize": plan.version, "figures": "predicted: nothing ran", **facts}


def _source(one: Link | Interconnect | DeviceSpec | EngineFacts) -> str:
    return f"{one.name} ({one.source})"
