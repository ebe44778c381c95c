"""``ladderize report``: what it joins, what it claims, and what it refuses."""

import json
import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from ladderize.console import printable
from ladderize.layout import Layout
from ladderize.report.documents import find_documents
from ladderize.report.join import join_documents
from ladderize.report.page import build_page
from tests.helpers import change_json, edit_json, fresh_rng, invoke, invoke_well, one_sentence
from tests.report_documents import (
    Written,
    bench_document,
    eval_document,
    layouts,
    write_document,
    write_metrics,
    write_sweep,
)

POINTS = {"ladder": -0.3, "spd": -20.0, "both": -35.0}  # from dense: one model slightly and two far worse
SPEEDUPS = {"ladder": 1.2, "spd": 1.3, "both": 1.5}  # all faster


def write_files(folder, *, points=POINTS, speedups=SPEEDUPS, models=None, spread=0.5, **bench):
    """results.json and bench.json of the four layouts, dense first, or of other models; None: no such file."""
    models = models or layouts()
    if points is not None:
        write_document(folder / "results.json", eval_document(models, points, spread=spread))
    if speedups is not None:
        write_document(folder / "bench.json", bench_document(models, speedups, **bench))
    return folder


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path)


def page_of(*paths, margin=None):
    return build_page(join_documents(find_documents(list(paths)), margin))


def answer_of(*paths, margin=None):
    """The whole answer as text, and the model that is recommended."""
    answer = page_of(*paths, margin=margin).answer
    return " ".join([answer.headline, *answer.sentences]), answer.best.name if answer.best else None


def rows_of(page, name):
    (plot,) = (plot for plot in page.plots if plot.name == name)
    return plot.panels[0].data.values


def models_of(page):
    """The table of all models: name -> column -> text."""
    return {row["model"]: row for row in page.models.rows}


def refused(*arguments, out):
    return one_sentence(invoke("report", *arguments, "--out", out / "page.html"))


def test_the_fastest_within_the_margin_is_recommended(files):
    text, best = answer_of(files)
    assert best == "ladder"
    assert text.startswith("ladder (ladder 0:4) is at most 1 point less accurate than dense and 1.20\u00d7 as fast:")
    write_document(files / "results.json", eval_document(layouts(), POINTS, margin=50.0))
    assert answer_of(files, margin=50.0)[1] == "both"


def test_few_questions_show_nothing(tmp_path):
    """Though the interval of a model that never answers otherwise than dense lies within the margin."""
    dense = fresh_rng().random(320) < 0.7
    write_sweep(tmp_path / "sweep", {"dense": dense, "ladder": dense})
    text, best = answer_of(tmp_path / "sweep", margin=1.0)
    assert best is None
    assert text.startswith("No layout is shown to be within 1 point of dense.")
    assert answer_of(tmp_path / "sweep", margin=3.0)[1] == "ladder"


def test_the_nearest_is_named_where_no_margin_is_shown(tmp_path):
    """By divergence, whatever perplexity and tasks say; without, by perplexity."""
    rng = fresh_rng()
    names = list(POINTS)
    divergence, points = ({name: float(rng.uniform(0.01, 0.3)) for name in names} for _ in range(2))
    nearest = {name: min(names, key=known.get) for name, known in (("divergence", divergence), ("perplexity", points))}
    write_files(tmp_path, points={name: -value for name, value in points.items()}, speedups=None, spread=5.0)

    def set_divergence(document):
        for one in document["comparisons"]:
            one["predictions"]["mean_kl"] = divergence[one["other"].removeprefix("models/")]

    change_json(tmp_path / "results.json", set_divergence)
    text, best = answer_of(tmp_path)
    assert best is None  # whatever the points: the interval holds the margin
    assert "no loss" not in text.lower()
    assert f"The nearest to dense is {nearest['divergence']} " in text
    assert f"KL {divergence[nearest['divergence']]:.4f} (" in text
    change_json(tmp_path / "results.json", lambda d: [one.update(predictions=None) for one in d["comparisons"]])
    assert f"The nearest to dense is {nearest['perplexity']} " in answer_of(tmp_path)[0]


