"""Perplexity against a plain loop, lm-eval through our command against lm-eval by itself, and the errors of `eval`."""

import json
import math
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from ladderize import EvalOptions, compare, convert_checkpoint, evaluate, load
from ladderize.convert.recipe import Recipe
from ladderize.demo.command import MODEL, TASKS, write_documents
from ladderize.demo.corpus import documents
from ladderize.errors import UserError
from ladderize.eval import likelihoods, tasks
from ladderize.eval.likelihoods import LikelihoodLM
from ladderize.eval.model import HFModel
from ladderize.eval.results import EvalResults, perplexity_from_nlls
from ladderize.eval.table import result_rows
from ladderize.eval.text import score_windows
from ladderize.modeling import load_tokenizer
from ladderize.ranks.group import Ranks
from tests.helpers import (
    FAMILIES,
    LAYOUTS,
    SHAPE,
    STORIES,
    edit_tensors,
    fresh_rng,
    invoke,
    invoke_json,
    listing,
    make_model,
    refusal,
    save_llama,
)
from tests.oracle import Oracle


@pytest.fixture(scope="module", autouse=True)
def tasks_of_lm_eval(tmp_path_factory):
    """One task, ``theirs``, in place of lm-eval's thousands, which it reads for many seconds."""
    folder = shutil.copytree(TASKS, tmp_path_factory.mktemp("lm_eval") / "tasks")
    for path in folder.glob("*.yaml"):
        path.unlink()
    text = (TASKS / "agreement.yaml").read_text()
    (folder / "theirs.yaml").write_text(text.replace("task: demo_agreement", "task: theirs"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.tasks.manager.__file__", str(folder / "manager.py"))
        yield


def nlls_of(model, windows, batch_size=8):
    return np.array([score.nll for score in score_windows(model, windows, batch_size=batch_size)])


def model_perplexity(model, windows, batch_size=8):
    return perplexity_from_nlls(nlls_of(model, windows, batch_size), windows)


def test_scores_of_windows_equal_a_plain_loop():
    model = make_model("mixed")
    rng = fresh_rng()
    windows = [rng.integers(3, 97, length) for length in (9, 9, 9, 9, 9, 7, 2)]
    oracle = Oracle(model.state_dict(), model.config)
    expected = []
    for window in windows:
        logits = oracle(torch.from_numpy(window)[None])[0][0].double().log_softmax(-1)
        expected.append(-sum(float(logits[i, window[i + 1]]) for i in range(len(window) - 1)))
    for batch_size in (1, 2, 8):
        np.testing.assert_allclose(nlls_of(model, windows, batch_size), expected, rtol=1e-4)
    result = model_perplexity(model, windows, batch_size=3)
    tokens = 5 * 8 + 6 + 1
    assert (result.tokens, result.windows, result.seq_len) == (tokens, 7, 9)
    assert math.isclose(result.perplexity, math.exp(sum(expected) / tokens), rel_tol=1e-4)


@pytest.mark.skipif(not STORIES.is_dir(), reason="../shared/fixtures is not here")
@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Recipe(dense="all"), "3.622"),
        (Recipe(ladder="-3:"), "5.761"),
        (Recipe(spd="all", sync_tp_size=2), "5.829"),
        (Recipe(spd="all", sync_tp_size=4, ladder="all"), "15.17"),
    ],
)
def test_published_perplexities(tmp_path, recipe, expected):
    """What was measured once with code of its own, to the digits that were kept."""
    convert_checkpoint(STORIES, tmp_path / "out", recipe, verify=False)
    ids = np.load(STORIES.with_name("stories260K-samples.npz"))["heldout"].astype(np.int64)
    result = model_perplexity(load(tmp_path / "out"), list(ids))
    digits = len(expected.split(".")[1])
    assert f"{result.perplexity:.{digits}f}" == expected


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    convert_checkpoint(MODEL, folder / "ladder", Recipe(ladder="all"), verify=False)
    return MODEL, folder / "ladder"


def demo(tasks: str, *more: object) -> list[object]:
    return ["--tasks", ",".join(f"demo_{name}" for name in tasks.split()), "--include-path", TASKS, *more]


