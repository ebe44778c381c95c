"""The one harness of all benchmarks: variants against each other in one run, in rounds; their rows; a kept document.

A benchmark (``inference``, ``training/``, serving/vllm/bench) supplies what one sample is and the figures of a row. The
order is drawn anew for each round, so that whatever the machine does hits all variants alike.
"""

import contextlib
import dataclasses
import random
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.figure import check_plot
from ladderize.files.documents import check_writable, write_json
from ladderize.memory import PeakMemory
from ladderize.ranks.environment import already_started, is_main_rank
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.cost_model import predict
from ladderize.runtime.bench.document import TimedDocument, environment
from ladderize.runtime.bench.messages import AloneTimes, PassOperations
from ladderize.runtime.bench.options import RoundsOptions
from ladderize.runtime.bench.plan import Asked, BenchPlan
from ladderize.runtime.bench.rows import MODEL_ROW, PassCommunication, difference_interval
from ladderize.runtime.bench.trace import Overlap
from ladderize.runtime.collectives.base import NoCommunication
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.collectives.emulated import emulate
from ladderize.runtime.launch import run
from ladderize.runtime.spec import ModelSpec

# Of the time in flight: less under compute than this is none at all.
MIN_OVERLAP = 0.01


class Timed(ABC):
    """What is timed. own_bytes: what it holds before and after a sample; None: its peak memory is not measured.

    ``seconds``: of every counted round, by part.
    """

    parts: ClassVar[tuple[str, ...]]
    own_bytes: int | None = None
    peak_memory_bytes: int | None = None

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {part: [] for part in self.parts}

    @abstractmethod
    def sample(self) -> tuple[float, ...]:
        """Seconds of each of ``parts``, done once. All ranks call it, right after a barrier."""

    def samples_ms(self) -> dict[str, list[float]]:
        return {part: [1e3 * one for one in seconds] for part, seconds in self.seconds.items()}

    def median_ms(self, part: str) -> float:
        return statistics.median(self.seconds[part]) * 1e3


def time_rounds(group: Ranks, timed: Sequence[Timed], options: RoundsOptions, console: Console, title: str) -> None:
    """As many rounds over all of ``timed`` as ``options`` say; all ranks call it."""
    order = list(timed)
    shuffle = random.Random(options.seed)  # the same on every rank
    rounds = options.warmup + options.repeat
    # nothing moves on the terminal while a sample is taken: the bar is drawn between rounds
    with console.progress(title, rounds, animated=False) as advance:
        for number in range(1, rounds + 1):
            counted = number - options.warmup
            warming = f"warm-up {number} of {options.warmup}"
            advance(0, f"round {counted} of {options.repeat}" if counted > 0 else warming)
            shuffle.shuffle(order)
            for one in order:
                _take_sample(group, one, counted=counted > 0)
            advance(1)


def _take_sample(group: Ranks, timed: Timed, *, counted: bool) -> None:
    memory = contextlib.nullcontext() if timed.own_bytes is None else PeakMemory(group.device)
    with memory:
        group.barrier()
        seconds = timed.sample()
    if counted:
        # the group is done when its last rank is
        for part, of_ranks in zip(timed.parts, zip(*group.gather(seconds), strict=True), strict=True):
            timed.seconds[part].append(max(of_ranks))
    elif isinstance(memory, PeakMemory) and memory.rise is not None and timed.own_bytes is not None:
        timed.peak_memory_bytes = max(timed.peak_memory_bytes or 0, timed.own_bytes + memory.rise)


@dataclass
class TimedVariant:
    """A model, or a baseline, at one batch size: what is timed of it, and what else was measured."""

    name: str
    spec: ModelSpec
    timed: Timed
    kind: str = field(default=MODEL_ROW, kw_only=True)
    overlap: Any = field(default=None, kw_only=True)  # what a trace showed

    @property
    def stem(self) -> str:
        """Of its files' names."""
        return "".join(c if c.isalnum() or c in "+-." else "_" for c in Path(self.name).name)

    def model_figures(self, ranks: int, batch: int) -> dict[str, Any]:
        """The fields of a ``VariantRow``. ranks: real or emulated."""
        layout, folder = self.spec.layout, self.spec.folder
        return {
            "model": self.name,
            "layout": str(layout),
            "attention_sync": list(layout.attention_sync),
            "mlp_sync": list(layout.mlp_sync),
            "sync_tp_size": layout.sync_tp_size,
            "weights": "random" if folder is None else str(folder),
            "dtype": self.spec.dtype,
            "tp_size": ranks,
            "batch_size": batch,
        }


