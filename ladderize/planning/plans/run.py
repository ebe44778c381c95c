"""``ladderize plan`` from its options to its document: read, predict, choose, write, show. Imports no torch."""

from collections.abc import Iterator
from pathlib import Path

from ladderize.console import SILENT, Console
from ladderize.errors import UsageError, UserError
from ladderize.files.documents import check_writable, write_json
from ladderize.files.sections import names_a_file
from ladderize.planning.hardware import DeviceSpec, EngineFacts, known_engines, read_device
from ladderize.planning.passes import Workload
from ladderize.planning.plans.document import PlannedRow, PlanResult
from ladderize.planning.plans.models import ModelToPlan, read_model, row_variants
from ladderize.planning.plans.options import PlanModel, PlanOptions
from ladderize.planning.plans.rows import PlannedGroup, RowMaker, group_link
from ladderize.planning.plans.show import show_plan
from ladderize.runtime.collectives.links import Interconnect, read_interconnect


def plan(
    choice: PlanModel,
    options: PlanOptions,
    *,
    out: Path | None = None,
    console: Console = SILENT,
) -> PlanResult:
    """Predict how fast layouts of a model are on hardware that need not be there.

    out: a JSON file. Raises UsageError, UserError or LayoutError for what cannot be predicted: unknown names, sizes
    that the ranks do not divide, a link without figures for so many ranks.
    """
    if out is not None:
        check_writable(out)
    model = read_model(choice, options)
    device = read_device(options.hardware)
    engine = chosen_engine(options, device)
    interconnect = chosen_link(options)
    workloads = [Workload(batch, options.prompt_len, options.output_len) for batch in options.batch_sizes]
    groups = [PlannedGroup(ranks, device, engine, interconnect if ranks > 1 else None) for ranks in options.tp_sizes]
    result = PlanResult(
        model=choice,
        options=options,
        device=device,
        link=interconnect,
        links=[group_link(group, model, workloads) for group in groups if group.ranks > 1],
        engine=engine,
        rows=[row for group in groups for row in _rows(model, choice, group, workloads)],
    )
    if out is not None:
        write_json(out, result.to_dict())
    console.document(result.to_dict())
    show_plan(result, console)
    return result


def _rows(
    model: ModelToPlan, choice: PlanModel, group: PlannedGroup, workloads: list[Workload]
) -> Iterator[PlannedRow]:
    found = row_variants(model, choice, group.ranks)
    for workload in workloads:
        maker = RowMaker(model, group, workload)
        yield from (maker.row(variant) for variant in found)


def chosen_engine(options: PlanOptions, device: DeviceSpec) -> EngineFacts:
    """Of --engine, else the one that the device's figures were fitted with; raises UsageError for a name of none."""
    engines = known_engines()
    name = options.engine or device.engine
    if name not in engines:
        raise UsageError(f"--engine {name} is not one of {', '.join(engines)}")
    return engines[name]


def chosen_link(options: PlanOptions) -> Interconnect | None:
    """Of --link, else of a file that --hardware names, which `ladderize calibrate` wrote; None for one rank.

    Raises UsageError where no link is named.
    """
    if max(options.tp_sizes) == 1:
        return None
    if options.link is not None:
        return read_interconnect(options.link)
    if names_a_file(options.hardware):
        try:
            return read_interconnect(options.hardware)
        except UserError as error:
            raise UserError(f"{error}, or give --link") from None
    raise UsageError(
        f"{max(options.tp_sizes)} ranks send messages: give --link, a name that `ladderize plan --list` shows,"
        " ALPHA_US,BETA_GB_S, or a file"
    )
