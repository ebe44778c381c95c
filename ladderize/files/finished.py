"""Whether an output is already what a command is asked to make: a run may be killed after its output appeared.

Whatever makes a folder out of long work writes a digest of everything that decided the result into the folder's
document. The same command, run again, finds it there.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladderize.files.documents import read_own
from ladderize.files.work import ABOUT

RUN = "run_sha256"  # key of a document: the digest of the run that wrote it
FINISHED = "finished"  # key of a work folder's record: the digest of the run that is about to put its output in place


def run_digest(identity: Mapping[str, Any]) -> str:
    """The sha256 of everything that decides a run's result, which JSON must be able to hold."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def may_be_finished(out: Path, document: str) -> bool:
    """Whether ``out`` has such a document of a run, so that it is worth finding out what the command is about."""
    return RUN in read_own(out / document)


def finished(out: Path, document: str, digest: str, *, overwrite: bool, work: Path) -> bool:
    """Whether the run of this digest wrote ``out``, as its document says.

    overwrite: then the work folder must say that it was killed after that, or the command is meant to run anew.
    """
    if overwrite and read_own(work / ABOUT).get(FINISHED) != digest:
        return False
    return read_own(out / document).get(RUN) == digest
