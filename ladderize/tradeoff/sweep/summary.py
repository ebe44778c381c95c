"""The table that ends ``ladderize sweep``: what each layout costs in accuracy, and how much faster it is."""

from pathlib import Path

from ladderize.errors import UserError
from ladderize.eval.results import EvalResults, ModelResult
from ladderize.files.documents import read_document
from ladderize.runtime.bench.document import BenchDocument
from ladderize.runtime.bench.rows import LEAST_ROUNDS
from ladderize.workflows.sweep_document import SweepDocument

TEXT_COLUMNS = ("point", "not promoted", "failed")  # columns that are no numbers


def sweep_rows(document: SweepDocument, root: Path) -> list[dict[str, str]]:
    """A row for each point, read from the files that the sweep has written in ``root``."""
    results = {point.name: _read_results(root, point.results) for point in document.points}
    dense = results[document.points[0].name]
    benches = [BenchDocument.from_dict(read_document(root / path, "benchmark"), path) for path in document.benches]
    rows = []
    for point in document.points:
        row = {"point": point.name}
        found = results[point.name]
        if any(one is not None and one.model.perplexity is not None for one in results.values()):
            row |= _perplexity(found, dense)
        for task in dict.fromkeys(name for one in results.values() if one is not None for name in one.tasks):
            row[task] = _accuracy(found, dense, task)
        for number, bench in enumerate(benches, start=1):
            row[_title(bench, number)] = _speedup(bench, point.timed)
        if any(one.not_promoted is not None for one in document.points):
            row["not promoted"] = point.not_promoted or ""
        if any(one.failure is not None for one in document.points):
            row["failed"] = point.failure or ""
        rows.append(row)
    return rows


def _read_results(root: Path, path: str | None) -> ModelResult | None:
    if path is None:
        return None
    models = EvalResults.from_dict(read_document(root / path, "results file"), root / path).models
    if len(models) != 1:
        raise UserError(f"{root / path} holds {len(models)} models, but a sweep's evaluation holds one; run it again")
    return models[0]


def _perplexity(found: ModelResult | None, dense: ModelResult | None) -> dict[str, str]:
    if found is None or found.model.perplexity is None:
        return {"perplexity": "", "difference": ""}
    own = found.model.perplexity.perplexity
    known = dense is not None and dense is not found and dense.model.perplexity is not None
    base = dense.model.perplexity.perplexity if known and dense is not None and dense.model.perplexity else None
    return {"perplexity": f"{own:.4f}", "difference": f"{own - base:+.4f}" if base is not None else ""}


def _accuracy(found: ModelResult | None, dense: ModelResult | None, task: str) -> str:
    """A task's first metric, and its difference to the dense model's."""
    if found is None or task not in found.tasks:
        return ""
    metrics = [key for key, value in found.tasks[task].items() if "," in key and isinstance(value, int | float)]
    metrics = [key for key in metrics if "_stderr" not in key]
    if not metrics:
        return ""
    own = float(found.tasks[task][metrics[0]])
    base = dense.tasks.get(task, {}).get(metrics[0]) if dense is not None and dense is not found else None
    return f"{own:.4f}" + (f" ({own - float(base):+.4f})" if base is not None else "")


def _title(bench: BenchDocument, number: int) -> str:
    options = bench.options
    where = f"emulated tp {options.emulate_tp}" if options.emulate_tp is not None else f"tp {options.tp_size}"
    batch = f", batch {options.batch_sizes[0]}" if len(options.batch_sizes) > 1 else ""
    return f"decode speed-up [{number}: {where}{batch}]"


def _speedup(bench: BenchDocument, model: str | None) -> str:
    """Of the first batch size, with its 95 % interval where the rounds are enough for one."""
    rows = [row for row in bench.rows if row.is_model and row.model == model]
    if not rows:
        return ""
    interval = rows[0].speedup_decode_interval if bench.options.repeat >= LEAST_ROUNDS else []
    ends = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if len(interval) == 2 else ""
    return f"{rows[0].speedup_decode:.2f}x{ends}"
