"""Put the output of the pages' `ladderize plan` and `adapt --dry-run` commands behind them again, as it is now.

    python scripts/plans_in_docs.py

That is of blocks of the language ``console`` that begin with such a command and name no other files than those of
examples/, ``llama-8b``, ``upper`` (the same with ladder on its upper half; both sparse, of an 8B's shape) and
``chat.jsonl``. tests/test_docs.py asks whether the pages are as this script would write them.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```console\n(\$ ladderize (?:plan|adapt) (?:.*\\\n)*.*\n)(?:.*\n)*?```$", re.MULTILINE)
WIDTH = 100


def output(command: str) -> str:
    """What the command prints, warnings too; prose is wrapped."""
    words = shlex.split(command.removeprefix("$ ").replace("\\\n", " "))[1:]
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(ROOT / "examples", Path(folder) / "examples")
        if words[0] == "adapt":
            _large_models(Path(folder))
        done = subprocess.run(
            [sys.executable, "-m", "ladderize", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "120"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if words[0] == "plan" else subprocess.DEVNULL,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {command}{done.stdout}")
    return "".join(f"{part}\n" for line in done.stdout.splitlines() for part in _wrapped(line.rstrip()))


def _large_models(folder: Path) -> None:
    sys.path.insert(0, str(ROOT))
    from ladderize.layout import Layout
    from ladderize.runtime.shards import read_shape
    from tests.helpers import save_sparse

    save_sparse(folder / "llama-8b", read_shape("8b"))
    save_sparse(folder / "upper", read_shape("8b"), Layout.from_layers(32, ladder=range(16, 32)))
    (folder / "chat.jsonl").write_text('{"text": "the cat"}\n')


def _wrapped(line: str) -> list[str]:
    is_prose = len(line) > WIDTH and "  " not in line
    return textwrap.wrap(line, WIDTH) if is_prose else [line]


def renewed(text: str) -> str:
    """A page with the outputs of its plans as they are now."""
    return BLOCK.sub(lambda block: f"```console\n{block[1]}{output(block[1])}```", text)


if __name__ == "__main__":
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if (after := renewed(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(ROOT))
