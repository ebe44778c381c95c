"""Which samples belong together: questions about one passage are not independent. Imports no torch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ladderize.errors import UserError
from ladderize.eval.paired.answers import Answers, TaskAnswers

if TYPE_CHECKING:
    from numpy.typing import NDArray

# fields of documents that hold a passage in lm-eval's tasks, the first one there is counts
PASSAGES = ("passage", "context", "article", "story", "paragraph")
EACH_ALONE = "none"  # of --cluster-by: every sample stands alone


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
