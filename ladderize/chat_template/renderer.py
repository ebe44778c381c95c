"""Conversations to text through a tokenizer's chat template, which is a program of whoever made the checkpoint.

It runs in a process of its own, with limits of time and memory (child.py).
"""

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ladderize.chat_template import child
from ladderize.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]

# What templates are told of today where data are made or read, which must not depend on when that is: what Llama 3.2's
# says where it is given no date.
DATE_OF_DATA = datetime(2024, 7, 26)


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

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> tuple[str, list[Span]]:
        """The text of a conversation. options: as ``apply_chat_template`` of transformers takes them; with
        ``return_assistant_tokens_mask`` the spans of characters that the template marks as the assistant's come too.

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
        return answer["text"], [(begin, end) for begin, end in answer["spans"]]

    def _ask(self, request: bytes) -> dict[str, Any]:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if line.endswith(b"\n"):
            found: dict[str, Any] = json.loads(line)
            return found
        self._process = None
        process.stdout.close()
        status = process.wait()
        if status == -signal.SIGXCPU:
            problem = f"it runs for more than {child.CPU_SECONDS} s"
        else:
            problem = f"its process ended with status {status}"
        raise UserError(f"the chat template cannot be used: {problem}")

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._owner != os.getpid():  # a fork must not talk to it too
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUTF8": "1"}
            self._process = subprocess.Popen(
                [sys.executable, child.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
            self._owner = os.getpid()
            weakref.finalize(self, _end, self._process, self._owner)
        return self._process


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """End the process: it waits for requests, and there are none to come."""
    if owner != os.getpid():
        return
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
