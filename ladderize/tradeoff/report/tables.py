"""What a report says in tables and lists: the models, their layouts layer by layer, the machines and versions. Imports
no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ladderize.console import human_bytes
from ladderize.eval.paired.words import margin_text
from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED, format_ranges
from ladderize.tradeoff.report.documents import FoundDocuments
from ladderize.tradeoff.report.join import ReportContent
from ladderize.tradeoff.report.subjects import Accuracy, Setting, Subject, Timing, WithInterval
from ladderize.tradeoff.report.words import (
    ReportTable,
    TableCell,
    estimate_text,
    number_cell,
    points_text,
    speedup_text,
)

# ---- all models ----


def models_table(content: ReportContent, setting: Setting | None) -> ReportTable:
    """A row for each model; columns without any value are left out. setting: of the times."""
    models = content.models
    columns: dict[str, Callable[[Subject], TableCell]] = {
        "model": lambda one: TableCell(one.name),
        "layout": lambda one: TableCell(one.layout_words),
        "adapted": lambda one: TableCell(one.adaptation),
        "points from dense (95 %)": lambda one: _estimate(one.difference, points_text),
        "points from control (95 %)": lambda one: _estimate(one.over_control, points_text),
        f"within {margin_text(content.margin)}": lambda one: TableCell(_verdict(one.accuracy)),
    }
    timings = {id(one): one.timing(setting) for one in models} if setting is not None else {}
    kind = setting.kind if setting is not None else ""

    def timed(cell: Callable[[Timing], TableCell]) -> Callable[[Subject], TableCell]:
        return lambda one: TableCell("") if (timing := timings.get(id(one))) is None else cell(timing)

    columns |= {
        f"speed-up (95 %), {kind}": timed(lambda timing: _estimate(timing.whole, speedup_text)),
        "perplexity (95 %)": lambda one: _estimate(one.perplexity, lambda found: estimate_text(found, 3)),
        "accuracy": lambda one: _percent(one.accuracy.value if one.accuracy else None),
        "KL to dense, nats": lambda one: number_cell(_predicted(one, "mean_kl"), "{:.4f}"),
        "same top token": lambda one: _percent(_predicted(one, "same_top_share")),
        f"prefill ms, {kind}": timed(lambda timing: number_cell(timing.prefill_ms, "{:.2f}")),
        f"decode ms, {kind}": timed(lambda timing: number_cell(timing.decode_ms_per_token, "{:.2f}")),
        "peak memory": timed(lambda timing: _memory(timing.peak_memory_bytes)),
        "not promoted": lambda one: TableCell(one.not_promoted or ""),
        "failed": lambda one: TableCell(one.failure or ""),
    }
    made = {label: [cell(one) for one in models] for label, cell in columns.items()}
    shown = {
        label: cells for label, cells in made.items() if label in ("model", "layout") or any(c.text for c in cells)
    }
    return ReportTable("All models", list(shown), [list(row) for row in zip(*shown.values(), strict=True)])


def _estimate(estimate: WithInterval | None, text: Callable[[WithInterval], str]) -> TableCell:
    return TableCell("") if estimate is None else TableCell(text(estimate), estimate.value)


def _percent(share: float | None) -> TableCell:
    return TableCell("") if share is None else TableCell(f"{100 * share:.1f} %", share)


def _memory(size: int | None) -> TableCell:
    return TableCell("") if size is None else TableCell(human_bytes(size), float(size))


def _predicted(subject: Subject, name: str) -> float | None:
    predictions = subject.comparison.predictions if subject.comparison is not None else None
    return None if predictions is None else float(getattr(predictions, name))


def _verdict(accuracy: Accuracy | None) -> str:
    if accuracy is None or accuracy.difference is None or accuracy.verdict is None:
        return ""
    if accuracy.verdict == "too few samples" and accuracy.needed:
        return f"too few samples: {accuracy.needed:,} needed"
    return "no: shown to be worse" if accuracy.verdict == "worse" else accuracy.verdict


# ---- the layers of each layout, as two rows of sync points ----

LETTERS = {BLOCKING: "B", OVERLAPPED: "O", DROPPED: "D"}


@dataclass(frozen=True)
class StripRun:
    """Sync points in a row that have one mode. layers: such as 4:8."""

    mode: str
    letter: str
    length: int
    layers: str


@dataclass(frozen=True)
class StripRow:
    """summary: all of it in words."""

    name: str
    runs: list[StripRun]
    summary: str


@dataclass(frozen=True)
class LayoutStrip:
    """One layout. models: that have it."""

    layout: str
    models: list[str]
    rows: list[StripRow]


def layout_strips(content: ReportContent) -> list[LayoutStrip]:
    """One for each layout of the models, in their order; a model whose layout is not known has none."""
    strips: dict[tuple[object, ...], LayoutStrip] = {}
    for subject in content.models:
        if not subject.attention_sync:
            continue
        if subject.modes not in strips:
            rows = [_row("attention", subject.attention_sync), _row("MLP", subject.mlp_sync)]
            strips[subject.modes] = LayoutStrip(subject.layout_words, [], rows)
        strips[subject.modes].models.append(subject.name)
    return list(strips.values())


def _row(name: str, modes: Sequence[str]) -> StripRow:
    runs, layer = [], 0
    for mode, same in groupby(modes):
        length = len(list(same))
        runs.append(StripRun(mode, LETTERS.get(mode, "?"), length, format_ranges(range(layer, layer + length))))
        layer += length
    words = [f"{mode} {format_ranges([i for i, m in enumerate(modes) if m == mode])}" for mode in dict.fromkeys(modes)]
    return StripRow(name, runs, f"{name}: {'; '.join(words)}")


# ---- on what machines and with which versions the numbers were made ----


@dataclass(frozen=True)
class SetupFact:
    """One document. name: its file; facts: (what, value)."""

    name: str
    facts: list[tuple[str, str]]


def setup_facts(found: FoundDocuments) -> list[SetupFact]:
    """Of every document that measured something; evaluations that were made alike are one."""
    facts: dict[tuple[tuple[str, str], ...], list[str]] = {}

    def add(path: Path, pairs: list[tuple[str, str]]) -> None:
        facts.setdefault(tuple(pairs), []).append(f"{path.parent.name}/{path.name}")

    for results in found.results:
        options = results.document.options
        for entry in results.document.models[:1]:
            model = entry.model
            pairs = [
                ("ladderize", results.version),
                ("torch", model.torch_version),
                ("transformers", model.transformers_version),
                ("lm-eval", str(entry.harness.get("lm_eval_version", "not used"))),
                ("device", f"{model.device}, {model.dtype}"),
                ("tasks", ", ".join(options.tasks) or "none"),
                ("samples for each task", str(options.limit or "all")),
                ("perplexity on", options.perplexity or "nothing"),
            ]
            add(results.path, pairs)
    for bench in found.benches:
        environment, document = bench.document.environment, bench.document
        pairs = [
            ("ladderize", bench.version),
            ("torch", environment.torch),
            ("transformers", environment.transformers),
            ("python", environment.python),
            ("system", environment.system),
            (
                "processor",
                f"{environment.processor}, {environment.cores} cores; threads a rank: {environment.threads_per_rank}",
            ),
        ]
        if environment.gpus:
            memory = human_bytes(environment.gpu_memory_bytes or 0)
            pairs.append(("GPUs", f"{len(environment.gpus)} x {environment.gpus[0]}, {memory}"))
            pairs.append(("CUDA, NCCL", f"{environment.cuda}, {environment.nccl}"))
        link = document.link if document.emulated else None
        communication = f"emulated link {link.name} ({link.source})" if link is not None else document.backend
        pairs += [
            ("communication", communication),
            ("rounds", f"{document.options.repeat}, after {document.options.warmup} to warm up"),
            ("complete", "yes" if document.complete else "no: it was interrupted"),
        ]
        add(bench.path, pairs)
    for plan in found.plans:
        planned = plan.document
        assumed = planned.link
        pairs = [
            ("ladderize", plan.version),
            ("figures", " and ".join(dict.fromkeys(row.basis for row in planned.rows)) + ": nothing ran"),
            ("device", f"{planned.device.name} ({planned.device.source})"),
            ("link", f"{assumed.name} ({assumed.source})" if assumed is not None else "none: one rank"),
            *((f"link with {one.ranks} ranks", one.derived) for one in planned.links if one.derived is not None),
            ("engine assumed", f"{planned.engine.name} ({planned.engine.source})"),
        ]
        add(plan.path, pairs)
    return [SetupFact(_some_names(names), list(pairs)) for pairs, names in facts.items()]


def _some_names(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 3 else ""
    return ", ".join(names[: 2 if more else 3]) + more
