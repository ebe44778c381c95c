"""`ladderize compare`: stored evaluations in pairs; what was not asked alike is refused."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from statsmodels.stats.contingency_tables import mcnemar

import ladderize
from ladderize import UserError
from ladderize.eval import compare as comparing
from ladderize.eval.compare import bootstrapped, estimate_mean, verdict_of
from ladderize.eval.results import Predictions
from tests.helpers import change_json, fresh_rng, invoke, one_sentence
from tests.report_documents import Written


def coins(count: int, right: float) -> list[float]:
    return (np.random.random(count) < right).astype(float).tolist()


def changed(values: list[float], worse: float, better: float) -> list[float]:
    turned = np.random.random(len(values))
    return [
        float(value if (turn >= worse if value else turn >= better) else 1 - value)
        for value, turn in zip(values, turned, strict=True)
    ]


@pytest.fixture
def pair(tmp_path):
    dense, other = Written(tmp_path, "dense"), Written(tmp_path, "other")
    for task, count in (("alpha", 300), ("beta", 120)):
        answers = coins(count, 0.7)
        dense.task(task, {"acc": answers})
        other.task(task, {"acc": changed(answers, 0.2, 0.1)})
    return dense, other


def compare_files(*written: Written) -> ladderize.ComparisonDocument:
    (document,) = ladderize.compare([one.write() for one in written]).comparisons
    return document


def test_differences_flips_and_pools_are_those_of_the_answers(pair):
    document = compare_files(*pair)
    for task in document.tasks:
        ours, theirs = ({sample["doc_id"]: sample["acc"] for sample in each.samples[task.task]} for each in pair)
        lost = sorted(doc for doc in ours if ours[doc] > theirs[doc])
        gained = sorted(doc for doc in ours if ours[doc] < theirs[doc])
        assert (lost, gained, len(ours), True) == (task.right_to_wrong, task.wrong_to_right, task.samples, task.main)
        assert task.difference == pytest.approx((len(gained) - len(lost)) / len(ours))
        p = mcnemar([[0, len(lost)], [len(gained), 0]], exact=True).pvalue
        assert task.mcnemar_p == pytest.approx(p)
    overall = document.overall
    assert overall.difference == pytest.approx(np.mean([one.difference for one in document.tasks]))
    assert (overall.tasks, overall.samples) == (["alpha", "beta"], 420)
    for one in (*document.tasks, overall):
        assert one.value - one.reference_value == pytest.approx(one.difference)
        assert one.low < one.difference < one.high
    assert document == compare_files(*pair)  # seeded
    assert type(document).from_dict(json.loads(json.dumps(document.to_dict())), "x") == document


def test_what_cannot_be_compared_is_left_out_by_name(pair):
    """What is no mean, or no number; and a metric beyond 1 has no points."""
    for written in pair:
        written.task("beta", {"acc": coins(30, 0.5), "odd": coins(30, 0.5)})
        written.task("score", {"points": np.random.normal(50, 9, 80).tolist()})
        written.harness["results"]["beta"].update({"odd,none": 17.0, "bleu,none": 0.5})
        for sample in written.samples["beta"]:
            sample["bleu"] = ["a prediction", "a reference"]
            sample["metrics"].append("bleu")
    document = compare_files(*pair)
    assert [f"{one.task} {one.metric}" for one in document.tasks] == ["alpha acc", "beta acc", "score points"]
    assert document.left_out == [f"beta: {name} is no mean of numbers over the questions" for name in ("odd", "bleu")]
    assert document.overall.tasks == ["alpha", "beta"]
    assert document.tasks[-1].verdict is None


def test_fewer_errors_are_a_gain(tmp_path):
    """Of a metric where less is better the margin is on the other side."""
    errors = coins(2000, 0.3)
    dense = Written(tmp_path, "dense").task("t", {"error": errors}, higher=False)
    other = Written(tmp_path, "other").task("t", {"error": changed(errors, 0.5, 0.0)}, higher=False)
    better, worse = compare_files(dense, other).tasks[0], compare_files(other, dense).tasks[0]
    assert (better.verdict, worse.verdict) == ("shown", "worse")
    assert better.difference < 0
    assert better.wrong_to_right == worse.right_to_wrong != []
    assert not better.main


def test_the_filters_of_a_task_are_told_apart(tmp_path):
    models, filters = (Written(tmp_path, name) for name in "ab"), ("strict", "flexible")
    written = [model.task("gsm", {"exact_match": coins(60, 0.5)}, filters=filters) for model in models]
    found = compare_files(*written).tasks
    assert {one.filter for one in found} == {"strict", "flexible"}
    assert sum(one.main for one in found) == 1


def test_a_group_counts_as_one_task(tmp_path):
    """One group of two tasks of 20 and 180 samples, within another, and a task by itself."""
    dense, other = Written(tmp_path, "dense"), Written(tmp_path, "other")
    for task, count in (("small", 20), ("large", 180), ("single", 50)):
        answers = [1.0] * (count // 2) + [0.0] * (count - count // 2 - 1) + [1.0]
        dense.task(task, {"acc": answers})
        other.task(task, {"acc": changed(answers, 0.3 if task == "small" else 0.05, 0.0)})
    for written in (dense, other):
        written.harness["group_subtasks"] = {"outer": ["pair"], "pair": ["small", "large"], "single": []}
    overall = compare_files(dense, other).overall
    accs = {task: np.mean([sample["acc"] for sample in logged]) for task, logged in other.samples.items()}
    assert overall.value == pytest.approx((0.1 * accs["small"] + 0.9 * accs["large"] + accs["single"]) / 2)
    for written in (dense, other):
        written.harness["group_subtasks"] = {"outer": ["pair"], "pair": ["outer", "small"]}  # a stranger's circle
    assert compare_files(dense, other).overall.value == pytest.approx(np.mean(list(accs.values())))


def test_perplexity_is_paired_by_window(tmp_path):
    tokens = np.random.randint(50, 128, 60)
    nll = tokens * np.random.gamma(20, 0.1, 60)
    dense = Written(tmp_path, "dense").perplexity(nll, tokens)
    other = Written(tmp_path, "other").perplexity(nll * 1.02, tokens)
    measured = Predictions("models/dense", 0.05, 0.04, 0.06, 0.7, 0.9, int(tokens.sum()))
    other.model["predictions"] = measured.to_dict()
    document = compare_files(dense, other)
    found = document.perplexity
    assert found.difference == pytest.approx(found.value - found.reference_value)
    assert found.low < found.difference < found.high
    parts = [math.exp(n.sum() / tokens.sum()) * (n - n.sum() / tokens.sum() * tokens) for n in (nll, nll * 1.02)]
    stderr = math.sqrt(60 / 59 * ((parts[1] - parts[0]) ** 2).sum()) / tokens.sum()
    assert found.stderr == pytest.approx(stderr, rel=0.1)
    assert document.predictions == measured
    other.model["predictions"]["reference"] = "another"
    assert compare_files(dense, other).predictions is None


def test_what_else_differed_is_remarked(pair):
    """Other dtypes may be compared, but the difference is then not the layout's alone."""
    dense, other = pair
    other.model.update(dtype="bfloat16", backend="vllm")
    assert compare_files(dense, other).remarks == [
        "the reference was evaluated with dtype float32, the other model with bfloat16",
        "the reference was evaluated with backend hf, the other model with vllm",
    ]


