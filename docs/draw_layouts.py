"""Draw docs/layouts and docs/domino, each as .png and .svg: one rank's compute and its all-reduces as a timeline.

python docs/draw_layouts.py        # needs matplotlib (pip install matplotlib)

layouts: what each layout does with the sync points of two layers. domino: what schedules make of that, forward and
backward. What is drawn is a run of the runtime's own code (docs/timeline.py).
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle
from timeline import FORWARD, INPUT, WEIGHT, Message, Span, Timeline, record

from ladderize.layout import APART, Layout
from ladderize.runtime.schedule import SEQUENTIAL, Schedule

REDUCE, EXPOSED, TEXT, FAINT = "#e9a23b", "#c8443a", "#222222", "#777777"
COLOURS = {FORWARD: "#3b6ea5", INPUT: "#2c7f78", WEIGHT: "#7d6aa8"}
LAYERS = 2
GAP = 0.04  # of time, at both ends of a box: boxes that follow each other do not touch
CHARACTER = 0.0105  # inches that a character is wide, for each point of its size
MARGIN = 1.0  # inches left of the timelines


@dataclass(frozen=True)
class Row:
    """A timeline of a picture, with what is to be seen in it."""

    title: str
    caption: str
    layout: Layout
    schedule: Schedule = SEQUENTIAL


@dataclass(frozen=True)
class Picture:
    """backward: whether the backward pass is drawn, too. width: inches."""

    name: str
    rows: tuple[Row, ...]
    backward: bool
    width: float


def layout(*names: str) -> Layout:
    ranks = 2 if {*names} & {"delayed", "spd"} else None
    return Layout.from_layers(LAYERS, **dict.fromkeys(names, range(LAYERS)), sync_tp_size=ranks)


DOMINO_SCHEDULE = Schedule("domino")
LAYOUTS = Picture(
    "layouts",
    (
        Row("dense", "every all-reduce is waited for", layout()),
        Row(
            "ladder",
            "each all-reduce runs under the next sub-module; what is longer than that, and the last, is waited for",
            layout("ladder"),
        ),
        Row(
            "delayed",
            "the same, but each sub-module reads the rank's own part (arrow); the other ranks' parts come late",
            layout("delayed"),
        ),
        Row(
            "spd",
            "no all-reduce after attention: the MLP reads the rank's own part, which travels on with the MLP's",
            layout("spd"),
        ),
        Row(
            "spd + ladder",
            "one all-reduce per layer, hidden under the next attention",
            layout("ladder", "spd"),
        ),
    ),
    backward=False,
    width=10,
)
DOMINO = Picture(
    "domino",
    (
        Row("sequential", "forward waits for every all-reduce; backward hides them under weight gradients", layout()),
        Row(
            "domino, 2 chunks",
            "the all-reduce of one half runs under the compute of the other",
            layout(),
            DOMINO_SCHEDULE,
        ),
        Row("ladder + domino", "the next sub-module hides it, and the other half", layout("ladder"), DOMINO_SCHEDULE),
        Row("spd + domino", "half as many all-reduces, each with a layer to hide it", layout("spd"), DOMINO_SCHEDULE),
    ),
    backward=True,
    width=15,
)


def name(row: Row, event: Span | Message) -> str:
    """What the SVG calls a box: a test compares the names with what the code does."""
    what = f"{event.kind} {event.label}" if isinstance(event, Span) else "all-reduce"
    return f"{row.title}|{what}|{event.start:.2f} {event.end:.2f}"


def draw(axis: Axes, row: Row, timeline: Timeline, end: float, inches: float) -> None:
    """end: of the axis, in the timeline's time. inches: of a unit of time."""

    def write(start: float, stop: float, height: float, *choices: tuple[str, int]) -> None:
        """The first text, with its size in points, that fits."""
        for text, size in choices:
            if len(text) * CHARACTER * size <= (stop - start) * inches - 0.05:
                axis.text((start + stop) / 2, height, text, ha="center", va="center", color="white", fontsize=size)
                return

    for span in timeline.spans:
        place, width = (span.start + GAP, 1.0), span.end - span.start - 2 * GAP
        box = FancyBboxPatch(place, width, 0.8, boxstyle="round,pad=0,rounding_size=0.06")
        box.set(color=COLOURS[span.kind], linewidth=0, gid=name(row, span))
        axis.add_patch(box)
        long = span.label.replace("A", "Attn ").replace("M", "MLP ")
        write(span.start, span.end, 1.39, (long, 9), (long, 8), (span.label, 9), (span.label, 7), (span.label, 6))
    if row.schedule == SEQUENTIAL and timeline.now == timeline.turned:
        modes = [mode for both in zip(row.layout.attention_sync, row.layout.mlp_sync, strict=True) for mode in both]
        for mode, (span, after) in zip(modes[:-1], pairwise(timeline.spans), strict=True):
            if mode in APART:
                arrow = {"arrowstyle": "->", "connectionstyle": "arc3,rad=-0.35", "color": TEXT}
                axis.annotate("", (after.start + 0.25, 1.83), (span.end - 0.25, 1.83), arrowprops=arrow)
    for message in timeline.messages:
        place, width = (message.start + GAP, 0.1), message.end - message.start - 2 * GAP
        axis.add_patch(Rectangle(place, width, 0.6, color=REDUCE, linewidth=0, gid=name(row, message)))
        for start, stop in timeline.waited(message):
            start, stop = max(start, message.start + GAP), min(stop, message.end - GAP)
            axis.add_patch(Rectangle((start, 0.1), stop - start, 0.6, color=EXPOSED, linewidth=0))
        write(message.start, message.end, 0.4, ("AR", 8), ("AR", 6))
    for height, text in ((1.4, "compute"), (0.4, "all-reduce")):
        axis.text(-0.2, height, text, ha="right", va="center", fontsize=8, color=TEXT)
    axis.plot([timeline.now] * 2, [-0.1, 2.0], color=TEXT, linewidth=1, linestyle=":")
    if timeline.now > timeline.turned:
        axis.plot([timeline.turned] * 2, [-0.1, 2.0], color=FAINT, linewidth=1)
        for text, side in (("forward", "right"), ("backward", "left")):
            place = timeline.turned + (0.1 if side == "left" else -0.1)
            axis.text(place, -0.12, text, ha=side, va="center", fontsize=7, color=FAINT)
    axis.set_title(row.title, loc="left", fontsize=11, fontweight="bold", color=TEXT, pad=4)
    axis.text(end, 2.2, row.caption, ha="right", va="bottom", fontsize=9, color=TEXT)
    axis.set_xlim(-MARGIN / inches, end)
    axis.set_ylim(-0.2, 2.1)
    axis.axis("off")


