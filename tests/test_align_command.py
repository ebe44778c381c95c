"""`ladderize adapt --method align`: what it writes and says, that it goes on, several processes, what is refused."""

import contextlib
import json
import math
import os
import re
import shutil
import sys
from itertools import takewhile
from unittest import mock

import numpy as np
import pytest
import torch

from ladderize.adapt.layers import align as alignment
from ladderize.adapt.layers import rewrite
from ladderize.adapt.layers.align import Aligning
from ladderize.adapt.layers.align_options import RANDOM_SHARE, AlignOptions
from ladderize.adapt.layers.layer_files import LayerFiles
from ladderize.adapt.layers.measures import HeldoutMeasures
from ladderize.blocks import open_checkpoint
from ladderize.console import Console
from ladderize.demo import corpus
from ladderize.demo.inputs import MODEL, write_documents
from ladderize.errors import UsageError
from ladderize.eval.results import Perplexity
from ladderize.modeling import load
from tests import warm
from tests.helpers import (
    ROOT,
    SHAPE,
    all_tensors,
    change_weights,
    changed_tensors,
    edit_json,
    fresh_rng,
    invoke,
    invoke_well,
    listing,
    one_sentence,
    python_options,
    save_llama,
    save_pair,
)

WORK = "out.ladderize-work"
PLACE = ["dense", "ids.npy", "spd"]
# Runs ladderize; rank 1 is killed when it has sent its second sum.
RANK_DIES = """
import os, signal, sys
from ladderize.ranks.group import Ranks
summed, count = Ranks.sum, [0]
def sum(self, values):
    count[0] += 1
    if self.rank == 1 and count[0] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return summed(self, values)
Ranks.sum = sum
sys.argv[:1] = ["ladderize"]
from ladderize.cli import main
main()
"""

FROM_DISK = """
import sys
from tests.helpers import python_options
sys.argv[:1] = ["ladderize"]
from ladderize.cli import main
with python_options(max_memory=1):
    main()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dense random model, its conversion, and windows of ids."""
    return save_pair(tmp_path_factory.mktemp("made"), fresh_rng())


@pytest.fixture
def pair(made, tmp_path):
    """The same for a test to change."""
    return models_of(shutil.copytree(made, tmp_path, dirs_exist_ok=True))


def models_of(folder):
    return folder / "dense", folder / "spd"


def command(pair, out, *options, data="ids.npy"):
    dense, model = pair
    own = [] if "--no-verify" in options or "--verified" in options else ["--no-verify"]
    sizes = [] if "--samples" in options else ["--samples", 60, "--heldout", 12]
    options = [option for option in options if option != "--verified"]
    write = [] if "--write" in options else ["--write", "last"]
    return [
        *("adapt", model, out, "--method", "align", "--distill-from", dense, "--data", dense.parent / data),
        *("--device", "cpu", *own, *sizes, *write, *options),
    ]


def align(pair, out, *options, data="ids.npy", **named):
    """named: options that Python alone has."""
    with python_options(**named):
        return invoke(*command(pair, out, *options, data=data))


def aligned(pair, out, *options, **more):
    """The same where nothing is to fail."""
    outcome = align(pair, out, *options, **more)
    assert outcome.code == 0, outcome.stderr
    return outcome


def bits(folder):
    return (folder / "model.safetensors").read_bytes()


# ---- what is written and said ----


