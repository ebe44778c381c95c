"""What names ``ladderize plan`` knows: devices, links, engines and shapes, with their sources. Imports no torch."""

from dataclasses import dataclass

from ladderize.checkpoint.llama import parameter_count
from ladderize.console import Console, human_count
from ladderize.files.records import Record
from ladderize.planning.hardware import DeviceSpec, EngineFacts, known_devices, known_engines
from ladderize.runtime.collectives.links import Interconnect, known_interconnects
from ladderize.runtime.shards import known_shapes


@dataclass(frozen=True)
class KnownHardware(Record):
    """All that is known by name. shapes: parameters of each."""

    devices: list[DeviceSpec]
    links: list[Interconnect]
    engines: list[EngineFacts]
    shapes: dict[str, int]

    @classmethod
    def read(cls) -> "KnownHardware":
        return cls(
            list(known_devices().values()),
            list(known_interconnects().values()),
            list(known_engines().values()),
            {name: parameter_count(config) for name, config in known_shapes().items()},
        )


def show_known(known: KnownHardware, console: Console) -> None:
    """Tables of what --hardware, --link, --engine and --shape take."""
    console.document(known.to_dict())
    console.result("Devices (--hardware)")
    console.table([_device(device) for device in known.devices], right=["GB/s", "memory", "error"])
    console.result("\nLinks (--link)")
    console.table([_link(link) for link in known.links], right=["error"])
    console.result("\nEngines (--engine)")
    console.table([{"name": engine.name, "source": engine.source} for engine in known.engines])
    console.result("\nShapes (--shape)")
    shapes = [{"name": name, "parameters": human_count(count)} for name, count in known.shapes.items()]
    console.table(shapes, right=["parameters"])
    console.result("")
    console.prose(
        "error: one standard deviation, of the time of compute or of a message. A file of `ladderize calibrate` stands"
        " for a device, a link, or both; so does YAML with device: or link: and the keys of --list --json."
    )


def _device(device: DeviceSpec) -> dict[str, str]:
    rates = ", ".join(f"{rate:g} {dtype}" for dtype, rate in device.matmul_tflop_s.items())
    return {
        "name": device.name,
        "GB/s": f"{device.memory_bandwidth_gb_s:g}",
        "TFLOP/s": rates,
        "memory": f"{device.memory_gib:g} GiB" if device.memory_gib is not None else "",
        "error": f"{device.relative_error:.0%}",
        "engine": device.engine,
        "source": device.source,
    }


def _link(link: Interconnect) -> dict[str, str]:
    def row_text(ranks: int, alpha: float, bus: float | None) -> str:
        return f"{ranks} ranks {alpha:.3g} us" + (f" + {bus:.3g} GB/s" if bus is not None else "")

    rows = "; ".join(row_text(row.ranks, row.alpha_us, row.bus_gb_s) for row in link.rows)
    return {"name": link.name, "bus": rows, "error": f"{link.relative_error:.0%}", "source": link.source}
