"""Conversations to text through a tokenizer's chat template, which is a program of whoever made the checkpoint.

transformers renders it in Jinja's sandbox, which stops neither a loop without end nor a text that fills the memory. So
it runs in a process of its own (``serve``), with limits of time and memory.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ladderize.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What templates are told of today where data are made or read, which must not depend on when that is: what Llama 3.2's
# says where it is given no date.
DATE_OF_DATA = datetime(2024, 7, 26)
CPU_SECONDS = 5  # for one conversation; the longest real ones take milliseconds
ADDRESS_SPACE = 2 << 30
MAX_TEXT = 64 << 20  # characters


class RefusedConversation(UserError):
    """The template raised an error for this conversation; it may take others."""


class ChatRenderer:
    """One chat template, and the process that renders it, which is started when it is first needed.

    template: Jinja. tokens: the tokenizer's special tokens, by the names that templates know. date: what the template
    is told of today; None: the truth.
    """

    def __init__(self, template: str, tokens: Mapping[str, Any], *, date: datetime | None = None) -> None:
        self.template, self.date = template, date
        self.tokens = {name: [*map(str, t)] if isinstance(t, list) else str(t) for name, t in tokens.items()}
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase", *, date: datetime | None = None) -> "ChatRenderer | None":
        """That of a tokenizer; None if it has no template. Raises UserError if it has several and none is the
        default."""
        if not getattr(tokenizer, "chat_template", None):
            return None
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise UserError(f"the chat template cannot be chosen: {' '.join(str(error).split())[:200]}") from None
        return cls(template, tokenizer.special_tokens_map, date=date)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the text of a conversation. options: as ``apply_chat_template`` of transformers takes them.

        Raises RefusedConversation where the template does, and UserError where the template is broken, runs for more
        than 5 seconds, or takes more than 2 GiB.
        """
        request = {
            "template": self.template,
            "messages": messages,
            "options": {**self.tokens, **options},
            "date": self.date.isoformat() if self.date is not None else None,
        }
        answer = self._ask(json.dumps(request, default=str).encode() + b"\n")
        if "problem" in answer:
            problem = " ".join(answer["problem"].split())[:200]
            if answer["of"] == "template":
                raise UserError(f"the chat template cannot be used: {problem}")
            raise RefusedConversation(f"the chat template refuses the conversation ({problem})")
        return str(answer["text"])

    def _ask(self, request: bytes) -> dict[str, Any]:
        if self._process is None or self._owner != os.getpid():  # a fork must not talk to it too
            self._process, self._owner = _start(), os.getpid()
            weakref.finalize(self, _end, self._process, self._owner)
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        try:
            requests.write(request)
            requests.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = b""
        if line.endswith(b"\n"):
            found: dict[str, Any] = json.loads(line)
            return found
        status = self._process.wait()
        answers.close()
        self._process = None
        ended = f"its process ended with status {status}"
        problem = f"it runs for more than {CPU_SECONDS} s" if status == -signal.SIGXCPU else ended
        raise UserError(f"the chat template cannot be used: {problem}")


def _start() -> "subprocess.Popen[bytes]":
    command = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({CPU_SECONDS})"
    return subprocess.Popen(
        [sys.executable, "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUTF8": "1"},
    )


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """End the process, unless this is a fork of the one that started it."""
    if owner == os.getpid():
        process.kill()
        with process:  # waits for it and closes the pipes
            pass


# ---- in the process that renders ----


def serve(cpu_seconds: int) -> None:
    """Each line of stdin is a request, and each line of stdout its answer, both JSON: {"text"}, or {"problem", "of":
    "template" or "conversation"}. A request that takes longer ends the process (SIGXCPU)."""
    import transformers.utils.chat_template_utils  # noqa: F401  (before the clock of the first request)

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever a library prints is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = int(used.ru_utime + used.ru_stime) + 1 + cpu_seconds
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        answers.write(json.dumps(_answer(request)).encode() + b"\n")
        answers.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """What transformers renders on the day that the request names, or what is wrong with the template or with this
    conversation."""
    import jinja2
    from transformers.utils import chat_template_utils

    templates: Any = chat_template_utils
    if request["date"] is not None:
        day = datetime.fromisoformat(request["date"])
        templates.datetime = type("Day", (), {"now": staticmethod(lambda: day)})  # what strftime_now asks
    try:
        texts, _ = templates.render_jinja_template(
            conversations=[request["messages"]], chat_template=request["template"], **request["options"]
        )
        if len(texts[0]) > MAX_TEXT:
            raise MemoryError
    except MemoryError:
        return {"of": "template", "problem": f"it needs more than {ADDRESS_SPACE >> 30} GiB of memory"}
    except RecursionError:
        return {"of": "template", "problem": "it calls itself without end, or is nested too deeply"}
    except (jinja2.TemplateSyntaxError, jinja2.exceptions.SecurityError, ImportError) as error:
        return {"of": "template", "problem": str(error)}
    except Exception as error:  # a template may raise whatever Python can: division by zero, a range that is too big
        return {"of": "conversation", "problem": str(error) or type(error).__name__}
    return {"text": texts[0]}
