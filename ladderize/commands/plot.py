"""``plot``."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.choices import DRAW, argument, option
from ladderize.commands.builder import OUTPUT, GivenOptions, command
from ladderize.console import Console


@dataclass(frozen=True)
class PlotArguments:
    folders: tuple[Path, ...] = argument("FOLDER...", "Outputs of adapt or spd, or folders of unfinished work.")
    out: Path = option(DRAW, Path("curves"))


@command(PlotArguments, panels={OUTPUT: "out"}, configurable=False)
def plot(given: GivenOptions) -> None:
    """Draw training curves: the loss, and the held-out perplexity beside the dense model's."""
    from ladderize.adapt.retrain.curves import draw_curves, read_curves
    from ladderize.figure import check_plot

    console, own = Console(), given.fill(PlotArguments)
    check_plot(own.out, option="--out")
    runs = [read_curves(folder) for folder in own.folders]
    with console.stage("drawing"):
        drawn = draw_curves(runs, own.out)
    console.result(f"wrote {' and '.join(map(str, drawn))}")
