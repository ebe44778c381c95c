"""Whether an output is already what a command is asked to make: a run may be killed after its output appeared.

Whatever makes a folder out of long work writes a digest of everything that decided the result into the folder's
document. The same command, run again, finds it there.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladderize.console import Console
from ladderize.files.documents import read_own
from ladderize.files.work import ABOUT, WorkFolder

RUN = "run_sha256"  # key of a document: the digest of the run that wrote it
FINISHED = "finished"  # key of a work folder's record: the digest of the run that is about to put its output in place


def run_digest(identity: Mapping[str, Any]) -> str:
    """The sha256 of everything that decides a run's result, which JSON must be able to hold."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class EarlierRun:
    """What an earlier run of the same command may have left: ``out`` with its document, and a work folder.

    On other processes than the main one nothing is found or removed: ask there, and broadcast.
    """

    out: Path
    document: str
    work: Path
    overwrite: bool

    def may_have_finished(self) -> bool:
        """Whether it is worth finding out what this command is about."""
        return RUN in self.read() and (not self.overwrite or FINISHED in read_own(self.work / ABOUT))

    def finished(self, digest: str) -> bool:
        """Whether the run of this digest wrote ``out``.

        With ``overwrite`` the work folder must say so too: else the command is meant to run anew.
        """
        if self.overwrite and read_own(self.work / ABOUT).get(FINISHED) != digest:
            return False
        return self.read().get(RUN) == digest

    def read(self) -> dict[str, Any]:
        """The document; empty where there is none."""
        return read_own(self.out / self.document)

    def tidy(self, kind: type[WorkFolder], identity: Mapping[str, Any], console: Console) -> dict[str, Any]:
        """Remove what the run left, say that it is done, and return the document."""
        kind.tidy(self.work, identity)
        console.note(f"{self.out} is complete: this command wrote it in an earlier run")
        return self.read()
