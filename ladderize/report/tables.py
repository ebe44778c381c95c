"""The table of all models, and the facts of machines and versions."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ladderize.eval.table import margin_text
from ladderize.report.documents import FoundDocuments
from ladderize.report.join import ReportContent
from ladderize.report.models import ReportModel, Setting, WithInterval, perplexity_text, points_text, speedup_text


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


def models_table(content: ReportContent, setting: Setting | None) -> ReportTable:
    """Return the table with a row for each model, without empty columns.

    setting: the setting of the times.
    """
    rows = [_model_row(one, setting, content.margin) for one in content.models]
    filled = {name for row in rows for name, cell in row.items() if cell not in ("", TableCell(""))}
    shared: dict[str, list[str]] = {}
    for one in content.models:
        if one.timed_as is not None:
            shared.setdefault(one.timed_as.name, []).append(one.name)
    words = "; ".join(f"{', '.join(names)} those of {timed}" for timed, names in shared.items())
    note = f"* Times of another model with the same layout, on which alone speed depends: {words}." if words else ""
    caption = "All models" + (f". Times: {setting.words}" if setting is not None else "")
    return make_table(caption, [{name: row[name] for name in row if name in filled} for row in rows], note)


def _model_row(one: ReportModel, setting: Setting | None, margin: float) -> dict[str, str | TableCell]:
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
        f"within {margin_text(margin)}": verdict + (f": {needed:,} samples needed" if needed else ""),
        f"speed-up (95 %), {kind}": estimate_cell(whole, lambda value: speedup_text(value) + star),
        "perplexity (95 %)": estimate_cell(one.perplexity, perplexity_text),
        "accuracy": percent_cell(one.accuracy),
        "KL to dense, nats": estimate_cell(one.divergence, lambda kl: f"{kl.value:.4f}"),
        "same top token": percent_cell(predictions.same_top_share if predictions is not None else None),
        f"prefill ms, {kind}": number_cell(row.ms["prefill"] if row is not None else None, "{:.2f}"),
        f"decode ms, {kind}": number_cell(row.ms["decode"] if row is not None else None, "{:.2f}"),
        "not promoted": one.not_promoted or "",
        "failed": one.failure or "",
    }


def setup_facts(found: FoundDocuments) -> list[tuple[str, dict[str, str]]]:
    """Return the names of documents, and the facts of their making. Documents with the same facts are one entry."""
    together: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for path, facts in _facts(found):
        texts = {name: ", ".join(fact) if isinstance(fact, list) else str(fact) for name, fact in facts.items() if fact}
        together.setdefault(tuple(texts.items()), []).append(f"{path.parent.name}/{path.name}")
    return [
        (", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3), dict(facts))
        for facts, names in together.items()
    ]


def _facts(found: FoundDocuments) -> Iterator[tuple[Path, dict[str, object]]]:
    """Yield the facts of each document's making: machine, versions, options."""
    for results in found.results:
        options, model = results.document.options, results.document.models[0].model
        versions = {"torch": model.torch_version, "transformers": model.transformers_version}
        asked = {"tasks": options.tasks, "samples for each task": options.limit, "perplexity on": options.perplexity}
        facts = {"device": model.device, "dtype": model.dtype, **versions, **asked}
        yield results.path, {"ladderize": results.version, **facts}
    for bench in found.benches:
        document = bench.document
        machine = {
            name.replace("_", " "): fact for name, fact in vars(document.environment).items() if name != "settings"
        }
        link = f"emulated link {document.link.name}" if document.link is not None else document.backend
        rounds = f"{document.options.repeat}, after {document.options.warmup} to warm up"
        yield bench.path, {"ladderize": bench.version, **machine, "communication": link, "rounds": rounds}