def test_a_speed_up_that_no_interval_shows_is_none(tmp_path):
    """Its interval holds 1, or too few rounds give no interval."""
    write_files(tmp_path, points={**POINTS, "ladder": 0.1}, speedups={**SPEEDUPS, "ladder": 1.02}, spread=0.05)
    for _ in range(2):
        text, best = answer_of(tmp_path)
        assert best is None
        assert "no layout within that is shown to be faster in any setting" in text
        change_json(tmp_path / "bench.json", lambda d: d["options"].update(repeat=2))
    assert "no interval: too few rounds" in answer_of(tmp_path)[0]


def test_times_in_vllm_are_settings_of_their_own(files):
    document = bench_document(layouts(), {name: 2 * value for name, value in SPEEDUPS.items()})
    write_document(files / "bench-vllm.json", {**document, "engine": "vllm", "messages": "gloo"})
    assert answer_of(files)[1] == "ladder"
    (speed,) = (plot for plot in page_of(files).plots if plot.name == "speed")
    assert sorted("(vLLM, cpu)" in panel.title for panel in speed.panels) == [False, True]


def test_the_share_of_the_bandwidth_is_in_the_table(files):
    column = "measured decode, of bandwidth"
    assert column not in models_of(page_of(files))["dense"]
    read = {"decode_read_bytes": 19_260_000_000, "bandwidth_share": 0.5249}
    change_json(files / "bench.json", lambda d: [row.update(read) for row in d["rows"]])
    assert models_of(page_of(files))["dense"][column] == "52 % (19.26 GB)"


def test_times_of_random_weights_are_never_joined_to_an_accuracy(files):
    change_json(files / "bench.json", lambda d: [row.update(weights="random") for row in d["rows"]])
    page = page_of(files)
    assert "speed was not measured" in page.answer.headline
    assert "Random weights: only the times mean something." in next(p for p in page.plots if p.name == "speed").caption


def test_each_accuracy_is_over_the_tasks_of_its_difference(tmp_path):
    """Dense's over its own tasks. What the others have in common with it may be less, and is said."""
    right = {(name, task): fresh_rng().random(90) < 0.6 for name in ("dense", "ladder", "spd") for task in ("a", "b")}
    paths = [Written(tmp_path, name) for name in ("dense", "ladder", "spd")]
    for name, task in [key for key in right if key != ("spd", "b")]:
        next(path for path in paths if path.name == name).task(task, {"acc": right[name, task].astype(float).tolist()})
    page = page_of(*(path.write() for path in paths))
    means = {key: 100 * values.mean() for key, values in right.items()}
    expected = {name: (means[name, "a"] + means[name, "b"]) / 2 for name in ("dense", "ladder")}
    expected["spd"] = means["spd", "a"]
    assert {name: row["accuracy"] for name, row in models_of(page).items()} == {
        name: f"{value:.1f} %" for name, value in expected.items()
    }
    assert page.answer.sentences[0] == "Not evaluated on b: spd. Points are over the tasks that dense has in common."


def test_perplexities_and_their_changes_against_a_bootstrap(tmp_path):
    """In the table and in the plot: intervals are of the change from dense, in pairs, and no perplexity has another."""
    rng = fresh_rng()
    tokens = rng.integers(60, 200, 40)
    nlls = {"dense": rng.normal(3, 0.3, 40) * tokens}
    nlls["ladder"] = nlls["dense"] + rng.normal(0.05, 0.02, 40) * tokens
    written = [Written(tmp_path, name).perplexity(nll, tokens) for name, nll in nlls.items()]
    for one in written:
        one.model |= {"layout": str(layouts()[one.name]), **layouts()[one.name].to_config()}
    write_document(tmp_path / "bench.json", bench_document({name: layouts()[name] for name in nlls}, SPEEDUPS))
    page = page_of(*(one.write() for one in written), tmp_path / "bench.json")
    draws = rng.integers(0, 40, (9999, 40))
    resampled = {name: np.exp(nll[draws].sum(1) / tokens[draws].sum(1)) for name, nll in nlls.items()}
    low, high = np.quantile(resampled["ladder"] - resampled["dense"], [0.025, 0.975])
    dense, ladder = (math.exp(nll.sum() / tokens.sum()) for nll in nlls.values())
    rows = models_of(page)
    assert [rows[name]["perplexity"] for name in nlls] == [f"{dense:.3f}", f"{ladder:.3f}"]
    number = re.compile(r"\+(\S+) \(\+(\S+) to \+(\S+)\)").fullmatch(rows["ladder"]["change of perplexity"])
    near = 0.1 * (high - low)
    assert [*map(float, number.groups())] == pytest.approx([ladder - dense, low, high], abs=near)
    assert rows["dense"]["change of perplexity"] == "0.000"
    drawn = {row["name"]: [row["y"], row["y_low"], row["y_high"]] for row in rows_of(page, "tradeoff-perplexity")}
    assert drawn["dense"] == [0.0, None, None]
    ratios = [ladder / dense, 1 + low / dense, 1 + high / dense]
    assert drawn["ladder"] == pytest.approx(np.log(ratios).tolist(), abs=near / dense)


