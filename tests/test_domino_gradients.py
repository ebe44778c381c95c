"""Gradients of tensor-parallel training against the single-process Hugging Face model: layouts, schedules, ranks."""

import math

import pytest
import torch

from ladderize.adapt.options import Objective
from ladderize.adapt.train.training_model import file_name, make_student, make_teacher, open_model, trained_tensors
from ladderize.adapt.training_data import IGNORED_TARGET, PADDING_TARGET
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime import launch as distributed
from ladderize.runtime.schedule import SEQUENTIAL, Schedule
from ladderize.runtime.training.batch import Batch
from tests.domino_ranks import CPU, Case, gradients
from tests.helpers import LAYOUTS, SHAPE, make_model

TOLERANCE = 1e-5  # of the whole gradient; of one tensor three times that, for both sides round in float32
SCHEDULES = [SEQUENTIAL, Schedule("domino"), Schedule("domino", 3)]
IN_FLIGHT = 3 + 1  # parts
LAYERS = SHAPE["num_hidden_layers"]
SIZE = (5, 11)  # rows and tokens: neither 2 nor 3 parts are even
ROW = (1, 13)  # is cut along its tokens
TEACHER = Objective(0.3)

# What else differs from case to case: rows x tokens of each micro-batch, and
#   packed, recompute, tied, teacher: whether; padding: tokens at the end of the last row;
#   kv_heads: 2 are held by 2 of 4 ranks each; layers: that are trained, None for the whole model.
VARIANTS = [
    {},
    {"packed": True, "recompute": True},
    {"tied": True, "packed": True},
    {"kv_heads": 2, "layers": (1, 2)},
    {"sizes": (ROW,)},
    {"sizes": (ROW,), "packed": True, "recompute": True, "kv_heads": 2},
    {"layers": (1, 3), "kv_heads": 2, "recompute": True},
    {"teacher": True, "sizes": (SIZE, (3, 8)), "padding": 3},
    {"layers": (3,), "packed": True},
    {"layers": (0,), "sizes": (ROW,), "teacher": True},
    {"layers": (0, 3), "recompute": True, "sizes": (SIZE, SIZE), "tied": True},
]


def text(rows, tokens, vocab, *, packed, scored, padding=0):
    """A micro-batch of random ids. packed: rows hold several texts. scored: the share of positions that count. padding:
    at the end of the last row."""
    positions = torch.arange(tokens).repeat(rows, 1)
    if packed:
        for row in positions:
            for cut in sorted(torch.randint(1, tokens, (2,)).tolist()):
                row[cut:] = torch.arange(tokens - cut)
    # the id of padding, 0, is among them: transformers gives its row of the embedding no gradient from look-ups
    ids, targets = torch.randint(vocab, (2, rows, tokens))
    targets.masked_fill_(torch.rand(rows, tokens) >= scored, IGNORED_TARGET)
    if padding:
        targets[-1, -padding:] = PADDING_TARGET
        positions[-1, -padding:] = torch.arange(padding)
    return {"input_ids": ids, "position_ids": positions, "targets": targets}


def make_case(folder, layout, schedule, *, sizes=(SIZE,), tied=False, kv_heads=4, layers=None, model=None, **more):
    """A case with a new model of the layout in ``folder``."""
    extra = {"tie_word_embeddings": tied, "num_key_value_heads": kv_heads, **(model or {})}
    make_model(layout, **extra).save_pretrained(folder / "student")
    if more.pop("teacher", False):
        make_model("dense", **{**extra, **LAYOUTS[layout][3]}).save_pretrained(folder / "teacher")
        more |= {"teacher": folder / "teacher", "objective": TEACHER}
    checkpoint = read_checkpoint(folder / "student")
    how = {"packed": False, "scored": 0.8, "padding": 0}
    how = {name: more.pop(name, usual) for name, usual in how.items()}
    micros = tuple(text(*size, checkpoint.config["vocab_size"], **how) for size in sizes)
    trained = trained_tensors(checkpoint.tensors, layers or (), layers is None)
    return Case(folder / "student", trained, micros, schedule, **more)


def reference(case):
    """Losses and gradients of one process, in float32: transformers."""
    checkpoint = read_checkpoint(case.folder)
    layout, how = Layout.from_config(checkpoint.config), {"gradient_checkpointing": case.recompute}
    student = make_student(
        open_model(checkpoint, layout, CPU, torch.float32), torch.float32, trained=case.trained, **how
    )
    named = student.model.named_parameters()
    parameters = {file_name(name): parameter for name, parameter in named if parameter.requires_grad}
    teacher = None
    if case.teacher is not None:
        dense = open_model(read_checkpoint(case.teacher), Layout.dense(layout.num_layers), CPU, torch.float32)
        teacher = make_teacher(dense, torch.float32, student)
    losses = []
    for tensors in case.micros:
        micro = Batch.of(tensors, CPU)
        scores = None
        if teacher is not None:
            with torch.no_grad():
                scores = teacher(micro)
        sums = student(micro, teacher_logits=scores)
        case.objective.total(*sums).backward()
        losses.append(sums.detach())
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in parameters.items()
    }
    return torch.stack(losses), found


