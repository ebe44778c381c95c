"""The next command to try, with which a command's output ends."""

import shlex
from collections.abc import Sequence

from ladderize.console import Console

FILE = "FILE"  # stands for what was not named yet


def command_line(*words: object) -> str:
    """A command line of ``ladderize`` as a shell takes it."""
    return shlex.join(["ladderize", *map(str, words)])


def align_command(converted: str, dense: str, data: str = FILE) -> str:
    """The command that aligns a converted checkpoint."""
    aligned = f"{converted.rstrip('/')}-aligned"
    return command_line("adapt", converted, aligned, "--method", "align", "--distill-from", dense, "--data", data)


def retrain_command(converted: str, out: str, dense: str, data: str = FILE, *, align: bool) -> str:
    """The command that retrains a converted checkpoint as docs/results.md found best for short runs. align: first,
    which is for checkpoints that were neither aligned nor retrained."""
    first = ["--align"] if align else []
    what = ["--distill-from", dense, *first, "--hidden-weight", 1, "--data", data, "--max-tokens", "20M"]
    return command_line("adapt", converted, out, *what)


def show_next(console: Console, *steps: tuple[str, str]) -> None:
    """steps: what for, and the command."""
    if not steps:
        return
    wide = max(len(purpose) for purpose, _ in steps)
    console.result("\nnext:")
    for purpose, line in steps:
        console.result(f"  {purpose:{wide}}  {line}")


def scoring_file(*files: Sequence[str]) -> str:
    """The first of the files that ``eval --perplexity`` reads, or a word that stands for one."""
    from ladderize.data import SUFFIXES
    from ladderize.files.regular import split_name

    for name in (name for names in files for name in names):
        path, _ = split_name(name)
        if path.suffix in SUFFIXES and path.is_file():
            return name
    return FILE
