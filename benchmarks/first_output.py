"""How long a user waits for the first output of each command: on a terminal, and with its output piped.

The time runs from the start of the process to the first byte that it prints; the process is then ended. The commands
are interleaved. Models and texts are those of ``ladderize demo``. Prints a table and writes
benchmarks/results/first_output.json. Run it on an idle machine.

    .venv/bin/python benchmarks/first_output.py
"""

import json
import os
import platform
import pty
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.demo.command import MODEL, write_documents

ROUNDS = 3
TARGET_S = 2.0
TIMEOUT_S = 60.0
RESULTS = Path(__file__).parent / "results" / "first_output.json"
TEXT = ["--data", "train.jsonl", "--seq-len", "128"]
COMMANDS = {
    "convert": ["convert", "dense", "out", "--ladder", "all"],
    "inspect": ["inspect", "ladder-all"],
    "sensitivity": ["sensitivity", "dense", "--sync-tp-size", "4", *TEXT, "--out", "s.json"],
    "spd": ["spd", "dense", "out", "--sync-tp-size", "4", *TEXT],
    "adapt": ["adapt", "ladder-all", "out", "--distill-from", "dense", *TEXT, "--max-tokens", "100k"],
    "adapt, lora": ["adapt", "ladder-all", "out", "--method", "lora", *TEXT, "--max-tokens", "100k"],
    "adapt, blocks": ["adapt", "spd-all", "out", "--method", "blocks", "--distill-from", "dense", *TEXT],
    "eval": ["eval", "dense", "ladder-all", "--perplexity", "train.jsonl"],
    "bench": ["bench", "dense", "ladder-all", "--tp-size", "2"],
    "bench --random-weights": ["bench", "--random-weights", "1b", "--emulate-tp", "8", "--link", "20,100"],
    "generate": ["generate", "ladder-all", "--prompt", "Once"],
    "generate --from-bos": ["generate", "dense", "--from-bos", "--num-samples", "64", "--out", "self.jsonl"],
    "merge": ["merge", "adapter", "merged"],
    "demo": ["demo", "--quick"],
    "bad option": ["adapt", "ladder-all", "out", "--lerning-rate", "1"],
    "no such model": ["adapt", "nowhere", "out", *TEXT, "--max-tokens", "100k"],
}


def main() -> None:
    samples: dict[str, dict[str, list[float]]] = {name: {"terminal": [], "piped": []} for name in COMMANDS}
    first: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder)
        for round_ in range(ROUNDS + 1):
            for name, arguments in COMMANDS.items():
                for way in ("terminal", "piped"):
                    seconds, text = first_output(arguments, folder, terminal=way == "terminal")
                    if round_ > 0:  # the first round fills the page cache
                        samples[name][way].append(seconds)
                        first[name] = text
    document = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "python": platform.python_version(),
        "target_s": TARGET_S,
        "first_line": first,
        "seconds": samples,
    }
    RESULTS.write_text(json.dumps(document, indent=2) + "\n")
    print(f"{'command':24}{'terminal':>10}{'piped':>10}  s, medians of {ROUNDS}")
    for name, ways in samples.items():
        terminal, piped = (statistics.median(ways[way]) for way in ("terminal", "piped"))
        late = "  late" if max(terminal, piped) > TARGET_S else ""
        print(f"{name:24}{terminal:10.2f}{piped:10.2f}  {first[name][:60]}{late}")


def prepare(folder: Path) -> None:
    """The files that the commands name: what the demo leaves, and an adapter."""
    shutil.copytree(MODEL, folder / "dense")
    for name, recipe in (("ladder-all", Recipe(ladder="all")), ("spd-all", Recipe(spd="all", sync_tp_size=2))):
        convert_checkpoint(str(folder / "dense"), folder / name, recipe, verify=False)
    write_documents(folder / "train.jsonl", 2000, test=False, seed=11)
    few = ["--max-steps", "1", "--batch-size", "1", "--write", "last"]
    lora = ["adapt", "ladder-all", "adapter", "--method", "lora", *TEXT, *few]
    subprocess.run([sys.executable, "-m", "ladderize", *lora], cwd=folder, check=True, capture_output=True)


def first_output(arguments: list[str], folder: Path, *, terminal: bool) -> tuple[float, str]:
    """Seconds to the first byte, and the line that it begins."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "ladderize", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
        start_new_session=True,
    )
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], TIMEOUT_S)
        seconds = time.monotonic() - begun
        text = os.read(reader, 4096).decode(errors="replace") if ready else ""
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(reader)
        for left in ("out", "s.json", "self.jsonl", "merged"):
            for path in folder.glob(f"*{left}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    if not text:
        raise RuntimeError(f"{' '.join(arguments)} printed nothing within {TIMEOUT_S:.0f} s")
    printable = "".join(letter for letter in text.splitlines()[0] if letter.isprintable())
    return seconds, printable.removeprefix("[?25l")


if __name__ == "__main__":
    main()
