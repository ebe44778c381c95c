"""``ladderize bench --train`` from its options to its document: plan, measure, keep, show."""

from pathlib import Path

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.files.documents import check_writable, write_json
from ladderize.ranks.device import check_device
from ladderize.ranks.environment import is_main_rank
from ladderize.ranks.group import already_started
from ladderize.runtime.bench.options import ModelChoice
from ladderize.runtime.bench.training.document import TrainingBenchDocument
from ladderize.runtime.bench.training.measure import measure_training
from ladderize.runtime.bench.training.options import TrainingBenchOptions
from ladderize.runtime.bench.training.plan import plan_training_bench
from ladderize.runtime.bench.training.report import show_training_bench
from ladderize.runtime.launch import run


def bench_training(
    choice: ModelChoice,
    options: TrainingBenchOptions,
    link: str | None = None,
    *,
    out: Path | None = None,
    console: Console = SILENT,
) -> TrainingBenchDocument:
    """Check and time training steps of the chosen models by the chosen schedules; returns the result, and shows it
    where the console speaks.

    link: of the ranks that ``options.emulate_tp`` emulates, as ``--link`` takes it. out: a JSON file, which is written
    after each batch size, and before traces are made. Raises UsageError or UserError for what cannot be measured, where
    a schedule gives other gradients than the sequential one, and where a trace disproves an overlap; what was measured
    until then is kept in ``out`` and shown.
    """
    check_device(options.device)
    if out is not None:
        check_writable(out)
    plan = plan_training_bench(choice, options, link)
    newest: list[TrainingBenchDocument] = []

    def keep(document: TrainingBenchDocument) -> None:
        newest[:] = [document]
        if out is not None:
            write_json(out, document.to_dict())

    def show() -> None:
        for document in newest:
            console.document(document.to_dict())
            show_training_bench(document, console)
            if out is not None:
                console.note(f"wrote {out}")

    if options.tp_size > 1 and not already_started():
        console.note(f"starting {options.tp_size} ranks")
    try:
        measured: TrainingBenchDocument = run(
            measure_training,
            plan,
            console,
            tp_size=options.tp_size,
            device=options.device,
            threads=options.threads,
            report=keep,
        )
    except BaseException:  # also Ctrl-C
        show()
        raise
    if is_main_rank():
        keep(measured)
    show()
    if measured.disproved:
        raise UserError(
            f"nothing overlapped in the trace of {' and '.join(measured.disproved)}, although the schedule overlaps:"
            " its row is not valid"
        )
    return measured
