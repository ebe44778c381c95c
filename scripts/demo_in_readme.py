"""Put a finished demo into the README (its answer, the plot, the time that it took) and its table into docs/results.md.

    ladderize demo --out demo          # on an idle machine; note how long it takes
    python scripts/demo_in_readme.py demo --minutes 4

Replaces what stands between the two marks of each of both pages, and docs/demo-tradeoff.png.
"""

import argparse
import shutil
import tempfile
import textwrap
from pathlib import Path

import ladderize
from ladderize.eval.results import EvalResults
from ladderize.files.documents import read_document
from ladderize.runtime.bench.document import BenchDocument
from ladderize.sweep_document import SweepDocument, SweepPoint

ROOT = Path(__file__).resolve().parent.parent
MARKS = "<!-- demo: scripts/demo_in_readme.py -->", "<!-- end of demo -->"
PICTURE = ROOT / "docs" / "demo-tradeoff.png"


def speedup(bench: BenchDocument, point: SweepPoint) -> str:
    row = next((row for row in bench.rows if row.is_model and row.model == point.timed), None)
    if row is None:
        return ""
    low, high = row.speedup_interval["decode"]
    return f"{row.speedup['decode']:.2f}x ({low:.2f} to {high:.2f})"


def table(root: Path) -> list[str]:
    """Lines of Markdown: a row for each model, with every task and every benchmark."""
    document = SweepDocument.from_dict(read_document(root / "sweep.json", "a sweep"), root / "sweep.json")
    benches = [BenchDocument.from_dict(read_document(root / name, "a benchmark"), name) for name in document.benches]
    titles = [f"{'emulated' if b.emulated else 'measured'}, {b.options.ranks} ranks" for b in benches]
    rows: list[list[str]] = []
    tasks: list[str] = []
    for point in document.points:
        assert point.results is not None, f"{point.name} was not evaluated"
        (entry,) = EvalResults.from_dict(read_document(root / point.results, "results"), point.results).models
        scores = {
            task: next(v for k, v in one.items() if "," in k and "stderr" not in k) for task, one in entry.tasks.items()
        }
        tasks = tasks or list(scores)
        assert entry.model.perplexity is not None
        how = "" if point.adapted == "none" else f", adapted ({point.adapted})"
        figures = [f"{entry.model.perplexity.perplexity:.3f}", *(f"{float(scores[task]):.3f}" for task in tasks)]
        rows.append([point.layout.partition(": ")[2] + how, *figures, *(speedup(bench, point) for bench in benches)])
    head = ["model", "perplexity", *(task.removeprefix("demo_") for task in tasks)]
    head += [f"decode speed-up, {title}" for title in titles]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def replace(page: Path, lines: list[str], marks: tuple[str, str] = MARKS) -> None:
    """Put lines between the two marks of a page."""
    begin, end = marks
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    assert found, f"{page} has no {begin} ... {end}"
    page.write_text("\n".join([before + begin, *lines, end + after]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="folder of `ladderize demo --out`")
    parser.add_argument("--minutes", required=True, help="that the demo took, in words such as 4 or '4 to 5'")
    arguments = parser.parse_args()
    root = arguments.demo / "sweep"
    with tempfile.TemporaryDirectory() as folder:
        summary = ladderize.write_report([root], Path(folder) / "page.html", markdown=Path(folder) / "page.md")
        shutil.copyfile(Path(folder) / "page-pictures" / "tradeoff-1.png", PICTURE)
    text = [
        f"`make demo` takes {arguments.minutes} minutes on 2 cores once everything is installed. It ends with",
        "`ladderize-demo/report.html` ([how to read it](docs/report.md)), which begins with this answer:",
        "",
        *(f"> {line}" for line in textwrap.wrap(summary.headline, 98)),
        "",
        "The bundled model is tiny, and its arithmetic breaks first. Least squares ([align](docs/align.md))",
        "win part of it back in seconds, a minute of retraining most of the rest ([all ten",
        "models](docs/results.md#the-demo)).",
        "",
        f"![speed-up against accuracy of the demo's models]({PICTURE.relative_to(ROOT).as_posix()})",
    ]
    replace(ROOT / "README.md", text)
    replace(ROOT / "docs" / "results.md", table(root))


if __name__ == "__main__":
    main()
