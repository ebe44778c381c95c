"""How much each layer minds a change."""

from ladderize.adapt.layers.sensitivity_plot import KIND_LOOKS, dense_line, measured_text, sensitivity_panel
from ladderize.convert.sensitivity_file import SensitivityDocument
from ladderize.report.documents import FoundDocuments
from ladderize.report.plot import ReportPlot
from ladderize.report.tables import make_table, number_cell


def sensitivity_plots(found: FoundDocuments) -> list[ReportPlot]:
    """Return one plot for each file."""
    return [
        _plot(one.document, "sensitivity" if number == 1 else f"sensitivity-{number}")
        for number, one in enumerate(found.sensitivities, 1)
    ]


def _plot(document: SensitivityDocument, name: str) -> ReportPlot:
    table = make_table(
        "Sensitivity: the data",
        (
            {
                "layer": number_cell(cost.layer, "{:.0f}"),
                "becomes": cost.kind,
                "increase of perplexity": number_cell(cost.sensitivity, "{:.5g}"),
                "low": number_cell(cost.low, "{:.5g}"),
                "high": number_cell(cost.high, "{:.5g}"),
                "nats per token": number_cell(cost.nats, "{:+.5f}"),
                "class": cost.sensitivity_class,
            }
            for cost in document.costs
        ),
    )
    return ReportPlot(
        name=name,
        title="Sensitivity of each layer",
        caption=f"{measured_text(document)}: {dense_line(document)}. Dashed lines: tau1 {document.tau1:g}, tau2"
        f" {document.tau2:g}, the ends of the classes.",
        summary=f"The cost of {document.num_layers} layers as {', '.join(document.kinds)}, each with its interval.",
        panels=[sensitivity_panel(document)],
        table=table,
        legend=[(kind, *KIND_LOOKS[kind]) for kind in document.kinds],
    )
