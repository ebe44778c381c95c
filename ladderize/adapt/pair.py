"""A converted checkpoint and the dense one that it was converted from."""

from ladderize.checkpoint.fingerprint import dense_function
from ladderize.checkpoint.llama import expected_tensors
from ladderize.checkpoint.reading import Checkpoint
from ladderize.errors import UserError
from ladderize.layout import Layout


def check_pair(student: Checkpoint, teacher: Checkpoint, model: str, teacher_name: str) -> Layout:
    """The student's layout. Raises UserError unless the teacher is a dense Llama of the same shape, and the student is
    none."""
    layout, dense = Layout.from_config(student.config), Layout.from_config(teacher.config)
    if layout.is_dense:
        raise UserError(f"{model} is dense; there is nothing to distil; convert it first")
    if not dense.is_dense:
        raise UserError(
            f"--distill-from {teacher_name} is not dense ({dense}); name the model that {model} was converted from"
        )
    if expected_tensors(student.config) != expected_tensors(teacher.config):
        raise UserError(
            f"--distill-from {teacher_name} has other shapes than {model}; name the model that it was converted from"
        )
    ours, theirs = dense_function(student.config), dense_function(teacher.config)
    if different := [key for key in ours if ours[key] != theirs[key]]:
        raise UserError(
            f"--distill-from {teacher_name} computes otherwise than {model} ({', '.join(different)}); name the model"
            " that it was converted from"
        )
    return layout
