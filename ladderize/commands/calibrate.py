"""Time this machine, and show the figures that were fitted."""

from typing import TYPE_CHECKING

import ladderize
from ladderize.commands.shared import LOADING, runtime_device, start_server
from ladderize.console import Console
from ladderize.files.documents import check_writable
from ladderize.plan.options import CalibrateOptions

if TYPE_CHECKING:
    from ladderize.plan.calibrate import CalibrationDocument


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
