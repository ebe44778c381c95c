"""What one model answered to the questions of a task: lm-eval's samples, of which the texts are not kept. Imports no
torch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.errors import UserError
from ladderize.files.parsing import parse_json
from ladderize.files.regular import read_lines

if TYPE_CHECKING:
    from numpy.typing import NDArray

HASHES = {"doc_hash": "documents", "target_hash": "targets", "prompt_hash": "prompts"}  # of a sample, and of what
MAX_DOC_ID = 2**53
MAX_VALUE = 1e100  # value of a metric that is taken: sums of squares stay finite
# fields of documents that hold a passage in lm-eval's tasks, the first one there is counts
PASSAGES = ("passage", "context", "article", "story", "paragraph")
EACH_ALONE = "none"  # of --cluster-by: every sample stands alone
Value = float | tuple[float, float] | None  # None: lm-eval's metric is neither a number nor a weighted one


@dataclass(frozen=True)
class Answers:
    """The samples of one task that passed one filter, by the number of their document.

    hashes: name of HASHES -> of each sample. passages: field of the documents -> a hash of its content in each sample;
    None where a document has no such field. values: metric -> of each sample; a sample may lack a metric.
    """

    doc_ids: list[int] = field(default_factory=list)
    hashes: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in HASHES})
    passages: dict[str, list[int | None]] = field(default_factory=dict)
    values: dict[str, dict[int, Value]] = field(default_factory=dict)

    def add(self, sample: Mapping[str, Any]) -> None:
        """Take in a sample as lm-eval logs it; raises ValueError, which says what is wrong with it."""
        doc_id = _part(sample, "doc_id", int)
        if abs(doc_id) > MAX_DOC_ID:
            raise ValueError(f"has the doc_id {doc_id}, which counts no document")
        for name, known in self.hashes.items():
            known.append(_part(sample, name, str))
        document = sample.get("doc")
        fields = document.items() if isinstance(document, Mapping) else ()
        texts = {
            key: hash(text) if isinstance(text, str) else text
            for key, text in fields
            if isinstance(text, str | int) and text != ""
        }
        for key in texts.keys() - self.passages.keys():
            self.passages[key] = [None] * len(self.doc_ids)
        for key, known_texts in self.passages.items():
            known_texts.append(texts.get(key))
        for metric in _part(sample, "metrics", list):
            if not isinstance(metric, str) or metric not in sample:
                raise ValueError(f"has no value of its metric {metric!r}")
            if doc_id in self.values.setdefault(metric, {}):
                raise ValueError(f"is a second answer to doc_id {doc_id}")
            self.values[metric][doc_id] = as_value(sample[metric])
        self.doc_ids.append(doc_id)

    def in_order(self) -> "Answers":
        """By doc_id, whichever order the processes of lm-eval had; raises ValueError where an id comes twice."""
        order = sorted(range(len(self.doc_ids)), key=self.doc_ids.__getitem__)
        doc_ids = [self.doc_ids[place] for place in order]
        twice = [one for one, following in pairwise(doc_ids) if one == following]
        if twice:
            raise ValueError(f"there are two answers to doc_id {twice[0]}")
        return Answers(
            doc_ids,
            {name: [known[place] for place in order] for name, known in self.hashes.items()},
            {name: [known[place] for place in order] for name, known in self.passages.items()},
            self.values,
        )


TaskAnswers = Mapping[str, Answers]  # filter -> what passed it


def collect_answers(samples: Iterable[tuple[str, Mapping[str, Any]]], source: str) -> TaskAnswers:
    """The answers of one task by filter. samples: with the words that name each in a message. source: names all of
    them. Raises UserError."""
    found: dict[str, Answers] = {}
    for where, sample in samples:
        if not isinstance(sample, Mapping):
            raise UserError(f"{where} is not a sample of lm-eval (an object); name the results of an evaluation")
        try:
            found.setdefault(_part(sample, "filter", str), Answers()).add(sample)
        except ValueError as error:
            raise UserError(f"{where} {error}; evaluate the model again") from None
    if not found:
        raise UserError(f"{source} holds no samples; evaluate the model again")
    try:
        return {name: answers.in_order() for name, answers in found.items()}
    except ValueError as error:
        raise UserError(f"{source}: {error}; evaluate the model again") from None


def read_answers(path: Path) -> TaskAnswers:
    """The samples of one task in a .jsonl file; raises UserError."""
    return collect_answers(_lines(path), str(path))


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(read_lines(path), start=1):
        where = f"{path}, line {number}"
        try:
            yield where, parse_json(line, constants=True)  # lm-eval writes NaN where a metric has none
        except ValueError as error:
            raise UserError(f"{where} is not valid JSON ({error}); evaluate the model again") from None


def as_value(value: Any) -> Value:
    """A metric's value of one sample: a finite number; a sum and its weight, of which lm-eval makes a weighted mean; or
    None."""
    if isinstance(value, list | tuple) and len(value) == 2:
        total, weight = (as_value(part) for part in value)
        return (total, weight) if isinstance(total, float) and isinstance(weight, float) and weight > 0 else None
    if isinstance(value, bool | int | float | np.number | np.bool_):
        try:
            number = float(value)
        except OverflowError:
            return None
        return number if abs(number) <= MAX_VALUE else None  # which NaN is not
    return None


def _part(sample: Mapping[str, Any], name: str, kind: type) -> Any:
    value = sample.get(name)
    if type(value) is not kind:
        raise ValueError(f"is not a sample of lm-eval: its {name} is not a {kind.__name__}")
    return value


# ---- which samples belong together: questions about one passage are not independent ----


def check_cluster_field(field: str | None, tasks: Mapping[str, TaskAnswers]) -> None:
    """Raise UserError where the documents of no task have the field."""
    if field in (None, EACH_ALONE):
        return
    known = {name for filters in tasks.values() for answers in filters.values() for name in answers.passages}
    if field not in known:
        raise UserError(
            f"--cluster-by {field}: no document has this field with text; there are"
            f" {', '.join(sorted(known)) or 'none'}"
        )


def cluster_codes(answers: Answers, field: str | None) -> "NDArray[np.int64]":
    """The number of each sample's cluster, from 0 on: [n]. field: as ``CompareOptions.cluster_by``.

    A sample without the field is a cluster of its own. A field that is chosen here for its name, but is the same in all
    samples, is an instruction rather than a passage.
    """
    alone = np.arange(len(answers.doc_ids))
    names = PASSAGES if field is None else (field,)
    chosen = next((answers.passages[name] for name in names if name in answers.passages), None)
    if chosen is None or field == EACH_ALONE or (field is None and len(set(chosen)) == 1):
        return alone
    keys = [("", place) if text is None else ("text", text) for place, text in enumerate(chosen)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys], dtype=np.int64)
