import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from ladderize.demo.command import demo_folder, write_inputs
from ladderize.demo.corpus import GENRES, dataset, documents, items
from ladderize.sweep.sweep_file import read_sweep
from tests.helpers import ROOT, invoke


@pytest.mark.parametrize("genre", GENRES)
def test_no_test_item_is_trained_on(genre):
    tested = {item.text for item in items(genre, 150, test=True)}
    assert len(tested) == 150
    text = list(documents(500, test=False, seed=4))
    assert text == list(documents(500, test=False, seed=4)) != list(documents(500, test=False, seed=5))
    assert not any(line in tested for document in text for line in document.splitlines())


@pytest.mark.parametrize("genre", GENRES)
def test_answers_are_right_and_among_the_choices(genre):
    for item in items(genre, 100, test=True):
        assert item.choices.count(item.answer) == 1
    rows = dataset(genre, 50)["test"]
    assert all(row["choices"][row["gold"]] == row["answer"] for row in rows)
    assert len({row["gold"] for row in rows}) == len(rows[0]["choices"])  # the right answer is not always the first


def test_the_quick_demo_of_the_wheel(tmp_path):
    """The wheel, in a fresh venv that borrows this environment's libraries: its demo runs, from elsewhere, and says
    what it should."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    binaries = tmp_path / "venv" / "bin"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    pip = [sys.executable, "-m", "pip", "--python", binaries / "python"]
    install = [*pip, "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True, env=environment)
    # Plain path lines come after the venv's own folder, and no .pth in the borrowed folders is processed, so that an
    # editable install of ladderize there stays out of sight.
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    where = [binaries / "python", "-c", "import ladderize; print(ladderize.__file__)"]
    found = subprocess.run(where, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert Path(found.stdout.strip()).is_relative_to(site), found.stderr
    command = [binaries / "ladderize", "demo", "--quick", "--out", "demo", "--json"]
    demo = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert demo.returncode == 0, demo.stderr
    document = json.loads(demo.stdout)
    points = {point["name"]: point for point in document["sweep"]["points"]}
    assert list(points) == ["dense", "ladder-all", "ladder-all+full", "spd-all"]
    folder = tmp_path / "demo"
    results = [json.loads((folder / "sweep" / point["results"]).read_text()) for point in points.values()]
    models = [result["models"][0]["ladderize"] for result in results]
    dense, ladder, retrained, spd = (model["perplexity"]["perplexity"] for model in models)
    assert 1 < dense < 0.9 * min(ladder, spd)
    assert dense < retrained < 0.5 * ladder
    emulated, measured = (json.loads((folder / "sweep" / name).read_text()) for name in document["sweep"]["benches"])
    for bench, is_emulated in ((emulated, True), (measured, False)):
        assert [row["tp_size"] for row in bench["rows"]] == [2] * 3
        assert (bench["link"] is not None) == is_emulated
        assert set(bench["checks"]) == {row["model"] for row in bench["rows"]}
    assert {"ladder-all", "ladder-all-full", "spd-all"} <= {path.name for path in folder.iterdir() if path.is_dir()}
    page = folder / "report.html"
    assert document["report"]["headline"] in page.read_text()


def test_the_demo_takes_no_other_folder(tmp_path):
    (tmp_path / "file").touch()
    outcome = invoke("demo", "--out", tmp_path)
    assert outcome.code == 1
    assert "not an empty folder" in outcome.stderr


def test_an_earlier_demo_goes_on_with_what_it_has(tmp_path):
    """What is there is kept, also where a killed run left a part of it; the sweep.yaml is that of this run. Two
    processes run each of its layouts, so that nobody meets one first that is slower for a reason of this machine."""
    (tmp_path / "sweep.yaml").write_text("# ladderize demo\n")
    (tmp_path / ".dense.unfinished").mkdir()
    for quick in (True, False):
        spec = read_sweep(write_inputs(demo_folder(tmp_path), quick=quick))
        assert spec.model == str(tmp_path / "dense")
        assert {layout.recipe.sync_tp_size for layout in spec.layouts} <= {None, 2}
        assert [(choice.options.tp_size, choice.options.emulate_tp) for choice in spec.bench] == [(1, 2), (2, None)]
        if quick:
            (tmp_path / "dense" / "mine").touch()
    assert (tmp_path / "dense" / "mine").exists()
    assert len(spec.layouts) == 4
    assert not list(tmp_path.glob(".*"))
