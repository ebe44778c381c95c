"""The hidden error against its definition: every example alone through the oracle, sub-module by sub-module."""

import pytest
import torch
from accelerate import Accelerator

from ladderize.adapt.data.packing import collate
from ladderize.adapt.lora import lora_config
from ladderize.adapt.train.states import read_metrics
from ladderize.adapt.train.student import make_student, make_teacher, open_model
from ladderize.adapt.train.training_model import HFTraining
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.layout import Layout
from ladderize.runtime.training.batch import Batch
from ladderize.runtime.training.outputs import SubModuleOutputs, hidden_error
from tests.adapt_data.rows import packed
from tests.helpers import FAMILIES, LAYOUTS, fresh_rng, make_layout, make_model
from tests.oracle import Oracle
from tests.train.commands import CPU, losses_of, succeed

SCALE = 2.0  # of LoRA


@pytest.fixture
def rows():
    """Rows with several examples, of different lengths, of which some tokens do not count in the loss."""
    random, lengths = fresh_rng(), (9, 6, 7, 3)
    # not the id of padding, of which transformers' embedding has no gradient
    examples = [random.integers(3, 97, n).tolist() for n in lengths]
    found = packed(examples, [(random.random(n) < 0.6).tolist() for n in lengths], 12)
    assert len({len(row["input_ids"]) for row in found}) > 1  # so there is padding
    assert max(len(row["lengths"]) for row in found) > 1
    return found


def oracle_error(weights, layout, config, teacher, rows):
    """Of every sub-module of the converted layers, in every row: squares of the difference over squares of the
    teacher's, on all tokens of its examples; the mean over the sub-modules, summed over the rows' tokens."""
    student, dense = Oracle(weights, config, layout.sync_tp_size), Oracle(teacher.state_dict(), teacher.config, 1)
    total = 0.0
    for row in rows:
        distance, size = {}, {}
        for ids in torch.tensor(row["input_ids"])[None].split(row["lengths"], 1):
            student(ids), dense(ids)
            for place, output in dense.added.items():
                if place[0] in layout.converted_layers:
                    difference = (student.added[place] - output).square().sum()
                    distance[place] = distance.get(place, 0.0) + difference
                    size[place] = size.get(place, 0.0) + output.square().sum()
        assert len(size) == 2 * len(layout.converted_layers)
        total = total + len(row["input_ids"]) * sum(distance[place] / size[place] for place in size) / len(size)
    return total


