"""What the time model of ``ladderize plan`` says to published speeds: fitted on all of them, on all but one group, and
after a calibration with two dense timings for each number of ranks.

    python benchmarks/planning.py [--out benchmarks/results/planning_reference.json] [--plot docs/planning_reference]

The published figures are in benchmarks/reference. The first part re-fits what devices.yaml and links.py ship. About two
minutes on one core.
"""

import argparse
import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from planning_fit import FitResult, OpenFigureError, fit
from planning_observations import Observation, expected_seconds, read_timings

from ladderize.files.documents import write_json
from ladderize.plan.hardware import DeviceSpec, read_device
from ladderize.plan.passes import CASES
from ladderize.plan.rows import relative_band
from ladderize.runtime.collectives.links import Interconnect, InterconnectRow, read_interconnect

REFERENCE = Path(__file__).parent / "reference"
SPEEDS, PHASES = "llama_70b_speed.csv", "llama_70b_phases.csv"
DEVICE_FIGURES = ("bandwidth_share", "matmul_share", "kernel_us", "thin_us", "thin_share", "launch_us")
LINK_FIGURES = ("contention", "alpha_us", "alpha_per_rank_us", "bus_gb_s")
VARIANTS = ("dense", "ladder", "parallel", "no-comm")
# Where the search begins: a data sheet's peaks, and round numbers for the rest.
ROUND_DEVICE = {
    "bandwidth_share": 0.8,
    "matmul_share": 0.5,
    "kernel_us": 2,
    "thin_us": 2,
    "thin_share": 0,
    "launch_us": 5,
}
ROUND_ROWS = [InterconnectRow(ranks, 15.0, 300.0) for ranks in (2, 4, 8)]


def read_published() -> list[Observation]:
    """Every row of the two tables of speeds."""
    return [seen for file in (SPEEDS, PHASES) for seen in read_timings(REFERENCE / file)]


def fit_published(published: Sequence[Observation]) -> tuple[FitResult, list[str]]:
    """Device and link from these figures alone, and the names of figures that these leave open: they count for
    nothing."""
    device = dataclasses.replace(read_device("h100-sxm"), **ROUND_DEVICE)
    link = dataclasses.replace(read_interconnect("nvlink"), rows=ROUND_ROWS, contention=0.2)
    free, still_open = [*DEVICE_FIGURES, *LINK_FIGURES], []
    if all(one.batch_size > 1 for one in published):  # no prefill that the host holds up
        free.remove("launch_us")
        still_open.append("launch_us")
        device = dataclasses.replace(device, launch_us=0.0)
    while True:
        try:
            return fit(published, device, link, free), still_open
        except OpenFigureError as error:
            free.remove(error.figure)
            still_open.append(error.figure)
            if error.figure in DEVICE_FIGURES:
                device = dataclasses.replace(device, **{error.figure: 0.0})
            elif error.figure == "contention":
                link = dataclasses.replace(link, contention=0.0)
            else:
                raise


def predicted(one: Observation, device: DeviceSpec, link: Interconnect) -> float:
    return expected_seconds([one], device, link)[0]


# ---- errors ----


def errors_of(published: Sequence[Observation], device: DeviceSpec, link: Interconnect) -> list[float]:
    """predicted / published - 1, of times."""
    return [predicted(one, device, link) / one.seconds - 1 for one in published]


def speedup_errors(
    published: Sequence[Observation], device: DeviceSpec, link: Interconnect
) -> list[tuple[Observation, float]]:
    """The same of each variant's speed-up over dense, wherever both were published."""
    found = []
    for one in published:
        dense = next((other for other in published if _beside(one, other)), None)
        if dense is not None and one.variant != "dense":
            ratio = predicted(dense, device, link) / predicted(one, device, link)
            found.append((one, ratio / (dense.seconds / one.seconds) - 1))
    return found


def _beside(one: Observation, other: Observation) -> bool:
    """Whether ``other`` is the dense row that belongs to ``one``."""
    same = ("file", "batch_size", "ranks", "quantity")
    return other.variant == "dense" and all(getattr(one, name) == getattr(other, name) for name in same)


def summary(errors: Sequence[float]) -> dict[str, float | int]:
    sizes = [abs(error) for error in errors]
    return {"count": len(sizes), "mean_error": sum(sizes) / len(sizes), "worst_error": max(sizes)}


# ---- how often bands hold ----


