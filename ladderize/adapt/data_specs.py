"""What ``--data SPEC`` means: files (a glob of them), or a dataset on the hub; and ``=WEIGHT`` after any of them.

``x.jsonl``, ``x.parquet``, ``x.txt``, ``x.npy``, ``x.npz[:array]``, ``dir/*.jsonl``, ``hub:OWNER/NAME[:CONFIG]:SPLIT``.
Nothing is read here; no numpy.
"""

import glob
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ladderize.errors import UsageError, UserError
from ladderize.files.regular import check_regular, split_name

SOURCE_SUFFIXES = (".jsonl", ".parquet", ".txt", ".npy", ".npz")
HUB = "hub:"


@dataclass(frozen=True)
class SourceSpec:
    """One --data. text: as it was given, without the weight. hub: name, configuration and split; None: ``text`` is a
    path or a glob.

    option: what it was given to, for messages.
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
        """The files meant, sorted; ``.npz`` with their array's name. Raises UserError if there are none, or of several
        kinds."""
        path, key = split_name(self.text)
        if not _is_glob(self.text):
            if not path.exists():
                raise UserError(f"{self.name}: {path} does not exist")
            check_regular(path)
            return [self.text]
        found = sorted(name for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if not found:
            raise UserError(f"{self.name}: no file matches")
        suffixes = sorted({Path(name).suffix for name in found})
        if len(suffixes) > 1 or suffixes[0] not in SOURCE_SUFFIXES:
            raise UserError(
                f"{self.name} matches files that end in {', '.join(suffixes)}; give one of {', '.join(SOURCE_SUFFIXES)}"
            )
        return [f"{name}:{key}" if key is not None else name for name in found]


def parse_specs(texts: Sequence[str], option: str = "--data") -> tuple[SourceSpec, ...]:
    """``option`` as given on the command line; nothing is opened. Raises UsageError for what is not valid."""
    specs = tuple(_parse(text, option) for text in texts)
    weighted = [spec for spec in specs if spec.weight is not None]
    if len(specs) == 1 and weighted:
        raise UsageError(
            f"{option} {texts[0]}: a weight has no effect on a single source; leave it out, or give several {option}"
        )
    if weighted and len(weighted) < len(specs):
        without = next(spec.text for spec in specs if spec.weight is None)
        raise UsageError(
            f"{option} {without} has no weight, but others have one; give all sources a weight (SPEC=2.5), or none"
        )
    if not weighted and len(specs) > 1 and (streamed := next((spec for spec in specs if spec.is_streamed), None)):
        raise UsageError(
            f"{streamed.name} is streamed, so its number of rows is unknown; give every source a weight (SPEC=2.5)"
        )
    return specs


def data_sources(*texts: str) -> tuple[SourceSpec, ...]:
    """``data_sources("a.jsonl=2", "chat/*.parquet=1")``: the data of ``RetrainOptions``, as --data takes them."""
    return parse_specs(texts)


def _parse(text: str, option: str) -> SourceSpec:
    head, equals, tail = text.rpartition("=")
    if not (equals and _is_source(head)):
        if not _is_source(text):
            raise UsageError(
                f"{option} {text}: neither a file that ends in {', '.join(SOURCE_SUFFIXES)}, nor a glob, nor"
                " hub:OWNER/NAME[:CONFIG]:SPLIT"
            )
        return SourceSpec(text, None, _parse_hub(text, option), option)
    try:
        weight = float(tail)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise UsageError(f"{option} {text}: the weight after = is not a positive number: {tail!r}")
    return SourceSpec(head, weight, _parse_hub(head, option), option)


def _is_glob(text: str) -> bool:
    return "*" in text and not Path(text).exists()


def _is_source(text: str) -> bool:
    """Whether this may be a whole SPEC; a path may hold a = too (``date=2024/x.jsonl``)."""
    return text.startswith(HUB) or "*" in text or split_name(text)[0].suffix in SOURCE_SUFFIXES


def _parse_hub(text: str, option: str) -> tuple[str, str | None, str] | None:
    if not text.startswith(HUB):
        return None
    if "[" in text:
        raise UsageError(f"{option} {text}: a slice of a split cannot be streamed; name a whole split")
    name, *rest = text.removeprefix(HUB).split(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or len(rest) not in (1, 2) or not all(rest):
        raise UsageError(
            f"{option} {text}: a dataset on the hub is written hub:OWNER/NAME:SPLIT or hub:OWNER/NAME:CONFIG:SPLIT"
        )
    return name, rest[0] if len(rest) == 2 else None, rest[-1]