def model_of(folder, layout, *, lora=None, recompute=False):
    """Student and teacher, as ``run.make_model`` makes them."""
    checkpoint, dense = read_checkpoint(folder / "student"), read_checkpoint(folder / "dense")
    student, teacher = (
        open_model(one, modes, collecting=True, device=CPU.device)
        for one, modes in ((checkpoint, layout), (dense, Layout.dense(layout.num_layers)))
    )
    trained = frozenset() if lora else frozenset(checkpoint.tensors)
    student = make_student(student, torch.float32, trained=trained, lora=lora, gradient_checkpointing=recompute)
    teacher = make_teacher(teacher, torch.float32, student)
    return HFTraining(Accelerator(cpu=True), student, teacher, compared=layout.converted_layers)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("ladder gaps", "full"),
        ("spd with biases", "recompute"),
        ("same layer", "lora"),
        *(("mixed", method) for method in ("full", "recompute", "lora")),
    ],
)
def test_value_and_gradient_are_the_oracles(tmp_path, rows, name, method):
    model_type = str(fresh_rng().choice(list(FAMILIES))) if name == "mixed" else "llama"
    layout = make_layout(name)
    student, dense = (make_model(of, model_type=model_type, **LAYOUTS[name][3]) for of in (name, "dense"))
    student.save_pretrained(tmp_path / "student")
    dense.save_pretrained(tmp_path / "dense")
    lora = None
    if method == "lora":
        lora = lora_config(range(4), 3)
    training = model_of(tmp_path, layout, lora=lora, recompute=method == "recompute")
    weights = {key: value.clone() for key, value in student.state_dict().items()}
    names = training.named
    copies = {}  # of what is trained, for the oracle
    for key, parameter in names.items():
        if lora is not None:
            parameter.data.normal_(0, 0.2)
        copies[key] = parameter.detach().clone().requires_grad_()
        if lora is None:
            weights[key] = copies[key]
    for key in copies:
        if key.endswith("lora_A.weight"):
            place = key.removeprefix("base_model.model.").removesuffix("lora_A.weight")
            low = copies[key.replace("lora_A", "lora_B")] @ copies[key]
            weights[f"{place}weight"] = weights[f"{place}weight"] + SCALE * low
    expected = oracle_error(weights, layout, student.config, dense, rows)
    expected.backward()

    sums = training.losses(Batch.of(collate(rows), CPU.device))
    torch.testing.assert_close(sums[2], expected.detach(), rtol=1e-4, atol=1e-5)
    sums[2].backward()
    reached = {key: copy.grad for key, copy in copies.items() if copy.grad is not None}
    assert all(names[key].grad is None or not names[key].grad.any() for key in copies.keys() - reached.keys())
    least = 1e-3 * max(gradient.norm() for gradient in reached.values())
    for key, gradient in reached.items():
        assert (names[key].grad - gradient).norm() <= 1e-4 * max(gradient.norm(), least), key
    with training.evaluating(torch.float32):
        parts = [training.losses(Batch.of(collate([row]), CPU.device)) for row in rows]
        torch.testing.assert_close(sum(part[2] for part in parts), sums[2].detach(), rtol=1e-5, atol=1e-5)
        assert training.losses(Batch.of(collate([]), CPU.device))[2] == 0
    plain = training.student.model
    with torch.no_grad():  # what is collected changes nothing
        tensors = collate(rows)
        ids = tensors["input_ids"]
        everything = Batch.of({**tensors, "targets": torch.zeros_like(ids)}, CPU.device)
        scored = training.student.scored_logits(everything, SubModuleOutputs(training.compared, ids >= 0))
        plain.config._attn_implementation = "sdpa"  # which finds out by itself where the texts begin
        logits = plain(ids, position_ids=tensors["position_ids"], use_cache=False).logits
    torch.testing.assert_close(scored, logits.flatten(0, 1), rtol=1e-6, atol=1e-7)


def test_a_teacher_that_adds_nothing_to_a_row_of_padding_is_no_error():
    real = torch.tensor([[True, True], [False, False]])
    teacher = SubModuleOutputs([0], real)
    for outputs in (student := teacher.again(), teacher):
        own = outputs.of(0)
        assert own is not None
        own.attention(torch.full((2, 2, 3), 1.0 if outputs is teacher else 3.0, requires_grad=outputs is student))
    assert teacher.of(1) is None
    teacher.kept[0, "attention"][0].data[1] = 0
    error = hidden_error(student, teacher)
    assert float(error.detach()) == pytest.approx(2 * 4.0)  # two tokens, each off by twice what it should be
    error.backward()
    (attention,) = student.kept[0, "attention"]
    assert attention.grad[1].abs().max() == 0
    assert attention.grad.isfinite().all()


def test_a_training_on_it_brings_the_outputs_nearer(place, tmp_path):
    more = ("--distill-from", place / "dense", "--hidden-weight", 2, "--eval-every", 10)
    succeed(place, tmp_path / "out", *more, steps=20)
    metrics = tmp_path / "out" / "metrics.jsonl"
    divergence, error = (read_metrics(metrics, key) for key in ("divergence", "hidden_error"))
    assert losses_of(tmp_path / "out") == pytest.approx([kl + 2 * e for kl, e in zip(divergence, error, strict=True)])
    heldout = read_metrics(metrics, "heldout_hidden_error")
    assert len(heldout) == 3
    assert heldout[-1] < 0.9 * heldout[0]
