"""Put a finished demo into the README: its answer, the plot, the time that it took.

    ladderize demo --out demo          # on an idle machine; note how long it takes
    python scripts/demo_in_readme.py demo --minutes 4

Replaces what stands between the two marks of the page, and docs/demo-tradeoff.png.
"""

import argparse
import shutil
import tempfile
import textwrap
from pathlib import Path

import ladderize

ROOT = Path(__file__).resolve().parent.parent
MARKS = "<!-- demo: scripts/demo_in_readme.py -->", "<!-- end of demo -->"
PICTURE = ROOT / "docs" / "demo-tradeoff.png"


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
        "`ladderize-demo/report.html` ([how to read it](docs/sweep.md)), which begins with this answer:",
        "",
        *(f"> {line}" for line in textwrap.wrap(summary.headline, 98)),
        "",
        "The bundled model is tiny, and loses more than the real one: ladder on its upper half breaks its",
        "arithmetic. But alignment takes seconds there, and a minute of training wins most of the rest back",
        "([more](docs/results.md#tiny-models)).",
        "",
        f"![speed-up against accuracy of the demo's models]({PICTURE.relative_to(ROOT).as_posix()})",
    ]
    replace(ROOT / "README.md", text)


if __name__ == "__main__":
    main()