def test_what_was_not_measured_alike_is_left_out_by_name(pair):
    tokens = np.full(20, 100)
    dense, other = (written.perplexity(tokens * 2.0, tokens) for written in pair)
    other.model["perplexity"]["ids_sha256"] = "zz"
    other.task("gamma", {"acc": coins(5, 0.5)})
    document = compare_files(dense, other)
    assert [compared.task for compared in document.tasks] == ["alpha", "beta"]
    assert document.perplexity is None
    assert [sentence[:10] for sentence in document.left_out] == ["gamma: onl", "perplexity"]
    for task in ("alpha", "beta"):
        del other.samples[task], other.harness["results"][task]
    with pytest.raises(UserError, match="nothing was measured alike of both"):
        compare_files(dense, other)


REFUSALS: dict[str, tuple[Any, str]] = {
    "limit": (lambda o: o.samples.update(alpha=o.samples["alpha"][:250]), "targets or prompts of 50 of 300 differ"),
    "prompt": (lambda o: o.samples["alpha"][7].update(prompt_hash="z"), "targets or prompts of 1 of 300 differ"),
    "version": (lambda o: o.harness["versions"].update(beta=2.0), "not the same version of beta: 1.0 in"),
    "generation": (
        lambda o: o.harness["configs"]["beta"].update(generation_kwargs={"max_gen_toks": 9}),
        "not the same generation_kwargs of beta: None in",
    ),
    "twice": (lambda o: o.samples["alpha"].append(o.samples["alpha"][3]), "there are two answers to doc_id"),
    "sample": (lambda o: o.samples["alpha"][3].pop("doc_hash"), "line .* is no sample of lm-eval"),
    "none": (lambda o: o.samples.update(beta=[]), "holds no samples"),
    "kept": (lambda o: o.samples.pop("beta"), "keeps no samples of beta"),
}


@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=REFUSALS)
def test_models_that_were_not_asked_the_same_are_refused(pair, change, message):
    dense, other = pair
    change(other)
    with pytest.raises(UserError, match=f"(?=.*other).*{message}"):
        compare_files(dense, other)


def point_outside(path: Path) -> None:
    (path.parent / "secret.jsonl").write_text("{}\n")
    change_json(path, lambda content: content["models"][0]["samples"].update(alpha="../../secret.jsonl"))


def link_outside(path: Path) -> None:
    file = path.with_suffix(".samples") / "alpha.jsonl"
    file.unlink()
    file.symlink_to("/etc/passwd")


