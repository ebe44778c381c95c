"""The rules of the house: who may import whom, no import-time work, what the runtime does not need."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ladderize.families.registry import BY_TYPE
from tests import warm
from tests.helpers import ROOT

PACKAGE = ROOT / "ladderize"
LEAVES = {
    *("families", "layout", "choices", "errors", "console", "boundary", "ranks", "files", "checkpoint"),
    *("chat_template", "modeling", "blocks", "data", "memory", "sweep_document"),
}
# of the runtime: what computes a model on several ranks, and starts them; not its commands
ENGINE = {
    f"runtime.{name}"
    for name in (
        *("collectives", "training", "model", "layers", "schedule", "shards", "loader", "kv_cache"),
        *("decode", "launch", "spec"),
    )
}
WORK = LEAVES | {"convert", "runtime", "eval", "adapt"}
MAY_IMPORT = {
    "convert": LEAVES | {"convert"},
    "runtime": LEAVES | {"convert", "runtime"},
    "eval": LEAVES | {"convert", "runtime", "eval"},
    "adapt": LEAVES | ENGINE | {"convert", "adapt", "eval.results", "eval.options"},
    "plan": WORK | {"plan"},
    "report": WORK | {"report"},
    "vllm": WORK | {"vllm"},
    "commands": WORK | {"plan", "report", "vllm", "commands"},
    # what runs commands has its own command beside it
    "sweep": WORK | {"report", "sweep", "commands"},
    "demo": LEAVES | {"runtime", "report", "sweep", "commands", "demo"},
    "cli": LEAVES | {"commands", "sweep.command", "demo.command"},
    **dict.fromkeys(LEAVES, LEAVES),
    "families": {"families", "errors"},
}
# the model class lives beside the converter that copies it
EXCEPTIONS = {("modeling", "convert.remote_code")}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def modules_named_in(path: Path) -> set[str]:
    """What a file imports, anywhere in it: modules, and what it takes from them as MODULE.NAME."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imports_of(path: Path) -> set[str]:
    """What a file imports of ladderize."""
    own = {name for name in modules_named_in(path) if name.startswith("ladderize.")}
    return {name.removeprefix("ladderize.") for name in own} - {"__version__"}


def sources():
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.name not in ("__init__.py", "__main__.py")]


def test_import_rules():
    problems = []
    for path in sources():
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if "remote_code" in parts:  # which stands alone in a checkpoint
            roots = {name.split(".")[0] for name in modules_named_in(path)}
            problems += [
                (path.name, root) for root in roots - {"dataclasses", "inspect", "re", "sys", "torch", "transformers"}
            ]
            continue
        rules = MAY_IMPORT.get(".".join(parts[:2]), MAY_IMPORT[parts[0]])
        for name in imports_of(path):
            allowed = any(name == rule or name.startswith(rule + ".") for rule in rules)
            excepted = any(parts[0] == who and name.startswith(what) for who, what in EXCEPTIONS)
            if not (allowed or excepted):
                problems.append(("/".join(parts), name))
    assert problems == []


# ---- no circles ----


def module_files() -> dict[str, Path]:
    """Dotted name -> file, of every module and package."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def import_graph() -> dict[str, set[str]]:
    """module -> modules of the package that it imports anywhere in its file: lazily and for types too."""
    files = module_files()
    graph = {}
    for name, path in files.items():
        named = modules_named_in(path)
        found = (named | {one.rpartition(".")[0] for one in named - files.keys()}) & files.keys()
        graph[name] = found - {name, "ladderize"}  # ladderize itself: __version__, and lazy names
    graph["ladderize"] = set()
    return graph


def rooms_of(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same graph of folders; modules that lie in no room are none."""

    files = module_files()

    def room(name: str) -> str:
        return name if files[name].name == "__init__.py" else name.rpartition(".")[0]

    rooms: dict[str, set[str]] = {}
    for name, imported in graph.items():
        rooms.setdefault(room(name), set()).update(room(other) for other in imported)
    rooms.pop("ladderize", None)
    return {name: others - {name, "ladderize"} for name, others in rooms.items()}


def test_no_module_and_no_room_imports_itself_in_a_circle():
    """Also not for types, and not inside functions."""
    graph = import_graph()
    assert "ladderize.runtime.model" in graph["ladderize.runtime.spec"] | graph["ladderize.runtime.decode"]
    for each in (graph, rooms_of(graph)):
        graphlib.TopologicalSorter(each).prepare()  # an error names a circle


# ---- one description of a family ----


