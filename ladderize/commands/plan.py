"""The commands ``plan`` and ``calibrate``: predict the speed of layouts, on hardware that may have been timed here."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import ladderize
from ladderize.commands.shared import LOADING, command_line, runtime_device, start_server
from ladderize.console import Console
from ladderize.files.documents import check_writable
from ladderize.files.regular import resolved
from ladderize.plan.options import CalibrateOptions, PlanOptions

if TYPE_CHECKING:
    from ladderize.plan.calibrate import CalibrationDocument
    from ladderize.plan.run import PlanResult


def plan(options: PlanOptions, console: Console) -> None:
    """Predict how fast layouts are on hardware that need not be there, and choose one."""
    from ladderize.plan.show import show_plan

    if options.verify is not None:
        with console.stage(LOADING):
            from ladderize.plan import measure  # noqa: F401  # which takes seconds
    result = ladderize.plan_layouts(options, console=console)
    console.document(result.to_dict())
    show_plan(result, console)
    for path in filter(None, (options.out, options.recipe_out)):
        console.note(f"wrote {path}")
    for line in _next_commands(result):
        console.result(line)


def _next_commands(result: "PlanResult") -> Iterator[str]:
    """Yield the commands that make the chosen layout, or that of the most favourable verdict, if one is favourable."""
    from ladderize.plan.rows import CHECKPOINT_ROW

    options, choice = result.options, result.choice
    if choice is not None and options.model is not None:
        made = f"{resolved(options.model).name}-planned"  # in the current folder, also for "." and hub ids
        make = command_line("convert", options.model, made, "--recipe", options.recipe_out or "RECIPE.yaml")
        yield f"\nmake it: {make}"
        if choice.aligned is not None:
            paths = (made, f"{made}-aligned")
            align = command_line(
                "adapt", *paths, "--method", "align", "--distill-from", options.model, "--data", "DATA"
            )
            yield f"align it, as was measured: {align}"
    favourable = [verdict for verdict in result.verdicts if verdict.layout not in (None, CHECKPOINT_ROW)]
    if choice is None and favourable:
        verdict = min(favourable, key=lambda verdict: ("yes", "perhaps").index(verdict.worth))
        kinds, _, ranges = str(verdict.layout).partition("=")
        flags = [text for kind in kinds.split("+") for text in (f"--{kind}", ranges or "all")]
        if kinds != "ladder":
            flags += ["--sync-tp-size", str(options.sync_tp_size or verdict.tp_size)]
        yield f"next: {command_line('convert', options.model or 'MODEL', 'OUT', *flags)}"


def calibrate(options: CalibrateOptions, console: Console) -> None:
    """Measure a device and a link in a minute, for plan and for bench --emulate-tp."""
    check_writable(options.out, inputs=[options.hardware])
    with console.stage(LOADING):
        start_server(max(options.tp_sizes))
        runtime_device(options.device, options.backend, None, max(options.tp_sizes))
    document = ladderize.calibrate(options, console=console)
    console.document(document.to_dict())
    figures = _figures(document)
    console.table([{"figure": name, "value": value} for name, value in figures.items()], right=["value"])
    console.note(f"wrote {options.out}")


def _figures(document: "CalibrationDocument") -> dict[str, str]:
    """Return the figures that were fitted, and how far their times are off, for people."""
    device, link, dtype = document.device, document.link, document.options.compute_dtype
    figures = {
        "memory bandwidth": f"{device.memory_bandwidth_gb_s * device.bandwidth_share:.3g} GB/s",
        f"products in {dtype}": f"{device.matmul_tflop_s[dtype] * device.matmul_share:.3g} TFLOP/s",
        "start of a kernel": f"{device.kernel_us:.3g} us",
        "error of products": f"{device.relative_error:.0%}",
    }
    if link is not None:
        for row in link.rows:
            figures[f"latency of an all-reduce, {row.ranks} ranks"] = f"{row.alpha_us:.3g} us"
            figures[f"bus bandwidth of an all-reduce, {row.ranks} ranks"] = f"{row.bus_gb_s:.3g} GB/s"
        figures |= {"contention": f"{link.contention:.2f}", "error of all-reduces": f"{link.relative_error:.0%}"}
    return figures
