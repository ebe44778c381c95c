"""Whether the layouts of a sweep.yaml fit the model, and every benchmark of them: refused before anything runs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ladderize.errors import LadderizeError, UserError
from ladderize.layout import Layout, check_split
from ladderize.runtime.bench.plan import plan_bench
from ladderize.runtime.shards import check_runnable
from ladderize.tradeoff.sweep.settings import bench_choice
from ladderize.tradeoff.sweep.spec import BenchChoice, LayoutChoice, SweepSpec


@contextmanager
def names_the_entry(where: str) -> Iterator[None]:
    """Around a check: its error gets the place in the file in front."""
    try:
        yield
    except LadderizeError as error:
        text = str(error)
        raise UserError(text if text.startswith(where) else f"{where}: {text}") from None


def check_fit(spec: SweepSpec, model: str, config: Mapping[str, Any]) -> None:
    """Raise UserError, which names the entry, for a layout or a benchmark that this model cannot have.

    model: the dense one, as stages name it. Layers that are yet to be chosen are taken as all of them.
    """
    dense = Layout.from_config(config)
    if not dense.is_dense:
        raise UserError(f"{spec.model} is not dense ({dense}); a sweep converts the dense model")
    layouts = []
    for choice in spec.layouts:
        with names_the_entry(choice.where):
            layouts.append((choice, _layout(choice, config)))
    if spec.eval_given is not None:
        ranks = spec.eval_options().tp_size
        for choice, layout in layouts:
            with names_the_entry(choice.where):
                check_runnable(config, layout, ranks, name="eval with --tp-size")
    for setting in spec.bench:
        with names_the_entry(setting.where):
            plan_bench(bench_choice(setting.given, [model], None, setting.where), setting.options, setting.link)
        for choice, layout in layouts:
            if is_timed(setting, choice.name):
                _check_runs(setting, choice, layout, config)


def is_timed(setting: BenchChoice, *entries: str | None) -> bool:
    """Whether a benchmark is for a layout whose entries have these names."""
    return not setting.layouts or any(name in setting.layouts for name in entries)


def _layout(choice: LayoutChoice, config: Mapping[str, Any]) -> Layout:
    if choice.sync_tp_size is not None:
        check_split(config, choice.sync_tp_size, name="sync_tp_size")
    layout = choice.recipe(dict.fromkeys(choice.auto, "all")).layout(Layout.from_config(config))
    layout.check_model(config)
    return layout


def _check_runs(setting: BenchChoice, choice: LayoutChoice, layout: Layout, config: Mapping[str, Any]) -> None:
    try:
        check_runnable(config, layout, setting.options.ranks, name=setting.options.ranks_option)
    except LadderizeError as error:
        place = choice.where.rpartition(": ")[2]
        raise UserError(
            f"{setting.where} cannot time {place}: {error} (a benchmark's key layouts names those that it times)"
        ) from None
