import json
import os
import random
import subprocess
import sys
import venv
from itertools import islice
from pathlib import Path

import pytest

from ladderize.demo.corpus import GENRES, dataset, documents, items
from ladderize.demo.inputs import HERE, MODEL
from tests.helpers import ROOT, invoke, listing


def test_the_corpus_is_deterministic():
    assert list(documents(20, test=False, seed=4)) == list(documents(20, test=False, seed=4))
    assert list(documents(20, test=False, seed=4)) != list(documents(20, test=False, seed=5))
    assert next(iter(documents(1, test=False, seed=0))) == next(iter(documents(1, test=False, seed=0)))


@pytest.mark.parametrize("genre", GENRES)
def test_no_test_item_is_trained_on(genre):
    tested = {item.text for item in items(genre, 150, test=True)}
    rng = random.Random(7)
    trained = {item.text for item in (GENRES[genre](rng) for _ in range(5000)) if not item.in_test_split}
    assert len(tested) == 150
    assert not tested & trained
    text = "\n".join(documents(500, test=False, seed=0))
    assert not any(line in tested for line in text.splitlines())


@pytest.mark.parametrize("genre", GENRES)
def test_answers_are_right_and_among_the_choices(genre):
    for item in items(genre, 100, test=True):
        assert item.choices.count(item.answer) == 1
    rows = dataset(genre, 50)["test"]
    assert all(row["choices"][row["gold"]] == row["answer"] for row in rows)
    assert len({row["gold"] for row in rows}) == len(rows[0]["choices"])  # the right answer is not always the first


def test_too_many_items_are_refused_not_waited_for():
    with pytest.raises(ValueError, match="different items"):
        list(islice(items("arithmetic", 5000, test=True), 5000))


def test_bundled_model_is_small():
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 4_000_000
    assert (HERE / "tasks" / "agreement.yaml").is_file()


@pytest.mark.timeout(900)  # a minute, but the work of six commands: on a busy machine many times that
def test_the_quick_demo_of_the_wheel(tmp_path):
    """The wheel, in a fresh venv that borrows this environment's libraries: its demo runs, from elsewhere, and says
    what it should."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    binaries = tmp_path / "venv" / "bin"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        binaries / "python",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        wheel,
    ]
    subprocess.run(install, check=True, capture_output=True, env=environment)
    # Plain path lines come after the venv's own folder, and no .pth in the borrowed folders is processed, so that an
    # editable install of ladderize there stays out of sight.
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    where = [binaries / "python", "-c", "import ladderize; print(ladderize.__file__)"]
    found = subprocess.run(where, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert Path(found.stdout.strip()).is_relative_to(site), found.stderr
    command = [binaries / "ladderize", "demo", "--quick", "--out", tmp_path / "demo", "--json"]
    demo = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert demo.returncode == 0, demo.stderr
    document = json.loads(demo.stdout)
    models = document["models"]
    assert [model["ladderize"]["layout"] for model in models] == [
        "8 layers: dense",
        "8 layers: ladder 0:8",
        "8 layers: spd 0:8 (sync_tp_size 4)",
        "8 layers: spd 0:8 (sync_tp_size 4)",
        "8 layers: ladder 0:8",
    ]
    dense, ladder, spd, distilled, retrained = (model["ladderize"]["perplexity"]["perplexity"] for model in models)
    assert dense < 0.8 * min(ladder, spd)
    assert dense < distilled < 0.9 * spd
    assert dense < retrained < 0.9 * ladder
    assert dense > 1
    assert {"results.json", "bench-emulated-tp4.json", "bench-tp2.json"} <= set(listing(tmp_path / "demo"))
    for bench, emulated, ranks in (("bench-emulated-tp4", True, 4), ("bench-tp2", False, 2)):
        rows = document["benches"][bench]["rows"]
        assert [(row["emulated"], row["tp_size"], row["checked"]) for row in rows] == [(emulated, ranks, True)] * 3
    assert invoke("demo", "--out", tmp_path / "demo").code == 1
