"""The table at the end of a sweep: what each point costs in accuracy, and how much faster it is."""

from pathlib import Path

from ladderize.errors import UserError
from ladderize.eval.results import EvalResults, ModelResult
from ladderize.files.documents import read_document
from ladderize.runtime.bench.document import BenchDocument
from ladderize.runtime.bench.rows import LEAST_ROUNDS
from ladderize.workflows.sweep_document import SweepDocument

TEXT_COLUMNS = ("point", "not promoted", "failed")  # columns that are no numbers


def sweep_rows(document: SweepDocument, root: Path) -> list[dict[str, str]]:
    """A row for each point, read from the files that the sweep has written in ``root``: what it costs in accuracy, and
    how much faster it is."""
    found = {point.name: one_result(root / point.results) for point in document.points if point.results is not None}
    dense = found.get(document.points[0].name)
    benches = [BenchDocument.from_dict(read_document(root / path, "benchmark"), path) for path in document.benches]
    rows = []
    for point in document.points:
        row, result = {"point": point.name}, found.get(point.name)
        if any(one.model.perplexity is not None for one in found.values()):
            row |= _perplexity(result, dense)
        for task in dict.fromkeys(name for one in found.values() for name in one.tasks):
            row[task] = _accuracy(result, dense, task)
        for number, bench in enumerate(benches, start=1):
            row[_title(bench, number)] = _speedup(bench, point.timed)
        if any(one.not_promoted is not None for one in document.points):
            row["not promoted"] = point.not_promoted or ""
        if any(one.failure is not None for one in document.points):
            row["failed"] = point.failure or ""
        rows.append(row)
    return rows


def one_result(path: Path) -> ModelResult:
    """Of a results.json of a sweep, which holds one model."""
    models = EvalResults.from_dict(read_document(path, "results file"), path).models
    if len(models) != 1:
        raise UserError(f"{path} holds {len(models)} models, but a sweep's evaluation holds one; run it again")
    return models[0]


def _perplexity(found: ModelResult | None, dense: ModelResult | None) -> dict[str, str]:
    own, base = (one.model.perplexity if one is not None else None for one in (found, dense))
    if own is None:
        return {"perplexity": "", "difference": ""}
    difference = f"{own.perplexity - base.perplexity:+.4f}" if base is not None and found is not dense else ""
    return {"perplexity": f"{own.perplexity:.4f}", "difference": difference}


def _accuracy(found: ModelResult | None, dense: ModelResult | None, task: str) -> str:
    """A task's first metric, and its difference to the dense model's."""
    values = found.tasks.get(task, {}) if found is not None else {}
    metrics = (key for key, value in values.items() if "," in key and isinstance(value, int | float))
    metric = next((key for key in metrics if "_stderr" not in key), None)
    if metric is None:
        return ""
    base = dense.tasks.get(task, {}).get(metric) if dense is not None and dense is not found else None
    return f"{values[metric]:.4f}" + (f" ({float(values[metric]) - float(base):+.4f})" if base is not None else "")


def _title(bench: BenchDocument, number: int) -> str:
    options = bench.options
    where = f"emulated tp {options.emulate_tp}" if options.emulate_tp is not None else f"tp {options.tp_size}"
    batch = f", batch {options.batch_sizes[0]}" if len(options.batch_sizes) > 1 else ""
    return f"decode speed-up [{number}: {where}{batch}]"


def _speedup(bench: BenchDocument, model: str | None) -> str:
    """Of the first batch size, with its 95 % interval where the rounds are enough for one."""
    row = next((row for row in bench.rows if row.is_model and row.model == model), None)
    if row is None:
        return ""
    interval = row.speedup_decode_interval if bench.options.repeat >= LEAST_ROUNDS else []
    ends = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if len(interval) == 2 else ""
    return f"{row.speedup_decode:.2f}x{ends}"