@pytest.mark.parametrize(
    ("case", "note"),
    [("timed alone", "aligned those of older."), ("timed itself", None), ("other virtual ranks", None)],
)
def test_a_model_that_was_not_timed_has_the_times_of_its_layout(tmp_path, case, note):
    """Those of a model that is in no evaluation, and which one is said. A model's own times go first."""
    rng = fresh_rng()
    dense, layout = layouts()["dense"], layouts()[rng.choice(["ladder", "spd", "both"])]
    if case == "other virtual ranks":
        layout = layouts()["spd"]
    speedups = {name: float(rng.uniform(1.1, 9.0)) for name in ("older", "newer", "aligned")}
    write_files(tmp_path, points={"aligned": -0.2}, speedups=None, models={"dense": dense, "aligned": layout})
    timed = {"dense": dense, "older": replace(layout, sync_tp_size=4) if case == "other virtual ranks" else layout}
    timed |= dict.fromkeys({"timed itself": ["newer", "aligned"]}.get(case, []), layout)
    write_files(tmp_path, points=None, speedups=speedups, models=timed)
    page = page_of(tmp_path)
    own = speedups["aligned" if case == "timed itself" else "older"]
    known = case != "other virtual ranks"
    assert (f"dense and {own:.2f}\u00d7 as fast" if known else "Its speed was not measured.") in page.answer.headline
    assert page.models.note.endswith(note or "")
    assert bool(page.models.note) == (note is not None)
    assert models_of(page)["aligned"].get("measured speed-up", "").endswith(" *") == (note is not None)


def test_a_model_that_failed_the_check_has_no_times(tmp_path):
    """Not those of another model with its layout and size either."""
    models = layouts() | {"twin": layouts()["ladder"]}
    write_document(tmp_path / "results.json", eval_document(models, POINTS | {"twin": -0.3}))
    bench = bench_document(layouts(), SPEEDUPS)
    for failed in ({}, {"models/twin": "a logit is 9 off"}):
        write_document(tmp_path / "bench.json", bench | {"failed": failed})
        content = join_documents(find_documents([tmp_path]))
        (twin,) = (one for one in content.models if one.model == "models/twin")
        why = "bench.json: a logit is 9 off, so it was not timed"
        assert (bool(twin.timings), twin.failure) == ((False, why) if failed else (True, None))
        assert (why in content.remarks) == bool(failed)
        assert all(one.timings for one in content.models if one is not twin)


@pytest.fixture
def sweep(tmp_path):
    """Three points of one layout, and one of another: what was retrained longer is better, and near the dense model."""
    rng = fresh_rng()
    dense = rng.random(3000) < 0.7
    changed = {"dense": 0.0, "ladder": 0.4, "ladder-1000": 0.1, "ladder-9000": 0.002, "spd": 0.5}
    write_sweep(tmp_path / "sweep", {name: dense & (rng.random(3000) > share) for name, share in changed.items()})
    return tmp_path / "sweep"


