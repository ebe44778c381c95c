"""Do predictions hold on this machine? Calibrate on some shapes and layouts, predict others, time these.

    python benchmarks/planning_machine.py [--links shm,gloo,200mbit] [--again] [--out FILE]

Over shared memory, gloo, and gloo over a real link of 200 Mbit/s (benchmarks/slow_link.sh: needs root). Held out are
the widths, depths, batches, lengths and layouts of HELD_OUT; none of them is in the calibration. What the result file
has is not timed again without --again. Nothing else may run meanwhile: on two cores, two ranks leave none.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from ladderize.planning.calibration.fit import fit
from ladderize.planning.calibration.observations import Observation, expected_seconds
from ladderize.planning.calibration.run import UNFITTED_OF_RUN, CalibrationDocument, begin_device, free_of_run
from ladderize.planning.calibration.timings import read_timings

FOLDER = Path(__file__).parent
OUT = FOLDER / "results" / "planning_machine.json"
PLOT = FOLDER.parent / "docs" / "planning_machine"
LINKS = {"shm": ("shm", "bfloat16"), "gloo": ("gloo", "bfloat16"), "200mbit": ("gloo", "float32")}
HELD_OUT = (("heldout-wide.json", 2, 48), ("heldout-deep.json", 16, 12))  # shape, batch, tokens of a prompt
LAYOUTS = "dense,ladder,spd,spd+ladder,ladder=2:5"
CALIBRATION = ("--prefill-tokens", "128", "--output-len", "5", "--repeat", "9")
MEASURED = ("--output-len", "7", "--repeat", "9")
WIRE = {
    "BURST": "64kbit",
    "GSO": "8000",
}  # of slow_link.sh: a shaper that lets no message of a decode step through at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.exists() else {"schema_version": 1, "links": {}}
    for link in args.links.split(","):
        content = {} if args.again else found["links"].setdefault(link, {})
        for name, arguments in commands(link).items():
            if name not in content:
                content[name] = ladderize(link, arguments)
                found["links"][link] = content
                args.out.write_text(json.dumps(found, indent=1) + "\n")
    rows = {link: compare(as_timed(content)) for link, content in found["links"].items()}
    for link, own in rows.items():
        show(f"{link}, medians of the rounds", own)
    for link, content in found["links"].items():
        show(f"{link}, the fastest round of each, calibration too", compare(undisturbed(content)), summary=True)
    draw(rows)


def commands(link: str) -> dict[str, list[str]]:
    """The calibration, and the benchmarks of what is held out, by the shape's name."""
    backend, dtype = LINKS[link]
    common = ["--tp-size", "2", "--backend", backend, "--dtype", dtype, "--threads", "1"]
    found = {"calibration": ["calibrate", *common, *CALIBRATION, "--name", link]}
    for shape, batch, prompt in HELD_OUT:
        models = ["--random-weights", str(FOLDER / "shapes" / shape), "--layout", LAYOUTS]
        lengths = ["--batch-size", str(batch), "--prompt-len", str(prompt), *MEASURED]
        found[shape] = ["bench", *models, "--baselines", "parallel,no-comm", *common, *lengths]
    return found


def ladderize(link: str, arguments: list[str]) -> dict[str, Any]:
    """What this command writes, run on the ranks of ``link``."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        if link in ("shm", "gloo"):
            command = [sys.executable, "-m", "ladderize", *arguments, "--out", str(out)]
        else:
            command = [str(FOLDER / "slow_link.sh"), link, str(out), "--", *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **WIRE})
        document: dict[str, Any] = json.loads(out.read_text())
        return document


# ---- predicted against measured ----


def refitted(content: dict[str, Any], observations: list[Observation]) -> dict[str, Any]:
    """The calibration with its figures fitted to ``observations``, as ``ladderize calibrate`` fits now."""
    seen = CalibrationDocument.from_dict(content["calibration"], "calibration")
    assert seen.options is not None
    free, device = free_of_run(seen.options, observations), begin_device(seen.options, observations, None)
    result = fit(observations, device, seen.link, free, unfitted=UNFITTED_OF_RUN)
    again = dataclasses.replace(seen, device=result.device, link=result.link)
    return {**content, "calibration": again.to_dict()}


def as_timed(content: dict[str, Any]) -> dict[str, Any]:
    """Of the medians of the rounds."""
    return refitted(content, CalibrationDocument.from_dict(content["calibration"], "calibration").observations)


def undisturbed(content: dict[str, Any]) -> dict[str, Any]:
    """The same of the fastest round of each: what other programs took is not in it, so what is left is the model's."""
    seen = CalibrationDocument.from_dict(content["calibration"], "calibration")
    observations = [
        dataclasses.replace(one, seconds=min(samples) / 1e3) if samples else one
        for one, samples in zip(seen.observations, seen.samples_ms, strict=True)
    ]
    found = refitted(content, observations)
    for shape, *_ in HELD_OUT:
        fastest = [
            {
                **one,
                "prefill_ms": min(one["samples_ms"]["prefill"]),
                "decode_ms_per_token": min(one["samples_ms"]["decode"]),
            }
            for one in content[shape]["rows"]
        ]
        found[shape] = {**content[shape], "rows": fastest}
    return found


