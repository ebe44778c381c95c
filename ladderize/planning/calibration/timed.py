"""A timed pass as the fit takes it. Imports no torch."""

from typing import Any

from ladderize.layout import Layout
from ladderize.planning.calibration.observations import Observation, Quantity, Variant
from ladderize.planning.passes import Workload

RUNTIME_ENGINES = {"cpu": "runtime-cpu", "cuda": "runtime"}  # what ladderize's own runtime is called on a device


def layout_observation(
    layout: Layout,
    quantity: Quantity,
    seconds: float,
    ranks: int,
    variant: Variant,
    workload: Workload,
    engine: str,
    *,
    config: dict[str, Any],
    dtype: str,
    name: str,
) -> Observation:
    """One timed pass; its group: what was timed, and over how many ranks. name: of the layout."""
    shown = {"layout": name, "no-comm": "no communication", "parallel": "parallel"}[variant]
    return Observation(
        quantity,
        seconds,
        ranks,
        f"{shown}, {quantity.replace('_', ' ')}, {ranks} rank{'s' * (ranks > 1)}",
        config=config,
        dtype=dtype,
        workload=workload,
        engine=engine,
        variant=variant,
        attention_sync=list(layout.attention_sync),
        mlp_sync=list(layout.mlp_sync),
        sync_tp_size=layout.sync_tp_size,
    )