def covered(published: Sequence[Observation], device: DeviceSpec, link: Interconnect) -> dict[str, tuple[int, int]]:
    """How many of the published times and speed-ups lie in their bands, and of how many."""
    held = {"times": [0, 0], "speed-ups": [0, 0]}
    for one in published:
        dense = next((other for other in published if _beside(one, other)), None)
        times = _in_cases(one, device, link)
        _count(held["times"], one.seconds, times, 1)
        if dense is not None and one.variant != "dense":
            before = _in_cases(dense, device, link)
            ratios = [first / second for first, second in zip(before, times, strict=True)]
            _count(held["speed-ups"], dense.seconds / one.seconds, ratios, 2)
    return {name: (inside, total) for name, (inside, total) in held.items()}


def _in_cases(observation: Observation, device: DeviceSpec, link: Interconnect) -> list[float]:
    phases = observation.parts(device, link)
    return [observation.predict({phase: parts.off_by(errors) for phase, parts in phases.items()}) for errors in CASES]


def _count(held: list[int], truth: float, values: Sequence[float], runs: int) -> None:
    held[0] += abs(truth / values[0] - 1) <= relative_band(values, runs=runs)
    held[1] += 1


# ---- the three questions ----


def training(published: Sequence[Observation]) -> tuple[dict[str, Any], FitResult]:
    result, still_open = fit_published(published)
    assert not still_open
    assert result.link is not None
    errors = errors_of(published, result.device, result.link)
    print("fitted on all published speeds:")
    for figure in result.figures:
        print(f"  {figure.name:20} {figure.value:8.4g} +- {figure.standard_error:.2g} {figure.unit}")
    groups: dict[str, list[float]] = {}
    for one, error in zip(published, errors, strict=True):
        for name in (one.file, *one.groups.values()):
            groups.setdefault(name, []).append(error)
    ratios = speedup_errors(published, result.device, result.link)
    table = {"all": summary(errors), **{name: summary(group) for name, group in groups.items()}}
    table["speed-ups over dense"] = summary([error for _, error in ratios])
    _print("training error (of times)", table)
    figures = {figure.name: [figure.value, figure.standard_error] for figure in result.figures}
    return {"figures": figures, "errors": table}, result


def left_out(published: Sequence[Observation]) -> dict[str, Any]:
    """Each group predicted by a fit that has seen none of it."""
    table, held, ratio_table = {}, {"times": [0, 0], "speed-ups": [0, 0]}, {}
    names = sorted({name for one in published for name in one.groups.values()})
    for name in names:
        inside = [one for one in published if name in one.groups.values()]
        rest = [one for one in published if name not in one.groups.values()]
        if name == "end to end":
            rest = [one for one in published if one.file == PHASES]  # of 8 ranks only: latencies are no line
        try:
            result, still_open = fit_published(rest)
        except OpenFigureError as error:
            print(f"  {name}: cannot be left out: {error}")
            continue
        if still_open:
            print(f"  without {name}, nothing tells {' and '.join(still_open)}")
        assert result.link is not None
        table[name] = summary(errors_of(inside, result.device, result.link))
        ratios = [error for one, error in speedup_errors(published, result.device, result.link) if one in inside]
        if ratios:
            ratio_table[name] = summary(ratios)
        # bands as they are shipped: of a device and a link that were fitted to published speeds
        device = dataclasses.replace(result.device, relative_error=read_device("h100-sxm").relative_error)
        link = dataclasses.replace(result.link, relative_error=read_interconnect("nvlink").relative_error)
        if still_open:  # bands are of figures that are known with some error
            continue
        for kind, (good, total) in covered(inside, device, link).items():
            held[kind][0] += good
            held[kind][1] += total
    _print("leave one group out: error of its times", table)
    _print("leave one group out: error of its speed-ups", ratio_table)
    shares = {kind: good / total for kind, (good, total) in held.items()}
    print(f"95 % bands hold {shares['times']:.0%} of left-out times, {shares['speed-ups']:.0%} of speed-ups")
    return {"times": table, "speedups": ratio_table, "share_in_95_percent_bands": shares}


def calibrated(published: Sequence[Observation]) -> dict[str, Any]:
    """The device from what does not communicate, contention as shipped, and the link at each number of ranks from two
    dense timings: the smallest and the largest batch. Everything else that communicates is predicted."""
    silent = [one for one in published if one.variant == "no-comm"]
    start = dataclasses.replace(read_device("h100-sxm"), **ROUND_DEVICE)
    device = fit(silent, start, None, DEVICE_FIGURES).device
    times, ratios, by_batch = {}, {}, operator.attrgetter("batch_size")
    for ranks in (2, 4, 8):
        table = [one for one in published if one.file == SPEEDS and one.ranks == ranks]
        dense = [one for one in table if one.variant == "dense"]
        known = [min(dense, key=by_batch), max(dense, key=by_batch)]
        link = dataclasses.replace(read_interconnect("nvlink"), rows=[row for row in ROUND_ROWS if row.ranks == ranks])
        try:
            found = fit(known, device, link, ["alpha_us", "bus_gb_s"]).link
        except OpenFigureError as error:
            print(f"  {ranks} ranks: {error}; {ROUND_ROWS[0].bus_gb_s:g} GB/s assumed")
            found = fit(known, device, link, ["alpha_us"]).link
        assert found is not None
        rest = [one for one in table if one not in known and one.variant != "no-comm"]
        row = found.rows[0]
        print(f"  {ranks} ranks: {row.alpha_us:.1f} us, bus {row.bus_gb_s:.0f} GB/s from two dense timings")
        times[f"{ranks} ranks"] = summary(errors_of(rest, device, found))
        pairs = [error for one, error in speedup_errors(table, device, found) if one.variant != "no-comm"]
        ratios[f"{ranks} ranks"] = summary(pairs)
    _print("after two dense timings per number of ranks: error of times", times)
    _print("after two dense timings per number of ranks: error of speed-ups", ratios)
    return {"times": times, "speedups": ratios}


