"""Generate text, or files of training data."""

from ladderize.commands.shared import loading, start_server
from ladderize.console import Console
from ladderize.files.records import Record
from ladderize.runtime.sampling import GenerateOptions


def generate(options: GenerateOptions, console: Console) -> None:
    """Generate text, or training data: answers to instructions, or texts of the model's own."""
    with loading(options, console):
        start_server(options.tp_size)
        from ladderize.runtime.generate import generate as generate_texts
        from ladderize.runtime.generate_file import generate_file
    document: Record | None
    if options.out is None:
        document = generate_texts(options, console=console)
    else:
        document = generate_file(options, console=console)
    if document is not None:  # None on other ranks than 0
        console.document(document.to_dict())
