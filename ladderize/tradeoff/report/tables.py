"""What a report says in tables and lists: the models, their layouts layer by layer, the machines and versions. Imports
no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from ladderize.console import human_bytes
from ladderize.eval.paired.words import margin_text
from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED, format_ranges
from ladderize.runtime.bench.document import BenchDocument
from ladderize.tradeoff.report.documents import FoundDocument, FoundDocuments
from ladderize.tradeoff.report.join import ReportContent
from ladderize.tradeoff.report.subjects import Accuracy, Setting, Subject, WithInterval
from ladderize.tradeoff.report.words import (
    ReportTable,
    TableCell,
    estimate_cell,
    make_table,
    number_cell,
    percent_cell,
    perplexity_text,
    points_text,
    speedup_text,
)

# ---- all models ----


def models_table(content: ReportContent, setting: Setting | None) -> ReportTable:
    """A row for each model; columns without any value are left out; times of another model have a star. setting: of the
    times."""
    rows = [_model_row(one, setting, content.margin) for one in content.models]
    empty = {name for name in (rows[0] if rows else ()) if all(row[name] in ("", TableCell("")) for row in rows)}
    empty -= {"model", "layout"}
    table = make_table("All models", [{key: row[key] for key in row if key not in empty} for row in rows])
    return replace(table, note=_shared_times(content.models))


def _shared_times(models: Sequence[Subject]) -> str:
    """Whose times the models with a star have; empty where none has one."""
    shared = []
    for first, same in groupby(models, key=lambda one: [timed.name for timed in one.timed_as]):
        names = ", ".join(one.name for one in same)
        if first:
            choice = f" (the first of {', '.join(first)})" if len(first) > 1 else ""
            shared.append(f"{names} those of {first[0]}{choice}")
    words = "* Times of another model with the same layout and size, on which alone speed depends:"
    return f"{words} {'; '.join(shared)}." if shared else ""


def _model_row(one: Subject, setting: Setting | None, margin: float) -> dict[str, str | TableCell]:
    timing = one.timing(setting) if setting is not None else None
    row = timing.row if timing is not None else None
    kind = setting.kind if setting is not None else ""
    predictions = one.comparison.predictions if one.comparison is not None else None

    def speedup(estimate: WithInterval) -> str:
        return speedup_text(estimate) + (" *" if one.timed_as else "")

    return {
        "model": one.name,
        "layout": one.layout_words,
        "adapted": one.adaptation,
        "points from dense (95 %)": estimate_cell(one.difference, points_text),
        "points from control (95 %)": estimate_cell(one.over_control, points_text),
        f"within {margin_text(margin)}": _verdict(one.accuracy),
        f"speed-up (95 %), {kind}": estimate_cell(timing.whole if timing is not None else None, speedup),
        "perplexity (95 %)": estimate_cell(one.perplexity, perplexity_text),
        "accuracy": percent_cell(one.accuracy.value if one.accuracy is not None else None),
        "KL to dense, nats": estimate_cell(one.divergence, lambda kl: f"{kl.value:.4f}"),
        "same top token": percent_cell(predictions.same_top_share if predictions is not None else None),
        f"prefill ms, {kind}": number_cell(row.prefill_ms if row is not None else None, "{:.2f}"),
        f"decode ms, {kind}": number_cell(row.decode_ms_per_token if row is not None else None, "{:.2f}"),
        "peak memory": number_cell(row.peak_memory_bytes if row is not None else None, human_bytes),
        "not promoted": one.not_promoted or "",
        "failed": one.failure or "",
    }


def _verdict(accuracy: Accuracy | None) -> str:
    if accuracy is None or accuracy.difference is None or accuracy.verdict is None:
        return ""
    if accuracy.verdict == "too few samples" and accuracy.needed:
        return f"too few samples: {accuracy.needed:,} needed"
    return "no: shown to be worse" if accuracy.verdict == "worse" else accuracy.verdict


# ---- the layers of each layout, as two rows of sync points ----

LETTERS = {BLOCKING: "B", OVERLAPPED: "O", DROPPED: "D"}


def layout_strips(content: ReportContent) -> list[dict[str, Any]]:
    """One for each layout of the models, in their order; a model whose layout is not known has none.

    A strip has the layout, the models that have it, and two rows: a name, runs of layers of one mode, a summary.
    """
    strips: dict[tuple[object, ...], dict[str, Any]] = {}
    for subject in content.models:
        if not subject.attention_sync:
            continue
        if subject.modes not in strips:
            rows = [_strip_row("attention", subject.attention_sync), _strip_row("MLP", subject.mlp_sync)]
            strips[subject.modes] = {"layout": subject.layout_words, "models": [], "rows": rows}
        strips[subject.modes]["models"].append(subject.name)
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


# ---- on what machines and with which versions the numbers were made ----

Facts = dict[str, str]


def setup_facts(found: FoundDocuments) -> list[tuple[str, Facts]]:
    """The names of documents, and what is to be known of these: of every one that measured something; those that were
    made alike are one."""
    together: list[tuple[list[str], Facts]] = []
    for one, facts in _facts(found):
        names = next((names for names, others in together if others == facts), None)
        if names is None:
            together.append((names := [], facts))
        names.append(f"{one.path.parent.name}/{one.path.name}")
    return [(_some_names(names), facts) for names, facts in together]


def _some_names(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 3 else ""
    return ", ".join(names[: 2 if more else 3]) + more


def _facts(found: FoundDocuments) -> Iterator[tuple[FoundDocument, Facts]]:
    for results in found.results:
        options = results.document.options
        for entry in results.document.models[:1]:
            yield (
                results,
                {
                    "ladderize": results.version,
                    "torch": entry.model.torch_version,
                    "transformers": entry.model.transformers_version,
                    "lm-eval": str(entry.harness.get("lm_eval_version", "not used")),
                    "device": f"{entry.model.device}, {entry.model.dtype}",
                    "tasks": ", ".join(options.tasks) or "none",
                    "samples for each task": str(options.limit or "all"),
                    "perplexity on": options.perplexity or "nothing",
                },
            )
    for bench in found.benches:
        yield bench, {"ladderize": bench.version, **_bench_facts(bench.document)}
    for plan in found.plans:
        planned = plan.document
        link = planned.link
        derived = {f"link with {one.ranks} ranks": one.derived for one in planned.links if one.derived is not None}
        yield (
            plan,
            {
                "ladderize": plan.version,
                "figures": " and ".join(dict.fromkeys(row.basis for row in planned.rows)) + ": nothing ran",
                "device": f"{planned.device.name} ({planned.device.source})",
                "link": f"{link.name} ({link.source})" if link is not None else "none: one rank",
                **derived,
                "engine assumed": f"{planned.engine.name} ({planned.engine.source})",
            },
        )


def _bench_facts(document: BenchDocument) -> Facts:
    machine, options = document.environment, document.options
    link = document.link if document.emulated else None
    gpus = {}
    if machine.gpus:
        memory = human_bytes(machine.gpu_memory_bytes or 0)
        gpus["GPUs"] = f"{len(machine.gpus)} x {machine.gpus[0]}, {memory}"
        gpus["CUDA, NCCL"] = f"{machine.cuda}, {machine.nccl}"
    return {
        "torch": machine.torch,
        "transformers": machine.transformers,
        "python": machine.python,
        "system": machine.system,
        "processor": f"{machine.processor}, {machine.cores} cores; threads a rank: {machine.threads_per_rank}",
        **gpus,
        "communication": f"emulated link {link.name} ({link.source})" if link is not None else document.backend,
        "rounds": f"{options.repeat}, after {options.warmup} to warm up",
        "complete": "yes" if document.complete else "no: it was interrupted",
    }
