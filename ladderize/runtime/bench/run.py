"""One rank's run of a benchmark: for each batch size the variants are opened, timed in rounds, and traced."""

import dataclasses
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic

import torch

from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import (
    Environment,
    Overlap,
    PhaseCommunication,
    TimedDocument,
    VariantRow,
    difference_interval,
    environment,
)
from ladderize.runtime.bench.plan import BenchPlan, SomeOptions
from ladderize.runtime.bench.rounds import Variant, sending_over, synchronize, time_rounds
from ladderize.runtime.bench.trace import trace
from ladderize.runtime.collectives.base import Collectives, NoCommunication
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.collectives.emulated import emulate
from ladderize.runtime.collectives.links import Link
from ladderize.runtime.collectives.observed import Traced
from ladderize.runtime.graphs import capture

TRACED_PASSES = 4
ALONE_ROUNDS, ALONE_REPEAT = 6, 10
MIN_OVERLAP = 0.01  # of the time in flight: less under compute than this is none at all


class AloneTimes:
    """The time of single collectives with nothing beside them, by name and size; measured when first asked for."""

    def __init__(self, group: Ranks, collectives: Collectives, link: Link | None, dtype: torch.dtype) -> None:
        self.group, self.collectives, self.link, self.dtype = group, collectives, link, dtype
        self.measured: dict[tuple[str, int], float] = {}

    def seconds(self, collective: str, size: int) -> float:
        """Return the seconds of one collective. All ranks call it.

        collective: all_reduce or all_gather.
        size: bytes of the message, of an all-gather those from each rank.
        """
        if (collective, size) not in self.measured:
            self.measured[collective, size] = self._measure(collective, size)
        return self.measured[collective, size]

    def milliseconds(self) -> dict[str, float]:
        """Return all times so far, in ms: ``alone_ms`` of bench.json."""
        return {f"{name} of {size} bytes": seconds * 1e3 for (name, size), seconds in sorted(self.measured.items())}

    def _measure(self, collective: str, size: int) -> float:
        if self.link is not None:
            return self.link.seconds(size * (self.collectives.ranks if collective == "all_gather" else 1))
        if self.collectives.ranks == 1 or isinstance(self.collectives, NoCommunication):
            return 0.0
        message = torch.zeros(size, dtype=torch.uint8, device=self.group.device)
        message = message.view(torch.bfloat16 if size % self.dtype.itemsize else self.dtype)
        communicate = getattr(self.collectives, collective)

        def back_to_back() -> None:
            for _ in range(ALONE_REPEAT):  # after a barrier ranks do not start at once
                communicate(message)

        run: Callable[[], None] = back_to_back
        if self.group.device.type == "cuda":  # launched one by one, small messages take as long as their launches
            run = capture(back_to_back, self.group.device, warm_ups=1)[0].replay
        samples = []
        for _ in range(ALONE_ROUNDS):
            self.group.barrier()
            synchronize(self.group.device)
            begin = time.perf_counter()
            run()
            synchronize(self.group.device)
            samples.append(max(self.group.gather(time.perf_counter() - begin)) / ALONE_REPEAT)
        return statistics.median(samples[1:])


