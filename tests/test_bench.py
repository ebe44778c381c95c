"""The benchmark: what it refuses, what it reports, that a wrong model stops it, and that its proofs can fail."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from ladderize import memory
from ladderize.demo.command import MODEL
from ladderize.errors import UserError
from ladderize.layout import Layout
from ladderize.runtime import launch as distributed
from ladderize.runtime import model as runtime_model
from ladderize.runtime import spec
from ladderize.runtime.bench import inference, reference_check, rounds
from ladderize.runtime.bench.document import BenchDocument, environment
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.collectives.base import Collectives, Handle
from ladderize.runtime.collectives.emulated import Emulated
from ladderize.runtime.decode import Generator
from ladderize.runtime.shards import Shape, decode_read_bytes
from ladderize.vllm.bench import served_models
from tests.groups import ALONE, report_and_die, report_once
from tests.helpers import (
    FAMILIES,
    SHAPE,
    assert_there_and_back,
    change_weights,
    held_bytes,
    invoke,
    invoke_well,
    listing,
    make_model,
    one_sentence,
    refusal,
    save_llama,
)

QUICK = ["--prompt-len", "8", "--output-len", "4", "--repeat", "2", "--warmup", "1", "--threads", "1"]
EMULATED = "--emulate-tp 2 --link 1,1"


def bench(*arguments, text="", code=0):
    """The command on ``arguments`` and the words of ``text``, which win over those of a quick run."""
    outcome = invoke("bench", *arguments, *QUICK, *text.split())
    assert outcome.code == code, outcome.stderr
    return outcome


def timed(*arguments, text=""):
    document = json.loads(bench(*arguments, "--json", text=text).stdout)
    assert_there_and_back(BenchDocument, document)
    return document


class BlocksAtTheStart(Emulated):
    def all_reduce_async(self, x):
        total = super().all_reduce_async(x).wait()
        return Handle(lambda: total)


class BlocksAtTheWait(Emulated):
    def all_reduce_async(self, x):
        return Handle(lambda: super(BlocksAtTheWait, self).all_reduce_async(x).wait())


def test_profile_proves_overlap_and_fails_without_it(tmp_path, shape, monkeypatch):
    """Behind an MLP that takes some time: that of SHAPE takes less than a call."""
    shape.write_text(json.dumps({**SHAPE, "model_type": "llama", "intermediate_size": 1 << 16}))
    arguments = ("--random-weights", shape, "--profile", tmp_path / "traces")
    text = "--layout dense,ladder --emulate-tp 4 --link 300,1"
    dense, ladder = timed(*arguments, text=text)["rows"]
    for phase in ("prefill", "decode"):
        assert "proven" not in dense["overlap"][phase]
        assert ladder["overlap"][phase]["proven"] is True
        plain, late = (row["overlap"][phase] for row in (dense, ladder))
        assert late["under_compute_ms"] / late["in_flight_ms"] > 2 * plain["under_compute_ms"] / plain["in_flight_ms"]
    assert listing(tmp_path / "traces") == ["0-dense-batch1-rank0.json", "1-ladder-batch1-rank0.json"]
    events = json.loads((tmp_path / "traces" / "1-ladder-batch1-rank0.json").read_text())["traceEvents"]
    assert sum(event["name"] == "all-reduce: wait" for event in events if event.get("ph") == "X") > 4
    for backend in (BlocksAtTheStart, BlocksAtTheWait):
        monkeypatch.setattr(inference, "emulate", lambda ranks, link, *_, backend=backend: backend(ranks, link))
        last = bench(*arguments, text=text, code=1).stderr.splitlines()[-1]
        assert "nothing overlapped in the trace of ladder (prefill) and ladder (decode)" in last


def test_two_real_ranks_on_checkpoints(tmp_path):
    models = [tmp_path / name for name in ("dense", "ladder", "both")]
    seed = int(torch.randint(1 << 30, ()))
    save_llama(models[0], dtype=torch.bfloat16, seed=seed, max_position_embeddings=24)
    for out, layout in zip(models[1:], ("--ladder all", "--ladder all --spd all --sync-tp-size 4"), strict=True):
        invoke_well("convert", models[0], out, "--no-verify", *layout.split())
    out = tmp_path / "bench.json"
    text = "--tp-size 2 --batch-size 1,2 --baselines parallel,no-comm"
    bench(*models, "--out", out, "--profile", tmp_path / "traces", text=text)
    document = json.loads(out.read_text())
    assert_there_and_back(BenchDocument, document)
    assert document["link"] is None
    assert document["backend"].startswith("shm")
    assert set(document["checks"]) == set(map(str, models))
    assert all(check["logit_difference"] < check["tolerance"] for check in document["checks"].values())
    rows = document["rows"]
    assert "in_flight_ms" in str(rows)
    assert "proven" not in str(rows)  # ranks copy messages of shared memory themselves: none is in flight
    assert [row["batch_size"] for row in rows] == [1] * 5 + [2] * 5
    assert [row["kind"] == "model" for row in rows[:5]] == [True, False, True, True, False]
    layers, hidden = SHAPE["num_hidden_layers"], SHAPE["hidden_size"]
    for row, reduces in zip(rows[:5], (2 * layers, None, 2 * layers, layers, layers), strict=True):
        assert row["speedup"]["decode"] > 0
        assert len(row["samples_ms"]["prefill"]) == 2
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch_size"] / row["ms"]["decode"])
        assert row["ms"]["end_to_end"] == pytest.approx(row["ms"]["prefill"] + 3 * row["ms"]["decode"])
        if reduces is None:
            assert not {"communication", "no_communication_samples_ms"} & row.keys()
        else:
            for phase, tokens in (("prefill", 8), ("decode", 1)):
                assert row["communication"][phase]["all_reduces"] == reduces
                assert row["communication"][phase]["bytes"] == reduces * tokens * hidden * 2


def test_a_domino_prefill_is_checked_and_counted(checked_model):
    """By both schedules in one run; one row is cut along its tokens, three are dealt out."""
    text = "--schedules domino,sequential --baselines no-comm --prompt-len 9 --output-len 3 --batch-size 1,3"
    document = timed(checked_model, text=f"{text} --emulate-tp 2 --link 900,1")
    (check,) = document["checks"].values()
    assert check["logit_difference"] < check["tolerance"]
    # two texts, equal and padded, and one by itself; and those that are read
    assert check["equal_greedy_tokens"] == check["greedy_tokens"] > 9 * 33
    for own, silent, plain in (document["rows"][:3], document["rows"][3:]):
        assert [row["schedule"] for row in (own, silent, plain)] == ["domino", "domino", "sequential"]
        assert [row["kind"] == "model" for row in (own, silent, plain)] == [True, False, False]
        assert plain["model"] == f"{own['model']} by the schedule sequential"
        # 2 dropped of 8, 2 parts; the same bytes in all
        assert own["communication"]["prefill"]["all_reduces"] == 2 * 6
        assert plain["communication"]["prefill"]["all_reduces"] == 6
        assert own["communication"]["prefill"]["bytes"] == plain["communication"]["prefill"]["bytes"]
        assert own["communication"]["decode"]["all_reduces"] == 6


def test_the_share_of_the_bandwidth_is_shown_where_that_is_known(shape, monkeypatch):
    arguments, text = ("--random-weights", shape), "--layout dense,ladder --batch-size 2 --emulate-tp 2 --link 1,1"
    assert [row["bandwidth_share"] for row in timed(*arguments, text=text)["rows"]] == [None, None]
    assert "of bandwidth" not in bench(*arguments, text=text).stdout
    known = {"gpu_memory_gb_s": 2.0}
    monkeypatch.setattr(inference, "environment", lambda *_, **__: dataclasses.replace(environment(ALONE), **known))
    document = timed(*arguments, text=text)
    config = json.loads(shape.read_text())
    read = decode_read_bytes(Shape.from_config(config, tp_size=2, rank=0), Layout.dense(4), 2, 8 + 2, 2)
    for row in document["rows"]:
        assert row["decode_read_bytes"] == read
        assert row["bandwidth_share"] == pytest.approx(read / (row["ms"]["decode"] / 1e3) / 2e9)
    assert "of bandwidth" in bench(*arguments, text=text).stdout


def ignored_padding(monkeypatch):
    read = Generator.read
    monkeypatch.setattr(Generator, "read", lambda self, ids, padding=None: read(self, ids))


def wrong_rope_beyond_64_positions(monkeypatch):
    table = spec.rope_table

    def stuck(config, positions, device):
        right = table(config, positions, device)
        return right[torch.arange(positions).clamp(max=63)]

    monkeypatch.setattr(spec, "rope_table", stuck)


def one_weight_is_off(monkeypatch, *models):
    load = spec.load_weights

    def off(read, *arguments, **more):
        weights = load(read, *arguments, **more)
        if not models or read.__self__.checkpoint.folder.name in models:
            weights.sublayers[2].norm.weight[3] += 0.5
        return weights

    monkeypatch.setattr(spec, "load_weights", off)


def parts_in_a_wrong_order(monkeypatch):
    right = runtime_model.join_parts
    monkeypatch.setattr(runtime_model, "join_parts", lambda results, rows: right(results[::-1], rows))


@pytest.mark.parametrize(("name", "family"), [("ladder with biases", "llama"), *(("mixed", one) for one in FAMILIES)])
def test_the_reference_is_the_whole_model(tmp_path, name, family):
    """It is computed layer by layer; windows and lengths are those of the whole model's own forward."""
    model = make_model(name, model_type=family, max_position_embeddings=160)
    model.save_pretrained(tmp_path)
    found = reference_check.compute_reference(spec.checkpoint_spec(str(tmp_path), tp_size=1), ALONE.device, 8)
    with torch.no_grad():
        logits = model(torch.tensor(found.ids)).logits[:, found.positions]
    torch.testing.assert_close(torch.from_numpy(found.logits), logits, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def checked_model(tmp_path_factory):
    """A model of which no two tokens are all but as good in the texts of the check: rounding chooses none."""
    while True:
        folder = tmp_path_factory.mktemp("checked") / "m"
        make_model("mixed", max_position_embeddings=160).save_pretrained(folder)
        reference = reference_check.compute_reference(spec.checkpoint_spec(str(folder), tp_size=1), ALONE.device, 8)
        ranked = np.sort(reference.logits, -1)
        if (ranked[..., -1] - ranked[..., -2]).min() > 1e-4:
            return folder


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (ignored_padding, ""),
        (wrong_rope_beyond_64_positions, ""),
        (one_weight_is_off, EMULATED),
        (parts_in_a_wrong_order, f"{EMULATED} --schedules domino --batch-size 2"),
    ],
)
def test_a_wrong_model_is_not_timed(checked_model, tmp_path, monkeypatch, fault, text):
    fault(monkeypatch)
    message = one_sentence(bench(checked_model, "--out", tmp_path / "bench.json", text=text, code=1))
    assert "off the fp32 reference" in message
    assert not (tmp_path / "bench.json").exists()


