"""How the runtime answers requests. Imports no torch."""

from dataclasses import dataclass, field

from ladderize.choices import THREADS, TP_SIZE, BackendName, Dtype, check_options, option
from ladderize.errors import UsageError
from ladderize.ranks.device import default_device

BUDGETS = {"cpu": 2048, "cuda": 16384}


@dataclass(frozen=True)
class RequestOptions:
    """How to answer. Raises UsageError."""

    tp_size: int = option(TP_SIZE, 1)
    rows: int = option("Texts that are continued at a time.", 8, min=1)
    token_budget: int | None = option("Tokens of a forward pass, padding included; None: 2048, on a GPU 16384.", min=16)
    max_length: int | None = option("The longest text; None: what the config promises.", min=2)
    backend: BackendName = "auto"
    dtype: Dtype = "auto"
    device: str = field(default_factory=default_device)
    threads: int | None = option(THREADS)
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_options(self)
        if self.backend == "none":
            raise UsageError("--backend none sums nothing, so scores would be meaningless; it is for bench")

    @property
    def budget(self) -> int:
        return self.token_budget or BUDGETS["cuda" if self.device.startswith("cuda") else "cpu"]