_Variant = TypeVar("_Variant", bound=TimedVariant)
_Document = TypeVar("_Document", bound=TimedDocument)
_Options = TypeVar("_Options", bound=RoundsOptions)


class Bench(ABC, Generic[_Variant, _Document, _Options]):
    """One rank's part of a benchmark. backend: what carries all-reduces; emulated: they are delays."""

    backend: str
    emulated: bool

    def __init__(self, group: Ranks, options: _Options, console: Console, settings: tuple[str, ...] = ()) -> None:
        """settings: see ``environment``."""
        self.group, self.options, self.console = group, options, console
        self.environment = environment(group, settings=settings)

    @abstractmethod
    def open(self, batch: int) -> list[_Variant]:
        """The variants of one batch size; the first is what the others are compared with."""

    @abstractmethod
    def rows(self, variants: list[_Variant], batch: int) -> list[Any]: ...

    @abstractmethod
    def trace(self, variant: _Variant, path: Path) -> Any:
        """Write a trace of a pass to ``path``, and return the overlap that it shows."""

    @abstractmethod
    def document(self, rows: list[Any], *, complete: bool) -> _Document: ...

    def document_figures(self, rows: list[Any], *, complete: bool) -> dict[str, Any]:
        """The fields of a ``TimedDocument``."""
        return {
            "complete": complete,
            "emulated": self.emulated,
            "options": self.options,
            "backend": self.backend,
            "environment": self.environment,
            "rows": rows,
        }

    def timed_of(self, variants: list[_Variant]) -> list[Timed]:
        """What is timed in each round."""
        return [variant.timed for variant in variants]

    def after_timing(self, variants: list[_Variant]) -> None:
        """Measure what rows need beside times."""

    def measure(self) -> _Document:
        """Time everything; reports the document as often as there is more of it. All ranks call it."""
        rows: list[Any] = []
        for batch in self.options.batch_sizes:
            variants = self.open(batch)
            time_rounds(self.group, self.timed_of(variants), self.options, self.console, f"timing, batch {batch}")
            self.after_timing(variants)
            done = len(rows)
            rows[done:] = self.rows(variants, batch)
            self.group.report(self.document(rows, complete=False))
            if self.options.profile is not None:
                with self.console.stage(f"profiling, traces in {self.options.profile}"):
                    for number, variant in enumerate(variants):
                        self.group.barrier()
                        name = f"{number}-{variant.stem}-batch{batch}-rank{self.group.rank}.json"
                        variant.overlap = self.trace(variant, self.options.profile / name)
                rows[done:] = self.rows(variants, batch)
                self.group.report(self.document(rows, complete=False))
        return self.document(rows, complete=True)


# ---- what the benchmarks of ladderize's runtime share ----


@dataclass
class RuntimeVariant(TimedVariant):
    """Timed without communication, too: the difference is what it waits for.

    overlapping: the parts in which its layout or its schedule lets a message run under compute. operations: by part.
    """

    silent: Timed
    overlapping: set[str]
    operations: dict[str, PassOperations] = field(default_factory=dict, kw_only=True)

    def communication(self, part: str) -> PassCommunication:
        """What is sent in this part, and waited for."""
        operations, seconds, without = self.operations[part], self.timed.seconds[part], self.silent.median_ms(part)
        prediction = predict(without / 1e3, operations.all_reduces, operations.vocabulary)
        exposed, alone = self.timed.median_ms(part) - without, prediction.communication * 1e3
        return PassCommunication(
            all_reduces=len(operations.all_reduces),
            bytes=sum(operation.bytes for operation in operations.all_reduces),
            no_communication_ms=without,
            alone_ms=alone,
            exposed_ms=exposed,
            exposed_interval_ms=[1e3 * end for end in difference_interval(seconds, self.silent.seconds[part])],
            hidden_ms=alone - exposed,
            hideable_ms=prediction.hideable * 1e3,
            predicted_ms=prediction.total * 1e3,
        )


_RuntimeVariant = TypeVar("_RuntimeVariant", bound=RuntimeVariant)


