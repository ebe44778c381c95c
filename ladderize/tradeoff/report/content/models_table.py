"""The table of all models: what each costs, and what it gains. Imports no torch."""

from ladderize.console import human_bytes
from ladderize.eval.paired.words import margin_text
from ladderize.tradeoff.report.content.join import ReportContent
from ladderize.tradeoff.report.content.subjects import Setting, Subject, WithInterval
from ladderize.tradeoff.report.content.tables import ReportTable, TableCell, TableColumn
from ladderize.tradeoff.report.content.words import (
    estimate_text,
    interval_text,
    number_text,
    speedup_text,
)


def models_table(content: ReportContent, setting: Setting | None) -> ReportTable:
    """A row for each model; columns without any value are left out. setting: of the times."""
    models = content.models
    table = ReportTable("All models", [TableColumn("model"), TableColumn("layout")])
    cells = [[TableCell(subject.name), TableCell(subject.layout_words)] for subject in models]

    def column(label: str, made: list[TableCell], *, numeric: bool = True) -> None:
        if any(cell.text for cell in made):
            table.columns.append(TableColumn(label, numeric))
            for row, cell in zip(cells, made, strict=True):
                row.append(cell)

    column("adapted", [TableCell(subject.adaptation) for subject in models], numeric=False)
    within = f"within {margin_text(content.margin)}"
    column("points from dense (95 %)", [_difference(subject) for subject in models])
    column("points from control (95 %)", [_points(subject.over_control) for subject in models])
    column(within, [_verdict(subject) for subject in models], numeric=False)
    if setting is not None:
        column(f"speed-up (95 %), {setting.kind}", [_speedup(subject, setting) for subject in models])
    column("perplexity (95 %)", [_perplexity(subject) for subject in models])
    column("accuracy", [_accuracy(subject) for subject in models])
    column("KL to dense, nats", [_kl(subject) for subject in models])
    column("same top token", [_same_top(subject) for subject in models])
    if setting is not None:
        column(f"prefill ms, {setting.kind}", [_milliseconds(subject, setting, "prefill") for subject in models])
        column(f"decode ms, {setting.kind}", [_milliseconds(subject, setting, "decode") for subject in models])
        column("peak memory", [_memory(subject, setting) for subject in models])
    column("not promoted", [TableCell(subject.not_promoted or "") for subject in models], numeric=False)
    column("failed", [TableCell(subject.failure or "") for subject in models], numeric=False)
    table.rows.extend(cells)
    return table


def _accuracy(subject: Subject) -> TableCell:
    if subject.accuracy is None:
        return TableCell("")
    return TableCell(f"{100 * subject.accuracy.value:.1f} %", subject.accuracy.value)


def _difference(subject: Subject) -> TableCell:
    return _points(subject.accuracy.difference if subject.accuracy is not None else None)


def _points(difference: WithInterval | None) -> TableCell:
    if difference is None:
        return TableCell("")
    interval = interval_text(difference, 1, sign=True)
    return TableCell(
        number_text(difference.value, 1, sign=True) + (f" ({interval})" if interval else ""), difference.value
    )


def _verdict(subject: Subject) -> TableCell:
    accuracy = subject.accuracy
    if accuracy is None or accuracy.difference is None or accuracy.verdict is None:
        return TableCell("")
    if accuracy.verdict == "too few samples" and accuracy.needed:
        return TableCell(f"too few samples: {accuracy.needed:,} needed")
    return TableCell({"worse": "no: shown to be worse"}.get(accuracy.verdict, str(accuracy.verdict)))


def _perplexity(subject: Subject) -> TableCell:
    return (
        TableCell("")
        if subject.perplexity is None
        else TableCell(estimate_text(subject.perplexity, 3), subject.perplexity.value)
    )


def _kl(subject: Subject) -> TableCell:
    predictions = subject.comparison.predictions if subject.comparison is not None else None
    return TableCell("") if predictions is None else TableCell(f"{predictions.mean_kl:.4f}", predictions.mean_kl)


def _same_top(subject: Subject) -> TableCell:
    predictions = subject.comparison.predictions if subject.comparison is not None else None
    if predictions is None:
        return TableCell("")
    return TableCell(f"{100 * predictions.same_top_share:.1f} %", predictions.same_top_share)


def _speedup(subject: Subject, setting: Setting) -> TableCell:
    timing = subject.timing(setting)
    if timing is None:
        return TableCell("")
    return TableCell(speedup_text(timing.speedup["end_to_end"]), timing.speedup["end_to_end"].value)


def _milliseconds(subject: Subject, setting: Setting, phase: str) -> TableCell:
    timing = subject.timing(setting)
    if timing is None:
        return TableCell("")
    value = timing.prefill_ms if phase == "prefill" else timing.decode_ms_per_token
    return TableCell(f"{value:.2f}", value)


def _memory(subject: Subject, setting: Setting) -> TableCell:
    timing = subject.timing(setting)
    if timing is None or timing.peak_memory_bytes is None:
        return TableCell("")
    return TableCell(human_bytes(timing.peak_memory_bytes), float(timing.peak_memory_bytes))
