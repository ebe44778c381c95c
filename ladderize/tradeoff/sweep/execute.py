"""Runs the stages of a plan, each in a process of its own: several side by side where nothing is timed, on this host
and on others. Where one fails, the others go on."""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ladderize.errors import UserError
from ladderize.tradeoff.sweep.builder import Inputs
from ladderize.tradeoff.sweep.hosts import OtherHost
from ladderize.tradeoff.sweep.launch import HostPart
from ladderize.tradeoff.sweep.stages import TIMED, Stage, finished_stage, mark_finished, prepare
from ladderize.tradeoff.sweep.workers import Ended, StageOrder, ThisHost
from ladderize.workflows.sweep_document import StageState

LOOK_SECONDS = 1.0  # between two looks at what runs
FULL_BYTES = 1 << 20  # a disk with less free is full
MISSING = ("failed", "skipped")


@dataclass
class Running:
    """A stage, and on each of its hosts the GPUs and cores that it has. store: where its ranks meet, if they are on
    several."""

    stage: Stage
    places: dict[int, tuple[tuple[str, ...], frozenset[int]]]
    store: Any = None
    ended: list[Ended] = field(default_factory=list)


@dataclass
class Execution:
    """The states of all stages by key, and what runs where. jobs: stages side by side on each host. hosts: this one
    first; no two stages share a GPU. changed: is called after every change; looked: now and then while something runs,
    unless that is timed."""

    root: Path
    inputs: Inputs
    jobs: int
    this: ThisHost
    others: Sequence[OtherHost]
    changed: Callable[[Stage, StageState], None]
    looked: Callable[[], None] = lambda: None
    states: dict[str, StageState] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)

    @property
    def hosts(self) -> list[ThisHost | OtherHost]:
        return [self.this, *self.others]

    def state(self, stage: Stage) -> StageState:
        """What is known of a stage: of one that is new here, whether an earlier run completed it."""
        if stage.key not in self.states:
            marker = finished_stage(stage, self.root)
            known = StageState(stage.kind, stage.key, stage.output, "waiting", command=stage.command)
            if marker is not None:
                known = replace(known, status="done", seconds=marker.seconds, reused=True)
            self.states[stage.key] = known
        return self.states[stage.key]

    def run(self, stages: Sequence[Stage]) -> None:
        """Run all of them that are waiting, each after those that it needs, which come before it.

        A stage that fails is noted, and what needs it skipped. Raises UserError where nothing can go on: an input that
        changed, a full disk. Ctrl-C stops what runs, after it has saved what it can, and is raised again.
        """
        waiting = [stage for stage in stages if self.state(stage).status == "waiting"]
        try:
            while waiting or self.running:
                waiting = self._start(waiting)
                self._wait()
        except BaseException as error:
            self._stop(gently=isinstance(error, KeyboardInterrupt))
            raise

    def is_done(self, stage: Stage) -> bool:
        return self.state(stage).status == "done"

    # ---- starting ----

    def _start(self, waiting: list[Stage]) -> list[Stage]:
        """Start what can run now; returns what cannot. What takes more GPUs comes first: the others would always keep
        some of them."""
        left, is_awaited = [], False
        for stage in sorted(waiting, key=lambda stage: -self._width(stage)):
            needed = [self.states[key].status for key in stage.needs if key in self.states]
            if any(status in MISSING for status in needed):
                lost = next(self.states[key] for key in stage.needs if self.states[key].status in MISSING)
                how = "failed" if lost.status == "failed" else "was skipped"
                self._set(stage, status="skipped", message=f"the stage {lost.stage} that it needs {how}")
                continue
            is_ready = all(status == "done" for status in needed)
            able = self._with_room(stage) if is_ready and not (is_awaited and self._width(stage)) else []
            if len(able) >= stage.launch.hosts:
                self._launch(stage, able[: stage.launch.hosts])
                continue
            is_awaited |= is_ready and self._width(stage) > 0
            left.append(stage)
        return left

    def _width(self, stage: Stage) -> int:
        """How many GPUs it takes of all hosts; what is on several takes one of each at least. What is timed has no need
        to ask."""
        return (self._share(stage) or int(stage.launch.hosts > 1)) * stage.launch.hosts

    def _share(self, stage: Stage) -> int:
        """How many GPUs it takes of a host."""
        return min(stage.launch.gpus, len(self.this.gpus))

    def _with_room(self, stage: Stage) -> list[int]:
        """The hosts that can take it, those first that have less to do, and this one last. Nothing runs beside what is
        timed."""
        able = []
        for number in range(len(self.hosts)):
            here = [one for one in self.running if number in one.places]
            is_alone = any(one.stage.kind == TIMED for one in here)
            has_room = len(here) < self.jobs and self._share(stage) <= len(self._free(number))
            if not here if stage.kind == TIMED else has_room and not is_alone:
                able.append((len(here), -number))
        return [-number for _, number in sorted(able)]

    def _free(self, number: int) -> list[str]:
        taken = {gpu for one in self.running for gpu in one.places.get(number, ((), ()))[0]}
        return [gpu for gpu in self.hosts[number].gpus if gpu not in taken]

    def _launch(self, stage: Stage, numbers: Sequence[int]) -> None:
        prepare(stage, self.root)
        one, address = Running(stage, {}), next((host.link.address for host in self.others), "")
        if len(numbers) > 1:
            from torch.distributed import TCPStore

            one.store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        for place, number in enumerate(numbers):
            gpus, own = tuple(self._free(number)[: self._share(stage)]), self._own_cores(stage, number)
            one.places[number] = gpus, own
            where = [f"GPU {', '.join(gpus)}"] if gpus else []
            where += [f"host {number}"] if len(self.hosts) > 1 else []
            order = StageOrder(
                title=stage.title + (f" ({'; '.join(where)})" if where else ""),
                output=stage.output,
                runs=tuple(stage.runs),
                cores=tuple(sorted(own)),
                # one without a GPU must take no memory of any
                gpus=gpus if self.hosts[number].gpus and stage.kind != TIMED else None,
                timed=stage.kind == TIMED,
                part=HostPart(place, address, one.store.port) if one.store is not None else None,
            )
            self.hosts[number].start(order)
        self.running.append(one)
        self._set(stage, status="running")

    def _own_cores(self, stage: Stage, number: int) -> frozenset[int]:
        """A worker's share of a host's cores; empty: all."""
        if self.jobs == 1 or stage.kind == TIMED:
            return frozenset()
        every = sorted(self.hosts[number].cores)
        shares = [frozenset(every[start :: self.jobs]) for start in range(self.jobs)]
        taken = {core for one in self.running if number in one.places for core in one.places[number][1]}
        free = [share for share in shares if taken.isdisjoint(share)]
        return frozenset().union(*free[: max(1, self._share(stage))])

    # ---- waiting ----

    def _wait(self) -> None:
        """Until a process ends, or for a moment."""
        if not self.running:
            return
        timed_here = any(one.stage.kind == TIMED and 0 in one.places for one in self.running)
        self.this.wait(None if timed_here and not self.others else LOOK_SECONDS)
        for number, host in enumerate(self.hosts):
            for output, ended in host.ended():
                one = next(one for one in self.running if one.stage.output == output)
                one.ended.append(ended)
                if ended.error is not None or len(one.ended) == len(one.places):
                    for other in one.places.keys() - {number}:  # those of a group that has lost one
                        self.hosts[other].stop(gently=False, output=output)
                    self.running.remove(one)
                    self._ended(one.stage, max(one.ended, key=lambda ended: (ended.error is not None, ended.seconds)))
        if not timed_here:
            self.looked()

    def _ended(self, stage: Stage, result: Ended) -> None:
        try:
            self.inputs.check_unchanged()
        except UserError as error:  # which is why it failed, if it did
            self._set(stage, status="failed", seconds=result.seconds, message=str(error))
            raise
        if result.error is not None:
            is_full = result.disk_full or shutil.disk_usage(self.root).free < FULL_BYTES
            with contextlib.suppress(*([OSError] if is_full else [])):  # sweep.json finds no room then, either
                self._set(stage, status="failed", seconds=result.seconds, message=result.error)
            if is_full:
                raise UserError(
                    f"the disk of {self.root} is full (stage {stage.title}: {result.error}); free some space and run"
                    " the same command again, which keeps every complete stage"
                )
            return
        mark_finished(stage, self.root, result.seconds)
        self._set(stage, status="done", seconds=result.seconds)

    def _set(self, stage: Stage, **values: Any) -> None:
        self.states[stage.key] = state = replace(self.state(stage), **values)
        self.changed(stage, state)

    # ---- stopping ----

    def _stop(self, *, gently: bool) -> None:
        """End all processes. gently: let them save what they can, unless Ctrl-C comes again."""
        for host in self.hosts:
            host.stop(gently=gently)
        for one in self.running:
            self.states[one.stage.key] = replace(self.states[one.stage.key], status="waiting")
        self.running.clear()