def test_a_checkpoint_is_written_with_its_document(pair, tmp_path):
    """It loads in plain transformers (which --no-verify would skip); its perplexity is the one that was measured."""
    shown = aligned(pair, tmp_path / "out", "--json", "--verified")
    document = json.loads(shown.stdout)
    out = tmp_path / "out"
    stored = json.loads((out / "alignment.json").read_text())
    assert len(stored.pop("run_sha256")) == 64
    assert stored == document
    assert [row["layer"] for row in document["layers"]] == [1, 2, 3]
    for row in document["layers"]:
        names = [entry["projection"] for entry in row["projections"]]
        assert [name.rpartition(".")[2][0] for name in names] == list("qkvogud")
        for entry in row["projections"]:
            assert (entry["error_after"] < entry["error_before"]) == (entry["ridge"] is not None)
            assert entry["error_after"] <= entry["error_before"]
    ppl = {name: value["perplexity"] for name, value in document["heldout_perplexity"].items()}
    assert list(ppl) == ["dense", "before", "aligned"]
    assert document["heldout_divergence"]["aligned"] < 0.7 * document["heldout_divergence"]["before"]
    written = {
        f"model.layers.{row['layer']}.{entry['projection']}.weight"
        for row in document["layers"]
        for entry in row["projections"]
        if entry["ridge"] is not None
    }
    assert changed_tensors(pair[1], out) == written
    assert listing(tmp_path) == sorted([*PLACE, "out"])
    assert "alignment:" in (out / "ladderize.yaml").read_text()
    assert "The projections of layers 1:4 were solved anew by least squares" in (out / "README.md").read_text()
    # the measures are those of the model
    options = AlignOptions(str(tmp_path / "ids.npy"), samples=60, heldout=12)
    ids = Aligning().windows(open_checkpoint(str(pair[0])), options).heldout
    np.save(tmp_path / "heldout.npy", ids.numpy())
    scored = json.loads(invoke("eval", out, "--perplexity", tmp_path / "heldout.npy", "--json").stdout)
    assert scored["models"][0]["ladderize"]["perplexity"]["perplexity"] == pytest.approx(ppl["aligned"], rel=1e-5)
    with torch.no_grad():
        p, q = (load(folder, dtype="float32")(ids).logits[:, :-1].log_softmax(-1) for folder in (pair[0], out))
    divergence = float((p.exp() * (p - q)).sum(-1).mean())
    assert divergence == pytest.approx(document["heldout_divergence"]["aligned"], rel=1e-4)


def test_the_table_says_what_is_left(pair, tmp_path):
    shown = aligned(pair, tmp_path / "out", "--train", "2:")
    rows = [line for line in shown.stdout.splitlines() if re.match(r"\s*[0-9]+ ", line)]
    assert [row.split()[0] for row in rows] == ["2", "3"]
    assert all(len(re.findall(r"[0-9.]+% to [0-9.]+%|[0-9.]+%, kept", row)) == 4 for row in rows), shown.stdout
    assert "KL to dense" in shown.stdout
    assert "aligning 2 layers on 960 tokens (60 windows of 16), 12 windows held out, on cpu" in shown.stderr


def test_the_documents_keys_are_described(pair, tmp_path):
    """Every key of alignment.json stands in its section of docs/files.md."""
    aligned(pair, tmp_path / "out", "--train", "3")
    pages = (ROOT / "docs" / "files.md").read_text()
    section = pages.partition("## `alignment.json`")[2].partition("\n## ")[0]
    document = json.loads((tmp_path / "out" / "alignment.json").read_text())
    keys = {*document, *document["layers"][0], *document["layers"][0]["projections"][0], *document["options"]}
    keys -= {"schema_version", "ladderize_version", "attention_sync", "mlp_sync", "sync_tp_size"}  # of every document
    assert {key for key in keys if f"`{key}`" not in section and key != "layout"} == set()


def test_a_chain_of_methods_is_told_in_its_order(pair, tmp_path):
    """align, then blocks, then full: each starts from what the one before wrote, and the last says all of it."""
    dense, _ = pair
    same = ["--data", tmp_path / "ids.npy", "--no-verify", "--write", "last"]
    aligned(pair, tmp_path / "one")
    blocks = ["--method", "blocks", "--distill-from", dense, "--samples", 60, "--heldout", 8]
    invoke_well("adapt", tmp_path / "one", tmp_path / "two", *blocks, *same)
    full = ["--max-steps", 1, "--batch-size", 2, "--seq-len", 16]
    invoke_well("adapt", tmp_path / "two", tmp_path / "three", *full, *same)
    told = json.loads(invoke("inspect", tmp_path / "three", "--json").stdout)["retrainings"]
    assert [entry["method"] for entry in told] == ["align", "blocks", "full"]
    assert [told[0][key] for key in ("model", "teacher", "layers")] == [str(pair[1]), str(dense), [1, 2, 3]]
    assert told[0]["data"] == [str(tmp_path / "ids.npy")]
    assert told[0]["layout"] == "4 layers: spd 1:4 (sync_tp_size 4)"
    assert list(told[0]["perplexity"]) == ["dense", "before", "aligned"]
    assert f"align: layers 1:4 of {pair[1]}" in " ".join(invoke("inspect", tmp_path / "three").stdout.split())
    warned = invoke("convert", tmp_path / "one", tmp_path / "four", "--ladder", "all", "--no-verify")
    assert "the weights were retrained (align) for another layout" in warned.stderr