def test_the_page_of_a_sweep(sweep):
    """Its points are compared in pairs, from the stored samples; the recommended one has the times of its layout; there
    is a plot for everything that a sweep measures."""
    page = page_of(sweep)
    assert page.answer.best.name == "ladder-9000"
    assert "at most 2 points less accurate than dense and 1.25" in page.answer.headline  # the sweep's margin
    rows = rows_of(page, "tradeoff")
    assert {row["name"] for row in rows} == {"dense", "ladder", "ladder-1000", "ladder-9000", "spd"}
    (tradeoff,) = (plot for plot in page.plots if plot.name == "tradeoff")
    assert [panel.title.split(", ")[1] for panel in tradeoff.panels] == ["batch 1", "batch 4"]
    assert all(row["y_low"] < row["y"] < row["y_high"] for row in rows if row["name"] != "dense")
    recovery = rows_of(page, "recovery")  # it begins at the model that was not retrained
    assert [row["tokens"] for row in recovery if row["line"] == "ladder 0:4, full"] == [0, 1000, 9000]
    assert [row["y"] for row in recovery] == sorted(row["y"] for row in recovery)
    assert {row["name"] for row in rows_of(page, "speed")} == {"ladder", "spd"}  # one model of a layout
    plots = {"tradeoff", "tasks", "speed", "time-prefill", "time-decode", "recovery", "heldout"}
    assert {plot.name for plot in page.plots} == plots
    other = shutil.copytree(sweep, sweep.with_name("other"))  # points that two sweeps share are shown once
    assert sorted(models_of(page_of(sweep, other))) == ["dense", "ladder", "ladder-1000", "ladder-9000", "spd"]


def test_of_one_layout_the_most_accurate_is_recommended(tmp_path):
    """All are equally fast. Training may teach what dense could have learned, too; an alignment teaches nothing."""
    chance = fresh_rng().random(4000)
    for best, trained in (("ladder-500-align", 0.696), ("ladder-900-align+full", 0.95)):
        shares = {"dense": 0.7, "ladder": 0.694, "ladder-500-align": 0.703, "ladder-900-align+full": trained}
        write_sweep(tmp_path / best, {name: chance < share for name, share in shares.items()})
        page = page_of(tmp_path / best)
        assert page.answer.best.name == best
        assert ("may come of the text" in " ".join(page.answer.sentences)) == (trained == 0.95)
    stages = [row["stage"] for row in rows_of(page, "tradeoff")]
    assert stages == ["as converted", "as converted", "aligned", "trained"]


def test_a_sweep_that_is_not_complete_says_so(sweep):
    failed = {"stage": "convert", "output": "stages/x", "status": "failed", "message": "no <disk> left"}
    change_json(sweep / "sweep.json", lambda d: d["points"][4].update(results=None, model=None, stages=[failed]))
    edit_json(sweep / "sweep.json", complete=False)
    page = page_of(sweep)
    assert "The sweep is not complete. `ladderize sweep" in " ".join(page.answer.sentences)
    assert models_of(page)["spd (sweep)"]["failed"] == "no <disk> left"  # bench.json has another one of this name
    assert page.answer.sentences[0].startswith("Not evaluated on any task: spd (sweep), spd (models/spd).")


@pytest.mark.parametrize("name", ["../outside.json", "/etc/hostname", "a\0b", "stages/none/results.json"])
def test_a_sweep_stays_in_its_folder(sweep, name):
    write_document(sweep.parent / "outside.json", bench_document(layouts(), SPEEDUPS))
    edit_json(sweep / "sweep.json", benches=[name])
    message = refused(sweep, out=sweep)
    assert ("outside of its folder" in message) == (not name.startswith("stages"))
    assert printable(name) in message


def test_a_retraining_is_drawn_by_its_divergence(tmp_path):
    """Validations by the tokens that were read by then, without those that are no numbers."""
    write_metrics(tmp_path / "adapted", [9.0, float("nan"), float("inf"), 4.0])
    rows = rows_of(page_of(tmp_path), "heldout")
    assert [(row["step"], row["tokens"]) for row in rows] == [(0, 0), (3, 1500)]
    assert [row["y"] for row in rows] == pytest.approx([math.log(9 / 3.4), math.log(4 / 3.4)])
    # one that had no teacher has no divergence; folders of the same name are told apart by those above them
    write_metrics(tmp_path / "other" / "adapted", [9.0, 5.0], dense=None)
    page = page_of(tmp_path / "adapted", tmp_path / "other")
    rows = [(row["name"], row["y"]) for row in rows_of(page, "heldout")]
    assert rows[1:] == [(f"{tmp_path.name}/adapted", 4.0), ("other/adapted", 9.0), ("other/adapted", 5.0)]
    assert "Dashed: the dense model, 3.4." in page.plots[-1].caption


