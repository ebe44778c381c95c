"""vLLM's engine for one model: started with all its output in a log, asked, and ended with all of its processes."""

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ladderize.checkpoint.config import is_tied
from ladderize.errors import UserError
from ladderize.families.registry import find_family
from ladderize.files.temporaries import temporary_folder
from ladderize.ranks.device import default_device
from ladderize.ranks.environment import environment_with
from ladderize.ranks.threads import cores
from ladderize.vllm.environment import BOUND_CORES, configuration_refusal

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

# What vLLM reads from the environment while an engine starts.
VLLM_ENVIRONMENT = {
    # a process of its own for the engine: what it holds is given back when it ends
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    # our process has threads of torch, which a fork would copy in the middle of something
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # A text may be one token longer than the model's positions: its last token is predicted, and never read.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout holds the one document of --json
}
PATIENCE_S = 20.0  # for a process that was told to end
LOGGED_ERROR = re.compile(r"ERROR [^\]]*\] +((?:\w+\.)*\w*(?:Error|Exception): .+)")
CHUNK_TOKENS = 1 << 15  # of prompts that are handed over at a time: their answers are Python objects for every token


class VLLMEngine:
    """A running vLLM, which is a context. Its processes write into a log, which is kept only where it fails."""

    def __init__(self, name: str, llm: "LLM", log: Path, stack: ExitStack) -> None:
        self.name, self.llm, self._log, self._stack = name, llm, log, stack

    @property
    def dtype(self) -> str:
        """The dtype that it computes in, by torch's name."""
        return str(self.llm.llm_engine.model_config.dtype).removeprefix("torch.")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence["SamplingParams"],
        advance: Callable[[int], object] = lambda n: None,
    ) -> Iterator["RequestOutput"]:
        """Continue prompts, one after the other as they were given. advance: told how many are done.

        Raises UserError where vLLM fails.
        """
        from vllm import TokensPrompt

        for part in chunks_of([len(prompt) for prompt in prompts]):
            given = [TokensPrompt(prompt_token_ids=list(prompts[index])) for index in part]
            done: dict[str, RequestOutput] = {}
            try:
                self.llm.enqueue(given, [sampling[index] for index in part], use_tqdm=False)
                while self.llm.llm_engine.has_unfinished_requests():
                    finished = [output for output in self.llm.llm_engine.step() if output.finished]
                    done.update({output.request_id: output for output in finished})
                    advance(len(finished))
            except Exception as error:
                raise _refusal(f"vLLM failed while it computed {self.name}", error, self._log) from error
            yield from (done[number] for number in sorted(done, key=int))  # vLLM counts requests as they come

    def close(self) -> None:
        """End all processes. The object is of no use after that."""
        self.llm.llm_engine.engine_core.shutdown()
        self._stack.close()


def ends_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument of vLLM's ``LLM`` that ties the ends as the weights say: vLLM believes config.json."""
    return {"hf_overrides": {"tie_word_embeddings": is_tied(config)}} if find_family(config) is not None else {}


def start_engine(name: str, arguments: Mapping[str, Any]) -> VLLMEngine:
    """Start vLLM. name: of the model, for messages. arguments: of vLLM's ``LLM``.

    Raises UserError with vLLM's own reason where it does not start; no process is left then.
    """
    settings = VLLM_ENVIRONMENT | cores_of_ranks(int(arguments.get("tensor_parallel_size", 1)))
    with ExitStack() as stack:
        log = stack.enter_context(temporary_folder("vllm")) / "vllm.log"
        stack.enter_context(_exiting_on(signal.SIGTERM))
        others = set(multiprocessing.active_children())
        stack.callback(_end_children, others)
        try:
            with _interruptible(), environment_with(settings), _written_to(log):
                from vllm import LLM

                llm = LLM(**arguments)
        except Exception as error:
            raise _refusal(f"vLLM cannot run {name}", error, log) from error
        return VLLMEngine(name, llm, log, stack.pop_all())


def cores_of_ranks(ranks: int) -> dict[str, str]:
    """On CPUs each rank's share of the cores, where the user has not named them: vLLM itself gives each rank a NUMA
    node, and does not start with more ranks than nodes."""
    free = sorted(cores())
    share = len(free) // ranks
    if ranks == 1 or share == 0 or BOUND_CORES in os.environ or default_device() != "cpu":
        return {}
    return {BOUND_CORES: "|".join(",".join(map(str, free[r * share : (r + 1) * share])) for r in range(ranks))}


def chunks_of(lengths: Sequence[int]) -> Iterator[range]:
    """Consecutive prompts of at most ``CHUNK_TOKENS`` tokens together, at least one at a time."""
    start = 0
    while start < len(lengths):
        stop, tokens = start, 0
        while stop < len(lengths) and (stop == start or tokens + lengths[stop] <= CHUNK_TOKENS):
            tokens += lengths[stop]
            stop += 1
        yield range(start, stop)
        start = stop


def _refusal(what: str, error: Exception, log: Path) -> UserError:
    """The reason in one sentence, and where the log was kept."""
    descriptor, kept = tempfile.mkstemp(prefix="vllm-", suffix=".log")
    os.close(descriptor)
    if log.exists():
        shutil.copyfile(log, kept)
    reason = reason_of(error, log)
    advice = "; here that is --max-length" if "max_model_len" in reason else ""
    return UserError(f"{what}: {reason.rstrip('.')}{advice} (the log of vLLM is {kept})")


def reason_of(error: Exception, log: Path) -> str:
    """Why vLLM failed. What its processes raise is only in their log; what its configuration refuses is the sentence
    within pydantic's."""
    if (refused := configuration_refusal(error)) is not None:
        return refused
    text = log.read_text(errors="replace") if log.exists() else ""
    if type(error).__name__ in ("RuntimeError", "EngineDeadError", "EngineGenerateError"):
        for line in text.splitlines():
            if match := LOGGED_ERROR.search(line):
                return " ".join(match[1].split())[:600]
    return " ".join(str(error).split())[:600] or type(error).__name__


@contextlib.contextmanager
def _written_to(log: Path) -> Iterator[None]:
    """Let stdout and stderr end in a file: of this process until the end of the block, and of those that it starts for
    as long as they live."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    kept = [os.dup(number) for number in (1, 2)]
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, own in zip((1, 2), kept, strict=True):
            os.dup2(own, number)
            os.close(own)


@contextlib.contextmanager
def _exiting_on(number: int) -> Iterator[None]:
    """A signal ends this process by SystemExit, so that on its way out it ends vLLM's processes, too."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    try:
        before = signal.signal(number, leave)
    except ValueError:  # not the main thread: its owner handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(number, before)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the block. While vLLM waits for its processes to start it takes KeyboardInterrupt for nothing, and
    then waits on for processes that have ended."""
    try:
        with _exiting_on(signal.SIGINT):
            yield
    except SystemExit as error:
        if error.code == 128 + signal.SIGINT:
            raise KeyboardInterrupt from None
        raise


def _end_children(others: set[Any]) -> None:
    """End every process that was started since: none of vLLM's outlives its engine, whatever it has come to."""
    started = [process for process in multiprocessing.active_children() if process not in others]
    for process in started:
        process.terminate()
    for process in started:
        process.join(PATIENCE_S)
        if process.is_alive():
            process.kill()
            process.join()
