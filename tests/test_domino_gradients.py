"""Gradients of tensor-parallel training against the single-process Hugging Face model: layouts, schedules, ranks."""

import contextlib
import gc
import math
import weakref
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from ladderize.adapt.options import Objective
from ladderize.adapt.train.training_model import file_name, make_student, make_teacher, open_model, trained_tensors
from ladderize.adapt.training_data import IGNORED_TARGET, PADDING_TARGET
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime import kv_cache
from ladderize.runtime import launch as distributed
from ladderize.runtime.collectives import differentiable
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.loader import CheckpointSource
from ladderize.runtime.schedule import SEQUENTIAL, Schedule
from ladderize.runtime.shards import Shape
from ladderize.runtime.training import linear
from ladderize.runtime.training.batch import Batch
from ladderize.runtime.training.model import TPTraining
from ladderize.runtime.training.weights import build_weights
from tests.groups import Counting
from tests.helpers import LAYOUTS, make_model

CPU = torch.device("cpu")
TOLERANCE = 1e-5  # of the whole gradient; of one tensor three times that, for both sides round in float32
SCHEDULES = [SEQUENTIAL, Schedule("domino"), Schedule("domino", 3)]
IN_FLIGHT = 3 + 1  # parts
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


# ---- what the ranks do; functions are pickled by name and run in other processes ----


@dataclass(frozen=True)
class Case:
    """A step of training. micros: micro-batches of input_ids, position_ids and targets. teacher: a checkpoint's
    folder."""

    folder: Path
    trained: frozenset[str]
    micros: tuple[dict[str, torch.Tensor], ...]
    schedule: Schedule = SEQUENTIAL
    recompute: bool = False
    teacher: Path | None = None
    objective: Objective = field(default_factory=Objective)
    compute: torch.dtype = torch.float32


@contextlib.contextmanager
def noted(*places):
    """References to the objects that classes of the package make within the block."""
    references = []

    def make(original, *arguments):
        made = original(*arguments)
        references.append(weakref.ref(made))
        return made

    with contextlib.ExitStack() as patches:
        for module, name in places:
            patches.enter_context(mock.patch.object(module, name, partial(make, getattr(module, name))))
        yield references


def build(case, group, collectives):
    checkpoint = read_checkpoint(case.folder)
    layout = Layout.from_config(checkpoint.config)
    shape = Shape.from_config(checkpoint.config, tp_size=group.size, rank=group.rank)
    weights = build_weights(
        lambda dtype: CheckpointSource(checkpoint, dtype, CPU).read, checkpoint.config, shape, layout,
        trained=case.trained, compute=case.compute,
    )  # fmt: skip
    how = {"schedule": case.schedule, "gradient_checkpointing": case.recompute}
    return TPTraining(weights, checkpoint.config, layout, collectives, **how).train()


def step(case, group, collectives):
    model = build(case, group, collectives)
    teacher = None
    if case.teacher is not None:
        teacher = build(Case(case.teacher, frozenset(), (), case.schedule, compute=case.compute), group, collectives)
    losses, validation = [], []
    with noted((differentiable, "_Link"), (linear, "WeightUse"), (kv_cache, "PartsCache")) as made:
        for tensors in case.micros:
            micro = Batch.of(tensors, CPU)
            with torch.no_grad():
                scores = teacher.scored_logits(micro) if teacher else None
            sums = model(micro, teacher_logits=scores)
            case.objective.total(*sums).backward()
            losses.append(sums.detach())
            with torch.no_grad():
                validation.append(model(micro, teacher_logits=scores))
            del sums, scores
    alive = sum(reference() is not None for reference in made)
    model.weights.sum_partial_gradients(group)

    def gradient(parameter):
        assert parameter.grad is not None  # zeros where nothing counts: DDP waits for every parameter
        return parameter.grad

    return {
        "losses": torch.stack(losses),
        "validation": torch.stack(validation),
        "gradients": {name: piece.whole(gradient, group).clone() for name, piece in model.weights.pieces().items()},
        "made": len(made),
        "alive": alive,
    }


