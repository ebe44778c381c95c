"""A sweep on several hosts, on each of which a launcher has started one process: process 0 leads, and the others run
what it orders.

They talk through the store at which ranks meet (``ranks.group.meet``), and see one folder. Whoever is gone is missed
after ``LOST_SECONDS``; then all end, and the same command goes on from what is complete.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ladderize.console import sentence
from ladderize.errors import UserError
from ladderize.files.temporaries import replacement
from ladderize.ranks.environment import ALONE, Place, launched
from ladderize.ranks.group import INFERENCE_TIMEOUT
from ladderize.tradeoff.sweep.builder import machine
from ladderize.tradeoff.sweep.meeting import launch_variables, meet, set_by_srun
from ladderize.tradeoff.sweep.stages import stage_files
from ladderize.tradeoff.sweep.workers import STOP_SECONDS, Ended, StageOrder, ThisHost

MEETING = ".sweep.json.hosts"  # in the sweep's folder while the hosts meet: they see the same one
BEAT_SECONDS, LOST_SECONDS = 2.0, 30.0
ASK_SECONDS = 0.2
MEET_SECONDS = 60.0  # for the other hosts' first word, and until a file that one has written is seen by another


def started_hosts() -> Place:
    """This process among those of a launcher, one on each host; ``ALONE``: there is none. Raises UserError for
    several on one host."""
    os.environ.update(set_by_srun())
    place = launched()
    if place.local_size > 1:
        raise UserError(
            f"a sweep is one process on each host, and starts those of its stages; the launcher started"
            f" {place.local_size} here: say torchrun --nproc-per-node 1, or srun --ntasks-per-node 1"
        )
    return place


class HostLink:
    """This process among those of the sweep, numbered as its ranks are."""

    def __init__(self, place: Place) -> None:
        variables = launch_variables()
        self.place, self.address = place, variables.master_addr or ""
        self.store = meet(variables, INFERENCE_TIMEOUT)
        self.sent: Counter[int] = Counter()
        self.read: Counter[int] = Counter()
        self.heard: dict[int, tuple[bytes, float]] = {}
        self.over = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def send(self, to: int, **message: Any) -> None:
        with _lost(to):
            self.store.set(f"{self.place.rank}>{to}/{self.sent[to]}", json.dumps(message))
        self.sent[to] += 1

    def receive(self, sender: int) -> Iterator[dict[str, Any]]:
        """What has come since the last call. Raises UserError where the sender is gone."""
        with _lost(sender):
            while self.store.check([key := f"{sender}>{self.place.rank}/{self.read[sender]}"]):
                self.read[sender] += 1
                message = json.loads(self.store.get(key))
                self.store.delete_key(key)
                if "gone" in message:
                    raise UserError(f"process {sender} of the sweep has ended: {message['gone']}")
                yield message
            self._check_alive(sender)

    def await_message(self, sender: int) -> dict[str, Any]:
        """The next one. Raises UserError after ``MEET_SECONDS``."""
        deadline = time.monotonic() + MEET_SECONDS
        while time.monotonic() < deadline:
            for message in self.receive(sender):
                return message
            time.sleep(ASK_SECONDS)
        raise UserError(f"process {sender} of the sweep said nothing for {MEET_SECONDS:.0f} s")

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):
            for number in iter(int, 1):
                self.store.set(f"alive/{self.place.rank}", f"{number} {time.monotonic()}")
                if self.over.wait(BEAT_SECONDS):
                    return

    def _check_alive(self, other: int) -> None:
        beat = self.store.get(key) if self.store.check([key := f"alive/{other}"]) else b""
        if other not in self.heard or self.heard[other][0] != beat:
            self.heard[other] = beat, time.monotonic()
        elif time.monotonic() - self.heard[other][1] > LOST_SECONDS:
            raise UserError(
                f"process {other} of the sweep has been silent for {LOST_SECONDS:.0f} s; see to its host, and run the"
                " same command again, which keeps every complete stage"
            )


@contextlib.contextmanager
def _lost(other: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError:  # torch's, of a store that does not answer
        raise UserError(
            f"process {other} of the sweep is gone; run the same command again, which keeps every complete stage"
        ) from None


@contextlib.contextmanager
def linked(place: Place) -> Iterator[HostLink | None]:
    """Around a sweep: its processes, or None where it is alone. Where one fails, the others end, too."""
    if place == ALONE:
        yield None
        return
    link = HostLink(place)
    try:
        yield link
    except BaseException as error:
        words = "it was stopped" if isinstance(error, KeyboardInterrupt) else sentence(error)
        with contextlib.suppress(UserError):
            for other in range(1, place.size) if place.rank == 0 else (0,):
                link.send(other, gone=words)
            time.sleep(5 * ASK_SECONDS)  # process 0 may serve the store
        raise
    finally:
        link.over.set()


# ---- the host that leads ----


@dataclass
class OtherHost:
    """Runs stages elsewhere; used like ``ThisHost``."""

    link: HostLink
    number: int
    root: Path
    gpus: tuple[str, ...]
    cores: frozenset[int]
    started: list[str] = field(default_factory=list)

    def start(self, order: StageOrder) -> None:
        self.link.send(self.number, run=order.to_dict())
        self.started.append(order.output)

    def ended(self) -> list[tuple[str, Ended]]:
        messages = self.link.receive(self.number)
        return [self._ended(**message) for message in messages if message.get("output") in self.started]

    def _ended(self, output: str, files: dict[str, int], **ended: Any) -> tuple[str, Ended]:
        """Once its files are seen here, where they are to be read."""
        self.started.remove(output)
        deadline, folder = time.monotonic() + MEET_SECONDS, self.root / output
        while not files.items() <= stage_files(folder).items():
            if time.monotonic() > deadline:
                raise UserError(f"what process {self.number} of the sweep has written to {folder} is not seen here")
            time.sleep(ASK_SECONDS)
        return output, Ended(**ended)

    def stop(self, *, gently: bool, output: str | None = None) -> None:
        """One stage: it is waited for no more. All: until they have stopped."""
        self.started = [one for one in self.started if output not in (None, one)]
        with contextlib.suppress(UserError, KeyboardInterrupt):
            self.link.send(self.number, stop=output, gently=gently)
            deadline = time.monotonic() + (STOP_SECONDS if gently else MEET_SECONDS)
            while output is None and time.monotonic() < deadline:
                if any("stopped" in message for message in self.link.receive(self.number)):
                    break
                time.sleep(ASK_SECONDS)


def other_hosts(link: HostLink, root: Path) -> list[OtherHost]:
    """All but this one. Raises UserError where one has other devices, or does not see the sweep's folder."""
    token, found = secrets.token_hex(16), []
    with replacement(root / MEETING) as file:
        file.write(token)
    try:
        for number in range(1, link.place.size):
            told = link.await_message(number)
            if told["machine"] != (own := machine()):
                raise UserError(
                    f"the hosts of a sweep must be alike, but process {number} ({told['name']}) has {told['machine']},"
                    f" and process 0 {own}"
                )
            link.send(number, root=str(root), token=token)
            if not link.await_message(number)["sees"]:
                raise UserError(
                    f"{told['name']} does not see the sweep's folder {root}; choose an --out on a file system that all"
                    " hosts share"
                )
            found.append(OtherHost(link, number, root, tuple(told["gpus"]), frozenset(told["cores"])))
    finally:
        (root / MEETING).unlink(missing_ok=True)
    return found


