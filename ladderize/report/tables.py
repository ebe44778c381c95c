"""The table of all models, and the facts of machines and versions."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.eval.results import EvalResults
from ladderize.eval.table import margin_text
from ladderize.report.documents import FoundDocuments
from ladderize.report.join import ReportContent
from ladderize.report.models import ReportModel, Setting, listing, number_text, points_text, speedup_text
from ladderize.runtime.bench.document import BenchDocument

# the beginnings of columns that hold no numbers
TEXT_COLUMNS = ("model", "layout", "adapted", "within", "not promoted", "failed")


@dataclass(frozen=True)
class ReportTable:
    """Rows with a text for every column: the first four are the model, how good, within the margin, and how fast.

    numbers: the columns that hold numbers.
    note: the text below it.
    """

    caption: str
    rows: list[dict[str, str]]
    numbers: list[str]
    note: str


def models_table(content: ReportContent, setting: Setting | None) -> ReportTable:
    """Return the table with a row for each model, without empty columns.

    setting: the setting of the times; None: the first one that has any.
    """
    timed = [setting for setting in content.settings if any(setting in model.timings for model in content.models)]
    setting = setting or (timed[0] if timed else None)
    rows = [_model_row(model, setting, content.margin) for model in content.models]
    filled = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
    shared: dict[str, list[str]] = {}
    for model in content.models:
        if model.timed_as is not None:
            shared.setdefault(model.timed_as.name, []).append(model.name)
    donors = "; ".join(f"{', '.join(names)} those of {timed}" for timed, names in shared.items())
    note = f"* Times of another model with the same layout, on which alone speed depends: {donors}." * bool(donors)
    caption = "All models, with 95 % intervals" + (f". Times: {setting.title}" if setting is not None else "")
    numbers = [name for name in filled if not name.startswith(TEXT_COLUMNS)]
    return ReportTable(caption, [{name: row[name] for name in filled} for row in rows], numbers, note)


def _model_row(model: ReportModel, setting: Setting | None, margin: float) -> dict[str, str]:
    timing = model.timings.get(setting) if setting is not None else None
    kind = setting.kind if setting is not None else ""
    predictions = model.comparison.predictions if model.comparison is not None else None
    star = " *" * (model.timed_as is not None)
    return {
        "model": model.name,
        "points from dense": points_text(model.difference) if model.difference else "",
        f"within {margin_text(margin)}": "no: shown to be worse" if model.verdict == "worse" else model.verdict,
        f"{kind} speed-up": speedup_text(timing.speedup()) + star if timing else "",
        "perplexity": number_text(model.perplexity, 3) if model.perplexity is not None else "",
        "KL to dense, nats": f"{model.divergence.value:.4f}" if model.divergence else "",
        "layout": model.layout.words,
        "adapted": model.adaptation,
        "accuracy": f"{100 * model.accuracy:.1f} %" if model.accuracy is not None else "",
        "change of perplexity": model.perplexity_change.text(3, sign=True) if model.perplexity_change else "",
        "same top token": f"{100 * predictions.same_top_share:.1f} %" if predictions else "",
        f"{kind} prefill ms": f"{timing.row.ms['prefill']:.2f}" if timing else "",
        f"{kind} decode ms": f"{timing.row.ms['decode']:.2f}" if timing else "",
        "not promoted": model.not_promoted or "",
        "failed": model.failure or "",
    }


def setup_facts(documents: FoundDocuments) -> list[tuple[str, dict[str, str]]]:
    """Return the names of documents, and the facts of their making: machine, versions, options.

    Documents with the same facts are one entry.
    """
    facts: list[tuple[Path, dict[str, object]]] = []
    for path, results in documents.of(EvalResults):
        options, model = results.options, results.models[0].model
        versions = {"torch": model.torch_version, "transformers": model.transformers_version}
        asked = {
            "tasks": [*options.get("tasks", ())],
            "samples for each task": options.get("limit"),
            "perplexity on": options.get("perplexity"),
        }
        facts.append((path, {"device": model.device, "dtype": model.dtype, **versions, **asked}))
    for path, bench in documents.of(BenchDocument):
        machine = {name.replace("_", " "): fact for name, fact in vars(bench.environment).items() if name != "settings"}
        link = f"emulated link {bench.link.name}" if bench.link is not None else bench.backend
        rounds = f"{bench.options.repeat}, after {bench.options.warmup} to warm up"
        facts.append((path, {**machine, "communication": link, "rounds": rounds}))
    together: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for path, stated in facts:
        texts = {
            name: ", ".join(fact) if isinstance(fact, list) else str(fact) for name, fact in stated.items() if fact
        }
        together.setdefault(tuple(texts.items()), []).append(f"{path.parent.name}/{path.name}")
    return [(listing(names), dict(texts)) for texts, names in together.items()]