def link_rows() -> dict[str, Any]:
    """Published all-reduces by themselves, over NVLink by NCCL, beside the link that whole models' speeds show."""
    table = {}
    link = read_interconnect("nvlink")
    published = read_interconnect("nccl_nvlink_h100")
    for ranks in (row.ranks for row in published.rows):
        alone, ours = published.at(ranks), link.at(ranks)
        sizes = _sizes(alone.min_bytes, alone.max_bytes or alone.min_bytes)
        errors = [ours.seconds(size) / alone.seconds(size) - 1 for size in sizes]
        table[f"{published.name}, {ranks} ranks"] = summary(errors)
    _print("published all-reduces alone (not fitted)", table)
    return table


def _sizes(low: int, high: int) -> list[int]:
    return [low << step for step in range(int(math.log2(high / low)) + 1)]


def _print(title: str, table: dict[str, dict[str, float | int]]) -> None:
    print(f"\n{title}\n  {'group':32} {'count':>5} {'mean':>7} {'worst':>7}")
    for name, row in table.items():
        print(f"  {name:32} {row['count']:5d} {row['mean_error']:7.1%} {row['worst_error']:7.1%}")


# ---- picture ----

COLOURS = {"dense": "#4477aa", "ladder": "#ee6677", "parallel": "#ccbb44", "no-comm": "#228833"}
MARKS = {2: "s", 4: "^", 8: "o"}


def draw(published: Sequence[Observation], predict: Callable[[Observation], float], stem: Path) -> None:
    """Predicted against published speeds, and how far off they are."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    speeds = [one for one in published if one.file == SPEEDS]
    for one in speeds:
        tokens = one.batch_size * one.output_len
        ours, theirs = tokens / predict(one), tokens / one.seconds
        look: dict[str, Any] = {"color": COLOURS[one.variant], "marker": MARKS[one.ranks], "s": 30, "alpha": 0.85}
        left.scatter(theirs, ours, **look)
        place = sorted({other.batch_size for other in speeds}).index(one.batch_size)
        shift = (VARIANTS.index(one.variant) - 1.5) * 0.17 + (one.ranks - 4) * 0.012
        right.scatter(place + shift, 100 * (ours / theirs - 1), **look)
    ends = [30, 3000]
    left.plot(ends, ends, color="#888888", linewidth=0.8, zorder=0)
    left.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    left.set(xlabel="published output tokens/s", ylabel="predicted output tokens/s")
    left.set_title("Llama-70B, H100, NVLink, prompt 1024, 512 new tokens", fontsize=9)
    for level, style in ((0, "-"), (5, ":"), (-5, ":")):
        right.axhline(level, color="#888888", linewidth=0.8, linestyle=style, zorder=0)
    right.set(xticks=range(4), xticklabels=["1", "4", "16", "64"], ylim=[-10, 10])
    right.set(xlabel="batch size", ylabel="predicted speed, % over the published one")
    right.set_title("error of the fit", fontsize=9)
    for name, colour in COLOURS.items():
        left.scatter([], [], color=colour, label=name)
    for ranks, mark in MARKS.items():
        left.scatter([], [], color="#555555", marker=mark, label=f"{ranks} ranks")
    left.legend(fontsize=8, frameon=False)
    for suffix in (".png", ".svg"):
        figure.savefig(stem.with_suffix(suffix), dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    published = read_published()
    document, result = training(published)
    answers = {
        "training": document,
        "published_all_reduces": link_rows(),
        "left_out": left_out(published),
        "calibrated": calibrated(published),
    }
    if args.out:
        write_json(args.out, answers)
    if args.plot:
        device, link = result.device, result.link
        assert link is not None
        draw(published, lambda one: predicted(one, device, link), args.plot)


if __name__ == "__main__":
    main()
