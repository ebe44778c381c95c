"""Published times, and what the model of ladderize/plan/passes.py says to them."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ladderize.layout import Layout
from ladderize.plan.hardware import DeviceSpec, known_engines
from ladderize.plan.passes import PassParts, Serving, pass_parts, predict_parallel, predict_pass, predict_silent
from ladderize.runtime.bench.options import named_layout
from ladderize.runtime.collectives.links import Interconnect
from ladderize.runtime.shards import read_shape

ENGINE = "published"
TIME_COLUMNS = {"prefill_ms": "prefill", "decode_ms_per_token": "decode", "end_to_end_tokens_per_s": "end_to_end"}
COUNTS = ("tp_size", "batch_size", "prompt_len", "output_len")


@dataclass(frozen=True)
class Observation:
    """One published time, in seconds: of a prefill, a mean decode step, or both with all steps (``end_to_end``).

    file: the table that it is of.
    variant: a layout, parallel, or no-comm.
    """

    file: str
    variant: str
    quantity: str
    seconds: float
    shape: str
    dtype: str
    ranks: int
    batch_size: int
    prompt_len: int
    output_len: int

    @property
    def communicates(self) -> bool:
        return self.ranks > 1 and self.variant != "no-comm"

    @property
    def passes(self) -> tuple[object, ...]:
        """The same for observations of passes with the same parts."""
        sizes = self.ranks, self.batch_size, self.prompt_len, self.output_len
        return self.shape, self.dtype, *sizes, self.communicates

    @property
    def groups(self) -> dict[str, str]:
        return {
            "batch": f"batch {self.batch_size}",
            "ranks": f"{self.ranks} ranks",
            "variant": self.variant,
            "quantity": self.quantity.replace("_", " "),
        }

    def parts(self, device: DeviceSpec, link: Interconnect | None) -> dict[str, PassParts]:
        engine, links = known_engines()[ENGINE], (link,) if link is not None and self.communicates else ()
        sizes = self.ranks, self.batch_size, self.prompt_len, self.output_len
        return pass_parts(
            Serving(read_shape(self.shape), self.dtype, False, device, engine, links, *sizes),
            self.ranks,
        )

    def predict(self, parts: Mapping[str, PassParts]) -> float:
        """Return the seconds that passes with these parts take."""
        layers = parts["prefill"].layers
        bounds: dict[str, Any] = {"parallel": predict_parallel, "no-comm": predict_silent}
        layout = Layout.dense(layers) if self.variant in bounds else named_layout(self.variant, layers, self.ranks)
        seconds = bounds.get(self.variant) or partial(predict_pass, layout=layout)
        if self.quantity != "end_to_end":
            return seconds(parts[self.quantity]).total
        return seconds(parts["prefill"]).total + (self.output_len - 1) * seconds(parts["decode"]).total


def expected_seconds(observations: Sequence[Observation], device: DeviceSpec, link: Interconnect | None) -> list[float]:
    """Return what the model says to each."""
    known: dict[object, dict[str, PassParts]] = {}
    for seen in observations:
        if seen.passes not in known:
            known[seen.passes] = seen.parts(device, link)
    return [seen.predict(known[seen.passes]) for seen in observations]


def read_timings(path: Path) -> list[Observation]:
    """Return the times of a table of benchmarks/reference."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    found = []
    for row in csv.DictReader(lines):
        ranks, batch, prompt, output = (int(row[name]) for name in COUNTS)
        for column, quantity in TIME_COLUMNS.items():
            if row.get(column):
                value = float(row[column])
                seconds = batch * output / value if quantity == "end_to_end" else value / 1e3
                how = (row["shape"], row["dtype"], ranks, batch, prompt, output)
                found.append(Observation(path.name, row["variant"], quantity, seconds, *how))
    return found
