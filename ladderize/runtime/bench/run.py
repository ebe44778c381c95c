"""One rank's run of a benchmark: for each batch size the variants are opened, timed in rounds, and traced."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import (
    BASELINE_ROW,
    END_TO_END,
    NO_COMM,
    WHOLE_STEP,
    BenchDocument,
    BenchRow,
    Environment,
    Overlap,
    PhaseCommunication,
    Seconds,
    difference_interval,
    timed_figures,
)
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.rounds import Timed, Variant, seconds_together, sending_over, time_rounds
from ladderize.runtime.bench.trace import trace
from ladderize.runtime.collectives.base import Collectives, NoCommunication
from ladderize.runtime.collectives.links import Link
from ladderize.runtime.collectives.observed import Recording

TRACED_PASSES = 4
ALONE_ROUNDS, ALONE_REPEAT = 6, 10
FAR_FROM_LINK = 0.1  # an emulated message's time, as a share of what its link says
GRAPH_GAP = 1e-6  # seconds between two kernels of a graph, at most
MIN_OVERLAP = 0.01  # of the time in flight: less under compute than this is none at all


class BenchRun(ABC):
    """One rank's part of a benchmark. Subclasses open what is timed.

    link: of an emulated group.
    alone_ms: the times of single collectives with nothing beside them, by name and size, as far as they were asked for.
    baselines: those that are timed.
    failed: the reason why a variant is not timed, by its name.
    checks: the differences from a reference of variants that passed, by name.
    """

    def __init__(self, group: Ranks, options: BenchOptions, console: Console, link: Link | None) -> None:
        self.group, self.options, self.console, self.link = group, options, console, link
        self.baselines = options.baselines
        self.alone_ms: dict[str, float] = {}
        self.rows: list[BenchRow] = []
        self.failed: dict[str, str] = {}
        self.checks: dict[str, dict[str, float]] = {}

    environment: Environment
    backend: str

    @abstractmethod
    def open_variants(self, batch: int) -> list[Variant]:
        """Return what is timed at this batch size. All ranks call it."""

    def measure(self) -> BenchDocument:
        """Time everything and return the document, which is reported after each batch size, and before traces are made.

        All ranks call it. Raises UserError if all variants fail their check.
        """
        options, group = self.options, self.group
        for batch in options.batch_sizes:
            variants: list[Variant] = []  # the caches of the batch before are let go first
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
                        stem = "".join(c if c.isalnum() or c in "+-." else "_" for c in Path(variant.name).name)
                        path = options.profile / f"{number}-{stem}-batch{batch}-rank{group.rank}.json"
                        variant.overlap = self.traced(variant, path)
                self.rows[done:] = self.rows_of(variants, batch)
                group.report(self.document(complete=False))
        if not self.rows:
            raise UserError(f"{next(iter(self.failed.values()))}, so nothing was timed")
        return self.document(complete=True)

    def document(self, *, complete: bool, **more: Any) -> BenchDocument:
        """Return the document so far."""
        return BenchDocument(
            complete=complete,
            options=self.options,
            backend=self.backend,
            environment=self.environment,
            link=self.link,
            alone_ms=dict(sorted(self.alone_ms.items())),
            rows=list(self.rows),
            failed=dict(self.failed),
            checks=dict(self.checks),
            **more,
        )

    # ---- rows ----

    def rows_of(self, variants: Sequence[Variant], batch: int) -> Iterator[BenchRow]:
        """Yield the rows of timed variants; speed-ups are over the first. All ranks call it."""
        options, first = self.options, variants[0].timed.seconds
        for variant in variants:
            timed, silent = variant.timed, variant.silent
            row = self._row(variant, timed, first, batch)
            if silent is not None:
                row = dataclasses.replace(
                    row,
                    communication={part: self.communication(variant, part) for part in timed.parts},
                    no_communication_samples_ms=silent.samples_ms(),
                )
            if options.train:
                # a model's fastest step without communication, whatever the schedule
                same = (one.silent for one in variants if one.spec is variant.spec)
                bound = min(sum(map(one.median_ms, one.parts)) for one in same)
                row = dataclasses.replace(row, bound_share=bound / row.ms[WHOLE_STEP])
            yield row
            if variant is variants[0] and "no-comm" in self.baselines:
                named = dataclasses.replace(variant, name=NO_COMM, kind=BASELINE_ROW, overlap=None)
                yield self._row(named, silent, first, batch)

    def _row(self, variant: Variant, timed: Timed, first: Seconds, batch: int) -> BenchRow:
        """Return the row of a variant with the times of ``timed``, without what is known of its messages."""
        options, layout, folder = self.options, variant.spec.layout, variant.spec.folder
        total, steps = (WHOLE_STEP, 1) if options.train else (END_TO_END, options.decode_steps)
        before, after = timed.parts
        figures = timed_figures(timed.seconds, first, {before: 1, after: steps}, total)
        tokens, whole = (batch * options.prompt_len, WHOLE_STEP) if options.train else (batch, after)
        return BenchRow(
            model=variant.name,
            kind=variant.kind,
            schedule=variant.schedule,
            layout=str(layout),
            attention_sync=list(layout.attention_sync),
            mlp_sync=list(layout.mlp_sync),
            sync_tp_size=layout.sync_tp_size,
            weights="random" if folder is None else str(folder),
            dtype=variant.spec.dtype,
            tp_size=options.ranks,
            batch_size=batch,
            tokens_per_s=1e3 * tokens / figures["ms"][whole],
            samples_ms=timed.samples_ms(),
            overlap=variant.overlap,
            architecture=variant.architecture,
            **figures,
        )

    def communication(self, variant: Variant, part: str) -> PhaseCommunication:
        """Return the communication of a variant in a part. All ranks call it."""
        timed, silent, messages = variant.timed, variant.silent, variant.messages[part]
        collectives, dtype = timed.model.collectives, variant.spec.torch_dtype
        sums = [message.bytes for message in messages if not message.vocabulary]
        return PhaseCommunication(
            all_reduces=len(sums),
            bytes=sum(sums),
            no_communication_ms=silent.median_ms(part),
            alone_ms=sum(self.time_alone(collectives, one.over, dtype, one.collective, one.bytes) for one in messages),
            exposed_ms=timed.median_ms(part) - silent.median_ms(part),
            exposed_interval_ms=[1e3 * end for end in difference_interval(timed.seconds[part], silent.seconds[part])],
        )

    def time_alone(
        self, collectives: Collectives, over: Collectives, dtype: torch.dtype, name: str, size: int
    ) -> float:
        """Return the ms of one collective with nothing beside it, measured when first asked for. All ranks call it.

        An emulated one takes on a CPU what its link says. A GPU's clock may tick too seldom for that, so that it is
        measured there, too, with a warning where it is far off.

        over: the collectives that carry it: those of the model, or of a split of them.
        name: all_reduce or all_gather.
        size: bytes of the message, of an all-gather those from each rank.
        """
        key = f"{name}{place_of(collectives, over)} of {size} bytes"
        if key not in self.alone_ms:
            asked, on_gpu = None, self.group.device.type == "cuda"
            if self.link is not None and over is collectives:
                asked = self.link.seconds(size * (collectives.ranks if name == "all_gather" else 1))
            seconds = seconds_alone(self.group, over, dtype, name, size) if asked is None or on_gpu else asked
            if asked is not None and abs(seconds - asked) > FAR_FROM_LINK * asked + GRAPH_GAP:
                self.console.warn(
                    f"an emulated {key} took {1e6 * seconds:.1f} us on this GPU, not {1e6 * asked:.1f} us"
                )
            self.alone_ms[key] = 1e3 * seconds
        return self.alone_ms[key]

    # ---- traces ----

    def traced(self, variant: Variant, path: Path) -> dict[str, Overlap]:
        """Write the trace of a variant; return the overlap of each part, with ``proven`` where there should be some."""
        timed, collectives, dtype = variant.timed, variant.timed.model.collectives, variant.spec.torch_dtype
        due = sum(map(len, variant.messages.values())) if collectives.ranks > 1 else 0
        with sending_over(timed.model, Recording(collectives)) as traced:
            overlap = trace(
                lambda: timed.run_marked(TRACED_PASSES),
                timed.parts,
                path,
                self.group.device,
                traced,
                lambda over, size: self.time_alone(collectives, over, dtype, "all_reduce", size) / 1e3,
                due,
            )
        # ranks copy the messages of shared memory themselves: none is in flight
        promised = set() if traced.name == "shm" else variant.overlapping
        return {
            part: dataclasses.replace(one, proven=one.under_compute_ms > MIN_OVERLAP * one.in_flight_ms)
            if part in promised
            else one
            for part, one in overlap.items()
        }


def place_of(collectives: Collectives, over: Collectives) -> str:
    """Return words for the ranks that a message goes over, of all ranks ""."""
    for size, split in collectives.splits.items():
        if over in split:
            return f" within {size} ranks" if over is split.within else f" across groups of {size} ranks"
    return ""


def seconds_alone(group: Ranks, collectives: Collectives, dtype: torch.dtype, name: str, size: int) -> float:
    """Measure one collective of ``size`` bytes; return the seconds. All ranks call it."""
    if collectives.ranks == 1 or isinstance(collectives, NoCommunication):
        return 0.0
    message = torch.zeros(size, dtype=torch.uint8, device=group.device)
    message = message.view(torch.bfloat16 if size % dtype.itemsize else dtype)
    communicate = getattr(collectives, name)

    def back_to_back() -> None:
        for _ in range(ALONE_REPEAT):  # after a barrier ranks do not start at once
            communicate(message)

    return seconds_together(group, back_to_back, ALONE_REPEAT, ALONE_ROUNDS)
