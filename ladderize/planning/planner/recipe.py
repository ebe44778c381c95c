"""A chosen layout as a recipe for ``ladderize convert --recipe``, with how it came about in front. Imports no torch."""

import math
import textwrap
from pathlib import Path

import yaml

from ladderize.convert.recipe import Recipe
from ladderize.convert.sensitivity_file import alignment_words
from ladderize.files.regular import resolved
from ladderize.files.temporaries import replacement
from ladderize.planning.planner.document import PlanChoice, PlannedLayout


def recipe_text(choice: PlanChoice) -> str:
    """YAML that ``convert`` takes: layers by name where names compile to the layout, else the modes of all."""
    recipe = Recipe.from_layout(choice.chosen.as_layout).to_dict()
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in recipe.items()}
    comments = [
        f"# {line}"
        for sentence in _about(choice)
        for line in textwrap.wrap("".join(c if c.isprintable() else "?" for c in sentence), 98)
    ]
    return "\n".join([*comments, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)])


def _about(choice: PlanChoice) -> list[str]:
    chosen, target = choice.chosen, choice.target
    asked = (
        f"--max-ppl-increase {target.max_ppl_increase}"
        if target.max_ppl_increase is not None
        else f"--min-speedup {target.min_speedup:g}"
    )
    what = {"end_to_end": "prefill and decode", "prefill": "prefill", "decode": "decode"}[choice.phase]
    sentences = [
        f"Chosen by `ladderize plan` for {asked}, by the costs of {choice.costs_file}.",
        f"{chosen.layout}. {what.capitalize()}: {chosen.speedup:.3f}x of the dense layout's speed, predicted.",
    ]
    sentences.append(f"Perplexity: {cost_words(chosen)} ({choice.statement}).")
    if choice.aligned is not None:
        sentences.append(
            f"Of that, {alignment_words(choice.aligned)}: align what is made of this, with `ladderize adapt --method"
            " align`."
        )
    return sentences


def cost_words(one: PlannedLayout) -> str:
    """``+1.20% estimated, +1.43% measured, +1.51% (standard error 0.30) on 16 held-out windows``."""
    told = [] if one.estimated_nats is None else [f"{shown_increase(one.estimated_nats)} estimated"]
    if one.measured is not None:
        told.append(f"{shown_increase(one.measured.increase)} measured")
    if (found := one.held_out) is not None:
        error = found.increase_stderr
        percent = "" if error is None else f" (standard error {100 * math.exp(min(found.increase, 30.0)) * error:.2f})"
        told.append(f"{shown_increase(found.increase)}{percent} on {found.windows} held-out windows")
    return ", ".join(told)


def shown_increase(nats: float) -> str:
    """An increase of the perplexity in per cent, with its sign."""
    return f"{100 * math.expm1(min(nats, 30.0)):+.2f}%"


def write_plan_recipe(path: Path, choice: PlanChoice) -> None:
    """Write ``--recipe-out``, whole or not at all."""
    with replacement(resolved(path, "--recipe-out ")) as file:
        file.write(recipe_text(choice))