class RuntimeBench(Bench[_RuntimeVariant, _Document, Asked]):
    """A benchmark of models whose messages go through ``collectives``, and of the same models in ``silence``."""

    def __init__(self, group: Ranks, plan: BenchPlan[Asked], console: Console) -> None:
        super().__init__(group, plan.options, console)
        self.plan, link = plan, plan.link
        self.emulated = link is not None
        if self.options.emulate_tp is not None:
            assert link is not None
            self.collectives = emulate(self.options.emulate_tp, link, group.device)
            self.backend = f"emulated: {self.options.emulate_tp} ranks over {link.name}"
        else:
            self.collectives, self.backend = choose(
                self.options.backend, group, max_bytes=plan.longest_message, in_flight=plan.in_flight
            )
        self.silence = NoCommunication(self.collectives.ranks)
        self.alone = AloneTimes(group, self.collectives, link, plan.specs[0].torch_dtype)

    @abstractmethod
    def operations(self, variant: _RuntimeVariant) -> dict[str, PassOperations]:
        """What each part of a variant would send, and under how much compute; all ranks call it."""

    def timed_of(self, variants: list[_RuntimeVariant]) -> list[Timed]:
        return [timed for variant in variants for timed in (variant.timed, variant.silent)]

    def after_timing(self, variants: list[_RuntimeVariant]) -> None:
        with self.console.stage("timing the communication alone"):
            for variant in variants:
                variant.operations = self.operations(variant)

    def alone_seconds(self, size: int) -> float:
        """Of an all-reduce of so many bytes."""
        return self.alone.seconds("all_reduce", size)

    def judged(self, overlap: Overlap, *, promised: bool) -> Overlap:
        """What a trace showed, and whether that is any overlap where some is promised."""
        # ranks copy messages of shared memory themselves: there is nothing in flight to be covered
        if not promised or self.collectives.name == "shm":
            return overlap
        return dataclasses.replace(overlap, proven=overlap.under_compute_ms > MIN_OVERLAP * overlap.in_flight_ms)

    def document_figures(self, rows: list[Any], *, complete: bool) -> dict[str, Any]:
        """The fields of a ``RuntimeDocument``."""
        return {
            **super().document_figures(rows, complete=complete),
            "link": self.plan.link,
            "message_bytes_outside_link_range": self.alone.sizes_outside_range(),
            "alone_ms": self.alone.milliseconds(),
        }

    def measure(self) -> _Document:
        document = super().measure()
        self.collectives.close()
        return document


# ---- from the options to the result ----


class KeptDocument(Generic[_Document]):
    """The newest document of a run: written to ``out`` as soon as it is there, shown at the end, however that comes.

    show: prints it. draw: draws it into files, and returns them; ``plot`` names these. Raises UserError for files that
    cannot be written.
    """

    def __init__(
        self,
        out: Path | None,
        plot: Path | None,
        console: Console,
        show: Callable[[_Document, Console], None],
        draw: Callable[[_Document, Path], list[Path]] | None = None,
    ) -> None:
        if out is not None:
            check_writable(out)
        if plot is not None:
            check_plot(plot)
        self.out, self.plot, self.console = out, plot, console
        self.show_document, self.draw = show, draw
        self.newest: _Document | None = None

    def write(self, document: _Document) -> None:
        self.newest = document
        if self.out is not None:
            write_json(self.out, document.to_dict())

    def show(self) -> None:
        if self.newest is None:
            return
        self.console.document(self.newest.to_dict())
        self.show_document(self.newest, self.console)
        if self.out is not None:
            self.console.note(f"wrote {self.out}")
        if self.plot is not None and self.draw is not None:
            self.console.note(f"wrote {' and '.join(map(str, self.draw(self.newest, self.plot)))}")

    def measured(
        self,
        measure: Callable[[Ranks, Any, Console], Any],
        plan: Any,
        *,
        device: str,
        start: Callable[..., Any] = run,
        of_engine: str = "",
    ) -> _Document:
        """Call ``measure(ranks, plan, console)`` on every rank, and keep and show what rank 0 reports and returns.

        start: starts the ranks, as ``run`` does.
        """
        options: RoundsOptions = plan.options
        if (options.tp_size > 1 or of_engine) and not already_started():
            self.console.note(f"starting {options.tp_size} rank{'s' * (options.tp_size > 1)}{of_engine}")
        ranks = {"tp_size": options.tp_size, "device": device, "threads": options.threads}
        try:
            document: _Document = start(measure, plan, self.console, **ranks, report=self.write)
        except BaseException:  # also Ctrl-C
            self.show()
            raise
        if is_main_rank():
            self.write(document)
        self.show()
        return document


def check_overlaps(disproved: Sequence[str], what: str) -> None:
    """Raise UserError if there are variants, named here, in whose trace nothing overlapped. what: promised it."""
    if disproved:
        raise UserError(
            f"nothing overlapped in the trace of {' and '.join(disproved)}, although {what} overlaps: its row is not"
            " valid"
        )