def test_eval_of_two_models(pair, tmp_path):
    write_documents(tmp_path / "text.jsonl", 40, test=True, seed=2)
    text = ("--perplexity", tmp_path / "text.jsonl", "--seq-len", 64)
    how = ("--limit", 20, "--batch-size", 16, "--dtype", "float32", "--out", tmp_path / "r.json")
    document = invoke_json("eval", *pair, *demo("agreement arithmetic"), *text, *how)
    assert json.loads((tmp_path / "r.json").read_text()) == document
    dense, ladder = document["models"]
    assert ladder["ladderize"]["layout"] == "8 layers: ladder 0:8"
    correct = [model["results"]["demo_arithmetic"]["exact_match,none"] for model in (dense, ladder)]
    assert correct[0] > correct[1] + 0.3
    assert dense["ladderize"]["perplexity"]["perplexity"] < ladder["ladderize"]["perplexity"]["perplexity"]
    assert {"results", "configs", "versions", "n-shot", "n-samples", "higher_is_better"} <= set(dense)
    assert listing(tmp_path) == ["r.json", "r.samples", "text.jsonl"]
    # the files that are named are those that are there, and give the metrics that lm-eval has printed
    named = [path for entry in document["models"] for path in entry["samples"].values()]
    files = [path.relative_to(tmp_path).as_posix() for path in (tmp_path / "r.samples").rglob("*") if path.is_file()]
    assert sorted(named) == sorted(files)
    for entry in document["models"]:
        assert list(entry["samples"]) == ["demo_agreement", "demo_arithmetic"]
        for task, metric in (("demo_agreement", "acc"), ("demo_arithmetic", "exact_match")):
            lines = [json.loads(line) for line in (tmp_path / entry["samples"][task]).read_text().splitlines()]
            assert [line["doc_id"] for line in lines] == list(range(20))
            assert np.mean([line[metric] for line in lines]) == entry["results"][task][f"{metric},none"]
    results = EvalResults.from_dict(document, "r.json")
    assert results.to_dict() == {key: document[key] for key in ("options", "models", "comparisons")}
    rows = result_rows(results)
    assert [row["task"] for row in rows if row["task"]] == ["perplexity", "demo_agreement", "demo_arithmetic"]
    assert {(row["model"], row["layout"]) for row in rows} == {("model", "dense"), ("ladder", "ladder 0:8")}
    # the comparison made on the fly is that of the stored files
    assert compare([tmp_path / "r.json"]).comparisons == results.comparisons
    assert document["models"][1]["ladderize"]["predictions"]["reference"] == str(pair[0])


def test_what_cannot_be_compared_is_said_and_the_results_stay(llama, tmp_path):
    """Two vocabularies: the windows are the same ids, the predictions are not comparable."""
    other = save_llama(tmp_path / "other", vocab_size=120)
    np.save(tmp_path / "ids.npy", fresh_rng().integers(3, 90, 60))
    outcome = invoke("eval", llama, other, "--perplexity", tmp_path / "ids.npy", "--seq-len", "9", "--json")
    assert "their vocabulary has 97 tokens, and this one 120" in outcome.stderr
    (comparison,) = json.loads(outcome.stdout)["comparisons"]
    assert comparison["predictions"] is None
    assert comparison["perplexity"]["windows"] == 7


def test_the_same_as_lm_eval_by_itself(pair, tmp_path):
    """Our numbers are lm-eval's: the same model through its own loader and command-line defaults; and our samples."""
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    expected = simple_evaluate(
        model="hf", model_args={"pretrained": str(pair[0]), "dtype": "float32"},
        tasks=["demo_agreement", "demo_copying"], task_manager=manager, limit=24, batch_size=8, device="cpu",
    )  # fmt: skip
    tracker = EvaluationTracker(output_path=str(tmp_path / "theirs.json"))
    logged = expected.pop("samples")
    tracker.save_results_aggregated(results=dict(expected), samples=logged)
    for task, samples in logged.items():
        tracker.save_results_samples(task, samples)
    how = ("--limit", 24, "--dtype", "float32", "--out", tmp_path / "ours.json")
    (entry,) = invoke_json("eval", pair[0], *demo("agreement copying"), *how)["models"]
    likelihood = re.compile(r'(?<=")-?\d+\.\d+(?=")')  # what is computed together decides the last digits
    for task, path in entry["samples"].items():
        files = (tmp_path / path, tmp_path / f"samples_{task}_{tracker.date_id}.jsonl")
        own, theirs = (file.read_text() for file in files)
        assert likelihood.sub("", own) == likelihood.sub("", theirs)
        scores = ([float(score) for score in likelihood.findall(text)] for text in (own, theirs))
        np.testing.assert_allclose(*scores, rtol=1e-4)
    for task, values in expected["results"].items():
        found = entry["results"][task]
        assert all(found[key] == value for key, value in values.items() if "stderr" not in key)


