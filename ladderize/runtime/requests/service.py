"""A model that waits for requests: in this process, in ranks that were started for it, or in those of a launcher.

Whoever asks runs in the parent process, in one piece; the ranks know nothing of what the answers are for.
"""

import contextlib
import multiprocessing.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from ladderize.errors import UserError
from ladderize.files.temporaries import temporary_folder
from ladderize.modeling import load_tokenizer
from ladderize.ranks.device import check_device
from ladderize.ranks.environment import ALONE, launched
from ladderize.ranks.group import Ranks, join_ranks
from ladderize.ranks.server import start_context
from ladderize.ranks.threads import set_threads
from ladderize.runtime.collectives.choose import check_backend, choose
from ladderize.runtime.cpu_operations import choose_operations
from ladderize.runtime.decode import GrowingRope
from ladderize.runtime.launch import check_group_size, joined, started
from ladderize.runtime.model import TPLlama
from ladderize.runtime.requests.options import RankOptions, RequestOptions
from ladderize.runtime.requests.reading import TextReader
from ladderize.runtime.spec import ModelSpec, WeightCache, checkpoint_spec

STATES_AT_ONCE = 2048  # that are scored
MESSAGE_BYTES = 4 * 3 * STATES_AT_ONCE  # the largest message of scoring
# of a module's level: (worker, *arguments, advance) -> the answer, equal on all ranks
RankFunction = Callable[..., Any]


def check_request(model: str, options: RankOptions) -> ModelSpec:
    """Everything that can be known before weights are read or ranks started. Raises UserError or LayoutError."""
    check_device(options.device)
    check_backend(options.backend, options.tp_size, options.device)
    check_group_size(options.tp_size, options.device)
    spec = checkpoint_spec(model, tp_size=options.tp_size, dtype=options.dtype, revision=options.revision)
    longest = getattr(options, "max_length", None)
    if longest is not None and longest > spec.positions:
        raise UserError(f"max_length {longest} exceeds the {spec.positions} positions of {model}")
    return spec


def open_service(spec: ModelSpec, options: RequestOptions) -> "Service":
    """The checked model, loaded and waiting. Raises UserError where a rank fails; by then all are gone."""
    joins = options.tp_size == 1 or launched() != ALONE
    return Service(spec, options) if joins else StartedService(spec, options)


