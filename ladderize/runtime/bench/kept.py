"""What a benchmark has found so far, in a file and for a person, however the run ends."""

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from ladderize.console import Console
from ladderize.files.documents import write_json
from ladderize.files.records import Record

Found = TypeVar("Found", bound=Record)


class KeptDocument(Generic[Found]):
    """The newest document of a run: written to ``out`` as soon as it is there, shown at the end, however that comes.

    show: prints it. draw: draws it into files, and returns them; ``plot`` names these.
    """

    def __init__(
        self,
        out: Path | None,
        plot: Path | None,
        console: Console,
        show: Callable[[Found, Console], None],
        draw: Callable[[Found, Path], list[Path]],
    ) -> None:
        self.out, self.plot, self.console = out, plot, console
        self.print_document, self.draw = show, draw
        self.newest: Found | None = None

    def write(self, document: Found) -> None:
        self.newest = document
        if self.out is not None:
            write_json(self.out, document.to_dict())

    def show(self) -> None:
        if self.newest is None:
            return
        self.console.document(self.newest.to_dict())
        self.print_document(self.newest, self.console)
        if self.out is not None:
            self.console.note(f"wrote {self.out}")
        if self.plot is not None:
            self.console.note(f"wrote {' and '.join(map(str, self.draw(self.newest, self.plot)))}")
