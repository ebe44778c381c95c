"""What all pictures share: a check before the work, and PNG and SVG after it. matplotlib is the extra ``plots``."""

from pathlib import Path
from typing import TYPE_CHECKING

from ladderize.errors import UserError
from ladderize.files.regular import resolved

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plot(stem: Path, *, option: str = "--plot") -> None:
    """Raise UserError unless a picture can be drawn and written: before hours of work, not after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(f"{option} needs matplotlib: pip install 'ladderize[plots]'") from None
    if not resolved(stem, "--plot ").parent.is_dir():
        raise UserError(f"{option} {stem}: the folder {stem.parent} does not exist")


def save_figure(figure: "Figure", stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns their paths."""
    written = []
    for suffix in (".png", ".svg"):
        path = stem.expanduser().with_name(stem.name.removesuffix(".png").removesuffix(".svg") + suffix)
        figure.savefig(path, dpi=150)
        written.append(path)
    return written
