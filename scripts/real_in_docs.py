"""Put the tables of finished sweeps into docs/results.md, and their figures into benchmarks/results.

    python scripts/real_in_docs.py real/sweep real/few

A sweep's name is that of its folder; it has marks of its own on the page. The time of a model is that of its own
stages: conversion, adaptation, evaluation.
"""

import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from demo_in_readme import replace

import ladderize
from ladderize.eval.results import EvalResults
from ladderize.files.documents import read_document
from ladderize.report.documents import find_documents
from ladderize.report.join import join_documents
from ladderize.report.models import ReportModel, WithInterval, points_text
from ladderize.sweep_document import SweepDocument, SweepPoint

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
PICTURE = "sweep", ROOT / "docs" / "real-tradeoff.png"  # of one of them
TASKS = {"piqa": "acc_norm", "arc_easy": "acc_norm", "hellaswag": "acc_norm", "lambada_openai": "acc"}


def figures(root: Path, point: SweepPoint, model: ReportModel) -> dict[str, Any]:
    """Return all that is known of one model."""
    assert point.results is not None, f"{point.name} was not evaluated"
    (entry,) = EvalResults.from_dict(read_document(root / point.results, "results"), point.results).models
    timings = (model.timed_as or model).timings
    return {
        "name": point.name,
        "layout": model.layout_words,
        "points": vars(model.difference) if model.difference is not None else None,
        "tasks": {task: entry.reported.results[task][f"{metric},none"] for task, metric in TASKS.items()},
        "perplexity": model.perplexity,
        "kl": model.divergence.value if model.divergence is not None else None,
        "speedup": vars(timings[0].whole) if timings else None,
        "seconds": {f"{number} {stage.stage}": stage.seconds for number, stage in enumerate(point.stages)},
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table."""
    dense = rows[0]["perplexity"]
    converted = {row["name"]: row["perplexity"] for row in rows}
    head = ["model", "points from dense", "PIQA", "ARC-Easy", "HellaSwag", "LAMBADA", "perplexity", "KL"]
    lines = [[*head, "recovered", "speed-up", "minutes"]]
    for row in rows:
        perplexity = row["perplexity"]
        before = converted.get(row["name"].partition("+")[0], perplexity)
        won = before != perplexity
        share = f"{1 - math.log(perplexity / dense) / math.log(before / dense):.0%}" if won else ""
        points = "" if row["points"] is None else points_text(WithInterval(**row["points"]))
        lines.append(
            [
                row["name"],
                points,
                *(f"{100 * value:.1f}" for value in row["tasks"].values()),
                f"{perplexity:,.1f}" if perplexity < 1000 else f"{perplexity:,.0f}",
                "" if row["kl"] is None else f"{row['kl']:.3f}",
                share,
                "" if row["speedup"] is None else f"{row['speedup']['value']:.2f}x",
                f"{sum(row['seconds'].values()) / 60:.1f}",
            ]
        )
    return [f"| {' | '.join(line)} |" for line in (lines[0], ["---"] * len(lines[0]), *lines[1:])]


def show(root: Path) -> None:
    """Put the table, the figures and perhaps the picture of one sweep where they belong."""
    document = SweepDocument.from_dict(read_document(root / "sweep.json", "a sweep"), root / "sweep.json")
    content = join_documents(find_documents([root]))
    models = {one.name: one for one in content.models}
    rows = [figures(root, point, models[point.name]) for point in document.points if point.results is not None]
    with tempfile.TemporaryDirectory() as folder:
        summary = ladderize.write_report([root], Path(folder) / "page.html", markdown=Path(folder) / "page.md")
        if root.name == PICTURE[0]:
            shutil.copyfile(Path(folder) / "page-pictures" / "tradeoff.png", PICTURE[1])
    (ROOT / f"benchmarks/results/real_{root.name}.json").write_text(
        json.dumps({"command": document.command, "answer": summary.headline, "models": rows}, indent=1) + "\n"
    )
    replace(PAGE, table(rows), (f"<!-- {root.name}: scripts/real_in_docs.py -->", f"<!-- end of {root.name} -->"))
    print(summary.headline)


def main() -> None:
    for root in map(Path, sys.argv[1:]):
        show(root)


if __name__ == "__main__":
    main()
