"""``plot``."""

from pathlib import Path
from typing import Annotated

import typer

from ladderize.commands.options import OUTPUT
from ladderize.console import Console


def plot(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Outputs of adapt or spd, or folders of unfinished work."),
    ],
    out: Annotated[
        Path, typer.Option(metavar="STEM", help="Draw STEM.png and STEM.svg.", rich_help_panel=OUTPUT)
    ] = Path("curves"),
) -> None:
    """Draw training curves: the loss, and the held-out perplexity beside the dense model's."""
    from ladderize.adapt.curves.draw import draw_curves
    from ladderize.adapt.curves.read import read_curves
    from ladderize.figure import check_plot

    console = Console()
    check_plot(out, option="--out")
    runs = [read_curves(folder) for folder in folders]
    with console.stage("drawing"):
        drawn = draw_curves(runs, out)
    console.result(f"wrote {' and '.join(map(str, drawn))}")
