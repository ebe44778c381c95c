"""One stage of a sweep: what it does, and the folder in which its output is kept under a hash of what it depends on."""

import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ladderize.errors import UserError
from ladderize.files.documents import read_own, write_json
from ladderize.files.records import Record
from ladderize.files.work import run_digest
from ladderize.tradeoff.sweep.stage_commands import Words

StageKind = Literal["sensitivity", "convert", "adapt", "eval", "bench"]
# Of the code behind each stage. Raise a stage's number when its output changes for the same input (another result,
# another form of its files): what earlier versions of ladderize kept is then made anew.
STAGE_VERSIONS: dict[StageKind, int] = {"sensitivity": 1, "convert": 1, "adapt": 2, "eval": 1, "bench": 1}
RESUMES = ("sensitivity", "convert", "adapt", "eval")  # stages that go on with what a killed run left in their folder
TIMED: StageKind = "bench"  # its times are the result, so nothing runs beside it
STAGES = "stages"  # folder of their outputs
MARKER = "stage.json"  # written when all else in the folder is complete
LOG = "log.txt"
KEY_DIGITS = 16


@dataclass(frozen=True)
class Stage:
    """identity: everything that decides its output; key: its hash. commands: what it runs, in the sweep's folder: words
    without the program. needs: keys of the stages whose output it reads. title: for people. amount: tokens that it
    trains on, where that is known."""

    kind: StageKind
    title: str
    identity: Mapping[str, Any]
    key: str
    commands: tuple[Words, ...]
    needs: tuple[str, ...] = ()
    amount: int | None = None

    @classmethod
    def of(
        cls,
        kind: StageKind,
        title: str,
        identity: Mapping[str, Any],
        commands: Callable[[str], tuple[Words, ...]],
        needs: tuple[str, ...] = (),
        amount: int | None = None,
    ) -> "Stage":
        """commands: of the folder for its output."""
        key = run_digest({"stage": kind, "version": STAGE_VERSIONS[kind], **identity})[:KEY_DIGITS]
        return cls(kind, title, identity, key, commands(f"{STAGES}/{kind}-{key}"), needs, amount)

    @property
    def output(self) -> str:
        """Its folder, relative to the sweep's."""
        return f"{STAGES}/{self.kind}-{self.key}"

    @property
    def command(self) -> str:
        """The same as a user types it."""
        return " && ".join(shlex.join(["ladderize", *words]) for words in self.commands)


@dataclass(frozen=True)
class FinishedStage(Record):
    """The marker of a complete output. files: path in the folder -> bytes, of everything that belongs to it."""

    stage: str
    key: str
    version: int
    title: str
    command: str
    seconds: float
    amount: int | None
    bytes: int
    identity: dict[str, Any]
    files: dict[str, int]


def read_marker(folder: Path) -> FinishedStage | None:
    """What the marker of a stage's folder says; None where there is none that can be read."""
    content = read_own(folder / MARKER)
    try:
        return FinishedStage.from_dict(content, folder / MARKER) if content else None
    except UserError:
        return None


def finished_stage(stage: Stage, root: Path) -> FinishedStage | None:
    """The marker of a stage's complete output: nothing of it may be missing, or of another size. What somebody added is
    no reason to make it anew."""
    folder = root / stage.output
    marker = read_marker(folder)
    if marker is None or marker.key != stage.key or marker.stage != stage.kind:
        return None
    return marker if marker.files.items() <= _files(folder).items() else None


def mark_finished(stage: Stage, root: Path, seconds: float) -> FinishedStage:
    """Write the marker, last of all."""
    folder = root / stage.output
    files = _files(folder)
    marker = FinishedStage(
        stage=stage.kind,
        key=stage.key,
        version=STAGE_VERSIONS[stage.kind],
        title=stage.title,
        command=stage.command,
        seconds=seconds,
        amount=stage.amount,
        bytes=sum(files.values()),
        identity=dict(stage.identity),
        files=files,
    )
    write_json(folder / MARKER, marker.to_dict())
    return marker


def prepare(stage: Stage, root: Path) -> Path:
    """The folder of a stage that is about to run. What a killed run left is kept where the stage goes on with it; an
    output that was complete, and is not any more, is not."""
    folder = root / stage.output
    folder.mkdir(parents=True, exist_ok=True)
    if stage.kind not in RESUMES or (folder / MARKER).exists():
        for entry in folder.iterdir():
            if entry.name != LOG:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return folder


def other_outputs(root: Path, keep: set[str]) -> list[Path]:
    """Folders of stages that are not among the outputs ``keep``."""
    if not (root / STAGES).is_dir():
        return []
    folders = sorted(entry for entry in (root / STAGES).iterdir() if entry.is_dir())
    return [folder for folder in folders if f"{STAGES}/{folder.name}" not in keep]


def _files(folder: Path) -> dict[str, int]:
    """Everything in a stage's folder but the log and the marker, with its size."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MARKER and path.relative_to(folder).as_posix() != LOG
    }
