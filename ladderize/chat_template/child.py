"""The process that renders chat templates for ``renderer``: a stranger's program, so its time and memory are limited.

It is started by its path and imports nothing of ladderize. Each line of stdin is a request, and each line of stdout its
answer, both JSON: {"text", "spans"}, or {"problem", "of": "template" or "conversation"}.
"""

import json
import os
import resource
import sys
from datetime import datetime
from typing import Any

CPU_SECONDS = 5  # for one conversation; the longest real ones take milliseconds
ADDRESS_SPACE = 2 << 30
MAX_TEXT = 64 << 20  # characters


def limit_cpu() -> None:
    """From now on this process has ``CPU_SECONDS``; then the kernel ends it (SIGXCPU)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def render(request: dict[str, Any]) -> dict[str, Any]:
    """Render one conversation exactly as transformers does, on the day that the request names."""
    from transformers.utils import chat_template_utils

    templates: Any = chat_template_utils

    if request["date"] is not None:
        day = datetime.fromisoformat(request["date"])
        # what the template's strftime_now asks
        templates.datetime = type("Day", (), {"now": staticmethod(lambda: day)})
    texts, spans = templates.render_jinja_template(
        conversations=[request["messages"]], chat_template=request["template"], **request["options"]
    )
    if len(texts[0]) > MAX_TEXT:
        raise MemoryError
    return {"text": texts[0], "spans": spans[0] if spans else []}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What ``render`` makes, or what is wrong with the template or with this conversation."""
    import jinja2

    try:
        return render(request)
    except MemoryError:
        return {"of": "template", "problem": f"it needs more than {ADDRESS_SPACE >> 30} GiB of memory"}
    except RecursionError:
        return {"of": "template", "problem": "it calls itself without end, or is nested too deeply"}
    except (jinja2.TemplateSyntaxError, jinja2.exceptions.SecurityError, ImportError) as error:
        return {"of": "template", "problem": str(error)}
    except Exception as error:  # a template may raise whatever Python can: division by zero, a range that is too big
        return {"of": "conversation", "problem": str(error) or type(error).__name__}


def serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever a library prints is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        limit_cpu()
        answers.write(json.dumps(answer(request)).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    import transformers.utils.chat_template_utils  # noqa: F401  (before the clock of the first request)

    serve()
