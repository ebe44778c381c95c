"""What vLLM reads from the environment when a process starts, and the sentence of what its configuration refuses."""

import contextlib
import os
from collections.abc import Iterator, Mapping

BOUND_CORES = "VLLM_CPU_OMP_THREADS_BIND"  # the cores of each rank, on CPUs


@contextlib.contextmanager
def environment_with(variables: Mapping[str, str]) -> Iterator[None]:
    """A process that is started inside has these variables, from its first instruction."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def configuration_refusal(error: BaseException) -> str | None:
    """Of what pydantic wraps into a report on all of vLLM's options, what was wrong; None for any other error."""
    errors = getattr(error, "errors", None)
    if not callable(errors) or not (found := errors()):
        return None
    return "; ".join(" ".join(str(each.get("msg", error)).removeprefix("Value error, ").split()) for each in found)
