"""Checks on a pair of student and dense teacher, and on whether training brought the student closer to it."""

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from ladderize.checkpoint.config import expected_tensors
from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import dense_function, read_tensor
from ladderize.convert.assignment import assignment_of
from ladderize.errors import UserError
from ladderize.layout import Layout

ROWS = 1024  # compared of each tensor
RELATED = 0.5  # fine-tuning changes weights by a few percent of their size; another model's are 1 or more away


def check_pair(student: Checkpoint, teacher: Checkpoint, model: str, teacher_name: str) -> None:
    """Raise UserError unless the teacher is a dense model of the student's shape and function."""
    layout, ours, theirs = Layout.from_config(teacher.config), _function(student), _function(teacher)
    different = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
    if not layout.is_dense:
        problem = f"is not dense ({layout})"
    elif different:
        problem = f"differs from {model} in its {', '.join(different)}"
    else:
        return
    raise UserError(f"--distill-from {teacher_name} {problem}; name the model that {model} was converted from")


def _function(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"shapes": expected_tensors(checkpoint.config), **dense_function(checkpoint.config)}


def check_related(student: Checkpoint, teacher: Checkpoint, model: str, teacher_name: str) -> None:
    """Raise UserError where the weights of a pair are unrelated: the middle rows of the embedding, and of an MLP of the
    first layer that is not converted and lies in the dense model's order."""
    layout, assignment = Layout.from_config(student.config), assignment_of(student)
    moved = assignment.neurons if assignment is not None else ()
    same = sorted(set(range(layout.num_layers)) - {*layout.converted_layers, *moved})
    for name in ["model.embed_tokens.weight", *(f"model.layers.{layer}.mlp.down_proj.weight" for layer in same[:1])]:
        ours, theirs = _middle_rows(student, name), _middle_rows(teacher, name)
        if float((ours - theirs).norm()) > RELATED * float(theirs.norm()):
            raise UserError(
                f"--distill-from {teacher_name} has other weights than {model} (in {name}); name the model that it was"
                " converted from"
            )


def _middle_rows(checkpoint: Checkpoint, name: str) -> Tensor:
    info = checkpoint.tensors[name]
    first = max(0, info.shape[0] - ROWS) // 2
    return read_tensor(checkpoint.folder, info, dim=0, start=first, stop=min(info.shape[0], first + ROWS)).double()


def check_improved(
    criterion: str, before: float, after: float, *, work: Path, advice: str, method: str = "training"
) -> None:
    """Raise UserError unless the held-out ``criterion``, such as KL, is lower after training than before, in nats per
    token."""
    if not after < before:
        raise UserError(
            f"{method} never lowered the held-out {criterion} (before {before:.4g}, after {after:.4g}), so nothing is"
            f" written and {work} keeps the work; {advice}, or run the same command with --write last to write the"
            " weights as they are"
        )


def target_text(before: float, after: float, dense: float) -> str:
    """Return the dense model's perplexity as the target, and the share of the conversion's loss that was won back."""
    target = f"dense model (target) {dense:.4f}"
    if not dense < before < math.inf or not 0 < after < math.inf:  # the conversion cost nothing, or nobody knows
        return target
    share = math.log(before / after) / math.log(before / dense)
    return f"{target}: {min(1.0, max(0.0, share)):.0%} of the loss recovered"