def say_end(link: HostLink, document: dict[str, Any]) -> None:
    """The sweep is over: to the others, who have it then."""
    for number in range(1, link.place.size):
        link.send(number, end=document)
    for number in range(1, link.place.size):
        with contextlib.suppress(UserError):  # it has no more to say
            link.await_message(number)


# ---- the others ----


def take_orders(link: HostLink) -> dict[str, Any]:
    """Run what process 0 orders; returns the document of the sweep. Raises UserError where that ends before."""
    here = ThisHost(Path())
    told = {"name": socket.gethostname(), "gpus": here.gpus, "cores": sorted(here.cores), "machine": machine()}
    link.send(0, **told)
    meeting = link.await_message(0)
    here.root = Path(meeting["root"])
    link.send(0, sees=_sees(here.root / MEETING, meeting["token"]))
    try:
        while True:
            for order in link.receive(0):
                if "end" in order:
                    link.send(0, heard=True)
                    return dict(order["end"])
                if "run" in order:
                    here.start(StageOrder.from_dict(order["run"], "what process 0 orders"))
                else:
                    here.stop(gently=order["gently"], output=order["stop"])
                    if order["stop"] is None:
                        link.send(0, stopped=True)
            here.wait(ASK_SECONDS)
            parts = {one.order.output: one.order.part for one in here.started}
            for output, ended in here.ended():
                leads = (part := parts[output]) is None or part.host == 0
                link.send(0, output=output, files=stage_files(here.root / output) if leads else {}, **asdict(ended))
    except BaseException as error:
        here.stop(gently=isinstance(error, KeyboardInterrupt))
        raise


def _sees(path: Path, token: str) -> bool:
    deadline = time.monotonic() + MEET_SECONDS / 2
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if path.read_text() == token:
                return True
        time.sleep(ASK_SECONDS)
    return False