def compare(content: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each held-out time and each speed-up over dense: measured, predicted, and the error."""
    calibration = CalibrationDocument.from_dict(content["calibration"], "calibration")
    rows = []
    for shape, *_ in HELD_OUT:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bench.json"
            path.write_text(json.dumps(content[shape]))
            seen = read_timings(path, engine="runtime-cpu", shape=str(FOLDER / "shapes" / shape))
        device, own = calibration.device, calibration.link
        predicted = expected_seconds(seen, device, own)
        dense = {one.quantity: (one.seconds, time) for one, time in zip(seen, predicted, strict=True) if is_dense(one)}
        for one, time in zip(seen, predicted, strict=True):
            about = {"shape": shape, "what": one.group.partition(",")[0], "phase": one.quantity}
            rows.append(row("time", about, one.seconds, time))
            if not is_dense(one):
                measured, modelled = dense[one.quantity]
                rows.append(row("speed-up", about, measured / one.seconds, modelled / time))
    return rows


def is_dense(one: Observation) -> bool:
    return one.group.startswith("dense,")


def row(kind: str, about: dict[str, Any], measured: float, predicted: float) -> dict[str, Any]:
    return {"kind": kind, **about, "measured": measured, "predicted": predicted, "error": predicted / measured - 1}


def show(title: str, rows: list[dict[str, Any]], *, summary: bool = False) -> None:
    print(f"\n{title}")
    for one in [] if summary else rows:
        unit = 1e3 if one["kind"] == "time" else 1
        figures = (
            f"measured {one['measured'] * unit:8.2f}  predicted {one['predicted'] * unit:8.2f}  {one['error']:+6.1%}"
        )
        print(f"  {one['kind']:8} {one['shape']:18} {one['phase']:7} {one['what']:17} {figures}")
    for kind in ("time", "speed-up"):
        errors = [abs(one["error"]) for one in rows if one["kind"] == kind]
        print(f"  {kind}: mean error {statistics.fmean(errors):.1%}, worst {max(errors):.1%}, of {len(errors)}")


def draw(rows: dict[str, list[dict[str, Any]]]) -> None:
    """Times and speed-ups, predicted against measured."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    for number, (kind, unit, label) in enumerate((("time", 1e3, "ms"), ("speed-up", 1, "speed-up over dense")), 1):
        axes = figure.add_subplot(1, 2, number)
        values = []
        for (link, own), marker in zip(rows.items(), "osD", strict=False):
            points = [(unit * one["measured"], unit * one["predicted"]) for one in own if one["kind"] == kind]
            axes.plot(*zip(*points, strict=True), marker, label=link, alpha=0.7, markersize=5, linestyle="none")
            values += [value for point in points for value in point]
        low, high = min(values) * 0.9, max(values) * 1.1
        axes.plot([low, high], [low, high], color="gray", linewidth=1)
        axes.set(xlabel=f"measured, {label}", ylabel=f"predicted, {label}", xlim=(low, high), ylim=(low, high))
        if kind == "time":
            axes.set(xscale="log", yscale="log")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter(ScalarFormatter())
                axis.set_minor_formatter(NullFormatter())
        axes.legend()
    for suffix in (".png", ".svg"):
        figure.savefig(PLOT.with_suffix(suffix), dpi=150)


if __name__ == "__main__":
    main()