def test_write_best_writes_nothing_that_got_worse(pair, tmp_path, monkeypatch):
    """Farther from the dense model, although its perplexity fell."""
    fell = {"dense": 9.2, "before": 9.0, "aligned": 8.9}
    found = {name: Perplexity(x, None, 1.0, 8, 1, 8, 1.0) for name, x in fell.items()}
    measures = HeldoutMeasures(found, {"before": 0.25, "aligned": 0.5})
    with monkeypatch.context() as patch:
        patch.setattr(rewrite, "before_and_after", lambda *arguments: measures)
        message = one_sentence(align(pair, tmp_path / "out", "--write", "best"))
    assert "alignment never lowered the held-out KL (before 0.25, after 0.5), so nothing" in message
    assert "align on more data" in message
    assert "--lr" not in message
    assert listing(tmp_path) == sorted([*PLACE, WORK])
    assert "aligned-00001.safetensors" in listing(tmp_path / WORK)
    written = aligned(pair, tmp_path / "out", "--write", "last")
    assert "layers up to 3 are already aligned" in written.stderr
    assert listing(tmp_path) == sorted([*PLACE, "out"])


# ---- killed, and several processes ----


def test_a_killed_run_ends_with_the_same_weights(pair, tmp_path, monkeypatch):
    """Its progress counts the layers that are solved, those before it went on too, and the windows' way to them
    apart."""
    shown = []

    @contextlib.contextmanager
    def progress(self, description, total, *, done=0, **_):
        steps = []
        shown.append((description, total, done, steps))
        yield lambda n=1, detail="": steps.append(n)

    monkeypatch.setattr(Console, "progress", progress)
    aligned(pair, tmp_path / "whole")
    way = "passing the windows through the layers before"
    assert shown[:2] == [(way, 1, 0, [1]), ("aligning", 3, 0, [1, 1, 1])]
    save, solved = LayerFiles.save, []

    def killed(self, layer, *rest):
        save(self, layer, *rest)
        solved.append(layer)
        if len(solved) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(LayerFiles, "save", killed)
    assert align(pair, tmp_path / "out").code == 130
    assert listing(tmp_path / WORK) == ["aligned-00001.safetensors", "aligned-00002.safetensors", "run.json"]
    again = align(pair, tmp_path / "out", max_memory=1)  # also: from disk this time
    assert again.code == 0, again.stderr
    assert "layers up to 2 are already aligned" in again.stderr
    assert "aligning 1 layers on 960 tokens" in again.stderr
    assert [one for one in shown if one[0] in (way, "aligning")][-2:] == [(way, 3, 0, [1] * 3), ("aligning", 3, 2, [1])]
    assert solved == [1, 2, 3]
    assert bits(tmp_path / "out") == bits(tmp_path / "whole")
    assert WORK not in listing(tmp_path)


@pytest.fixture(scope="module")
def solved(made, tmp_path_factory):
    """The work of a run on what was ``made``, killed when all layers were solved."""
    out = tmp_path_factory.mktemp("solved") / "out"
    with mock.patch.object(rewrite, "convert_checkpoint", side_effect=KeyboardInterrupt):
        assert align(models_of(made), out).code == 130
    return out.with_name(WORK)


@pytest.fixture
def stopped(solved, tmp_path):
    """The same for a test to go on with."""
    return shutil.copytree(solved, tmp_path / WORK)


@pytest.mark.parametrize(
    "other",
    [
        (["--seed", 1], {}),
        ([], {"ridge": 0.3}),
        ([], {"random_share": 0.5}),
        (["--train", "2:"], {}),
        (["--samples", 59, "--heldout", 12], {}),
    ],
)
def test_layers_that_were_solved_otherwise_are_solved_anew(made, stopped, tmp_path, other):
    options, named = other
    again = aligned(models_of(made), tmp_path / "out", *options, **named)
    assert "already aligned" not in again.stderr
    aligned(models_of(made), tmp_path / "fresh", *options, **named)
    assert bits(tmp_path / "out") == bits(tmp_path / "fresh")


def test_a_layer_behind_one_that_is_missing_is_solved_anew(made, stopped, tmp_path, monkeypatch):
    """A layer is solved on what the layers before it write."""
    (stopped / "aligned-00002.safetensors").write_bytes(b"cut off")
    solved, save = [], LayerFiles.save
    monkeypatch.setattr(LayerFiles, "save", lambda self, layer, *rest: solved.append(layer) or save(self, layer, *rest))
    again = align(models_of(made), tmp_path / "out")
    assert "layers up to 1 are already aligned" in again.stderr
    assert solved == [2, 3]