def test_the_tolerance_is_of_this_very_model(tmp_path):
    """Where rounding in bfloat16 takes transformers itself far off, by weights that are so large, it may take the
    runtime as far, and no further."""
    seed = int(torch.randint(1 << 30, ()))
    save_llama(tmp_path, dtype=torch.bfloat16, seed=seed, num_hidden_layers=24, max_position_embeddings=160)
    change_weights(tmp_path, lambda name, x: x.normal_(0, 0.6) if "layers" in name and x.ndim == 2 else x)
    model = spec.checkpoint_spec(str(tmp_path), tp_size=1)
    reference = reference_check.compute_reference(model, ALONE.device, 8)
    deviations = reference.rms_error / reference.logits.std()
    assert deviations > 0.05 * 24**0.5 / 2, "rounding does little to this model, so it shows nothing"
    weights = spec.WeightCache(torch.device("cpu"), pack=True)
    generator = spec.open_generator(model, Collectives(), weights, ALONE, 2, len(reference.ids[0]))
    rounding_less = dataclasses.replace(reference, rms_error=reference.rms_error / 9, largest_error=99.0)
    with torch.inference_mode():
        found = reference_check.check_against_reference([generator], reference, model, ALONE)
        assert found["rms_difference"] < found["rms_tolerance"]
        failure = reference_check.check_against_reference([generator], rounding_less, model, ALONE)
        assert "the logits are, in their root mean square," in failure


