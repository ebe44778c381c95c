"""``ladderize sweep``: what a stage depends on decides whether it runs again."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from ladderize.demo.command import MODEL
from ladderize.sweep import run
from tests.helpers import ROOT, SHAPE, invoke, invoke_json, invoke_well, refusal, save_llama
from tests.sweeps import FAST, plan_of, ran, read, rerun, set_gpus, spec, stages_here, stages_of, sweep, write


@pytest.fixture(scope="module", autouse=True)
def _stages_here():
    with stages_here():
        yield


def keys(folder, content):
    """The kind of each stage that is planned, by the key under which its output is kept."""
    return {stage.key: stage.kind for stage in plan_of(folder, content).stages()}


def test_a_change_reruns_what_depends_on_it_and_nothing_else(place, tmp_path):
    before = keys(tmp_path, spec(place))
    assert sorted(before.values()) == ["adapt", "bench"] + ["convert"] * 3 + ["eval"] * 5

    def rerun(**changes):
        return sorted(kind for key, kind in keys(tmp_path, spec(place, **changes)).items() if key not in before)

    adapt, layouts = spec(place)["adapt"], spec(place)["layouts"]
    assert rerun(margin=2.0) == []
    assert rerun(bench=[{**FAST, "repeat": 2}]) == ["bench"]
    assert rerun(eval={"perplexity": str(place / "heldout.npy"), "batch_size": 3}) == ["eval"] * 5
    assert rerun(adapt=[adapt[0], {**adapt[1], "seed": 1}]) == ["adapt", "eval"]
    assert rerun(layouts=[*layouts, {"ladder": "1"}]) == ["bench", "convert", "eval"]  # all models in one run


def test_other_data_and_another_model_are_noticed(place, tmp_path):
    ids = np.load(place / "heldout.npy")
    np.save(tmp_path / "heldout.npy", ids)
    content = {"layouts": [{"ladder": "all"}], "adapt": None, "bench": None}
    content |= {"eval": {"perplexity": str(tmp_path / "heldout.npy")}, "model": str(tmp_path / "dense")}
    save_llama(tmp_path / "dense")
    out = tmp_path / "out"
    assert rerun(place, out, **content) == ["convert", "eval", "eval"]
    (model,) = {point["model"] for point in read(out)["points"][1:]}
    (out / model / "config.json").unlink()
    assert rerun(place, out, **content) == ["convert"]
    (out / model / "notes.txt").write_text("mine")
    assert rerun(place, out, **content) == []
    assert (out / model / "notes.txt").exists()
    known = keys(tmp_path, spec(place, **content))
    ids[0, 0] = (ids[0, 0] + 1 - 3) % (SHAPE["vocab_size"] - 3) + 3
    np.save(tmp_path / "heldout.npy", ids)
    changed = keys(tmp_path, spec(place, **content))
    assert [key in known for key in changed] == [False, True, False]
    (tmp_path / "dense").rename(tmp_path / "elsewhere")  # the same model, whose name all results hold
    content["model"] = str(tmp_path / "elsewhere")
    renamed = keys(tmp_path, spec(place, **content))
    assert [key in changed for key in renamed] == [False, True, False]
    shutil.rmtree(tmp_path / "elsewhere")
    save_llama(tmp_path / "elsewhere", seed=1)
    assert not renamed.keys() & keys(tmp_path, spec(place, **content)).keys()


def write_task(folder: Path) -> Path:
    """A task in ``folder/tasks`` whose data, rest and function lie elsewhere: the second word is right."""
    for name in ("tasks", "data", "rest"):
        (folder / name).mkdir(parents=True)
    rows = [{"a": f"{word} and", "gold": 1} for word in ("cat", "dog", "bird", "fish", "tree", "house")]
    (folder / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rest" / "choices.py").write_text("def choices(row):\n    return [' a', ' the']\n")
    (folder / "rest" / "rest.yaml").write_text(
        f"dataset_path: json\ndataset_kwargs: {{data_dir: {folder / 'data'}}}\ntest_split: train\n"
        "output_type: multiple_choice\ndoc_to_text: '{{a}}'\ndoc_to_target: gold\ntarget_delimiter: ''\n"
        "doc_to_choice: !function choices.choices\nmetric_list: [{metric: acc}]\nmetadata: {version: 1}\n"
    )
    (folder / "tasks" / "task.yaml").write_text(f"include: {folder / 'rest' / 'rest.yaml'}\ntask: elsewhere\n")
    return folder / "tasks"


CHANGES = [("data/rows.jsonl", ": 1}", ": 0}"), ("rest/rest.yaml", "{{a}}", "{{a}}!"), ("rest/choices.py", "a'", "an'")]


def test_what_tasks_read_elsewhere_is_noticed(tmp_path):
    """Against eval alone; a change while the evaluation runs ends the sweep."""
    tasks, out = write_task(tmp_path / "mine"), tmp_path / "out"
    content = {"model": str(MODEL), "no_verify": True, "layouts": [{"ladder": "all"}]}
    content["eval"] = {"tasks": "elsewhere", "include_path": str(tasks)}
    before: set[str] = set()
    for name, old, new in [("tasks/task.yaml", "", ""), *CHANGES]:
        path = tmp_path / "mine" / name
        path.write_text(path.read_text().replace(old, new))
        planned = keys(tmp_path, content)
        assert sorted(planned[key] for key in planned.keys() - before) == ["convert"] * (not before) + ["eval"] * 2
        before |= planned.keys()
        _, document = sweep(tmp_path, content)
        kept = json.loads((out / document["points"][0]["results"]).read_text())["models"][0]["results"]
        asked = ("--tasks", "elsewhere", "--include-path", tasks)
        assert kept == invoke_json("eval", MODEL, *asked)["models"][0]["results"]
    content["eval"]["limit"] = 2
    run_stage = run.run_stage

    def change(stage, root):
        run_stage(stage, root)
        (tmp_path / "mine" / "data" / "rows.jsonl").write_text('{"a": "cat and", "gold": 1}\n')

    with mock.patch.object(run, "run_stage", change):
        outcome = invoke("sweep", write(tmp_path / "s.yaml", content), "--out", out)
    assert outcome.code == 1
    assert "Error: elsewhere changed while the sweep ran" in outcome.stderr


def test_what_is_printed_and_run_by_hand_is_taken(place, tmp_path):
    """All but the benchmark, which takes the longest."""
    content = spec(place, layouts=[{"ladder": "2:"}], adapt=None)
    file, out = write(tmp_path / "s.yaml", content), tmp_path / "out"
    printed = invoke_well("sweep", file, "--out", out, "--print-commands")
    first, *stages = printed.stdout.strip().split("\n\n")
    assert first == f"mkdir -p {out} && cd {out} || exit 1"
    assert [stage.split(":")[0] for stage in stages] == ["# 1. eval", "# 2. convert", "# 3. eval", "# 4. bench"]
    assert "after 1, 2" in stages[2]
    assert "after 2; alone" in stages[3]
    program = f'ladderize() {{ {shlex.quote(sys.executable)} -m ladderize "$@"; }}\n'
    script = program + "\n\n".join([first, *stages[:3]])
    subprocess.run(["bash", "-e", "-c", script], check=True, capture_output=True)
    outcome, document = sweep(tmp_path, spec(place, layouts=[{"ladder": "2:"}], adapt=None, bench=None))
    assert ran(outcome) == []
    assert document["complete"]


def test_prune_removes_what_the_file_does_not_ask_for(place, tmp_path):
    """Here an assigned layout, which was made."""
    same, stages = {"adapt": None, "bench": None}, tmp_path / "out" / "stages"
    assigned = {"spd": "1:3", "sync_tp_size": 2, "assign": "heads,neurons", "data": str(place / "ids.npy")}
    _, document = sweep(tmp_path, spec(place, **same, layouts=[assigned]))
    assert (tmp_path / "out" / document["points"][1]["model"] / "assignment.json").is_file()
    content = spec(place, **same, layouts=[{"ladder": "1"}])
    sweep(tmp_path, content)
    assert len(list(stages.iterdir())) == 5
    (stages / "mine").mkdir()
    _, document = sweep(tmp_path, content, "--prune")
    (stages / "mine").rmdir()
    kept = {f"stages/{entry.name}" for entry in stages.iterdir()}
    assert kept == set(stages_of(document))
    assert len(kept) == 3
    (tmp_path / "project" / "stages" / "mine").mkdir(parents=True)
    refused = refusal("sweep", tmp_path / "s.yaml", "--out", tmp_path / "project", "--prune")
    assert "is not empty, and no folder of a sweep" in refused


def test_how_a_stage_starts_is_no_part_of_it(place, tmp_path, monkeypatch):
    """But where the batch follows from it. A stage gets the GPUs that its batch is divisible by."""

    def started(gpus, **more):
        set_gpus(monkeypatch, *map(str, range(gpus)))
        full = {"method": "full", "data": str(place / "ids.npy"), "max_tokens": "1k", "batch_size": 6, **more}
        adapt = {key: value for key, value in full.items() if value is not None}
        content = spec(place, layouts=[{"ladder": "0"}], adapt=[adapt], bench=None)
        (stage,) = plan_of(tmp_path, content).points()[1].adapting
        words = shlex.split(stage.command)
        before, line = words[: words.index("adapt")], words[words.index("adapt") :]
        number = int(before[before.index("--nproc-per-node") + 1]) if before[0] != "ladderize" else 1
        return number, "FSDP_VERSION=2" in before, line, stage.key

    one, *others = (started(0), started(4), started(2))
    assert [other[:2] for other in (one, *others)] == [(1, False), (3, True), (2, True)]
    assert all(other[2:] == one[2:] for other in others)
    assert started(4, device="cpu")[:2] == (1, False)
    assert started(2, tp_size=2)[:2] == (1, False)  # the command starts its ranks
    assert started(4, tp_size=2)[:2] == (4, False)
    shared, elsewhere = (started(4, teacher_cache=folder) for folder in ("a", "b"))
    assert shared[:2] == (3, False)  # the dense model's answers are not for models that FSDP shards
    assert shared[3] == elsewhere[3] != one[3]
    assert len({started(gpus, batch_size=None)[3] for gpus in (0, 1, 2, 3)}) == 3


def test_what_files_hold_decides(place, tmp_path, monkeypatch):
    """A recipe, what an assignment is computed on, and a link, whose file stages find from the sweep's folder."""
    monkeypatch.chdir(tmp_path)
    recipe, data, card = Path("recipe.yaml"), Path("mine.npy"), Path("card.yaml")
    recipe.write_text("ladder: '1:3'")
    np.save(data, np.load(place / "ids.npy"))
    card.write_text((ROOT / "examples" / "hardware" / "my-card.yaml").read_text())
    assigned = {"spd": "all", "sync_tp_size": 2, "assign": ["none", "neurons", "heads,neurons"]}
    layouts = [{"recipe": str(recipe)}, assigned]
    emulated = {**FAST, "emulate_tp": 2, "link": ["card.yaml", "50,10"]}
    content = spec(place, layouts=layouts, adapt=None, data=str(data), bench=[emulated])
    commands = [stage.command for stage in plan_of(tmp_path, content).stages()]
    assert [sum(str(tmp_path / file) in command for command in commands) for file in (data, card)] == [2, 1]

    def rerun(change):
        before = keys(tmp_path, content)
        change()
        return sorted(kind for key, kind in keys(tmp_path, content).items() if key not in before)

    assert rerun(lambda: recipe.write_text("ladder: '1:3'\ndtype: bfloat16")) == ["bench"] * 2 + ["convert", "eval"]
    assert (
        rerun(lambda: np.save(data, np.load(place / "heldout.npy"))) == ["bench"] * 2 + ["convert"] * 2 + ["eval"] * 2
    )
    assert rerun(lambda: card.write_text(f"{card.read_text()}\n# measured again\n")) == ["bench"]