def test_two_processes_solve_the_same_weights(pair, tmp_path):
    """But for rounding: sums are added up in another order. One of them has no window that is held out."""
    sizes = ["--samples", 61, "--heldout", 1]
    aligned(pair, tmp_path / "one", *sizes)
    more = command(pair, tmp_path / "two", *sizes, "--json")
    result = warm.run_group([sys.executable, "-c", FROM_DISK, *more])
    assert result.returncode == 0, result.stderr
    assert [row["layer"] for row in json.loads(result.stdout)["layers"]] == [1, 2, 3]
    documents = [json.loads((tmp_path / name / "alignment.json").read_text()) for name in ("one", "two")]
    entries = [
        {f"{row['layer']}.{entry['projection']}": entry for row in document["layers"] for entry in row["projections"]}
        for document in documents
    ]
    assert list(entries[0]) == list(entries[1])
    # only up to where another ridge is chosen, as rounding may of two that are as good: what comes after reads another
    # stream
    alike = list(takewhile(lambda name: entries[0][name]["ridge"] == entries[1][name]["ridge"], entries[0]))
    for name in [*entries[0]][: len(alike) + 1]:
        assert entries[1][name]["error_after"] == pytest.approx(entries[0][name]["error_after"], rel=0.05)
    one, two = (
        [all_tensors(tmp_path / out)[f"model.layers.{name}.weight"] for name in alike] for out in ("one", "two")
    )
    assert all(float((a - b).norm() / a.norm()) < 1e-3 for a, b in zip(one, two, strict=True))
    one, two = (document["heldout_divergence"] for document in documents)
    assert two == pytest.approx(one, rel=1e-3 if len(alike) == len(entries[0]) else 0.1)
    assert listing(tmp_path) == sorted([*PLACE, "one", "two"])


def test_a_rank_that_dies_ends_the_others(pair, tmp_path):
    result = warm.run_group([sys.executable, "-c", RANK_DIES, *command(pair, tmp_path / "out")])
    assert result.returncode
    *_, last = result.stderr.splitlines()
    assert last == "Error: another process of the group has ended; see what it said"
    assert "out" not in listing(tmp_path)
    aligned(pair, tmp_path / "out")
    assert listing(tmp_path) == sorted([*PLACE, "out"])


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--train", ":2"], 1, "--train: 0 read what the dense model's read; only 1:4 can be aligned"),
        (["--train", "9"], 1, "--train: 9 is out of range"),
        (["--samples", 70, "--heldout", 3], 1, "gives 72 windows of 16 tokens, and 73 are asked for"),
        (["--samples", 72], 1, "too few for 72 to train on and"),
        (["--seq-len", 1], 2, "--seq-len"),
        (["--seq-len", 65], 1, "--seq-len 65 is over the model's 64 positions"),
        (["--heldout", 0, "--samples", 3], 2, "--heldout"),
        (["--dtype", "float16"], 2, "--dtype float16 has too small a range"),
        (["--max-memory", "1B"], 2, "No such option: --max-memory"),
        (["--data", "b.npy"], 2, "--method align reads one --data file"),
        (["--lr", 1e-3], 2, "--lr has no effect with --method align"),
    ],
)
def test_what_is_refused(made, tmp_path, options, code, message):
    outcome = align(models_of(made), tmp_path / "out", *options)
    assert message in one_sentence(outcome)
    assert outcome.code == code
    assert listing(tmp_path) == []