def gradients(group, folder, jobs, in_flight):
    """Run cases of folder/cases.pt, on each backend of ``jobs`` those of its names; rank 0 writes what ``step``
    returned for each. Through files: tensors that are given to a process by hand each take an open file."""
    cases = torch.load(folder / "cases.pt", weights_only=False)
    found = {}
    gc.disable()  # what is left of a step is then left by the code, and not by a cycle that is collected some day
    for backend, names in jobs.items():
        collectives, _ = choose(backend, group, max_bytes=1 << 18, in_flight=in_flight)
        results = found[group.size, backend] = {}
        for name in names:
            counting = Counting(collectives)
            results[name] = result = step(cases[name], group, counting)
            assert all(torch.equal(other, result["losses"]) for other in group.gather(result["losses"]))
            result["open"] = counting.started - counting.waited
        collectives.settle()
    gc.enable()
    if group.is_main:
        torch.save(found, folder / f"{group.size}.pt")


# ---- what they must find ----


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
    layout = Layout.from_config(checkpoint.config)
    model, how = open_model(checkpoint, layout, CPU, torch.float32), {"gradient_checkpointing": case.recompute}
    student = make_student(model, torch.float32, trained=case.trained, **how)
    trained = [(name, one) for name, one in student.model.named_parameters() if one.requires_grad]
    teacher = None
    if case.teacher is not None:
        dense = open_model(read_checkpoint(case.teacher), Layout.dense(layout.num_layers), CPU, torch.float32)
        teacher = make_teacher(dense, torch.float32, student)
    losses = []
    for tensors in case.micros:
        micro = Batch.of(tensors, CPU)
        with torch.no_grad():
            scores = teacher(micro) if teacher else None
        sums = student(micro, teacher_logits=scores)
        case.objective.total(*sums).backward()
        losses.append(sums.detach())
    zeros = {file_name(name): torch.zeros_like(one) for name, one in trained}
    found = {file_name(name): one.grad for name, one in trained if one.grad is not None}
    return torch.stack(losses), zeros | found


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
    assert not {name: error for name, error in errors.items() if error > 3 * tolerance * max(least, norms[name])}
    assert all(gradient.dtype == torch.float32 for gradient in result["gradients"].values())
    # nothing is left
    assert result["open"] == 0  # every message was waited for
    assert result["made"] > 0
    assert result["alive"] == 0


# every layout: (layout, number of its schedule, number of the variant)
EVERYTHING = [(layout, index % len(SCHEDULES), index % len(VARIANTS)) for index, layout in enumerate(LAYOUTS)]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
O_BIAS = {"attention_bias": True, "tie_word_embeddings": True}  # which goes through the norm behind the sum
WIDE_YARN = {"head_dim": 8, "rope_parameters": YARN}
SPECIAL = {
    "a rank without a vocabulary": ("dense", SCHEDULES[1], {"model": {"vocab_size": 9}, "tied": True, "teacher": True}),
    "one KV head": ("same layer", SCHEDULES[2], {"kv_heads": 1, "packed": True}),
    "wide heads, yarn": ("mixed", SCHEDULES[1], {"model": WIDE_YARN, "sizes": (ROW,), "recompute": True}),
    # what the frozen attention adds needs no gradient, and the stream that it is added to does
    "frozen under a trained sum": ("mixed", SCHEDULES[2], {"layers": (1,)}),
    "qwen3": ("same layer", SCHEDULES[2], {"model": {"model_type": "qwen3"}, "packed": True, "kv_heads": 2}),
    "granite": ("same layer", SCHEDULES[2], {"model": {"model_type": "granite"}, "teacher": True, "tied": True}),
    "phi3": ("same layer", SCHEDULES[2], {"model": {"model_type": "phi3"}, "packed": True, "kv_heads": 2}),
    "phi3, a rank with two copies": ("every mode", SCHEDULES[0], {"model": {"model_type": "phi3"}, "kv_heads": 1}),
    "gemma3": ("ladder gaps", SCHEDULES[1], {"model": {"model_type": "gemma3_text", **O_BIAS}, "packed": True}),
    "gemma3, one layer": ("ladder all", SCHEDULES[0], {"model": {"model_type": "gemma3_text"}, "layers": (1,)}),
    "exaone4": ("ladder all", SCHEDULES[2], {"model": {"model_type": "exaone4"}, "recompute": True, "teacher": True}),
    "glm": ("same layer", SCHEDULES[1], {"model": {"model_type": "glm"}, "kv_heads": 2}),
    "glm4": ("ladder gaps", SCHEDULES[2], {"model": {"model_type": "glm4"}, "packed": True}),
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
        check(expected, results[group][name], **more)
