"""``ladderize sweep``: what a stage depends on decides whether it runs again."""

import shlex

import numpy as np

from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import to_json
from ladderize.convert.heads import HeadMap
from ladderize.demo.inputs import TASKS
from tests.helpers import SHAPE, invoke, save_llama
from tests.sweeps import FAST, planner, ran, read, rerun, set_gpus, spec, stages_of, write


def test_a_change_reruns_what_depends_on_it_and_nothing_else(place, tmp_path):
    """The first sweep's outputs stay, so going back runs nothing."""
    out = tmp_path / "out"
    assert rerun(place, out) == ["adapt"] + ["bench"] + ["convert"] * 3 + ["eval"] * 5 + ["sensitivity"]
    assert rerun(place, out, margin=2.0) == []
    assert rerun(place, out, bench=[{**FAST, "repeat": 2}]) == ["bench"]
    assert rerun(place, out, eval={"perplexity": str(place / "heldout.npy"), "batch_size": 3}) == ["eval"] * 5
    adapt = spec(place)["adapt"]
    assert rerun(place, out, adapt=[adapt[0], {**adapt[1], "seed": 1}]) == ["adapt", "eval"]
    more = [*spec(place)["layouts"], {"ladder": "1"}]
    assert rerun(place, out, layouts=more) == ["bench", "convert", "eval"]  # all models in one run
    sensitivity = {"data": str(place / "ids.npy"), "samples": 5}
    assert set(rerun(place, out, sensitivity=sensitivity)) <= {"sensitivity", "convert", "adapt", "eval", "bench"}
    assert rerun(place, out) == []


def test_other_data_and_another_model_are_noticed(place, tmp_path):
    ids = np.load(place / "heldout.npy")
    np.save(tmp_path / "heldout.npy", ids)
    content = {"sensitivity": None, "layouts": [{"ladder": "all"}], "adapt": None, "bench": None}
    content |= {"eval": {"perplexity": str(tmp_path / "heldout.npy")}, "model": str(tmp_path / "dense")}
    save_llama(tmp_path / "dense")
    out = tmp_path / "out"
    assert rerun(place, out, **content) == ["convert", "eval", "eval"]
    ids[0, 0] = (ids[0, 0] + 1 - 3) % (SHAPE["vocab_size"] - 3) + 3
    np.save(tmp_path / "heldout.npy", ids)
    assert rerun(place, out, **content) == ["eval", "eval"]
    (tmp_path / "dense").rename(tmp_path / "elsewhere")  # the same model, whose name results.json holds
    assert rerun(place, out, **content | {"model": str(tmp_path / "elsewhere")}) == ["eval"]
    weights = tmp_path / "elsewhere" / "model.safetensors"
    content["model"] = str(tmp_path / "elsewhere")
    blob = bytearray(weights.read_bytes())
    blob[-1] ^= 1
    weights.unlink()  # outputs share its place on the disk
    weights.write_bytes(blob)
    assert rerun(place, out, **content) == ["convert", "eval", "eval"]
    (model,) = {point["model"] for point in read(out)["points"][1:]}
    (out / model / "config.json").unlink()
    assert rerun(place, out, **content) == ["convert"]
    (out / model / "notes.txt").write_text("mine")
    assert rerun(place, out, **content) == []
    assert (out / model / "notes.txt").exists()


def test_what_is_printed_and_run_by_hand_is_taken(place, tmp_path, monkeypatch):
    content = spec(place, layouts=[{"mode": "ladder", "fraction": 0.5}], adapt=None)
    file, out = write(tmp_path / "s.yaml", content), tmp_path / "out"

    def printed():
        outcome = invoke("sweep", file, "--out", out, "--print-commands")
        assert outcome.code == 0, outcome.stderr
        return outcome.stdout.strip().split("\n\n")

    first, *stages, chosen = printed()
    assert first == f"cd {out}"
    assert [stage.split(":")[0] for stage in stages] == ["# 1. eval", "# 2. sensitivity to ladder"]
    assert "ladder 0.5 of the layers by sensitivity: to be printed when" in chosen
    assert rerun_by_hand(out, stages, monkeypatch) == ["eval", "sensitivity"]
    _, *stages = printed()  # the layout is known
    assert stages[1].endswith(": kept")
    assert "after 1, 3" in stages[3]
    assert "after 3; alone" in stages[4]
    assert rerun_by_hand(out, stages[2:], monkeypatch) == ["convert", "eval", "bench"]
    models = [*out.glob("stages/*/model/*.safetensors"), *out.glob("stages/bench-*/*"), *out.glob("stages/sens*/*")]
    kept = {path: path.stat().st_mtime_ns for path in models}
    outcome = invoke("sweep", file, "--out", out)
    assert outcome.code == 0, outcome.stderr
    assert [line.split(":")[0] for line in ran(outcome)] == ["eval", "convert", "eval"]  # which find it all there
    assert {path: path.stat().st_mtime_ns for path in models} == kept


