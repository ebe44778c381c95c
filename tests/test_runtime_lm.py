"""lm-eval's model class on the runtime against lm-eval's HF backend: the same numbers and texts for every kind of
request, on one rank and two; and lm-eval's own command line."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from ladderize import load
from ladderize.demo.inputs import MODEL
from ladderize.errors import UserError
from ladderize.eval.backends.runtime_lm import RuntimeLM
from ladderize.lm_eval import run_lm_eval
from ladderize.modeling import load_tokenizer
from tests import warm
from tests.helpers import ROOT, clearly_chosen, edit_json, fresh_rng, make_model

WORDS = (
    "the cat cats sees see a dog and on one two plus is many green big it 3 7 ( , . end".split()  # noqa: SIM905
)
TOKENIZER = {"vocab_size": 527, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}


def save_with_tokenizer(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    return folder


def make_text(rng: np.random.Generator, least: int, most: int) -> str:
    return " ".join(rng.choice(WORDS, rng.integers(least, most)))


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def choices(rng: np.random.Generator) -> list[Instance]:
    """Questions with several answers; none in front of an answer; a space at the end; texts that do not fit."""
    found = []
    for context in [make_text(rng, 1, 12) for _ in range(4)] + [
        make_text(rng, 2, 5) + "  ",
        make_text(rng, 70, 90),
        "",
    ]:
        found += [(context, " " + make_text(rng, 1, 5)) for _ in range(3)]
    found.append((found[0][0], found[0][1]))
    found.append(("<s>" + found[0][0], found[0][1]))
    return requests("loglikelihood", found)


def texts(rng: np.random.Generator) -> list[Instance]:
    return requests("loglikelihood_rolling", [(make_text(rng, *sizes),) for sizes in ((1, 9), (40, 60), (150, 200))])


def generations(rng: np.random.Generator) -> list[Instance]:
    """Stop strings of one token and of several, none, many tokens and few, a context that has to be cut."""
    wishes = [{"until": ["e", "\n\n"], "max_gen_toks": 9}, {"until": "the", "max_gen_toks": 14, "temperature": 0.0}]
    wishes += [{"max_gen_toks": 5, "do_sample": False, "top_p": 0.5}, {"until": ["cat s", ". ", "</s>"]}]
    found = [(make_text(rng, 1, 20), {"max_gen_toks": 12, **wish}) for wish in wishes for _ in range(2)]
    return requests("generate_until", [*found, (make_text(rng, 60, 70), {"until": [" a"], "max_gen_toks": 6})])


@pytest.mark.parametrize("name", ["dense", "ladder with biases", "spd more ranks than kv heads", "mixed", "same layer"])
def test_equal_to_the_hf_backend(name, tmp_path):
    rng = fresh_rng()
    folder = save_with_tokenizer(make_model(name, **TOKENIZER), tmp_path)
    add_bos = [None, True, False][rng.integers(3)]
    hf = HFLM(pretrained=load(folder), tokenizer=load_tokenizer(folder), batch_size=1, add_bos_token=add_bos)
    asked = {"choices": choices(rng), "texts": texts(rng), "generations": generations(rng)}
    expected = {
        "choices": hf.loglikelihood(asked["choices"], disable_tqdm=True),
        "texts": hf.loglikelihood_rolling(asked["texts"], disable_tqdm=True),
        "generations": hf.generate_until(asked["generations"], disable_tqdm=True),
    }
    assert len(set(expected["generations"])) > 3
    for tp_size in (1, 2):
        settings = {"threads": 1, "add_bos_token": add_bos, "token_budget": int(rng.integers(30, 200))}
        lm = RuntimeLM(str(folder), tp_size=tp_size, batch_size=3, **settings)
        with lm.engine:
            found = lm.loglikelihood(asked["choices"], disable_tqdm=True)
            rolled = lm.loglikelihood_rolling(asked["texts"], disable_tqdm=True)
            made = lm.generate_until(asked["generations"], disable_tqdm=True)
        np.testing.assert_allclose([a for a, _ in found], [a for a, _ in expected["choices"]], atol=1e-3, rtol=0)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected["choices"]]
        np.testing.assert_allclose(rolled, expected["texts"], atol=1e-3 * 5, rtol=0)  # of up to 5 windows
        # of two tokens that are as likely the last bit of a logit decides
        assert sum(ours != theirs for ours, theirs in zip(made, expected["generations"], strict=True)) <= 1


@pytest.fixture(scope="module")
def demo_lm():
    lm = RuntimeLM(str(MODEL), dtype="float32", threads=1, batch_size=4)
    with lm.engine:
        yield lm


def test_the_real_tokens_that_a_trained_model_prefers(demo_lm):
    """Random models are never greedy; a trained one is, also across several tokens."""
    hf = HFLM(pretrained=load(MODEL, dtype="float32"), tokenizer=load_tokenizer(MODEL), batch_size=1)
    rng = fresh_rng()
    contexts = [make_text(rng, 2, 8) for _ in range(20)]
    told = hf.generate_until(requests("generate_until", [(c, {"max_gen_toks": 3, "until": []}) for c in contexts]))
    asked = requests("loglikelihood", [(c, t) for c, t in zip(contexts, told, strict=True) if t.strip()])
    found, expected = demo_lm.loglikelihood(asked), hf.loglikelihood(asked)
    # of two tokens that are as likely the last bit of a logit decides
    assert sum(ours[1] != theirs[1] for ours, theirs in zip(found, expected, strict=True)) <= 1
    assert any(greedy for _, greedy in found)


def test_samples_depend_on_the_seed_alone(demo_lm):
    asked = requests("generate_until", [("the cat", {"do_sample": True, "temperature": 1.5, "max_gen_toks": 8})] * 4)
    torch.manual_seed(int(fresh_rng().integers(1 << 30)))
    first = demo_lm.generate_until(asked)
    assert first == demo_lm.generate_until(asked)
    assert len(set(first)) > 1, "repeats of one question are to differ"
    torch.manual_seed(1 + torch.initial_seed())
    assert first != demo_lm.generate_until(asked)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"do_sample": True}, "without a temperature"),
        ({"until": {"a": 1}}, "generation_kwargs cannot be used"),
        ({"max_gen_toks": 0}, "max_gen_toks 0"),
        ({"max_gen_toks": "many"}, "generation_kwargs cannot be used"),
        ({"max_gen_toks": 512}, "leaves no room"),
    ],
)
def test_wishes_that_are_not_done_are_refused(demo_lm, wish, message):
    with pytest.raises(UserError, match=message):
        demo_lm.generate_until(requests("generate_until", [("the cat", wish)]))


def test_what_cannot_be_scored_is_refused(demo_lm):
    for context, continuation in (("the", ""), ("the", " cat" * 600)):
        with pytest.raises(UserError, match="tokens can be scored"):
            demo_lm.loglikelihood(requests("loglikelihood", [(context, continuation)]))
    with pytest.raises(UserError, match="nothing to continue"):
        demo_lm.generate_until(requests("generate_until", [("", {})]))
    with pytest.raises(UserError, match="has no argument 'peft'"):
        RuntimeLM(str(MODEL), peft="x")


def test_other_defaults_of_generation_are_refused(tmp_path):
    folder = save_with_tokenizer(make_model("dense", **TOKENIZER), tmp_path)
    edit_json(folder / "generation_config.json", repetition_penalty=1.1)
    lm = RuntimeLM(str(folder), threads=1)
    with lm.engine, pytest.raises(UserError, match="generation_config.json sets repetition_penalty"):
        lm.generate_until(requests("generate_until", [("the", {})]))


# ---- lm-eval's own command line ----


def is_clear(model, tokenizer, row: dict) -> bool:
    """Whether rounding does not decide how the model goes on, nor which of a row's answers it finds the likeliest."""
    ids = tokenizer(row["q"])["input_ids"]
    made = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0, len(ids) :]
    sums = []
    for answer in row["a"]:
        whole = tokenizer(f"{row['q']} {answer}")["input_ids"]
        with torch.no_grad():
            told = model(torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
        sums.append(told[range(len(whole) - 1), whole[1:]][len(ids) - 1 :].sum())
    for values in (torch.stack(sums), torch.stack(sums) / torch.tensor([len(answer) for answer in row["a"]])):
        best, second, _ = values.sort(descending=True).values
        if best - second < 1e-3:
            return False
    return clearly_chosen(model, ids, made.tolist())


@pytest.fixture
def tasks(tmp_path) -> Path:
    """A folder with one task of each kind, for --include_path."""
    rng, rows = fresh_rng(), []
    model, tokenizer = load(MODEL, dtype="float32"), load_tokenizer(MODEL)
    while len(rows) < 7:
        row = {"q": make_text(rng, 2, 9), "a": [make_text(rng, 1, 4) for _ in range(3)], "label": int(rng.integers(3))}
        if is_clear(model, tokenizer, row):
            rows.append(row)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
              "test_split": "test"}  # fmt: skip
    for name, own in {
        "own_choice": {"output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{a}}",
                       "doc_to_target": "label"},
        "own_text": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}}"},
        "own_generation": {"output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{a[0]}}",
                           "generation_kwargs": {"until": ["."], "max_gen_toks": 8}},
    }.items():  # fmt: skip
        (tmp_path / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **own}))
    return tmp_path / "tasks"


