"""The rules of the house: who may import whom, no import-time work, what the runtime does not need."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

PACKAGE = ROOT / "ladderize"
LEAVES = {"layout", "console", "files", "modeling", "ranks", "data", "figure", "memory"}
MAY_IMPORT = {
    "convert": LEAVES | {"convert"},
    "runtime": LEAVES | {"convert", "runtime"},
    "blocks": LEAVES | {"convert"},
    "eval": LEAVES | {"blocks", "convert", "runtime", "eval"},
    "adapt": LEAVES | {"blocks", "convert", "adapt", "eval.perplexity", "eval.results"},
    "demo": LEAVES | {"blocks", "convert", "runtime", "eval", "adapt", "workflows", "demo"},
    "workflows": LEAVES | {"blocks", "convert", "runtime", "eval", "adapt", "workflows"},
    "commands": LEAVES | {"blocks", "convert", "runtime", "eval", "adapt", "workflows", "demo", "commands"},
    "cli": LEAVES | {"commands"},
    **dict.fromkeys(LEAVES, LEAVES),
}
# load and register hand out the model class, which lives beside the converter that copies it
EXCEPTIONS = {("modeling", "convert.remote_code")}


def imports_of(path: Path) -> set[str]:
    """The modules of ladderize that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {
                f"{node.module}.{alias.name}" if node.module == "ladderize" else node.module for alias in node.names
            }
    return {name.removeprefix("ladderize.") for name in found if name.startswith("ladderize.")} - {"__version__"}


def sources():
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.name not in ("__init__.py", "__main__.py")]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_import_rules(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    imported = imports_of(path)
    if "remote_code" in parts:
        tree = ast.parse(path.read_text())
        roots = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        roots |= {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level == 0}
        assert roots <= {"torch", "transformers"}
        return
    for name in imported:
        allowed = any(name == rule or name.startswith(rule + ".") for rule in MAY_IMPORT[parts[0]])
        excepted = any(parts[0] == who and name.startswith(what) for who, what in EXCEPTIONS)
        assert allowed or excepted, f"{'/'.join(parts)} must not import ladderize.{name}"


def test_every_module_has_a_rule():
    assert {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in sources()} <= set(MAY_IMPORT)


def test_help_is_instant_and_imports_no_torch():
    code = (
        "import sys; sys.argv = ['ladderize', '--help']\nfrom ladderize.cli import main\ntry: main()\nexcept"
        " SystemExit: pass\n"
    )
    code += "assert not {'torch', 'transformers', 'lm_eval', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_version_and_module_entry_point():
    result = subprocess.run([sys.executable, "-m", "ladderize", "--version"], capture_output=True, text=True)
    from ladderize import __version__

    assert result.stdout == f"ladderize {__version__}\n"


def test_the_runtime_needs_neither_lm_eval_nor_datasets(tmp_path):
    """A GPU machine without them runs generate and bench; matplotlib and peft are not needed either."""
    arguments = [
        "ladderize",
        "bench",
        str(PACKAGE / "demo" / "model"),
        "--prompt-len",
        "4",
        "--output-len",
        "3",
        "--repeat",
        "1",
    ]
    arguments += ["--no-check", "--out", str(tmp_path / "bench.json")]
    script = (
        "import sys\n"
        "for name in ('lm_eval', 'datasets', 'peft', 'accelerate', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        f"sys.argv = {arguments!r}\n"
        "from ladderize.cli import main\n"
        "main()\n"
    )
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert outcome.returncode == 0, outcome.stderr
    assert (tmp_path / "bench.json").is_file()