def rerun_by_hand(out, stages, monkeypatch):
    """Type what was printed; returns the names of the commands."""
    out.mkdir(exist_ok=True)
    monkeypatch.chdir(out)
    names = []
    for stage in stages:
        made, _, line = stage.splitlines()[1].partition(" && ")
        (out / made.removeprefix("mkdir -p ")).mkdir(parents=True)
        outcome = invoke(*shlex.split(line)[1:])
        assert outcome.code == 0, outcome.stderr
        names.append(shlex.split(line)[1])
    return names


def test_prune_removes_what_the_file_does_not_ask_for(place, tmp_path):
    content = {"sensitivity": None, "adapt": None, "bench": None, "eval": {"perplexity": str(place / "heldout.npy")}}
    out = tmp_path / "out"
    rerun(place, out, **content, layouts=[{"ladder": ["0", "1"]}])
    assert len(list((out / "stages").iterdir())) == 5
    file = write(tmp_path / "s.yaml", spec(place, **content, layouts=[{"ladder": "1"}]))
    assert invoke("sweep", file, "--out", out).code == 0
    assert len(list((out / "stages").iterdir())) == 5
    assert invoke("sweep", file, "--out", out, "--prune").code == 0
    kept = {f"stages/{entry.name}" for entry in (out / "stages").iterdir()}
    assert kept == set(stages_of(read(out)))
    assert len(kept) == 3


def test_prune_keeps_what_a_failed_sensitivity_would_have_chosen(place, tmp_path):
    """Its outputs are of this sweep, although this run cannot know it."""
    out = tmp_path / "out"
    content = {"adapt": None, "bench": None, "layouts": [{"name": "half", "mode": "ladder", "fraction": 0.5}]}
    rerun(place, out, **content)
    kept = {entry.name for entry in (out / "stages").iterdir()}
    sensitivity = {"data": str(place / "ids.npy"), "seq_len": 2000}  # longer than the model's positions
    file = write(tmp_path / "s.yaml", spec(place, **content, sensitivity=sensitivity))
    outcome = invoke("sweep", file, "--out", out, "--prune")
    assert outcome.code == 1
    assert "no outputs were removed" in outcome.stderr
    assert kept <= {entry.name for entry in (out / "stages").iterdir()}


def test_on_how_many_processes_a_stage_runs_is_no_part_of_it(place, tmp_path, monkeypatch):
    """But where the batch follows from it. Without a word a stage gets the GPUs that its batch is divisible by."""

    def started(gpus, **more):
        set_gpus(monkeypatch, *map(str, range(gpus)))
        full = {"method": "full", "data": str(place / "ids.npy"), "max_tokens": "1k", "batch_size": 6, **more}
        adapt = [{key: value for key, value in full.items() if value is not None}]
        content = spec(place, sensitivity=None, layouts=[{"ladder": "0"}], adapt=adapt, bench=None)
        (stage,) = planner(tmp_path, content).plan().points[1].adapting
        words = shlex.split(stage.command)
        before, line = words[: words.index("adapt")], words[words.index("adapt") :]
        number = int(before[before.index("--nproc-per-node") + 1]) if before[0] != "ladderize" else 1
        return number, "FSDP_VERSION=2" in before, line, stage.key

    one, *others = (started(0), started(4), started(2), started(2, fsdp=False), started(0, processes=2))
    assert [other[:2] for other in (one, *others)] == [(1, False), (3, True), (2, True), (2, False), (2, False)]
    assert all(other[2:] == one[2:] for other in others)
    for alone in ({"tp_size": 2}, {"device": "cpu"}, {"processes": 1}):
        assert started(4, **alone)[:2] == (1, False)
    assert started(4, tp_size=2, processes=4)[:2] == (4, False)
    assert len({started(gpus, batch_size=None)[3] for gpus in (0, 1, 2, 3)}) == 3


def test_an_evaluation_needs_the_dense_ones_only_for_its_text(place, tmp_path):
    def needs(**eval_):
        content = spec(place, eval=eval_, sensitivity=None, layouts=[{"ladder": "0"}], adapt=None)
        plan = planner(tmp_path, content).plan()
        dense, converted = (point.evaluating for point in plan.points)
        return dense.key in converted.needs

    assert needs(perplexity=str(place / "heldout.npy"))
    assert not needs(tasks=["demo_copying"], include_path=str(TASKS))


def test_layouts_that_differ_in_their_heads_alone_are_two_points(place, tmp_path):
    for name in ("a", "b"):
        orders = {0: (1, 0, 2, 3) if name == "a" else (0, 1, 3, 2)}
        head_map = HeadMap(2, orders, fingerprint(read_checkpoint(place / "dense")))
        (tmp_path / f"{name}.json").write_text(to_json(head_map.to_dict()))
    layouts = [{"spd": "all", "sync_tp_size": 2, "head_map": str(tmp_path / f"{name}.json")} for name in "ab"]
    content = spec(place, sensitivity=None, bench=None, adapt=None, layouts=layouts)
    points = planner(tmp_path, content).plan().points
    assert len(points) == 3
    assert len({point.identity for point in points}) == 3
