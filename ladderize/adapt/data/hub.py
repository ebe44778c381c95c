"""A dataset on the hub, read in its own order as it arrives, from any place that was noted."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from ladderize.errors import UserError
from ladderize.rows.files import quiet_datasets
from ladderize.rows.formats import TRAINING, Row

HubState = dict[str, Any]  # of datasets' making; JSON can hold it


class HubRows:
    """``datasets.load_dataset(name, config, split=split, streaming=True)``; code from the hub is never run.

    text: the spec, for messages. Raises UserError if the dataset cannot be reached, does not exist, or has no column
    that is known.
    """

    def __init__(self, text: str, name: str, config: str | None, split: str) -> None:
        import datasets

        self.text = text
        try:
            with quiet_datasets():
                self._dataset = datasets.load_dataset(name, config, split=split, streaming=True)
                self._start: HubState = deepcopy(self._dataset.state_dict())
        except Exception as error:  # of datasets, huggingface_hub, fsspec and their HTTP client
            raise UserError(
                f"--data {text} cannot be opened ({_reason(error)}); check its name, its split and the connection"
            ) from None
        columns = self._dataset.column_names
        if columns and TRAINING.find(columns) is None:
            raise UserError(f"--data {text} has the columns {', '.join(columns)}; rows need {TRAINING.in_words}")

    def read(self, state: HubState | None = None, number: int = 0) -> Iterator[tuple[Row, HubState]]:
        """The rows from ``state`` on (None: from the first), and with each the state to read on behind it. number: of
        rows before."""
        self._dataset.load_state_dict(deepcopy(self._start if state is None else state))
        rows = iter(self._dataset)
        while True:
            try:
                values = next(rows)
                after = self._dataset.state_dict()
            except StopIteration:
                return
            except Exception as error:
                raise UserError(
                    f"--data {self.text} cannot be read beyond row {number} ({_reason(error)}); resume when it can be"
                ) from None
            number += 1
            yield Row(values, f"{self.text}, row {number}"), after


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