def test_a_continuation_is_scored_at_its_place_beside_any_other():
    """Also where its context is another request's context and the beginning of its continuation, of which lm-eval's
    logits_cache makes one: it reads the shorter one at the place of the longer."""
    options = asked([MODEL], "demo_copying", TASKS, dtype="float32")
    lm = HFModel("demo", MODEL, options, Ranks(0, 1, torch.device("cpu"))).harness()
    pairs = [("the cat sees", " a"), ("the cat", " sees a"), ("the", " cat sees the"), ("the cat sees", " the")]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    together = lm.loglikelihood(requests, disable_tqdm=True)
    alone = [lm.loglikelihood([request], disable_tqdm=True)[0] for request in requests]
    np.testing.assert_allclose([score for score, _ in together], [score for score, _ in alone], atol=1e-4)


def asked(models, tasks, folder, **more):
    return EvalOptions(tuple(map(str, models)), tuple(tasks.split()), include_path=str(folder), **{"limit": 4, **more})


def test_a_run_goes_on_after_the_tasks_that_it_has(pair, tmp_path, monkeypatch):
    out, ran, original = tmp_path / "r.json", [], tasks.run_task
    text = tmp_path / "text.txt"
    text.write_text("\n".join(documents(4, test=True, seed=3)))
    options = asked(pair[:1], "demo_agreement demo_copying", TASKS, perplexity=str(text), out=out)

    def noted(lm, task, manager, options):
        ran.append(task)
        if task in fails:
            raise RuntimeError("killed, say")
        return original(lm, task, manager, options)

    monkeypatch.setattr(tasks, "run_task", noted)
    fails = ["demo_copying"]
    with pytest.raises(RuntimeError):
        evaluate(options)
    (saved,) = json.loads(out.read_text())["models"]
    assert list(saved["results"]) == ["demo_agreement"]
    kept = {path: (tmp_path / path).stat().st_mtime_ns for path in saved["samples"].values()}
    fails, ran = [], []
    (resumed,) = evaluate(replace(options, resume=True)).models
    assert ran == ["demo_copying"]
    assert {path: (tmp_path / path).stat().st_mtime_ns for path in kept} == kept
    (whole,) = evaluate(replace(options, out=tmp_path / "whole.json")).models
    assert resumed.reported.results == whole.reported.results
    assert set(resumed.samples) == set(whole.samples)

    # with other options or models it is not lost, and without its samples it is of no use
    for changes, message in [
        ({"limit": 3}, "r.json is of an eval with another --limit; name another --out"),
        ({"models": (str(pair[1]),)}, "r.json also has .*; name all its models"),
    ]:
        with pytest.raises(UserError, match=message):
            evaluate(replace(options, resume=True, **changes))
    (tmp_path / next(iter(kept))).unlink()
    ran = []
    evaluate(replace(options, resume=True))
    assert ran == ["demo_agreement", "demo_copying"]


def with_tag(folder, task, tag):
    copied = shutil.copytree(TASKS, folder)
    with (copied / f"{task}.yaml").open("a") as file:
        file.write(f"tag: {tag}\n")  # and of tasks that include it
    return copied


def test_a_finished_tag_is_not_run_again(pair, tmp_path, monkeypatch):
    """lm-eval's results name its tasks alone."""
    options = asked(pair[:1], "some", with_tag(tmp_path / "tasks", "copying", "some"), out=tmp_path / "r.json")
    assert {"demo_copying", "demo_last_word"} < {*evaluate(options).models[0].reported.results}
    monkeypatch.setattr(tasks, "run_task", lambda *given: pytest.fail("run again"))
    evaluate(replace(options, resume=True))


def test_patterns_name_tasks_as_in_lm_eval(tmp_path):
    """Also lm-eval's own. A task that two patterns match, or a tag and a pattern, is asked once."""
    folder = with_tag(tmp_path / "tasks", "repeating", "demo_tag")
    for names, expected in [
        ("thei* demo_?????_word *y_agreement", {"theirs", "demo_first_word", "demo_many_agreement"}),
        ("demo_re* demo_tag", {"demo_repeating"}),
    ]:
        assert {*tasks.open_tasks(asked([MODEL], names, folder)).loaded} == expected