def test_the_models_that_pass_are_timed(checked_model, tmp_path, monkeypatch):
    """Without the baselines of the first model, which does not pass."""
    models = [shutil.copytree(checked_model, tmp_path / name) for name in "ab"]
    one_weight_is_off(monkeypatch, "a")
    outcome = bench(*models, "--out", tmp_path / "bench.json", text="--baselines no-comm", code=1)
    document = json.loads((tmp_path / "bench.json").read_text())
    failure = outcome.stderr.splitlines()[-1].removeprefix("Error: ").removesuffix(", so it was not timed")
    assert document["failed"] == {str(tmp_path / "a"): failure}
    assert set(document["checks"]) == {str(tmp_path / "b")}
    assert [row["model"] for row in document["rows"]] == [str(tmp_path / "b")]
    assert document["rows"][0]["speedup"]["decode"] == 1


def test_results_are_written_before_traces_are_made(tmp_path, shape, monkeypatch):
    def broken(*arguments):
        seen.append(json.loads((tmp_path / "bench.json").read_text()))
        raise UserError("the disk is full")

    seen = []
    monkeypatch.setattr(rounds, "traced_events", broken)
    outputs = ("--out", tmp_path / "bench.json", "--profile", tmp_path / "traces")
    text = f"{EMULATED} --layout dense,ladder --batch-size 1,2"
    outcome = bench("--random-weights", shape, *outputs, text=text, code=1)
    assert outcome.stderr.splitlines()[-1] == "Error: the disk is full"
    document = json.loads((tmp_path / "bench.json").read_text())
    assert_there_and_back(BenchDocument, document)
    assert document == seen[0]
    assert document["complete"] is False
    assert [(row["model"], row["batch_size"]) for row in document["rows"]] == [("dense", 1), ("ladder", 1)]


