"""How the runtime answers requests. Imports no torch."""

from dataclasses import dataclass, field

from ladderize.choices import BackendName, Dtype, check_at_least, check_choices
from ladderize.errors import UsageError
from ladderize.ranks.device import default_device

BUDGETS = {"cpu": 2048, "cuda": 16384}


@dataclass(frozen=True)
class RequestOptions:
    """tp_size: processes that share the model. rows: texts that are continued at a time. token_budget: tokens of a
    forward pass, padding included; None: 2048, on a GPU 16384. max_length: the longest text; None: what the config
    promises. threads: of each process; None shares the cores out. Raises UsageError.
    """

    tp_size: int = 1
    rows: int = 8
    token_budget: int | None = None
    max_length: int | None = None
    backend: BackendName = "auto"
    dtype: Dtype = "auto"
    device: str = field(default_factory=default_device)
    threads: int | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 1, "tp_size", "rows", "threads")
        check_at_least(self, 2, "max_length")
        check_at_least(self, 16, "token_budget")
        if self.backend == "none":
            raise UsageError("--backend none sums nothing, so scores would be meaningless; it is for bench")

    @property
    def budget(self) -> int:
        return self.token_budget or BUDGETS["cuda" if self.device.startswith("cuda") else "cpu"]
