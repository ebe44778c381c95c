"""``ladderize bench`` from its options to its document: plan, measure, keep, show."""

from pathlib import Path

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.figure import check_plot
from ladderize.files.documents import check_writable
from ladderize.ranks.device import check_device
from ladderize.ranks.environment import is_main_rank
from ladderize.ranks.group import already_started
from ladderize.runtime.bench.document import BenchDocument
from ladderize.runtime.bench.kept import KeptDocument
from ladderize.runtime.bench.measure import measure_plan
from ladderize.runtime.bench.options import BenchOptions, ModelChoice
from ladderize.runtime.bench.plan import plan_bench
from ladderize.runtime.bench.plot import plot_bench
from ladderize.runtime.bench.report import show_bench
from ladderize.runtime.launch import run


def bench(
    choice: ModelChoice,
    options: BenchOptions,
    link: str | None = None,
    *,
    out: Path | None = None,
    plot: Path | None = None,
    console: Console = SILENT,
) -> BenchDocument:
    """Check and time the chosen models against each other; returns the result, and shows it where the console speaks.

    link: of the ranks that ``options.emulate_tp`` emulates, as ``--link`` takes it. out: a JSON file, which is written
    after each batch size, and before traces are made. plot: draws ``plot``.png and ``plot``.svg. Raises UsageError or
    UserError for what cannot be measured, and where a trace disproves an overlap; what was measured until then is kept
    in ``out`` and shown.
    """
    check_device(options.device)
    if out is not None:
        check_writable(out)
    if plot is not None:
        check_plot(plot)
    plan = plan_bench(choice, options, link)
    kept = KeptDocument(out, plot, console, show_bench, plot_bench)
    if options.tp_size > 1 and not already_started():
        console.note(f"starting {options.tp_size} ranks")
    try:
        document: BenchDocument = run(
            measure_plan,
            plan,
            console,
            tp_size=options.tp_size,
            device=options.device,
            threads=options.threads,
            report=kept.write,
        )
    except BaseException:  # also Ctrl-C
        kept.show()
        raise
    if is_main_rank():
        kept.write(document)
    kept.show()
    if document.disproved:
        nothing = f"nothing overlapped in the trace of {' and '.join(document.disproved)}"
        if options.schedule == "sequential":
            raise UserError(f"{nothing}, although the layout overlaps: its row is not valid")
        raise UserError(f"{nothing}, although --schedule {options.schedule} overlaps: its row is not valid")
    return document
