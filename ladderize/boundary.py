"""The one place that turns errors and signals into sentences and exit codes."""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ladderize.console import say, sentence
from ladderize.errors import LadderizeError, UsageError
from ladderize.ranks.environment import WORLD_SIZE, is_main_rank

INTERRUPTED, TERMINATED = 130, 143  # the exit codes after Ctrl-C and SIGTERM
DEBUG = "LADDERIZE_DEBUG"  # in the environment of started ranks: --debug was given
LONGEST_ERROR = 1500  # characters
PANIC = "PanicException"  # the name of pyo3's class, which cannot be imported
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # names the file from which torchrun reads a rank's error


@contextlib.contextmanager
def error_boundary(debug: bool) -> Iterator[None]:
    """Turn exceptions into one sentence on stderr, with ``debug`` the traceback too, and an exit code."""
    from ladderize.layout import RangeSyntaxError

    terminated: list[int] = []
    try:
        with _terminable(terminated):
            yield
    except BrokenPipeError:
        # The reader of our stdout is gone (`| head`), so nobody can be told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        with handled(signal.SIG_IGN, signal.SIGINT):  # the message must not be interrupted
            if is_main_rank():  # Ctrl-C reaches all of them
                say("Stopped by SIGTERM." if terminated else "Interrupted.")
        sys.exit(TERMINATED if terminated else INTERRUPTED)
    except SystemExit as end:
        if end.code == TERMINATED:  # an engine's own handler
            say("Stopped by SIGTERM.")
        raise
    except (LadderizeError, OSError) as error:
        _record(error)
        if debug:
            raise
        _say_error(sentence(error))
        sys.exit(2 if isinstance(error, UsageError | RangeSyntaxError) else 1)
    except BaseException as error:
        # A panic of Rust code, such as the tokenizers library's on some regular expressions, is no Exception.
        _record(error)
        if debug or not (isinstance(error, Exception) or type(error).__name__ == PANIC):
            raise
        _say_error(unplanned(error))
        sys.exit(1)
    finally:
        # As an exception, Ctrl-C during the libraries' own cleanup would print their traceback.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)


def unplanned(error: BaseException) -> str:
    """Return the sentence for an error that ladderize did not raise."""
    kind, text = type(error).__name__, sentence(error)
    if kind == PANIC:
        return (
            f"the tokenizers library gave up ({text[:200]}); tokenizer.json has a rule that it cannot apply to this"
            " text, take the tokenizer of the original model"
        )
    if is_lost_rank(error):
        return "another process of the group has ended; see what it said"
    # of Python, of torch's allocator on a GPU, and on a CPU, where it is a plain RuntimeError
    is_memory = isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't allocate memory" in str(error)
    if is_memory:
        return f"the memory is exhausted ({text[:200]}); give fewer or shorter rows at a time, or a smaller model"
    if kind == "StrictDataclassFieldValidationError":  # transformers' check of a config's types
        return f"config.json: {text}; repair the file"
    return f"unexpected error: {kind}: {text} (run again with --debug for the traceback)"


@contextlib.contextmanager
def handled(handler: Any, *numbers: int) -> Iterator[None]:
    """Handle signals within the block, where Python allows it: in the main thread. Elsewhere its owner handles them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class _Terminated(KeyboardInterrupt):
    """An exception for SIGTERM. KeyboardInterrupt itself, raised during an import, makes Python end by SIGINT."""


def _terminable(received: list[int]) -> contextlib.AbstractContextManager[None]:
    """Let SIGTERM, which batch systems send before they kill, end the block as Ctrl-C does; a second one kills. A
    launcher's rank ends at once as usual: it may wait for others where no exception is raised."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise _Terminated

    return handled(interrupt, *([signal.SIGTERM] if os.environ.get(WORLD_SIZE, "") in ("", "1") else []))


def _record(error: BaseException) -> None:
    """Pass a rank's error to torchrun, whose report names the rank that failed first."""
    if os.environ.get(ERROR_FILE) and os.environ.get(WORLD_SIZE, "1") != "1":
        from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

        ErrorHandler().record_exception(error)


def _say_error(text: str) -> None:
    """Print the error on rank 0, a very long one shortened; torchrun's report has those of other ranks."""
    if os.environ.get(ERROR_FILE) and not is_main_rank():
        return
    text = text if len(text) <= LONGEST_ERROR else f"{text[: LONGEST_ERROR - 500]} [...] {text[-400:]}"
    say(f"Error: {text}", style="red")


def is_lost_rank(error: BaseException) -> bool:
    """Return whether this rank could not reach another one, for which gloo raises a plain RuntimeError."""
    is_lost = any(message in str(error) for message in ("closed by peer", "reset by peer", "Broken pipe"))
    is_distributed = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")
    return isinstance(error, RuntimeError) and (is_lost or is_distributed)
