"""``calibrate``."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ladderize
from ladderize.choices import AS_JSON, option
from ladderize.commands.builder import ADVANCED, DATA, MEASUREMENT, MEMORY, MODELS, OUTPUT, GivenOptions, command
from ladderize.commands.shared import LOADING, command_line, runtime_device, show_next, start_server
from ladderize.console import Console
from ladderize.errors import UsageError
from ladderize.planning.calibration.options import CalibrateOptions, TimingsOptions

if TYPE_CHECKING:
    from ladderize.planning.calibration.fit import FittedFigure
    from ladderize.planning.calibration.run import CalibrationDocument

ONLY_TIMINGS = {"link", "engine", "fit"}
FOR_BOTH = {"timings", "hardware", "shape", "name", "out", "json", "config"}


@dataclass(frozen=True)
class CalibrateArguments:
    out: Path = option(
        "The JSON file to write; --hardware and --link take it. A killed run goes on when it is run again (not under"
        " torchrun).",
        ...,
        metavar="FILE",
    )
    as_json: bool = option(AS_JSON, False)


@command(
    CalibrateArguments,
    CalibrateOptions,
    TimingsOptions,
    panels={
        OUTPUT: "out name json",
        MEMORY: "tp_size backend dtype device threads",
        MODELS: "shape",
        MEASUREMENT: "batch_size prefill_tokens output_len warmup repeat seed",
        DATA: "timings hardware link engine",
        ADVANCED: "fit",
    },
)
def calibrate(given: GivenOptions) -> None:
    """Measure a device and a link in minutes, for plan and for bench --emulate-tp, or fit them to timings."""
    own, shapes = given.fill(CalibrateArguments), given.params["shape"] or ()
    console = Console(own.as_json)
    if given.params["timings"]:
        idle = given.params.keys() - ONLY_TIMINGS - FOR_BOTH
        given.refuse(idle, "with --timings, which times nothing; leave it out")
        if given.params["hardware"] is None:
            raise UsageError("--timings needs --hardware: the device that the timings were made on, or a file with it")
        if len(shapes) > 1:
            raise UsageError("--timings take one --shape: that of rows which name none")
        fitted = given.fill(TimingsOptions, shape=shapes[0] if shapes else None)
        with console.stage("fitting"):
            document = ladderize.calibrate(fitted, out=own.out)
    else:
        given.refuse(ONLY_TIMINGS, "without --timings; leave it out")
        options = given.fill(CalibrateOptions, device=given.params["device"] or "cpu")
        options.check()
        with console.stage(LOADING):
            start_server(max(options.tp_sizes))
            device = runtime_device(given.params["device"], options.backend, options.threads, max(options.tp_sizes))
        options = given.fill(CalibrateOptions, device=device)
        document = ladderize.calibrate(options, out=own.out, console=console)
    console.document(document.to_dict())
    _show(document, console)
    console.note(f"wrote {own.out}")
    if document.link is not None and document.link.rows:
        ranks = document.link.rows[-1].ranks
        predict = command_line("plan", "--hardware", own.out, "--link", own.out, "--tp-size", ranks, "--shape", "8b")
        show_next(console, ("predict with it", predict))


def _show(document: "CalibrationDocument", console: Console) -> None:
    """Figures, residuals by what was timed, and what to know before the file is used."""
    figures = [
        {
            "figure": _title(figure),
            "value": f"{figure.value:.3g}",
            "standard error": f"{figure.standard_error:.2g}",
            "unit": figure.unit,
        }
        for figure in document.figures
    ]
    console.table(figures, right=["value", "standard error"])
    groups: dict[str, list[float]] = {}
    for residual in document.residuals:
        groups.setdefault(residual.group, []).append(residual.relative_error)
    residuals = [
        {
            "what": name,
            "timings": len(errors),
            "mean error": f"{sum(map(abs, errors)) / len(errors):.1%}",
            "worst": f"{max(errors, key=abs):+.1%}",
        }
        for name, errors in groups.items()
    ]
    console.result("")
    console.table(residuals, right=["timings", "mean error", "worst"])
    console.result("")
    console.prose(
        f"{len(document.residuals)} timings; the fit misses its own by {document.mean_error:.1%} on average, by"
        f" {document.worst_error:.1%} at worst"
    )
    for figure in document.figures:
        if figure.is_uncertain:
            console.prose(
                f"{_title(figure)} is uncertain by more than its size: these timings hardly depend on it, nor do"
                " predictions of the same kind; others are guesses"
            )
    for note in document.notes:
        console.prose(note)


def _title(figure: "FittedFigure") -> str:
    from ladderize.planning.calibration.fit import FITTED, figure_kind, figure_of

    dtype, ranks = figure_of(figure.name)
    title = FITTED[figure_kind(figure.name)].title
    return title + (f" in {dtype}" if dtype else "") + (f", {ranks} ranks" if ranks else "")