def test_an_argument_of_the_model_that_is_given_twice():
    """Found by lm-eval's command line as users start it, before it reads its tasks."""
    command = ["-m", "ladderize.lm_eval", "run", "--model", "ladderize", "--tasks", "a,b", "--model_args"]
    for words in (["pretrained=a,tp_size=1,tp_size=2"], ["tp_size=1", "dtype=float32", "tp_size=1"]):
        outcome = warm.run([sys.executable, *command, *words])
        assert outcome.returncode == 2
        assert outcome.stderr == "Error: --model_args has tp_size 2 times; leave one\n"


def test_lm_evals_command_line(tasks, tmp_path, monkeypatch):
    """Against lm-eval's function with its own model. Its thousands of tasks, which it reads for many seconds, are left
    out."""
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(tmp_path / "no tasks" / "manager.py"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    names, arguments = "own_choice,own_text,own_generation", f"pretrained={MODEL},dtype=float32"
    own = ["--model", "ladderize", "--model_args", f"{arguments},tp_size=2,threads=1", "--batch_size", "4"]
    more = ["--tasks", names, "--include_path", str(tasks), "--log_samples", "--output_path", str(tmp_path / "ours")]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["lm_eval", "run", *own, *more])
        run_lm_eval()
    (path,) = tmp_path.rglob("results_*.json")
    ours = json.loads(path.read_text())
    manager = TaskManager(include_path=str(tasks))
    how = {"tasks": names.split(","), "task_manager": manager, "device": "cpu", "log_samples": True}
    theirs = simple_evaluate(model="hf", model_args=arguments, **how)
    assert ours["config"]["model"] == "ladderize"
    assert ours["results"].keys() == theirs["results"].keys() == set(names.split(","))
    for task, metrics in theirs["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                assert ours["results"][task][metric] == pytest.approx(value, rel=1e-3), (task, metric)
    for name in ("own_generation", "own_choice"):
        (path,) = tmp_path.rglob(f"samples_{name}_*.jsonl")
        answers = [json.loads(line)["resps"] for line in path.open()]
        assert len(answers) == 7
        if name == "own_generation":
            assert answers == [sample["resps"] for sample in theirs["samples"][name]]


def test_lm_eval_finds_the_class_by_its_entry_point():
    """Releases after 0.4.13 record it as a placeholder and import the module when the model is asked for."""
    from importlib.metadata import EntryPoint

    from lm_eval.api.model import LM
    from lm_eval.api.registry import Registry

    from ladderize.lm_eval import MODEL_CLASS

    found = (ROOT / "pyproject.toml").read_text().split('[project.entry-points."lm_eval.models"]')[1].split("\n\n")[0]
    assert found.strip() == f'ladderize = "{MODEL_CLASS}"'
    registry: Registry = Registry("model", base_cls=LM)
    registry.register("ladderize", target=EntryPoint("ladderize", MODEL_CLASS, "lm_eval.models"))
    assert registry.get("ladderize") is RuntimeLM