class Service:
    """An opened model. Use it as a context, or ``close`` it; if neither happens, it ends with the process.

    As it stands: this process is a rank, the only one, or one of those that a launcher has started, which all ask the
    same.
    """

    def __init__(self, spec: ModelSpec, options: RequestOptions) -> None:
        self.stack = contextlib.ExitStack()
        place = launched()
        with contextlib.ExitStack() as stack:  # closed where the model does not open
            if place == ALONE:
                self.group = stack.enter_context(joined(place, options.device, options.threads, None, lambda n: None))
            else:  # one group for all models of the process: a second one would meet where the first has been
                set_threads(options.threads, place.local_size)
                self.group = join_ranks(options.device)
            self.worker: Worker | None = stack.enter_context(opened(self.group, spec, options))
            self.stack = stack.pop_all()

    def ask(self, answer: RankFunction, *arguments: Any, advance: Callable[[int], None] = lambda n: None) -> Any:
        """Call a function with each rank's worker, these arguments, and what tells ``advance`` how much more is done;
        returns what it returns. Raises UserError where a rank fails: the service has ended then."""
        if self.worker is None:
            raise UserError("the model was closed, so nothing can be asked of it")
        answer, arguments = self.group.broadcast((answer, arguments))
        with torch.inference_mode():
            return answer(self.worker, *arguments, advance if self.group.is_main else lambda n: None)

    def close(self) -> None:
        """End the ranks. A second call does nothing."""
        self.worker = None
        self.stack.close()

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class StartedService(Service):
    """Ranks of this host that were started for the model, and wait for what this process sends."""

    def __init__(self, spec: ModelSpec, options: RequestOptions) -> None:
        self.received: list[tuple[str, Any]] = []
        self.inboxes: list[Connection] = []
        self.stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(temporary_folder("service"))
            pairs = [start_context().Pipe(duplex=False) for _ in range(options.tp_size)]
            for reading, writing in pairs:
                stack.callback(writing.close)
                stack.callback(reading.close)
            self.inboxes = [writing for _, writing in pairs]
            self.ranks = stack.enter_context(
                started(
                    _serve,
                    [(spec, options, reading) for reading, _ in pairs],
                    options.device,
                    options.threads,
                    folder / "store",
                    self.received.append,
                )
            )
            for reading, _ in pairs:  # so that the pipe breaks when its rank ends
                reading.close()
            self._hear(lambda n: None)  # that the model is open
            self.stack = stack.pop_all()
        # where it is not closed: before multiprocessing, at the exit, waits for the processes that it has started
        self.at_exit = multiprocessing.util.Finalize(self, self.stack.close, exitpriority=10)

    def ask(self, answer: RankFunction, *arguments: Any, advance: Callable[[int], None] = lambda n: None) -> Any:
        if not self.inboxes:
            raise UserError("the ranks have ended, so nothing can be asked of them")
        try:
            # a rank that is gone cannot be sent to; why it is gone is heard from the others and from the system
            with contextlib.suppress(BrokenPipeError):
                for inbox in self.inboxes:
                    inbox.send((answer, arguments))
            return self._hear(advance)
        except BaseException:  # Ctrl-C too: the ranks would go on with what is not wanted any more
            self.close()
            raise

    def _hear(self, advance: Callable[[int], None]) -> Any:
        """Listen until rank 0 has answered."""
        while True:
            self.ranks.watch(lambda: bool(self.received))
            if not self.received:
                raise UserError("the ranks have ended without an answer")
            kind, value = self.received.pop(0)
            if kind == "answer":
                return value
            advance(value)

    def close(self) -> None:
        inboxes, self.inboxes = self.inboxes, []
        if inboxes:
            self.at_exit()


def _serve(group: Ranks, spec: ModelSpec, options: RequestOptions, inbox: Connection) -> None:
    """A started rank: requests in, answers out, until the other end of ``inbox`` is closed."""
    with opened(group, spec, options) as worker, torch.inference_mode():
        group.report(("answer", None))
        while True:
            try:
                answer, arguments = inbox.recv()
            except EOFError:
                return
            group.report(("answer", answer(worker, *arguments, lambda count: group.report(("done", count)))))


# ---- one rank ----


@dataclass
class Worker:
    """One rank of an opened model. backend: how its ranks communicate."""

    group: Ranks
    spec: ModelSpec
    options: RequestOptions
    reader: TextReader
    backend: str

    def tokenizer(self) -> Any:
        assert self.spec.folder is not None
        found = load_tokenizer(self.spec.folder, trust_remote_code=self.options.trust_remote_code)
        if found is None:
            raise UserError(f"{self.spec.name} has no tokenizer, and stop strings need one")
        return found


@contextlib.contextmanager
def opened(
    group: Ranks, spec: ModelSpec, options: RequestOptions, advance: Callable[[int], None] = lambda count: None
) -> Iterator[Worker]:
    """A checked model on this rank, its weights loaded; all ranks enter and leave together. advance: told of layers
    that are loaded."""
    vocabulary = -(-spec.config["vocab_size"] // group.size)
    largest = max(options.budget, options.rows) * spec.config["hidden_size"], options.rows * vocabulary
    collectives, backend = choose(options.backend, group, max_bytes=max(4 * max(largest), MESSAGE_BYTES))
    shape, weights = WeightCache(group.device, pack=True).get(spec, group.size, group.rank, advance)
    operations = choose_operations(group, spec.torch_dtype)
    model = TPLlama(shape, spec.layout, weights, collectives, operations)
    rope = GrowingRope(spec.config, options.max_length or spec.positions, group.device)
    yield Worker(group, spec, options, TextReader(model, rope, options.budget, spec.torch_dtype), backend)
    collectives.close()
