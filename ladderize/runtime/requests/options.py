"""How the runtime answers requests. Imports no torch."""

from dataclasses import dataclass

from ladderize.choices import (
    BACKEND,
    DEVICE,
    DTYPE,
    REVISION,
    THREADS,
    TP_SIZE,
    Dtype,
    SendingBackend,
    check_options,
    option,
)
from ladderize.ranks.device import default_device

BUDGETS = {"cpu": 2048, "cuda": 16384}


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Where and how ranks compute. Raises UsageError."""

    tp_size: int = option(TP_SIZE, 1)
    backend: SendingBackend = option(BACKEND, "auto")
    dtype: Dtype = option(DTYPE, "auto")
    device: str = option(DEVICE, default_device)
    threads: int | None = option(THREADS)
    revision: str | None = option(REVISION)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class RequestOptions(RankOptions):
    """How to answer."""

    rows: int = option("Texts that are continued at a time.", 8, min=1)
    token_budget: int | None = option("Tokens of a forward pass, padding included; None: 2048, on a GPU 16384.", min=16)
    max_length: int | None = option("The longest text; None: what the config promises.", min=2)
    trust_remote_code: bool = False

    @property
    def budget(self) -> int:
        return self.token_budget or BUDGETS["cuda" if self.device.startswith("cuda") else "cpu"]