def test_only_the_families_say_what_a_family_is():
    """What another module wants to know of a family is a field of its description: nothing else asks for a name."""
    names = {"model_type", *BY_TYPE}
    problems = []
    for path in sources():
        if path.is_relative_to(PACKAGE / "families") or "remote_code" in path.parts:
            continue
        for node in ast.walk(tree_of(path)):
            asks = isinstance(node, ast.Compare) and not any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
            tested = [node] if asks else node.cases if isinstance(node, ast.Match) else []
            words = {part.value for test in tested for part in ast.walk(test) if isinstance(part, ast.Constant)}
            if words & names:
                problems.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert problems == []


# ---- what starts without what ----


def test_only_the_plugin_imports_an_engine():
    """Not even inside a function: where vLLM is not installed, nothing else may miss it."""

    engines = re.compile(r"(vllm|sglang)\b")
    importing = [path for path in sources() if any(map(engines.match, modules_named_in(path)))]
    assert importing
    assert [path for path in importing if not path.is_relative_to(PACKAGE / "vllm")] == []
    assert PACKAGE / "vllm" / "environment.py" not in importing


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import ladderize; dir(ladderize); ladderize.Layout; ladderize.UserError", {"numpy", "rich", "typer"}),
        ("--help", {"numpy", "lm_eval"}),
        ("plan --shape 70b --hardware h100-sxm --tp-size 8", set()),
    ],
)
def test_what_imports_no_torch(code, heavy):
    if "import" not in code:
        words = ["ladderize", *code.split()]
        code = f"import sys; sys.argv = {words}\nfrom ladderize.cli import main\ntry: main()\nexcept SystemExit: pass"
    code += f"\nimport sys; assert not {heavy | {'torch', 'transformers'}} & set(sys.modules), sys.modules"
    outcome = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    assert "--shape" not in code or "8 x h100-sxm, batch 1 (predicted)" in outcome.stdout


def test_the_runtime_needs_neither_lm_eval_nor_datasets(tmp_path):
    """A GPU machine without them runs generate and bench; peft and what draws pictures are not needed either."""
    words = f"--prompt-len 4 --output-len 3 --repeat 1 --no-check --out {tmp_path}/bench.json"
    arguments = ["ladderize", "bench", str(PACKAGE / "demo" / "model"), *words.split()]
    script = (
        "import sys\n"
        "for name in ('lm_eval', 'datasets', 'peft', 'accelerate', 'vl_convert'):\n"
        "    sys.modules[name] = None\n"
        f"sys.argv = {arguments!r}\n"
        "from ladderize.cli import main\n"
        "main()\n"
    )
    outcome = warm.run([sys.executable, "-c", script], cwd=ROOT)
    assert outcome.returncode == 0, outcome.stderr
    assert (tmp_path / "bench.json").is_file()


# ---- words ----

UNFINISHED = re.compile(r"(What|Of|Whether|The same|That)\b")
# a variable is called by what it is
NO_NAMES = {
    *("one", "own", "part", "parts", "place", "found", "known", "told", "words", "how", "what", "given", "beside"),
    "able",
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def names_bound_in(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else None


def nests(node: ast.AST, kinds: type | tuple[type, ...]) -> bool:
    """Return True for a node of these kinds with another inside."""
    return isinstance(node, kinds) and any(isinstance(other, kinds) for other in ast.walk(node) if other is not node)


def test_a_variable_is_called_by_what_it_is_and_a_statement_has_one_idea():
    problems = []
    for path in sources():
        for node in ast.walk(tree_of(path)):
            is_named = names_bound_in(node) in NO_NAMES
            has_walrus = isinstance(node, ast.BoolOp) and any(
                isinstance(other, ast.NamedExpr) for other in ast.walk(node)
            )
            if is_named or has_walrus or nests(node, COMPREHENSIONS) or nests(node, ast.IfExp):
                problems.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert problems == []


def test_the_mistakes_of_the_mutations_can_be_made():
    """benchmarks/mutations.py, which is run by hand, needs each text to stand once in its file."""
    mutations = yaml.safe_load((ROOT / "benchmarks" / "mutations.yaml").read_text())
    counts = {each["name"]: (PACKAGE / "runtime" / each["file"]).read_text().count(each["text"]) for each in mutations}
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert len(counts) == len(mutations)


def test_docstrings_can_be_read_alone():
    """They begin with a verb or with what is returned, and do not finish the sentence that a name begins."""
    kinds = (ast.Module, ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    nodes = [(path.name, node) for path in sources() for node in ast.walk(tree_of(path)) if isinstance(node, kinds)]
    texts = [(name, ast.get_docstring(node) or "") for name, node in nodes]
    assert [(name, text) for name, text in texts if UNFINISHED.match(text)] == []