@pytest.mark.parametrize("is_known", [True, False])
def test_an_answer_that_joins_a_token_of_its_context_is_encoded_alone(tmp_path, monkeypatch, is_known):
    """In our class and in lm-eval's own, for which the family is unknown. The others' scores are lm-eval's."""
    monkeypatch.setattr("ladderize.eval.model.find_family", lambda config: is_known or None)
    (tmp_path / "rows.jsonl").write_text('{"a": "Rep"}\n{"a": "the cat"}\n')
    (tmp_path / "joins.yaml").write_text(
        f"task: joins\ndataset_path: json\ndataset_kwargs: {{data_files: {tmp_path / 'rows.jsonl'}}}\n"
        "test_split: train\noutput_type: multiple_choice\ndoc_to_text: '{{a}}'\ndoc_to_choice: [eat, ' sees']\n"
        "doc_to_target: 0\ntarget_delimiter: ''\nmetric_list: [{metric: acc}]\nmetadata: {version: 1}\n"
    )
    how = ("--tasks", "joins", "--include-path", tmp_path, "--dtype", "float32", "--out", tmp_path / "r.json")
    outcome = invoke("eval", MODEL, *how)
    assert outcome.stderr.count("were encoded alone (1, such as 'eat' behind 'Rep')") == 1
    model, tokenizer = load(MODEL, dtype="float32"), load_tokenizer(MODEL)
    (path,) = json.loads((tmp_path / "r.json").read_text())["models"][0]["samples"].values()
    answers = [json.loads(line)["filtered_resps"] for line in (tmp_path / path).read_text().splitlines()]
    for context, texts in zip(("Rep", "the cat"), answers, strict=True):
        for choice, (score, _) in zip(("eat", " sees"), texts, strict=True):
            before, whole = (tokenizer(text)["input_ids"] for text in (context, context + choice))
            answer = whole[len(before) :] or tokenizer(choice, add_special_tokens=False)["input_ids"]
            logits = model(torch.tensor([before + answer])).logits.detach()[0, len(before) - 1 : -1].log_softmax(-1)
            expected = logits.gather(1, torch.tensor(answer)[:, None]).sum()
            assert float(score) == pytest.approx(float(expected), rel=1e-4)


def test_a_model_that_answers_nan_has_no_score(tmp_path):
    """lm-eval would take the first choice of each question."""
    broken = shutil.copytree(MODEL, tmp_path / "broken")
    edit_tensors(broken, lambda tensors: tensors["model.layers.3.mlp.down_proj.weight"][0].fill_(math.nan))
    said = refusal("eval", broken, *demo("agreement", "--limit", 4), "--out", tmp_path / "r.json")
    assert "broken: log-likelihoods of demo_agreement are NaN" in said
    assert json.loads((tmp_path / "r.json").read_text())["models"][0].get("results") is None


