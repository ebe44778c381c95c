"""Draw docs/serving_trace.png and .svg: what one rank does in a prefill in vLLM, dense and ladder, from its traces.

    benchmarks/slow_link.sh 200mbit /tmp/vllm.json --engine vllm --layout dense,ladder --profile /tmp/traces
    python docs/draw_serving_trace.py /tmp/traces/0-dense-batch1-rank0.json /tmp/traces/1-ladder-batch1-rank0.json
    python docs/draw_serving_trace.py        # again, from benchmarks/results/vllm_trace.json

The first form keeps what is drawn of the traces: sub-modules, from their first product to their last, and messages.
Needs matplotlib (pip install matplotlib).
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

KEPT = Path(__file__).parent.parent / "benchmarks" / "results" / "vllm_trace.json"
PICTURE = Path(__file__).parent / "serving_trace"
PHASE = "prefill"
START, WAIT = (
    "all-reduce: start",
    "all-reduce: wait",
)  # the messages in flight, as `ladderize bench --profile` marks them
ARRIVAL = "gloo:recv"  # it ends when the other rank's part is there
BLOCKING = ("gloo:all_reduce", "_C::shm_allreduce")  # vLLM's own all-reduce on a CPU
PRODUCTS = ("_C::onednn_mm", "aten::mm", "aten::addmm")
PRODUCTS_OF_LAYER = 4  # qkv and o_proj; gate_up and down
FIRST_LAYER, LAYERS = 2, 2
SLACK_US = 200.0

ATTENTION, MLP, HIDDEN, EXPOSED, TEXT = "#3b6ea5", "#6f9bc8", "#e9a23b", "#c8443a", "#222222"


@dataclass(frozen=True)
class SubModule:
    """Milliseconds from the first layer drawn; label: A2 or M2."""

    label: str
    start: float
    end: float


@dataclass(frozen=True)
class Sent:
    """A message: in flight from ``start`` to ``end``; the rank waited for it, doing nothing else, from ``waited``."""

    start: float
    waited: float
    end: float


def events_of(trace: list[dict[str, Any]], names: Iterable[str], window: tuple[float, float]) -> list[dict[str, Any]]:
    found = [e for e in trace if e.get("ph") == "X" and e["name"] in names and window[0] <= e["ts"] <= window[1]]
    return sorted(found, key=lambda event: event["ts"])


def reduced(path: Path) -> dict[str, Any]:
    """What is drawn of a trace: two layers of its prefill, and the attention after them."""
    trace = json.loads(path.read_text())["traceEvents"]
    phase = next(e for e in trace if e.get("name") == PHASE and e.get("cat") == "user_annotation")
    window = phase["ts"], phase["ts"] + phase["dur"]
    products = events_of(trace, PRODUCTS, window)
    first, stop = PRODUCTS_OF_LAYER * FIRST_LAYER, PRODUCTS_OF_LAYER * (FIRST_LAYER + LAYERS)
    if len(products) < stop + 2:
        sys.exit(f"{path}: {len(products)} products in its prefill, too few for {FIRST_LAYER + LAYERS} layers")
    zero, end = products[first]["ts"], products[stop]["ts"]

    def ms(time: float) -> float:
        return round((time - zero) / 1e3, 4)

    modules = []
    for number in range(first, stop + 2, 2):  # and what hides the last message
        one, other = products[number : number + 2]
        name = "A" if number % PRODUCTS_OF_LAYER == 0 else "M"
        modules.append(SubModule(f"{name}{number // PRODUCTS_OF_LAYER}", ms(one["ts"]), ms(other["ts"] + other["dur"])))
    messages = [
        Sent(ms(begin), ms(waited), ms(through))
        for begin, waited, through in [*_in_flight(trace, window), *_blocking(trace, window)]
        if begin < end and through > zero
    ]
    return {
        "end": ms(end),
        "modules": [asdict(module) for module in modules],
        "messages": [asdict(message) for message in sorted(messages, key=lambda message: message.start)],
    }


def _in_flight(trace: list[dict[str, Any]], window: tuple[float, float]) -> list[tuple[float, float, float]]:
    """Start, begin of the wait, and arrival, of each message in flight. Where it was there before the wait, it arrived
    when its receive ended."""
    arrivals = [e["ts"] + e["dur"] for e in trace if e.get("name") == ARRIVAL and e.get("ph") == "X"]
    found = []
    starts, waits = (events_of(trace, (name,), window) for name in (START, WAIT))
    for start, wait in zip(starts, waits, strict=True):
        done = wait["ts"] + wait["dur"]
        own = [time for time in arrivals if start["ts"] <= time <= done + SLACK_US]
        arrived = min(done, max(own, default=done))
        found.append((start["ts"], min(wait["ts"], arrived), arrived))
    return found


def _blocking(trace: list[dict[str, Any]], window: tuple[float, float]) -> list[tuple[float, float, float]]:
    return [(e["ts"], e["ts"], e["ts"] + e["dur"]) for e in events_of(trace, BLOCKING, window)]


def draw(axis: Axes, title: str, row: dict[str, Any], width: float) -> None:
    for module in (SubModule(**each) for each in row["modules"]):
        colour = ATTENTION if module.label[0] == "A" else MLP
        axis.add_patch(Rectangle((module.start, 1.0), module.end - module.start, 0.8, color=colour, linewidth=0))
        if module.end - module.start > 0.02 * width:
            middle = (module.start + module.end) / 2
            axis.text(middle, 1.4, module.label, ha="center", va="center", color="white", fontsize=8)
    for sent in (Sent(**each) for each in row["messages"]):
        axis.add_patch(Rectangle((sent.start, 0.1), sent.end - sent.start, 0.6, color=HIDDEN, linewidth=0))
        axis.add_patch(Rectangle((sent.waited, 0.1), sent.end - sent.waited, 0.6, color=EXPOSED, linewidth=0))
    for height, text in ((1.4, "compute"), (0.4, "all-reduce")):
        axis.text(-0.01 * width, height, text, ha="right", va="center", fontsize=8, color=TEXT)
    axis.plot([row["end"]] * 2, [0, 1.9], color=TEXT, linewidth=1, linestyle=":")
    axis.set_title(
        f"{title}: {LAYERS} layers in {row['end']:.1f} ms", loc="left", fontsize=10, fontweight="bold", color=TEXT
    )
    axis.set_xlim(0, width)
    axis.set_ylim(0, 2)
    axis.set_yticks([])
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(labelsize=8)


def main() -> None:
    if len(sys.argv) == 3:
        rows = {name: reduced(Path(path)) for name, path in zip(("dense", "ladder"), sys.argv[1:], strict=True)}
        KEPT.write_text(json.dumps({"schema_version": 1, "first_layer": FIRST_LAYER, "rows": rows}, indent=1) + "\n")
    elif len(sys.argv) != 1:
        sys.exit(__doc__)
    rows = json.loads(KEPT.read_text())["rows"]
    mpl.rcParams["svg.hashsalt"] = "ladderize"
    figure, axes = plt.subplots(len(rows), 1, figsize=(10, 1.5 * len(rows) + 0.7), sharex=True)
    width = 1.01 * max(each["end"] for row in rows.values() for each in (*row["modules"], *row["messages"]))
    for axis, (title, row) in zip(axes, rows.items(), strict=True):
        draw(axis, title, row, width)
    axes[-1].set_xlabel("ms", fontsize=8)
    words = ("attention", "MLP", "all-reduce, under compute", "all-reduce, waited for")
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in (ATTENTION, MLP, HIDDEN, EXPOSED)]
    figure.legend(handles, words, loc="lower center", ncol=len(words), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0.04, 0.09, 1, 1))
    for suffix in ("png", "svg"):
        # no date in the SVG, so that drawing again changes nothing
        metadata = {"Date": None} if suffix == "svg" else None
        figure.savefig(f"{PICTURE}.{suffix}", dpi=130, metadata=metadata)


if __name__ == "__main__":
    main()
