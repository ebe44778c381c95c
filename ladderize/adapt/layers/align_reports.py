"""The errors that alignment left in each projection. Imports no torch."""

from dataclasses import dataclass

from ladderize.files.records import Record

READS_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
WRITES_ATTENTION = ("self_attn.o_proj",)
READS_MLP = ("mlp.gate_proj", "mlp.up_proj")
WRITES_MLP = ("mlp.down_proj",)
GROUPS = {
    "attention reads": READS_ATTENTION,
    "attention writes": WRITES_ATTENTION,
    "MLP reads": READS_MLP,
    "MLP writes": WRITES_MLP,
}


@dataclass(frozen=True)
class ProjectionReport(Record):
    """The result for one projection. Errors are squared, on held-out tokens, as a share of the squared targets."""

    projection: str  # such as self_attn.q_proj
    ridge: float | None  # the one chosen; None: the old weights were kept, since no ridge lowered the error
    error_before: float
    error_after: float


@dataclass(frozen=True)
class LayerReport(Record):
    """The result for one layer, its projections in the order in which they were solved."""

    layer: int
    projections: list[ProjectionReport]
    seconds: float

    def of_group(self, name: str) -> list[ProjectionReport]:
        """Return the projections of one of ``GROUPS``."""
        return [entry for entry in self.projections if entry.projection in GROUPS[name]]

    def errors(self, name: str) -> tuple[float, float] | None:
        """Return the mean errors of a group, before and after; None where the report has none of it."""
        own = self.of_group(name)
        if not own:
            return None
        return sum(e.error_before for e in own) / len(own), sum(e.error_after for e in own) / len(own)