class Reader(HTMLParser):
    """The elements of a page with their attributes, and the text behind each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = [("", {})]
        self.texts: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.setdefault(self.elements[-1][0], []).append(data)


def test_page_markdown_and_pictures(files):
    """The page asks the network for nothing, runs no script, and is the same for the same documents."""
    arguments = ("report", files, "--out", files / "p.html", "--markdown", files / "card.md", "--json")
    outcome = invoke(*arguments)
    text = (files / "p.html").read_text()
    assert invoke(*arguments).stdout == outcome.stdout
    assert (files / "p.html").read_text() == text
    assert "<title>Accuracy against speed: models/dense</title>" in text
    assert "<dd>arc, hellaswag</dd>" in text
    page = Reader(text)
    for tag, attributes in page.elements:
        assert tag not in ("script", "iframe", "object", "embed", "base")
        for name in ("src", "href", "data", "action", "xlink:href"):
            assert not re.match(r"(?i)\s*(https?:)?//", attributes.get(name) or ""), (tag, attributes)
    assert not any("@import" in style or "url(" in style for style in page.texts["style"])
    assert len(text.encode()) < 1_000_000
    summary = json.loads(outcome.stdout)
    assert summary["best"] == "models/ladder"
    card = (files / "card.md").read_text()
    assert summary["headline"] in text
    assert summary["headline"] in card
    links = re.findall(r"\[[^\]]*\]\(([^)]*\.png)\)", card)
    assert len(set(links)) > 3
    for link in links:
        assert (files / link).read_bytes().startswith(b"\x89PNG")
        drawn = (files / link).with_suffix(".svg").read_text()
        assert drawn.startswith("<svg")
    assert set(summary["files"]) >= {str(files / link) for link in links}
    rows = [line for line in card.splitlines() if line.startswith("| ")]
    assert len({line.count("|") for line in rows}) == 1


def test_what_documents_say_is_text_and_nothing_else(tmp_path):
    evil = '"><script>window.bad=1</script><img src=x onerror=bad()>${1}{{7*7}}|`\x1b[31m\x07\u202e'
    models = {"dense": Layout.dense(4), evil: Layout.from_layers(4, ladder=range(4))}
    write_files(tmp_path, points={evil: -0.2}, speedups={evil: 1.3}, models=models)
    invoke_well("report", tmp_path, "--out", tmp_path / "p.html", "--markdown", tmp_path / "p.md")
    page = Reader((tmp_path / "p.html").read_text())
    assert not [attributes for tag, attributes in page.elements if tag == "img" or "onerror" in attributes]
    assert "script" not in page.texts
    for name in ("p.html", "p.md"):
        assert not re.search("[\x07\x1b\u202e]", (tmp_path / name).read_text())
    assert not re.search("<script|<img", (tmp_path / "p.md").read_text())


ROWS = bench_document(layouts(), SPEEDUPS)["rows"]
OTHERS = [{**row, "model": f"others/{row['model']}"} for row in ROWS]
CHANGED = [ROWS[0], {**ROWS[1], "attention_sync": ["blocking", *ROWS[1]["attention_sync"][1:]]}]
REFUSALS = {
    "accuracies are compared with models/dense": {"bench.json": {"rows": ROWS[1:]}},
    "speed-ups over others/models/dense": {"bench.json": {"rows": OTHERS}},
    "another layout": {"bench.json": {"rows": CHANGED}},
    "two rows of models/dense": {"bench.json": {"rows": [*ROWS, ROWS[0]]}},
    "both evaluate models/ladder": {"results.json": {}, "results-2.json": {}},
}


@pytest.mark.parametrize("message", REFUSALS)
def test_documents_that_do_not_belong_together_are_refused(files, message):
    write_document(files / "results-2.json", eval_document({"ladder": layouts()["ladder"]}, {}))
    for name in {"results-2.json"} - {*REFUSALS[message]}:
        (files / name).unlink()
    for name, change in REFUSALS[message].items():
        edit_json(files / name, **change)
    assert message in refused(files, out=files)