@pytest.mark.parametrize("case", ["no teacher", "dense student", "converted teacher", "other shape", "other rope"])
def test_models_that_do_not_belong_together(pair, tmp_path, case):
    dense, model = pair
    messages = {
        "no teacher": "--method align needs --distill-from DENSE",
        "dense student": "is dense",
        "converted teacher": "is not dense (4 layers: spd 1:4 (sync_tp_size 4)); name the model that",
        "other shape": "has other shapes than",
        "other rope": "(rope); name the model that it was converted from",
    }
    if case == "no teacher":
        outcome = invoke("adapt", model, tmp_path / "out", "--method", "align", "--data", tmp_path / "ids.npy")
        assert outcome.code == 2
    else:
        other = save_llama(tmp_path / "other", seed=5, **({"intermediate_size": 64} if case == "other shape" else {}))
        if case == "other rope":
            edit_json(other / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
        pairs = {"dense student": (dense, other), "converted teacher": (model, model)}
        outcome = align(pairs.get(case, (other, model)), tmp_path / "out", data="../" + tmp_path.name + "/ids.npy")
        assert outcome.code == 1
    assert messages[case] in one_sentence(outcome)
    assert not {"out", WORK} & set(listing(tmp_path))


def test_out_is_none_of_the_models_and_empty(pair, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    assert "is not empty" in one_sentence(align(pair, tmp_path / "full"))
    assert "is the source" in one_sentence(align(pair, pair[1]))


@pytest.mark.parametrize("same", [[], ["embed_tokens"], ["embed_tokens", "layers.0"]])
def test_a_dense_model_that_is_not_the_source_is_refused(pair, tmp_path, same):
    """Another model of the same shape, also one that shares the embedding; one that shares the unconverted layers and
    was trained from there on is a relative."""
    stranger = save_llama(tmp_path / "stranger", seed=6)
    source = all_tensors(pair[0])
    change_weights(stranger, lambda name, weight: source[name] if any(part in name for part in same) else weight)
    outcome = align((stranger, pair[1]), tmp_path / "out", data="../" + tmp_path.name + "/ids.npy")
    if len(same) == 2:
        assert outcome.code == 0, outcome.stderr
        return
    name = "model.layers.0.mlp.up_proj.weight" if same else "model.embed_tokens.weight"
    assert re.search(
        rf"--distill-from \S*stranger has other weights than \S*spd \(in {name}\);"
        " name the model that it was converted from",
        one_sentence(outcome),
    )
    assert listing(tmp_path) == sorted([*PLACE, "stranger"])


def test_a_fine_tuned_relative_is_no_stranger(pair, tmp_path):
    change_weights(pair[1], lambda _, weight: weight + 0.1 * weight.std() * torch.randn_like(weight))
    outcome = aligned(pair, tmp_path / "out")
    assert "has a different embedding, final norm or LM head" in outcome.stderr


def test_few_tokens_are_said(pair, tmp_path):
    """Fewer than a projection has inputs: the ridge keeps what they do not say, so that little is lost."""
    few = aligned(pair, tmp_path / "few", "--samples", 2, "--heldout", 12, "--json")
    assert "32 tokens are fewer than the 48 inputs of the widest projection" in " ".join(few.stderr.split())
    divergences = json.loads(few.stdout)["heldout_divergence"]
    assert divergences["aligned"] < 1.5 * divergences["before"]
    enough = align(pair, tmp_path / "enough", "--samples", 3, "--heldout", 12)
    assert "fewer than" not in enough.stderr


def test_rows_of_one_token_are_joined(pair, tmp_path):
    """A window of one token is never made."""
    rows = fresh_rng().integers(3, SHAPE["vocab_size"], 2048)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": [int(token)]}) + "\n" for token in rows))
    np.save(tmp_path / "column.npy", rows[:, None])
    for name in ("rows.jsonl", "column.npy"):
        outcome = align(pair, tmp_path / "out", "--samples", 20, "--heldout", 8, "--json", data=name)
        print(outcome)
        assert "gives 1 tokens, none of which the loss could score" in one_sentence(outcome)


def test_windows_that_say_nothing_change_nothing(pair, tmp_path):
    """One token again and again: every product has rank 1 or so, and the result is finite and no worse on it."""
    np.save(tmp_path / "same.npy", np.full((72, 16), 7))
    outcome = aligned(pair, tmp_path / "out", "--json", data="same.npy")
    divergences = json.loads(outcome.stdout)["heldout_divergence"]
    assert divergences["aligned"] <= divergences["before"] + 1e-6
    assert all(torch.isfinite(weight).all() for weight in all_tensors(tmp_path / "out").values())


@pytest.mark.parametrize("model", ["dense", "spd"])
def test_weights_that_are_no_numbers(pair, tmp_path, model):
    def spoilt(name, weight):
        return weight.index_fill(0, torch.tensor([1]), torch.nan) if "layers.2.mlp.up_proj" in name else weight

    change_weights(tmp_path / model, spoilt)
    message = one_sentence(align(pair, tmp_path / "out"))
    assert "layer 2: mlp.up_proj of the dense or the converted model has NaN or infinite weights or inputs" in message
    assert listing(tmp_path) == sorted([*PLACE, WORK])
    assert listing(tmp_path / WORK) == ["aligned-00001.safetensors", "run.json"]


@pytest.mark.parametrize("number", [0, 2])
def test_a_full_disk_is_one_sentence(pair, tmp_path, monkeypatch, number):
    """At the first file of states or at a later one: those before it are not left behind."""
    reserved, reserve = [], os.posix_fallocate

    def full(descriptor, offset, size):
        if len(reserved) == number:
            raise OSError(28, "No space left on device")
        reserved.append(size)
        reserve(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "no space left on device" in one_sentence(align(pair, tmp_path / "out", max_memory=1))
    assert len(reserved) == number
    assert listing(tmp_path) == PLACE


def test_a_disk_that_is_full_when_a_layer_is_saved(pair, tmp_path, monkeypatch):
    from ladderize.adapt.layers import layer_files as folder

    def full(*arguments, **more):
        raise folder.SafetensorError("No space left on device")

    monkeypatch.setattr(folder, "save_file", full)
    assert "block 1 cannot be saved" in one_sentence(align(pair, tmp_path / "out"))
    assert listing(tmp_path) == PLACE


def test_ctrl_c_frees_the_disk_of_states(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(alignment.LayerAlignment, "run", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    assert align(pair, tmp_path / "out", max_memory=1).code == 130
    assert listing(tmp_path) == PLACE


# ---- models that were trained ----


def test_other_kinds_of_text_get_no_worse(tmp_path):
    """Aligned on prose alone, the bundled model is no worse at sums than as converted: random tokens see to that, and
    without them it is worse."""
    prose, kinds = {"stories": 1, "agreement": 1, "copying": 1}, ("stories", "arithmetic")
    write_documents(tmp_path / "prose.jsonl", 1200, test=False, seed=3, weights=prose)
    for kind in kinds:
        write_documents(tmp_path / f"{kind}.jsonl", 60, test=True, seed=4, weights={kind: 1})
    invoke_well("convert", MODEL, tmp_path / "ladder", "--ladder", "4:", "--no-verify")
    models = {"as converted": tmp_path / "ladder"}
    for name, share in {"aligned": RANDOM_SHARE, "without": 0}.items():
        models[name] = tmp_path / name
        aligning = ["--method", "align", "--distill-from", MODEL, "--data", tmp_path / "prose.jsonl", "--no-verify"]
        sizes = ["--seq-len", 128, "--samples", 192, "--heldout", 24, "--dtype", "float32"]
        with python_options(random_share=share):
            invoke_well("adapt", models["as converted"], models[name], *aligning, *sizes)
    found = {}
    for kind in kinds:
        data = ["--perplexity", tmp_path / f"{kind}.jsonl", "--seq-len", 128, "--dtype", "float32", "--device", "cpu"]
        scored = invoke_well("eval", MODEL, *models.values(), *data, "--json")
        results = [model["ladderize"]["perplexity"]["perplexity"] for model in json.loads(scored.stdout)["models"]]
        found[kind] = dict(zip(("dense", *models), results, strict=True))
    prose, sums = found.values()
    assert prose["aligned"] - prose["dense"] < 0.5 * (prose["as converted"] - prose["dense"])
    assert sums["aligned"] <= sums["as converted"]
    assert sums["without"] > sums["as converted"]


def test_a_trained_model_gets_nearer_to_the_dense_one(tmp_path):
    """The bundled model, in bfloat16: much of the divergence goes, and the output is stored as the source is."""
    text = tmp_path / "text.txt"
    text.write_text("".join(corpus.documents(400, test=False)))
    same = ["--seq-len", 64, "--samples", 64, "--heldout", 16, "--no-verify"]
    for name, layout in {"ladder": ["--ladder", "4:"], "spd": ["--spd", "all", "--sync-tp-size", 4]}.items():
        invoke_well("convert", MODEL, tmp_path / name, *layout, "--no-verify")
        aligning = ["--method", "align", "--distill-from", MODEL, "--data", text, *same, "--json"]
        document = json.loads(invoke_well("adapt", tmp_path / name, tmp_path / f"{name}-aligned", *aligning).stdout)
        assert document["dtype"] == "bfloat16"
        divergences = document["heldout_divergence"]
        assert divergences["aligned"] < 0.7 * divergences["before"]
        assert {weight.dtype for weight in all_tensors(tmp_path / f"{name}-aligned").values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"ridge": 0.0}, "--ridge must be above 0"),
        ({"ridge": math.nan}, "--ridge must be a finite number of at least 0, not nan"),
        ({"random_share": -1.0}, "--random-share must be a finite number of at least 0, not -1"),
        ({"random_share": 11.0}, "--random-share must be between 0 and 10"),
    ],
)
def test_what_python_is_refused(named, message):
    with pytest.raises(UsageError, match=message):
        AlignOptions("ids.npy", **named)