def paint(picture: Picture, timelines: list[Timeline], folder: Path) -> None:
    figure, axes = plt.subplots(len(picture.rows), 1, figsize=(picture.width, 1.5 * len(picture.rows) + 0.6))
    end = max(timeline.now for timeline in timelines) + 0.1
    inches = (picture.width - MARGIN - 0.3) / end
    for axis, row, timeline in zip(axes, picture.rows, timelines, strict=True):
        draw(axis, row, timeline, end, inches)
    colours = [COLOURS[FORWARD], *([COLOURS[INPUT], COLOURS[WEIGHT]] if picture.backward else []), EXPOSED, REDUCE]
    words = ["sub-module", *(["its backward: activations", "its backward: weights"] if picture.backward else [])]
    words += ["all-reduce, waited for", "all-reduce, hidden"]
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in colours]
    figure.legend(handles, words, loc="lower center", ncol=len(words), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    for suffix in ("png", "svg"):
        # no date in the SVG, so that drawing again changes nothing
        metadata = {"Date": None} if suffix == "svg" else None
        figure.savefig(folder / f"{picture.name}.{suffix}", dpi=130, metadata=metadata)


def main() -> None:
    mpl.rcParams["svg.hashsalt"] = "ladderize"
    for picture in (LAYOUTS, DOMINO):
        timelines = [record(row.layout, row.schedule, backward=picture.backward) for row in picture.rows]
        paint(picture, timelines, Path(__file__).parent)


if __name__ == "__main__":
    main()
