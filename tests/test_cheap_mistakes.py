"""Cheap mistakes are told in a second: before torch, transformers or lm-eval are imported, which takes many."""

import json
import subprocess
import sys

import numpy as np
import pytest
import yaml

from ladderize.errors import UserError
from ladderize.eval.options import EvalOptions, check_task_names
from tests.helpers import ROOT, invoke_well

HEAVY = {"torch", "transformers", "lm_eval", "peft", "datasets", "accelerate"}
SCRIPT = """
import contextlib, io, json, sys
from ladderize.cli import main
answers = []
for words in json.load(sys.stdin):
    sys.argv, said = ["ladderize", *words], io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        main()
    answers.append([said.getvalue(), sorted({name.partition(".")[0] for name in sys.modules})])
print(json.dumps(answers))
"""
DATA = "--data ids.npy"
FULL = "--max-steps 2"
SWEEP = {"model": "src", "out": "swept", "layouts": [{"ladder": "all"}], "eval": {"tasks": ["piqa"]}}
FULL_STAGE = {"method": "full", "data": "ids.npy", "max_steps": 2}
MISTAKES = {
    "bench src --tp-size 3": "--tp-size 3 does not divide the 8 attention heads; this model takes 1, 2, 4, 8",
    "bench src --emulate-tp 3 --link nccl_pcie": "--emulate-tp 3 does not divide the 8 attention heads",
    "bench src --emulate-tp 2 --link nccl_pci": "--link 'nccl_pci' is neither",
    "bench nowhere": "nowhere",
    "merge src OUT": "src is not the folder of a PEFT adapter; it holds no adapter_config.json",
    "eval src --tasks arc_eazy": "no task has the name 'arc_eazy' or matches it (did you mean 'arc_easy' or",
    "eval src --tasks mime --include-path tasks": "did you mean 'mine'",
    "eval ./nowhere --tasks piqa": "./nowhere does not exist; name a checkpoint folder",
    "eval src --perplexity nowhere.txt": "nowhere.txt does not exist",
    f"adapt ladder OUT {FULL} --data nowhere.jsonl": "--data nowhere.jsonl does not exist",
    f"adapt ladder OUT {FULL} {DATA} --eval-data nowhere": "--eval-data nowhere does not exist",
    f"adapt ladder OUT {FULL} --data nowhere/*.txt": "names nothing that exists; give files of one of",
    f"adapt ladder OUT {FULL} {DATA} --align": "--align has no effect without --distill-from",
    f"adapt nowhere/x OUT {FULL} {DATA}": "nowhere/x",
    f"adapt ladder OUT {FULL} {DATA} --distill-from ./no": "./no does not exist; name a checkpoint",
    f"adapt ladder OUT {FULL} {DATA} --tp-size 3": "--tp-size 3 does not divide",
    f"sensitivity src {DATA} --out s.json --sync-tp-size 3": "--sync-tp-size 3 does not divide the 8 attention heads",
    "sensitivity src --data nowhere.txt --out s.json": "nowhere.txt does not exist",
    f"sensitivity src {DATA} --out s.json --mode sweep": "--mode sweep needs --sync-tp-size N",
    f"spd src OUT --sync-tp-size 2 --spd-fraction 1.5 {DATA}": "--spd-fraction must be above 0 and at most 1",
    f"spd src OUT --sync-tp-size 3 {DATA}": "--sync-tp-size 3 does not divide the 8 attention heads",
    "generate src -p x --tp-size 3": "--tp-size 3 does not divide the 8 attention heads",
    "generate src --prompt-file nowhere.txt --out o.jsonl": "nowhere.txt does not exist",
    "calibrate --out nowhere/c.json": "the folder",
    "key": "key.yaml: unknown key 'layuots' (did you mean 'layouts'?); known are model, out,",
    "option": "option.yaml: layouts[0]: there is no option 'laddr' (did you mean 'ladder'?)",
    "method": "adapt[0]: method is 'ful' (did you mean 'full'?), but must be one of full, lora,",
    "name": "layouts names 'hafl', but no layout has this name (did you mean 'half'?); known are half",
    "task": "eval: no task has the name 'arc_eazy' or matches it (did you mean 'arc_easy' or",
    "layers": "layouts[0]: --ladder: 2:40 is empty or out of range for a model of 4 layers",
    "ranks": "bench[0]: --tp-size 3 does not divide the 8 attention heads",
}
CHANGES = {
    "key": {"layuots": "x"},
    "option": {"layouts": [{"laddr": "all"}]},
    "method": {"adapt": [{**FULL_STAGE, "method": "ful"}]},
    "name": {"layouts": [{"name": "half", "ladder": "2:"}], "adapt": [{**FULL_STAGE, "layouts": "hafl"}]},
    "task": {"eval": {"tasks": ["arc_eazy"]}},
    "layers": {"layouts": [{"ladder": "2:40"}], "adapt": [FULL_STAGE], "bench": [{"tp_size": 2}]},
    "ranks": {"bench": [{"tp_size": 3}]},
}


def test_cheap_mistakes_are_told_before_anything_slow_is_imported(llama, tmp_path):
    invoke_well("convert", llama, tmp_path / "ladder", "--ladder", "2:", "--no-verify")
    np.save(tmp_path / "ids.npy", np.arange(3, 67).reshape(4, 16))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.yaml").write_text("task: mine\n")
    for name, changes in CHANGES.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**SWEEP, **changes}))
    before = sorted(path.name for path in tmp_path.iterdir())
    commands = [["sweep", f"{words}.yaml"] if words in CHANGES else words.split() for words in MISTAKES]
    made = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, input=json.dumps(commands), capture_output=True, text=True,
        env={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    for (said, modules), message in zip(json.loads(made.stdout), MISTAKES.values(), strict=True):
        assert message in said.replace(f"{tmp_path}/", "")
        assert len(said.splitlines()) == 1, said
        assert not HEAVY & {*modules}, message
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("task: mine\n", "mine"),
        ("tag:\n  - mine\ntask: other\n", "mine"),
        ("include: template\n", "mine"),  # which has the name, and no suffix
        ("include: ../elsewhere.yaml\n", "hidden"),
        ("include:\n  - a.yaml\n", "hidden"),
        ('"task": "m\\u0069ne"\n', "mine"),
        ("task: some (other) name\n", "some (other) name"),
        ("task: mine\n", "mi*"),
    ],
)
def test_only_what_is_certainly_no_task_is_refused(tmp_path, content, name):
    """lm-eval itself decides on the others."""
    (tmp_path / "a.yaml").write_text(content)
    (tmp_path / "template").write_text("task: mine\n")
    check_task_names(EvalOptions(("m",), (name, "arc_easy"), include_path=str(tmp_path)))
    (tmp_path / "a.yaml").write_text("task: other\n")
    with pytest.raises(UserError, match=r"no task has the name 'arc_eas' or matches it \(did you mean 'arc_easy'"):
        check_task_names(EvalOptions(("m",), ("arc_eas",), include_path=str(tmp_path)))