def check(expected, result, *, tolerance=TOLERANCE, losses=1e-5):
    """Each tensor's error relative to its norm. A tensor whose gradient all but cancels (biases of k) is measured
    against what it is made of: a thousandth of the largest tensor's gradient."""
    sums, whole = expected
    torch.testing.assert_close(result["losses"], sums, rtol=losses, atol=1e-4)
    torch.testing.assert_close(result["validation"], result["losses"], rtol=1e-6, atol=1e-6)
    assert result["gradients"].keys() == whole.keys()
    errors = {name: float((result["gradients"][name] - gradient).norm()) for name, gradient in whole.items()}
    norms = {name: float(gradient.norm()) for name, gradient in whole.items()}
    assert math.hypot(*errors.values()) <= tolerance * math.hypot(*norms.values())
    least = 1e-3 * max(norms.values())
    wrong = {
        name: errors[name] / norms[name] for name in whole if errors[name] > 3 * tolerance * max(least, norms[name])
    }
    assert not wrong, sorted(wrong.items(), key=lambda item: -item[1])[:20]
    assert all(gradient.dtype == torch.float32 for gradient in result["gradients"].values())
    # nothing is left
    assert result["open"] == 0  # every message was waited for
    assert result["made"] > 0
    assert result["alive"] == 0


# every layout: (layout, number of its schedule, number of the variant)
EVERYTHING = [(layout, index % len(SCHEDULES), index % len(VARIANTS)) for index, layout in enumerate(LAYOUTS)]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
WIDE_YARN = {"head_dim": 8, "rope_parameters": YARN}
SPECIAL = {
    "a rank without a vocabulary": ("dense", SCHEDULES[1], {"model": {"vocab_size": 9}, "tied": True, "teacher": True}),
    "one KV head": ("same layer", SCHEDULES[2], {"kv_heads": 1, "packed": True}),
    "wide heads, yarn": ("mixed", SCHEDULES[1], {"model": WIDE_YARN, "sizes": (ROW,), "recompute": True}),
    # what the frozen attention adds needs no gradient, and the stream that it is added to does
    "frozen under a trained sum": ("mixed", SCHEDULES[2], {"layers": (1,)}),
    "qwen3": ("same layer", SCHEDULES[2], {"model": {"model_type": "qwen3"}, "packed": True, "kv_heads": 2}),
    "granite": ("same layer", SCHEDULES[2], {"model": {"model_type": "granite"}, "teacher": True, "tied": True}),
    "nothing counts": ("same layer", SCHEDULES[1], {"scored": 0.0}),
    "bfloat16": ("same layer", SCHEDULES[2], {"compute": torch.bfloat16, "teacher": True, "padding": 3}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("domino")


@pytest.fixture(scope="module")
def cases(place):
    """name -> case; every case has a model of its own."""
    made = {}

    def add(name, *arguments, **more):
        made[name] = make_case(place / str(len(made)), *arguments, **more)

    for layout, number, variant in EVERYTHING:
        add((layout, number), layout, SCHEDULES[number], **VARIANTS[variant])
    for name, (layout, schedule, variant) in SPECIAL.items():
        add(name, layout, schedule, **variant)
    torch.save(made, place / "cases.pt")
    return made


@pytest.fixture(scope="module")
def results(place, cases):
    """(ranks, backend) -> the results of its cases. Every number of ranks is started once, and one is this process."""
    names = list(cases)
    # Four ranks are slow on two cores.
    chosen = {
        1: {"auto": names[::5]},
        2: {"gloo": names[1::2], "shm": names[::2]},
        4: {"gloo": [*names[: len(LAYOUTS) : 3], *(name for name in SPECIAL if "bfloat16" not in name)]},
    }
    found = {}
    for size, jobs in chosen.items():
        jobs = {
            backend: [name for name in names if (LAYOUTS[SPECIAL.get(name, name)[0]][2] or size) % size == 0]
            for backend, names in jobs.items()
        }
        if size == 1:
            gradients(Ranks(0, 1, CPU), place, jobs, IN_FLIGHT)
        else:
            distributed.run(gradients, place, jobs, IN_FLIGHT, tp_size=size, device="cpu", threads=1)
        found |= torch.load(place / f"{size}.pt", weights_only=False)
    return found


@pytest.mark.parametrize("name", [*(pair[:2] for pair in EVERYTHING), *SPECIAL], ids=str)
def test_gradients_are_those_of_one_process(cases, results, name):
    """In bfloat16 rounded on the way, but accumulated and summed in float32."""
    more = {"tolerance": 0.1, "losses": 0.02} if name == "bfloat16" else {}
    expected = reference(cases[name])
    groups = [group for group, found in results.items() if name in found]
    assert groups
    for group in groups:
        try:
            check(expected, results[group][name], **more)
        except AssertionError as error:
            raise AssertionError(f"{name} on {group}: {error}") from None
