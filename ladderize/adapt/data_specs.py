"""The values of ``--data SPEC``: files of one kind, or a dataset on the hub, each with an optional ``=WEIGHT``.

``x.jsonl``, ``x.npz[:array]``, ``folder``, ``folder/*.parquet``, ``hub:OWNER/NAME[:CONFIG]:SPLIT``. No file is opened
here, and numpy is not imported.
"""

import glob
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ladderize.errors import UsageError, UserError
from ladderize.files.regular import check_regular, split_name

SOURCE_SUFFIXES = (".json", ".jsonl", ".parquet", ".txt", ".npy", ".npz")
HUB = "hub:"


@dataclass(frozen=True)
class SourceSpec:
    """One value of --data.

    text: as given, without the weight.
    hub: name, configuration and split; None where ``text`` names files.
    option: the option that it was given to, for messages.
    """

    text: str
    weight: float | None = None
    hub: tuple[str, str | None, str] | None = None
    option: str = "--data"

    @property
    def name(self) -> str:
        return f"{self.option} {self.text}"

    @property
    def is_streamed(self) -> bool:
        return self.hub is not None

    def files(self) -> list[str]:
        """Return the paths that are meant, sorted, those of ``.npz`` with their array's name.

        Raises UserError if there are none, or of several kinds.
        """
        path, key = split_name(self.text)
        if path.is_dir():  # which may hold a README too
            found = [file for file in path.iterdir() if file.suffix in SOURCE_SUFFIXES]
        else:
            found = [path] if path.exists() else [Path(name) for name in glob.glob(str(path), recursive=True)]
        suffixes = sorted({file.suffix for file in found})
        if len(suffixes) != 1 or suffixes[0] not in SOURCE_SUFFIXES:
            what = f"files that end in {', '.join(suffixes)}" if found else "nothing that exists"
            raise UserError(f"{self.name} names {what}; give files of one of {', '.join(SOURCE_SUFFIXES)}")
        for file in found:
            check_regular(file)
        return [f"{file}:{key}" if key is not None else str(file) for file in sorted(found)]


def parse_specs(texts: Sequence[str], option: str = "--data") -> tuple[SourceSpec, ...]:
    """Parse the values of ``option``; no file is opened. Raises UsageError for an invalid one."""
    specs = tuple(_parse(text, option) for text in texts)
    unweighted = [spec for spec in specs if spec.weight is None]
    if len(specs) == 1 and not unweighted:
        raise UsageError(f"{option} {texts[0]}: a weight has no effect on a single source; leave it out")
    if 0 < len(unweighted) < len(specs):
        raise UsageError(f"{unweighted[0].name} has no weight, but others have one; give all one (SPEC=2.5), or none")
    if len(unweighted) > 1 and (streamed := next((spec for spec in specs if spec.is_streamed), None)):
        raise UsageError(f"{streamed.name} is streamed, so its length is unknown; give all a weight (SPEC=2.5)")
    return specs


def data_sources(*texts: str) -> tuple[SourceSpec, ...]:
    """Return the data of ``RetrainOptions`` from values of --data: ``data_sources("a.jsonl=2", "chat/*.parquet=1")``.
    Raises UsageError for an invalid one."""
    return parse_specs(texts)


def _parse(text: str, option: str) -> SourceSpec:
    name, _, weight = text.rpartition("=")
    if not _is_source(name):  # a path may hold a = too (date=2024/x.jsonl)
        name, weight = text, ""
    elif not re.fullmatch(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", weight) or not 0 < float(weight) < math.inf:
        raise UsageError(f"{option} {text}: the weight after = is not a positive number: {weight!r}")
    if not _is_source(name):
        kinds = f"a file that ends in {', '.join(SOURCE_SUFFIXES)}, nor a folder, nor a glob"
        raise UsageError(f"{option} {text}: neither {kinds}, nor hub:OWNER/NAME[:CONFIG]:SPLIT")
    hub = re.fullmatch(HUB + r"([\w.-]+/[\w.-]+)(?::([^:\[]+))?:([^:\[]+)", name)
    if name.startswith(HUB) and hub is None:
        raise UsageError(f"{option} {text}: write hub:OWNER/NAME:SPLIT or hub:OWNER/NAME:CONFIG:SPLIT, a whole split")
    return SourceSpec(name, float(weight) if weight else None, (hub[1], hub[2], hub[3]) if hub else None, option)


def _is_source(text: str) -> bool:
    path = split_name(text)[0]
    return text.startswith(HUB) or "*" in text or path.suffix in SOURCE_SUFFIXES or (text != "" and path.is_dir())
