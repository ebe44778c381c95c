"""The table of all models, and the facts of machines and versions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ladderize.eval.table import margin_text
from ladderize.report.documents import FoundDocuments
from ladderize.report.join import ReportContent
from ladderize.report.models import ReportModel, Setting, change_text, listing, number_text, points_text, speedup_text

# the beginnings of columns that hold no numbers
TEXT_COLUMNS = ("model", "layout", "adapted", "within", "not promoted", "failed")
Known = TypeVar("Known")


@dataclass(frozen=True)
class ReportTable:
    """A table. Each row has a text for every column, the first of which is its header.

    rows: their first four columns are the answer: the model, how good, within the margin, how fast.
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
    setting = setting or next(iter(content.real_settings), None)
    rows = [_model_row(one, setting, content.margin) for one in content.models]
    filled = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
    shared: dict[str, list[str]] = {}
    for one in content.models:
        if one.timed_as is not None:
            shared.setdefault(one.timed_as.name, []).append(one.name)
    words = "; ".join(f"{', '.join(names)} those of {timed}" for timed, names in shared.items())
    note = f"* Times of another model with the same layout, on which alone speed depends: {words}." if words else ""
    caption = "All models, with 95 % intervals" + (f". Times: {setting.words}" if setting is not None else "")
    numbers = [name for name in filled if not name.startswith(TEXT_COLUMNS)]
    return ReportTable(caption, [{name: row[name] for name in filled} for row in rows], numbers, note)


def _model_row(one: ReportModel, setting: Setting | None, margin: float) -> dict[str, str]:
    timing = one.timing(setting) if setting is not None else None
    row = timing.row if timing is not None else None
    kind = setting.kind if setting is not None else ""
    predictions = one.comparison.predictions if one.comparison is not None else None
    verdict = {"worse": "no: shown to be worse"}.get(one.verdict, one.verdict)
    star = " *" * (one.timed_as is not None)
    speed = timing.whole if timing is not None else None
    same = predictions.same_top_share if predictions is not None else None
    return {
        "model": one.name,
        "points from dense": _known(one.difference, points_text),
        f"within {margin_text(margin)}": verdict,
        f"{kind} speed-up": _known(speed, lambda value: speedup_text(value) + star),
        "perplexity": _known(one.perplexity, lambda value: number_text(value, 3)),
        "KL to dense, nats": _known(one.divergence, lambda kl: f"{kl.value:.4f}"),
        "layout": one.layout_words,
        "adapted": one.adaptation,
        "accuracy": _known(one.accuracy, percent),
        "change of perplexity": _known(one.perplexity_change, change_text),
        "same top token": _known(same, percent),
        f"{kind} prefill ms": _known(row, lambda row: f"{row.ms['prefill']:.2f}"),
        f"{kind} decode ms": _known(row, lambda row: f"{row.ms['decode']:.2f}"),
        "not promoted": one.not_promoted or "",
        "failed": one.failure or "",
    }


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _known(value: Known | None, text: Callable[[Known], str]) -> str:
    """Return the text of a value; empty where there is none."""
    return "" if value is None else text(value)


def setup_facts(found: FoundDocuments) -> list[tuple[str, dict[str, str]]]:
    """Return the names of documents, and the facts of their making. Documents with the same facts are one entry."""
    together: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for path, facts in _facts(found):
        texts = {name: ", ".join(fact) if isinstance(fact, list) else str(fact) for name, fact in facts.items() if fact}
        together.setdefault(tuple(texts.items()), []).append(f"{path.parent.name}/{path.name}")
    return [(listing(names), dict(facts)) for facts, names in together.items()]


def _facts(found: FoundDocuments) -> Iterator[tuple[Path, dict[str, object]]]:
    """Yield the facts of each document's making: machine, versions, options."""
    for path, results in found.results:
        options, model = results.options, results.models[0].model
        versions = {"torch": model.torch_version, "transformers": model.transformers_version}
        asked = {
            "tasks": [*options.get("tasks", ())],
            "samples for each task": options.get("limit"),
            "perplexity on": options.get("perplexity"),
        }
        yield path, {"device": model.device, "dtype": model.dtype, **versions, **asked}
    for path, document in found.benches:
        machine = {
            name.replace("_", " "): fact for name, fact in vars(document.environment).items() if name != "settings"
        }
        link = f"emulated link {document.link.name}" if document.link is not None else document.backend
        rounds = f"{document.options.repeat}, after {document.options.warmup} to warm up"
        yield path, {**machine, "communication": link, "rounds": rounds}