class BenchRun(ABC, Generic[SomeOptions]):
    """One rank's part of a benchmark. Subclasses say what is timed, and what a row holds.

    backend: the name of the backend that carries messages.
    link: of an emulated group.
    failed: the reason why a variant is not timed, by its name.
    checks: the differences from a reference of variants that passed, by name.
    """

    document_class: ClassVar[type[TimedDocument]]

    environment: Environment
    backend: str
    link: Link | None

    def __init__(self, group: Ranks, options: SomeOptions, console: Console) -> None:
        self.group, self.options, self.console = group, options, console
        self.rows: list[VariantRow] = []
        self.failed: dict[str, str] = {}
        self.checks: dict[str, Any] = {}

    @abstractmethod
    def open_variants(self, batch: int) -> list[Variant]:
        """Return what is timed at this batch size. All ranks call it."""

    @abstractmethod
    def rows_of(self, variants: Sequence[Variant], batch: int) -> list[VariantRow]:
        """Return the rows of timed variants; speed-ups are over the first. All ranks call it."""

    @abstractmethod
    def alone_times(self, variant: Variant) -> AloneTimes:
        """Return the times alone of the collectives that carry a variant's messages."""

    def document(self, *, complete: bool, **more: Any) -> Any:
        """Return the document so far."""
        return self.document_class(
            complete=complete,
            options=self.options,
            backend=self.backend,
            environment=self.environment,
            link=self.link,
            rows=list(self.rows),
            failed=dict(self.failed),
            checks=dict(self.checks),
            **more,
        )

    def measure(self) -> Any:
        """Time everything and return the document, which is reported after each batch size, and before traces are made.

        All ranks call it. Raises UserError if all variants fail their check.
        """
        options, group = self.options, self.group
        for batch in options.batch_sizes:
            variants = self.open_variants(batch)
            if not variants:
                continue
            time_rounds(group, variants, options, self.console, f"timing, batch {batch}")
            done = len(self.rows)
            with self.console.stage("timing messages alone, making rows"):
                self.rows += self.rows_of(variants, batch)
            group.report(self.document(complete=False))
            if options.profile is not None:
                with self.console.stage(f"profiling, traces in {options.profile}"):
                    for number, variant in enumerate(variants):
                        group.barrier()
                        path = variant.trace_path(options.profile, number, batch, group.rank)
                        variant.overlap = self.traced(variant, path)
                self.rows[done:] = self.rows_of(variants, batch)
                group.report(self.document(complete=False))
        if not self.rows:
            raise UserError(f"{next(iter(self.failed.values()))}, so nothing was timed")
        return self.document(complete=True)

    def traced(self, variant: Variant, path: Path) -> dict[str, Overlap]:
        """Write the trace of a variant; return the overlap of each part, with ``proven`` where there should be some."""
        timed, alone = variant.timed, self.alone_times(variant)
        with sending_over(timed.model, Traced(timed.model.collectives)) as traced:
            overlap = trace(
                lambda: timed.run_marked(TRACED_PASSES),
                timed.parts,
                path,
                self.group.device,
                traced,
                lambda size: alone.seconds("all_reduce", size),
            )
        # ranks copy the messages of shared memory themselves: none is in flight
        promised = set() if traced.name == "shm" else variant.overlapping
        return {
            part: dataclasses.replace(one, proven=one.under_compute_ms > MIN_OVERLAP * one.in_flight_ms)
            if part in promised
            else one
            for part, one in overlap.items()
        }


class RuntimeRun(BenchRun[SomeOptions]):
    """A run on ladderize's runtime.

    silence: collectives of as many ranks, without communication.
    """

    def __init__(
        self, group: Ranks, plan: BenchPlan[SomeOptions], console: Console, operations: str | None = None
    ) -> None:
        """Choose the collectives. All ranks call it, and close ``collectives`` at the end."""
        super().__init__(group, plan.options, console)
        options, link = plan.options, plan.link
        if options.emulate_tp is not None and link is not None:
            self.collectives: Collectives = emulate(options.emulate_tp, link, group.device)
            self.backend = f"emulated: {options.emulate_tp} ranks over {link.name}"
        else:
            self.collectives, self.backend = choose(
                options.backend, group, max_bytes=plan.longest_message, in_flight=plan.in_flight
            )
        self.environment, self.link = environment(group, operations=operations), link
        self.silence = NoCommunication(self.collectives.ranks)
        self.alone = AloneTimes(group, self.collectives, link, plan.specs[0].torch_dtype)

    def alone_times(self, variant: Variant) -> AloneTimes:
        return self.alone

    def document(self, *, complete: bool, **more: Any) -> Any:
        return super().document(complete=complete, alone_ms=self.alone.milliseconds(), **more)

    def communication(self, variant: Variant, part: str) -> PhaseCommunication:
        """Return the communication of a variant in a part. All ranks call it."""
        timed, silent, messages = variant.timed, variant.silent, variant.messages[part]
        sums = [message.bytes for message in messages if not message.vocabulary]
        alone = 1e3 * sum(self.alone.seconds(one.collective, one.bytes) for one in messages)
        exposed = timed.median_ms(part) - silent.median_ms(part)
        return PhaseCommunication(
            all_reduces=len(sums),
            bytes=sum(sums),
            no_communication_ms=silent.median_ms(part),
            alone_ms=alone,
            exposed_ms=exposed,
            exposed_interval_ms=[1e3 * end for end in difference_interval(timed.seconds[part], silent.seconds[part])],
            hidden_ms=alone - exposed,
        )