def test_going_on_in_another_order_replaces_no_samples(pair, tmp_path):
    """Of models whose folders have one name."""
    for name, model in zip("ab", pair, strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model").symlink_to(model)
    names, out = [tmp_path / name / "model" for name in "ab"], tmp_path / "r.json"
    (first,) = evaluate(asked(names[:1], "demo_agreement", TASKS, out=out)).models
    (kept,) = ((tmp_path / path).read_bytes() for path in first.samples.values())
    resumed = evaluate(asked(names[::-1], "demo_agreement", TASKS, out=out, resume=True)).models
    assert resumed[1].samples == first.samples
    assert [(tmp_path / path).read_bytes() for path in first.samples.values()] == [kept]
    assert resumed[0].samples != first.samples


REFUSED = {
    "": (2, "nothing to evaluate"),
    f"{MODEL} --perplexity x.txt": (2, "a model is named twice"),
    f"--tasks qqqq* --include-path {TASKS}": (1, "no task has the name 'qqqq*' or matches it"),
    f"--tasks demo_copying --include-path {TASKS} --apply-chat-template": (1, "has no chat template"),
    "--tasks a --tp-size 2": (2, "--tp-size needs --engine vllm"),
    "--tasks a --max-length 9": (2, "--max-length needs --engine vllm"),
    "--tasks a --reference x": (2, "--reference has no effect without --perplexity"),
    "--perplexity x.txt --reference x --keep-predictions y": (2, "exclude each other"),
    "--perplexity x.txt --reference x --engine vllm": (2, "vLLM does not tell the probabilities"),
    "--perplexity x.txt --device cpu --engine vllm": (2, "--device cpu has no effect on vLLM"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_options(words):
    code, message = REFUSED[words]
    assert message in refusal("eval", MODEL, *words.split(), code=code)


def test_found_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(HFModel, "__init__", lambda *_: pytest.fail("a model was loaded"))
    (tmp_path / "lost.samples").touch()
    (tmp_path / "lost.yaml").write_text(
        "task: lost\ndataset_path: nobody/nothing\noutput_type: multiple_choice\ntest_split: test\n"
        "doc_to_text: '{{a}}'\ndoc_to_choice: b\ndoc_to_target: c\nmetric_list:\n  - metric: acc\n"
    )
    lost = refusal("eval", MODEL, "--tasks", "lost", "--include-path", tmp_path)
    assert "the task 'lost' cannot be loaded, most likely because its data set is not here" in lost
    out = ("--out", tmp_path / "lost.json")
    assert "its samples belong into" in refusal("eval", MODEL, *demo("copying"), *out)
    assert "does not exist" in refusal("eval", MODEL, "/no/model", *demo("copying"))


def test_the_first_windows(tmp_path):
    ids = fresh_rng().integers(3, 400, 95)
    np.save(tmp_path / "ids.npy", ids)
    options = ("--perplexity", tmp_path / "ids.npy", "--seq-len", "10")
    windows = (), ("--windows", "3"), ("--windows", "99")
    found = [invoke_json("eval", MODEL, *options, *more)["models"][0]["ladderize"] for more in windows]
    whole, first, beyond = (model["perplexity"] for model in found)
    assert whole["window_tokens"] == [9] * 9 + [4]
    np.testing.assert_allclose(first["window_nll"], whole["window_nll"][:3], rtol=1e-4)
    assert (first["windows"], first["tokens"], first["window_tokens"]) == (3, 27, [9] * 3)
    assert math.isclose(first["perplexity"], math.exp(sum(whole["window_nll"][:3]) / 27), rel_tol=1e-4)
    assert beyond["window_nll"] == whole["window_nll"]
    assert beyond["ids_sha256"] == whole["ids_sha256"] != first["ids_sha256"]


POSITIONS = 48


def drawn_requests(vocab_size):
    """Questions with answers of 1 token and more, some too long for the model, some twice."""

    def ids(most):
        return [random.randrange(vocab_size) for _ in range(random.randint(1, most))]

    requests = []
    for number in range(9):
        context = ids(POSITIONS + 9 if number % 3 == 0 else 20)
        requests += [((str(number), str(k)), context, ids(15)) for k in range(random.randint(1, 5))]
    return [*requests, *random.sample(requests, 3)]


@pytest.mark.parametrize("model_type", ["llama", *FAMILIES])
def test_answers_are_those_of_lm_eval(model_type, monkeypatch):
    monkeypatch.setattr(likelihoods, "MOST_SHARED", random.choice([1, 40, 1024]))
    layout = random.choice(list(LAYOUTS))
    vocabulary = SHAPE["vocab_size"]
    model = make_model(layout, model_type=model_type, max_position_embeddings=POSITIONS)
    tokenizer, requests = load_tokenizer(MODEL), drawn_requests(vocabulary)
    how = {"pretrained": model, "tokenizer": tokenizer, "batch_size": random.randint(1, 7), "logits_cache": False}
    models = (backend(**how) for backend in (LikelihoodLM, HFLM))
    found, expected = (model._loglikelihood_tokens(requests, disable_tqdm=True) for model in models)
    np.testing.assert_allclose([score for score, _ in found], [score for score, _ in expected], rtol=1e-4, atol=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_the_greedy_answer_is_known():
    model = make_model("dense")
    lm = LikelihoodLM(pretrained=model, tokenizer=load_tokenizer(MODEL), batch_size=4, logits_cache=False)
    context = torch.randint(3, SHAPE["vocab_size"], (1, 9))
    greedy = model.generate(context, max_new_tokens=4, min_new_tokens=4, do_sample=False)[0, 9:].tolist()
    other = [*greedy[:3], (greedy[3] + 1) % SHAPE["vocab_size"]]
    answers = lm._loglikelihood_tokens([(("", ""), context[0].tolist(), one) for one in (greedy, other, greedy[:1])])
    assert [same for _, same in answers] == [True, False, True]


def test_the_standard_error_covers_the_truth():
    """Windows drawn from the model itself: across resamples, the stated error is about the spread of the perplexity."""
    model = make_model("dense", seed=3)
    torch.manual_seed(0)
    ids = model.generate(torch.full((640, 1), 5), max_new_tokens=11, do_sample=True, top_k=0).numpy()
    results = [model_perplexity(model, list(ids[i::40])) for i in range(40)]
    spread = np.std([result.perplexity for result in results], ddof=1)
    stated = np.mean([result.stderr for result in results])
    assert 0.5 < stated / spread < 2
    assert model_perplexity(model, list(ids[:1])).stderr is None