BROKEN: dict[str, tuple[Any, str]] = {
    "foreign": (lambda path: path.write_text('{"a": 1}'), "it should be a results.json of ladderize eval"),
    "no file": (lambda path: (path.with_suffix(".samples") / "beta.jsonl").unlink(), "beta.jsonl is not there"),
    "path": (point_outside, "names samples of alpha outside of its folder"),
    "link": (link_outside, "outside of its folder"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_files_are_one_sentence(pair, change, message):
    dense, other = (written.write() for written in pair)
    change(other)
    assert message in one_sentence(invoke("compare", dense, other))


REPEATS = 400  # simulated evaluations for a coverage


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(comparing, "BOOTSTRAP_RESAMPLES", 999)


def answers(rng: np.random.Generator, samples: int, worse: float, better: float) -> np.ndarray:
    return rng.choice([-1.0, 0.0, 1.0], samples, p=[worse, 1 - worse - better, better])


@pytest.mark.parametrize(("samples", "worse", "better"), [(50, 0.02, 0.02), (100, 0.3, 0.1)])
def test_the_interval_of_answers_that_changed_covers(samples, worse, better):
    """Each end aims at missing in 2.5 % of evaluations; of 400, five standard errors are 4 %."""
    rng = fresh_rng()
    low, high, _ = np.array([estimate_mean([answers(rng, samples, worse, better)]) for _ in range(REPEATS)]).T
    true = better - worse
    assert np.mean(low > true) < 0.07
    assert np.mean(high < true) < 0.07
    normal = 2 * 1.96 * math.sqrt((worse + better - true**2) / samples)
    assert np.mean(high - low) < 1.2 * normal + 6 / samples


@pytest.mark.parametrize("samples", [370, 500, 600, 1000])
def test_a_lost_margin_is_rarely_shown(samples, monkeypatch):
    """A model that loses a margin of 1 point, and wins nothing, is "shown" to lose less in 2 to 7 % of evaluations: few
    answers change, so the interval's end moves in large steps. The chance is a sum over how many answers were lost."""
    monkeypatch.setattr(comparing, "BOOTSTRAP_RESAMPLES", 9999)
    chance = 0.0
    for lost in range(samples // 100):
        low, high, _ = estimate_mean([np.repeat([-1.0, 0.0], [lost, samples - lost])])
        if verdict_of(low, high, 1.0, samples) == "shown":
            chance += float(scipy.stats.binom.pmf(lost, samples, 0.01))
    assert 0.01 < chance < 0.07


@pytest.mark.parametrize("samples", [2, 20, 300, 340, 400])
def test_no_change_at_all_does_not_mean_that_there_is_none(samples, monkeypatch):
    """The exact bound at 2.5 % is that of Clopper and Pearson; this one is within a third of it. 369 answers without
    a change exclude 1 % at 97.5 %."""
    monkeypatch.setattr(comparing, "BOOTSTRAP_RESAMPLES", 9999)
    low, high, _ = estimate_mean([np.zeros(samples)])
    exact = scipy.stats.binomtest(0, samples).proportion_ci(0.95).high
    assert 0.6 * exact < high < 1.35 * exact
    assert -1.35 * exact < low < -0.6 * exact
    assert verdict_of(low, high, 1.0, samples) == ("shown" if samples == 400 else "not shown")


def test_tasks_are_resampled_within_and_weigh_alike():
    """Three tasks of different sizes: the standard error of the mean over tasks, against the formula."""
    rng = fresh_rng()
    tasks = [answers(rng, samples, 0.2, 0.1) for samples in (100, 200, 400)]
    low, high, stderr = estimate_mean(tasks)
    formula = math.sqrt(sum(values.var() / len(values) for values in tasks)) / 3
    assert stderr == pytest.approx(formula, rel=0.15)
    assert high - low == pytest.approx(2 * 1.96 * formula, rel=0.2)
    assert (low, high, stderr) == estimate_mean(tasks)  # seeded


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.009, 0.02, "shown"),
        (-0.01, 0.02, "not shown"),  # the end on the margin is not above it
        (-0.03, -0.009, "not shown"),
        (-0.03, -0.011, "worse"),
    ],
)
def test_the_verdict_says_what_the_interval_shows(low, high, verdict):
    assert verdict_of(low, high, 1.0, 1000) == verdict


def test_the_interval_of_a_ratio_of_sums_covers():
    """As of a perplexity or a KL over windows of several lengths."""
    rng = fresh_rng()

    def mean(sums, tokens, axis=-1):
        return sums.sum(axis) / tokens.sum(axis)

    covered = 0
    for _ in range(REPEATS):
        tokens = rng.integers(60, 130, 50).astype(float)
        sums = tokens * rng.normal(0.05, 0.02, 50)
        low, high, stderr = bootstrapped(mean, sums, tokens)
        left = [(sums.sum() - sums[i]) / (tokens.sum() - tokens[i]) for i in range(50)]
        assert stderr == pytest.approx(math.sqrt(49 * np.var(left)), rel=0.2)  # the jackknife's
        covered += low <= 0.05 <= high
    assert covered / REPEATS > 0.88