def test_what_a_rank_reports_is_heard_before_it_dies():
    heard = []
    with pytest.raises(UserError, match="rank 0 was killed by SIGKILL"):
        distributed.run(report_and_die, tp_size=2, device="cpu", threads=1, report=heard.append)
    assert heard == ["rank 0 of 2", "again"]
    assert distributed.run(report_once, tp_size=1, device="cpu", threads=1, report=heard.append) == 7
    assert heard[2:] == ["alone"]


def test_no_key_of_the_environment_is_kept(monkeypatch):
    """Files of results are published."""
    for name in ("VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "1")
    settings = environment(ALONE, settings=("VLLM_",)).settings
    assert "VLLM_CPU_KVCACHE_SPACE" in settings
    assert "VLLM_API_KEY" not in settings


def test_a_checkpoint_is_linked_to_for_vllm_and_not_copied(llama, tmp_path):
    (tmp_path / "work").mkdir()
    model = spec.checkpoint_spec(str(llama), tp_size=1)
    for row in served_models([model], BenchOptions(engine="vllm", baselines=("plugin",)), tmp_path / "work"):
        assert row.spec.folder == model.folder
        weights = row.folder / "model.safetensors"
        assert weights.is_symlink()
        assert weights.resolve() == (llama / "model.safetensors").resolve()
        assert not (row.folder / "config.json").is_symlink()
    (tmp_path / "emulated").mkdir()  # no class of vLLM's own has delays in place of sums
    (row,) = served_models([model], BenchOptions(), tmp_path / "emulated", emulated=True)
    assert row.architecture == "LadderizedLlamaForCausalLM"
    assert json.loads((llama / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("MODEL --random-weights 8b", 2, "name checkpoints, or a shape with --random-weights, and not both"),
        ("MODEL --link 1,1", 2, "--link has no effect without --emulate-tp"),
        ("MODEL --emulate-tp 2", 2, "--emulate-tp has no effect without --link"),
        ("MODEL --tp-size 2 --backend nccl --device cpu", 1, "--backend nccl is for GPUs"),
        ("MODEL --schedules domino,magic", 2, "--schedules domino,magic must name sequential or domino"),
        ("MODEL --batch-size 99999999999", 1, "are free; choose fewer or smaller models"),
        (
            "--random-weights 8b --emulate-tp 16 --link nccl_two_nodes_ib_ndr",
            2,
            "give it as --outer-link",
        ),
        ("--random-weights 8b --layout ladder --baselines parallel", 1, "needs a dense model as the first one"),
        ("--random-weights 8b --train --output-len 9", 2, "--output-len has no effect with --train"),
        ("--random-weights 8b --train --dtype float16 --num-layers 1", 1, "float16 has too small a range for training"),
        (
            "--random-weights 8b --engine vllm --backend gloo",
            2,
            "has no effect with --engine vllm; LADDERIZE_VLLM_",
        ),
    ],
)
def test_bad_arguments(text, code, message):
    assert message in refusal("bench", *text.replace("MODEL", str(MODEL)).split(), code=code)


def test_memory_is_checked_before_it_is_taken(tmp_path, monkeypatch):
    """Weights that models share count once, and so does the cache, which one model has at a time."""
    model = spec.checkpoint_spec(str(MODEL), tp_size=1)
    options = BenchOptions(batch_sizes=(1, 3), prompt_len=8, output_len=4)
    weights = spec.WeightCache(ALONE.device, pack=False)
    generator = spec.open_generator(model, Collectives(), weights, ALONE, 3, 12)
    # as convert makes it: another folder with the same files
    converted = tmp_path / "ladder"
    converted.mkdir()
    for path in MODEL.resolve().iterdir():
        (converted / path.name).symlink_to(path)
    both = [model, spec.checkpoint_spec(str(converted), tp_size=1)]
    needed = inference.needed_bytes(both, options, ALONE.device)
    own, cache = held_bytes(generator.model.weights), held_bytes(generator.cache)
    assert own <= needed - cache <= 1.3 * own  # packed, the tied LM head is a copy
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed)
    inference.check_bench_memory(both, options, ALONE)
    with pytest.raises(UserError, match="in each of 2 processes needs .* are free; choose fewer or smaller models"):
        inference.check_bench_memory(both, options, dataclasses.replace(ALONE, local_size=2))
    monkeypatch.setattr(memory, "available_bytes", lambda device: cache * 3 // 2)
    with pytest.raises(UserError, match="a KV cache for 3 texts of 12 tokens in each of 2 processes needs"):
        spec.open_generator(model, Collectives(), weights, dataclasses.replace(ALONE, local_size=2), 3, 12)
    # half a model is timed, and a whole one checked
    emulated = dataclasses.replace(options, emulate_tp=2, batch_sizes=(1,))
    monkeypatch.setattr(memory, "available_bytes", lambda device: own - 1)
    with pytest.raises(UserError, match="with --no-check no whole model is needed"):
        inference.check_bench_memory(both, emulated, ALONE)
