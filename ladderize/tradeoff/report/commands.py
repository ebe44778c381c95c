"""The command that made a document, as a user types it: what it says itself, else put together from its options."""

from collections.abc import Iterable, Mapping

from ladderize.convert.sensitivity_file import SensitivityDocument
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import EvalResults
from ladderize.planning.plans.document import PlanResult
from ladderize.planning.plans.options import PlanModel
from ladderize.runtime.bench.document import BenchDocument
from ladderize.runtime.bench.options import BenchOptions
from ladderize.tradeoff.report.documents import FoundDocument, FoundDocuments
from ladderize.tradeoff.sweep.by_hand import NOT_ON_THE_COMMAND_LINE, line, options_by_hand


def sweep_commands(found: FoundDocuments) -> list[str]:
    return list(dict.fromkeys(sweep.document.command for sweep in found.sweeps))


def eval_commands(found: FoundDocuments) -> list[str]:
    return _unique(found, (one.command or _eval_command(one) for one in found.results))


def time_commands(found: FoundDocuments) -> list[str]:
    """Of measured and of predicted times."""
    benches = (one.command or _bench_command(one) for one in found.benches)
    return _unique(found, [*benches, *map(_plan_command, found.plans)])


def sensitivity_commands(found: FoundDocuments) -> list[str]:
    return _unique(found, (one.command or _sensitivity_command(one) for one in found.sensitivities))


def all_commands(found: FoundDocuments) -> list[str]:
    """What the trade-off rests on."""
    return sweep_commands(found) or [*eval_commands(found), *time_commands(found)]


def _unique(found: FoundDocuments, commands: Iterable[str]) -> list[str]:
    own = list(dict.fromkeys(commands))
    return sweep_commands(found) + own[:4] if found.sweeps else own


def _eval_command(results: FoundDocument[EvalResults]) -> str:
    options = results.document.options
    models = [entry.model.model for entry in results.document.models]
    changed = _changed(vars(options), vars(EvalOptions()))
    return _line("eval", models, changed, results.path.name)


def _bench_command(bench: FoundDocument[BenchDocument]) -> str:
    document = bench.document
    rows = list(dict.fromkeys((row.model, row.is_random) for row in document.rows if row.is_model))
    changed = _changed(vars(document.options), vars(BenchOptions(device=document.options.device)))
    changed = {"batch_size" if name == "batch_sizes" else name: value for name, value in changed.items()}
    if document.link is not None:
        link = document.link
        by_hand = link.source == "given by hand"
        changed["link"] = f"{link.alpha_us:g},{link.beta_gb_s or float('inf'):g}" if by_hand else link.name
    models = [model for model, is_random in rows if not is_random]
    if not models:
        changed = {"random_weights": "SHAPE", "layout": ",".join(model for model, _ in rows), **changed}
    return _line("bench", models, changed, bench.path.name)


def _plan_command(plan: FoundDocument[PlanResult]) -> str:
    asked, options = plan.document.model, plan.document.options
    models = [] if asked.model is None else [asked.model]
    changed = _changed({**vars(asked), "model": None}, vars(PlanModel(shape="")))
    names = {"tp_sizes": "tp_size", "batch_sizes": "batch_size"}
    changed |= {names.get(name, name): value for name, value in vars(options).items() if value is not None}
    return _line("plan", models, changed, plan.path.name)


def _sensitivity_command(found: FoundDocument[SensitivityDocument]) -> str:
    document = found.document
    changed: dict[str, object] = {"mode": document.mode, "data": document.data.file}
    if document.sync_tp_size is not None:
        changed["sync_tp_size"] = document.sync_tp_size
    changed |= {"samples": document.data.samples, "seq_len": document.data.seq_len}
    if document.aligned is not None:
        changed |= {"align": True, "align_samples": document.aligned.samples}
    return _line("sensitivity", [document.model], changed, found.path.name)


def _changed(values: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, object]:
    return {
        name: value
        for name, value in values.items()
        if name not in NOT_ON_THE_COMMAND_LINE and value != defaults.get(name) and value is not None
    }


def _line(command: str, models: list[str], changed: Mapping[str, object], out: str) -> str:
    given = {
        f"no_{name}" if value is False else name: True if value is False else value for name, value in changed.items()
    }
    return line(command, *models, *options_by_hand(given), "--out", out)
