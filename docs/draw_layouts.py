"""Draw docs/layouts.png and .svg: what each layout does with the two sync points of a layer, as a timeline of two
ranks.

python docs/draw_layouts.py        # needs matplotlib (pip install 'ladderize[plots]')
"""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch, Rectangle

COMPUTE, REDUCE, EXPOSED, TEXT = "#3b6ea5", "#e9a23b", "#c8443a", "#222222"
ATTENTION, MLP, ALL_REDUCE = 1.0, 1.7, 1.3


def schedule(layers, *, ladder=False, spd=False):
    """(compute boxes, all-reduces, total time): (start, length, label) and (start, end, from when the rank waits for
    it)."""
    compute, reduces = [], []
    now, pending_end = 0.0, 0.0
    for layer in range(layers):
        for name, length in (("attention", ATTENTION), ("mlp", MLP)):
            mode = "blocking"
            last = layer == layers - 1 and name == "mlp"
            if spd and name == "attention":
                mode = "dropped"
            elif ladder and not last:
                mode = "overlapped"
            compute.append((now, length, f"{'Attn' if name == 'attention' else 'MLP'} {layer}"))
            now += length
            if pending_end:  # what was in flight under this sub-module is waited for now
                reduces.append((pending_end - ALL_REDUCE, pending_end, now))
                now, pending_end = max(now, pending_end), 0.0
            if mode == "blocking":
                reduces.append((now, now + ALL_REDUCE, now))
                now += ALL_REDUCE
            elif mode == "overlapped":
                pending_end = now + ALL_REDUCE
    return compute, reduces, now


def draw(axis, title, caption, boxes):
    compute, reduces, total = boxes
    for start, length, label in compute:
        axis.add_patch(
            FancyBboxPatch(
                (start + 0.04, 1.0), length - 0.08, 0.8, boxstyle="round,pad=0,rounding_size=0.08", color=COMPUTE
            )
        )
        axis.text(start + length / 2, 1.4, label, ha="center", va="center", color="white", fontsize=9)
    for start, end, waited_from in reduces:
        axis.add_patch(Rectangle((start + 0.04, 0.1), end - start - 0.08, 0.6, color=EXPOSED))
        hidden = min(end, waited_from) - start - 0.08
        if hidden > 0:
            axis.add_patch(Rectangle((start + 0.04, 0.1), hidden, 0.6, color=REDUCE))
        axis.text((start + end) / 2, 0.4, "AR", ha="center", va="center", color="white", fontsize=8)
    axis.text(-0.2, 1.4, "compute", ha="right", va="center", fontsize=8, color=TEXT)
    axis.text(-0.2, 0.4, "all-reduce", ha="right", va="center", fontsize=8, color=TEXT)
    axis.plot([total, total], [-0.1, 2.0], color=TEXT, linewidth=1, linestyle=":")
    axis.set_title(f"{title}", loc="left", fontsize=11, fontweight="bold", color=TEXT, pad=4)
    axis.text(11.6, 2.2, caption, ha="right", va="bottom", fontsize=9, color=TEXT)
    axis.set_xlim(-1.4, 11.6)
    axis.set_ylim(-0.2, 2.1)
    axis.axis("off")


def main():
    figure, axes = plt.subplots(4, 1, figsize=(10, 6.6))
    layers = 2
    rows = [
        ("dense", "every all-reduce is waited for", {}),
        (
            "ladder",
            "each all-reduce runs under the next sub-module; what is longer than that, and the last, is waited for",
            {"ladder": True},
        ),
        ("spd", "no all-reduce after attention; its partial travels with the MLP's", {"spd": True}),
        ("spd + ladder", "one all-reduce per layer, hidden under the next attention", {"spd": True, "ladder": True}),
    ]
    for axis, (title, caption, options) in zip(axes, rows, strict=True):
        draw(axis, title, caption, schedule(layers, **options))
    handles = [Rectangle((0, 0), 1, 1, color=c) for c in (COMPUTE, EXPOSED, REDUCE)]
    names = ["sub-module", "all-reduce, waited for", "all-reduce, hidden"]
    figure.legend(handles, names, loc="lower center", ncol=3, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    for suffix in ("png", "svg"):
        # no date in the SVG, so that drawing again changes nothing
        metadata = {"Date": None} if suffix == "svg" else None
        figure.savefig(Path(__file__).with_name(f"layouts.{suffix}"), dpi=130, metadata=metadata)


if __name__ == "__main__":
    mpl.rcParams["svg.hashsalt"] = "ladderize"
    main()
