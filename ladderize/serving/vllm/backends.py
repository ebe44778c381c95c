"""What carries messages that are in flight, and the environment variable that chooses it.

============================= =======================================================================================
``LADDERIZE_VLLM_BACKEND``
============================= =======================================================================================
``auto`` (or unset)           on GPUs ``vllm``; on CPUs ``shm`` where all ranks share a host, else ``gloo``
``shm``, ``gloo``             ladderize's own collectives, on CPUs
``vllm``                      vLLM's own all-reduce: on GPUs on a stream of its own; on CPUs nothing overlaps
``emulated:RANKS:LINK``       one rank of a group that is not there, at TP 1: a delay instead of each all-reduce, for
                              timing only. LINK is what ``ladderize bench --link`` takes: ``20,100``, or a name
============================= =======================================================================================
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ladderize.errors import UserError
from ladderize.runtime.collectives.links import Link, parse_link

BACKEND_VARIABLE = "LADDERIZE_VLLM_BACKEND"
NAMES = ("auto", "shm", "gloo", "vllm")


@dataclass(frozen=True)
class MessageBackend:
    """name: one of ``NAMES``, or ``emulated`` for ``ranks`` ranks over ``link``."""

    name: str = "auto"
    ranks: int = 1
    link: Link | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "MessageBackend":
        """Raises ValueError for a value that is none."""
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
            return cls(name, int(ranks), parse_link(link, int(ranks)))
        except UserError as error:
            raise ValueError(f"{BACKEND_VARIABLE}={value}: {error}") from None
