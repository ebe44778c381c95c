"""Published times, and what the model of ladderize/plan/passes.py says to them."""

import csv
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ladderize.files.records import Record
from ladderize.layout import BLOCKING, Layout
from ladderize.plan.hardware import DeviceSpec, known_engines
from ladderize.plan.passes import PassParts, Workload, pass_parts, predict_layer, predict_parallel
from ladderize.runtime.bench.options import named_layout
from ladderize.runtime.collectives.links import Interconnect
from ladderize.runtime.shards import read_shape

Variant = Literal["layout", "no-comm", "parallel"]
Quantity = Literal["prefill", "decode", "end_to_end", "all_reduce"]
COUNTS = ("tp_size", "batch_size", "prompt_len", "output_len")
VARIANTS: dict[str, Variant] = {"no-comm": "no-comm", "parallel": "parallel"}
TIME_COLUMNS: dict[str, Quantity] = {
    "prefill_ms": "prefill",
    "decode_ms_per_token": "decode",
    "end_to_end_tokens_per_s": "end_to_end",
}


@dataclass(frozen=True)
class Observation(Record):
    """One time, in seconds: of a prefill, a mean decode step, both with all steps (``end_to_end``), or one all-reduce.

    config: the model's sizes, as config.json names them. engine: a row of engines.yaml. variant: a layout, what it
    computes without communication, or the parallel baseline. The modes are None for the dense layout. message_bytes: of
    an all-reduce, which needs nothing else but ``ranks``. group: by which residuals are shown together.
    """

    quantity: Quantity
    seconds: float
    ranks: int
    group: str
    message_bytes: int | None = None
    config: dict[str, Any] | None = None
    dtype: str | None = None
    workload: Workload | None = None
    engine: str | None = None
    variant: Variant = "layout"
    attention_sync: list[str] | None = None
    mlp_sync: list[str] | None = None
    sync_tp_size: int | None = None

    @property
    def communicates(self) -> bool:
        return self.ranks > 1 and self.variant != "no-comm"

    @cached_property
    def pass_key(self) -> tuple[object, ...]:
        """Observations of one key are of passes with the same parts."""
        config = json.dumps(self.config, sort_keys=True)
        return config, self.dtype, self.workload, self.engine, self.ranks, self.sync_tp_size, self.communicates

    @cached_property
    def layer_modes(self) -> Counter[tuple[str, str]]:
        """How many layers have which mode of the entering MLP sync and of attention's."""
        assert self.config is not None
        if self.attention_sync is None or self.mlp_sync is None:
            return Counter({(BLOCKING, BLOCKING): self.config["num_hidden_layers"]})
        return Counter(zip((BLOCKING, *self.mlp_sync[:-1]), self.attention_sync, strict=True))


def layout_observation(
    layout: Layout,
    quantity: Quantity,
    seconds: float,
    ranks: int,
    variant: Variant,
    workload: Workload,
    engine: str,
    *,
    config: dict[str, Any],
    dtype: str,
    name: str,
) -> Observation:
    """One timed pass; its group: what was timed, and over how many ranks. name: of the layout."""
    shown = {"layout": name, "no-comm": "no communication", "parallel": "parallel"}[variant]
    return Observation(
        quantity,
        seconds,
        ranks,
        f"{shown}, {quantity.replace('_', ' ')}, {ranks} rank{'s' * (ranks > 1)}",
        config=config,
        dtype=dtype,
        workload=workload,
        engine=engine,
        variant=variant,
        **layout.to_config(),
    )


def expected_seconds(
    observations: Sequence[Observation], device: DeviceSpec, interconnect: Interconnect | None
) -> list[float]:
    """What the model says to each. interconnect: None where nothing is sent."""
    engines, parts_of, found = known_engines(), {}, []
    for seen in observations:
        if seen.quantity == "all_reduce":
            assert interconnect is not None
            found.append(interconnect.at(seen.ranks).seconds(seen.message_bytes or 0))
            continue
        if seen.config is None or seen.dtype is None or seen.workload is None or seen.engine is None:
            raise ValueError(f"a time of {seen.quantity} needs a config, a dtype, a workload and an engine")
        if seen.pass_key not in parts_of:
            link = interconnect if seen.communicates else None
            how = (seen.config, device, engines[seen.engine], link, seen.ranks, seen.dtype, seen.workload)
            parts_of[seen.pass_key] = pass_parts(*how, seen.sync_tp_size)
        passes = parts_of[seen.pass_key]
        if seen.quantity == "end_to_end":
            steps = seen.workload.decode_steps
            found.append(_pass_seconds(seen, passes["prefill"]) + steps * _pass_seconds(seen, passes["decode"]))
        else:
            found.append(_pass_seconds(seen, passes[seen.quantity]))
    return found


def _pass_seconds(seen: Observation, parts: PassParts) -> float:
    if seen.variant == "parallel":
        return predict_parallel(parts).total
    layers = (count * predict_layer(parts, *modes).total for modes, count in seen.layer_modes.items())
    return parts.rest + parts.vocabulary + sum(layers)


def read_timings(path: Path, engine: str) -> list[Observation]:
    """Return the times of a table of benchmarks/reference."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    found = []
    for row in csv.DictReader(lines):
        ranks, batch, prompt, output = (int(row[f"{name}"]) for name in COUNTS)
        config = dict(read_shape(row["shape"], "shape"))
        name, variant = row["variant"], VARIANTS.get(row["variant"], "layout")
        layout = named_layout(name if variant == "layout" else "dense", config["num_hidden_layers"], ranks)
        for column, quantity in TIME_COLUMNS.items():
            if row.get(column):
                value = float(row[column])
                seconds = batch * output / value if quantity == "end_to_end" else value / 1e3
                how = (ranks, variant, Workload(batch, prompt, output), engine)
                found.append(
                    layout_observation(layout, quantity, seconds, *how, config=config, dtype=row["dtype"], name=name)
                )
    return found
