"""What was timed, by whatever engine, and what the model of planning/passes.py says to it. Imports no torch."""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ladderize.files.records import Record
from ladderize.layout import BLOCKING
from ladderize.planning.hardware import DeviceSpec, EngineFacts
from ladderize.planning.passes import PassParts, Workload, pass_parts
from ladderize.planning.prediction import point_seconds, predict_parallel
from ladderize.runtime.collectives.links import NO_LINK, Interconnect

Variant = Literal["layout", "no-comm", "parallel"]
Quantity = Literal["prefill", "decode", "end_to_end", "all_reduce"]


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


def parts_seen(
    seen: Observation, device: DeviceSpec | None, engine: EngineFacts | None, interconnect: Interconnect | None
) -> Mapping[str, PassParts]:
    """The parts of the passes that ``seen`` times; of an all-reduce, of none. interconnect: None where nothing is sent.

    They are the same for all observations of one ``parts_key``.
    """
    if seen.quantity == "all_reduce":
        return {}
    if device is None or engine is None or seen.config is None or seen.dtype is None or seen.workload is None:
        raise ValueError(f"a time of {seen.quantity} needs a device, an engine, a config, a dtype and a workload")
    link = NO_LINK if interconnect is None or not seen.communicates else interconnect.at(seen.ranks)
    contention = 0.0 if interconnect is None else interconnect.contention
    return pass_parts(
        seen.config, device, engine, link, contention, seen.ranks, seen.dtype, seen.workload, seen.sync_tp_size
    )


def parts_key(seen: Observation) -> tuple[object, ...]:
    config = json.dumps(seen.config, sort_keys=True)
    return config, seen.dtype, seen.workload, seen.engine, seen.ranks, seen.sync_tp_size, seen.communicates


def expected_seconds(seen: Observation, parts: Mapping[str, PassParts], interconnect: Interconnect | None) -> float:
    """What the model says. parts: of ``parts_seen``."""
    if seen.quantity == "all_reduce":
        assert interconnect is not None
        return interconnect.at(seen.ranks).seconds(seen.message_bytes or 0)
    if seen.quantity != "end_to_end":
        return _total(seen, parts[seen.quantity])
    assert seen.workload is not None
    return _total(seen, parts["prefill"]) + seen.workload.decode_steps * _total(seen, parts["decode"])


def _total(seen: Observation, parts: PassParts) -> float:
    if seen.variant == "parallel":
        return predict_parallel(parts).total
    if seen.variant == "no-comm":
        parts = dataclasses.replace(parts, message=0.0, message_start=0.0, vocabulary=0.0)
    seconds = point_seconds(parts)  # the same as predict_pass's, and a fit asks for it thousands of times
    return seconds.constant + sum(count * seconds.layer[modes] for modes, count in _modes(seen).items())


def _modes(seen: Observation) -> Mapping[tuple[str, str], int]:
    """How many layers have which mode of the entering MLP sync and of attention's."""
    assert seen.config is not None
    layers = seen.config["num_hidden_layers"]
    if seen.attention_sync is None or seen.mlp_sync is None:
        return {(BLOCKING, BLOCKING): layers}
    return Counter(zip((BLOCKING, *seen.mlp_sync[:-1]), seen.attention_sync, strict=True))
