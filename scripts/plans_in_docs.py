"""Put the output of the pages' `ladderize plan` and `adapt --dry-run` commands behind them again, as it is now; and the
verdicts of the worked cases into the README.

    python scripts/plans_in_docs.py

That is of blocks of the language ``console`` that begin with such a command and name no other files than those of
examples/, ``llama-8b``, ``upper`` (the same with ladder on its upper half; both sparse, of an 8B's shape) and
``chat.jsonl``. tests/test_docs.py asks whether the pages are as this script would write them.
"""

import json
import math
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
CASES = re.compile(r"(<!-- cases: scripts/plans_in_docs.py -->\n).*?(<!-- end of cases -->)", re.DOTALL)
WORKED = {  # whose answers are predicted for one text at a time, and for 16
    "Llama 70B on one machine of 8 H100": "--shape 70b --hardware h100-sxm --tp-size 8",
    "Llama 70B on two such machines, InfiniBand": (
        "--shape 70b --hardware h100-sxm --tp-size 16 --outer-link nccl_two_nodes_ib_ndr"
    ),
    "Llama 405B, which needs these two": (
        "--shape 405b --hardware h100-sxm --tp-size 16 --outer-link nccl_two_nodes_ib_ndr"
    ),
    "Qwen3 32B on 4 RTX 4090 (PCIe)": "--shape qwen3-32b --hardware rtx-4090 --tp-size 4",
    "Qwen3 32B on 8 RTX 3090 (PCIe)": "--shape qwen3-32b --hardware rtx-3090 --tp-size 8",
    "Llama 8B on 2 RTX 4090 (PCIe)": "--shape 8b --hardware rtx-4090 --tp-size 2",
}


def output(command: str) -> str:
    """What the command prints; prose is wrapped."""
    return "".join(f"{part}\n" for line in printed(command).splitlines() for part in _wrapped(line.rstrip()))


def printed(command: str) -> str:
    """What the command prints. A plan that warns is an error: a page's command is one that needs no warning."""
    words = shlex.split(command.removeprefix("$ ").replace("\\\n", " "))[1:]
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(ROOT / "examples", Path(folder) / "examples")
        if words[0] == "adapt":
            _large_models(Path(folder))
        done = subprocess.run(
            [sys.executable, "-m", "ladderize", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "120"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode or (words[0] == "plan" and done.stderr):
        raise RuntimeError(f"exit code {done.returncode}: {command}{done.stdout}{done.stderr}")
    return done.stdout


def _large_models(folder: Path) -> None:
    sys.path.insert(0, str(ROOT))
    from ladderize.layout import Layout
    from ladderize.runtime.shards import read_shape

    _save_sparse(folder / "llama-8b", read_shape("8b"))
    upper = Layout.from_layers(32, ladder=range(16, 32)).to_config()
    _save_sparse(folder / "upper", {**read_shape("8b"), "model_type": "ladderized_llama", **upper})
    (folder / "chat.jsonl").write_text('{"text": "the cat"}\n')


def _save_sparse(folder: Path, config: dict[str, object]) -> None:
    """A checkpoint of any size that takes no room: a header in bfloat16, and a hole."""
    from ladderize.checkpoint.config import expected_tensors

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in expected_tensors(config).items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _wrapped(line: str) -> list[str]:
    is_prose = len(line) > WIDTH and "  " not in line
    return textwrap.wrap(line, WIDTH) if is_prose else [line]


def cases() -> str:
    """The lines of the table of worked cases."""
    lines = [
        "| you have | dense, tokens/s (waiting) | one text at a time | 16 texts at a time | ask `plan` |",
        "|---|---|---|---|---|",
    ]
    for case, arguments in WORKED.items():
        document = json.loads(printed(f"$ ladderize plan {arguments} --batch-size 1,16 --json"))
        dense = [row for row in document["rows"] if row["name"] == "dense"]
        speeds = "; ".join(f"{row['tokens_per_s']:,.0f} ({row['waiting_share']:.0%})" for row in dense)
        answers = " | ".join(verdict["sentence"] for verdict in document["verdicts"])
        lines.append(f"| {case} | {speeds} | {answers} | `{arguments}` |")
    return "".join(f"{line}\n" for line in lines)


def renewed(text: str) -> str:
    """A page with the outputs of its plans as they are now."""
    text = CASES.sub(lambda block: f"{block[1]}{cases()}{block[2]}", text)
    return BLOCK.sub(lambda block: f"```console\n{block[1]}{output(block[1])}```", text)


if __name__ == "__main__":
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if (after := renewed(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(ROOT))
