"""README and docs: their commands are real ones, and their links resolve."""

import ast
import functools
import re
import runpy
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator
from html import unescape
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import typer
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from ladderize.cli import BadCommandLine, app
from ladderize.demo.command import MODEL
from ladderize.files.documents import parse_yaml
from ladderize.sweep.sweep_file import sweep_spec
from tests.helpers import ROOT, invoke_well

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
STORY = ROOT / "docs" / "getting-started.md"
FENCE = re.compile(r"^(`{3,}) *([\w-]*)[^\n]*\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
each_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)
# of `vllm serve`; tests/vllm/test_serving_page.py asks vLLM
OF_VLLM = {
    "--decode-context-parallel-size", "--enable-dbo", "--fully-sharded-loras", "--hf-overrides", "--max-loras",
    "--max-model-len", "--pipeline-parallel-size", "--quantization", "--runner", "--served-model-name",
    "--tensor-parallel-size", "--trust-remote-code", "--ubatch-size",
}  # fmt: skip
SHELL = ("", "sh", "bash", "console")


class Block(NamedTuple):
    """A fenced block of a page; line: the number of its first line."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(m[2], m[3], text.count("\n", 0, m.start(3)) + 1) for m in FENCE.finditer(text)]


def prose(page: Path) -> str:
    """The page without its fenced blocks; line numbers stay."""
    return FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text(encoding="utf-8"))


LAUNCHERS = {  # by the parsers of the versions that are installed
    "torchrun": get_args_parser().parse_args,
    "accelerate": lambda words: launch_command_parser().parse_args(words[1:]),
}


def lines_of_words(text: str) -> Iterator[list[str]]:
    """The words of each line of a block, without prompt, comment and variables in front."""
    for line in text.replace("\\\n", " ").splitlines():
        if not re.search(rf"\b(ladderize|{'|'.join(LAUNCHERS)})\b", line):
            continue
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # VARIABLE=value in front
            words = words[1:]
        yield words[: words.index(">")] if ">" in words else words


def arguments_of(words: list[str]) -> list[str] | None:
    """Of ``ladderize ...``: alone, after a prompt, or behind ``-m``."""
    if words[:1] == ["ladderize"]:
        return words[1:]
    launched = words[:1] in (["torchrun"], ["accelerate"], ["python"]) and ("-m", "ladderize") in pairwise(words)
    return words[words.index("ladderize") + 1 :] if launched else None


@functools.cache
def command_line() -> Any:
    return typer.main.get_command(app)


def parse(arguments: list[str]) -> None:
    """Parse as the command line does, without running anything; raises what it raises for a bad one."""
    group = command_line()
    context = group.make_context("ladderize", list(arguments))
    if arguments and arguments[0].startswith("-"):
        return
    name, command, rest = group.resolve_command(context, list(arguments))
    command.make_context(name, rest, parent=context)


@each_page
def test_commands_are_parsed(page: Path) -> None:
    wrong = []
    for block in blocks(page):
        for words in lines_of_words(block.text) if block.language in SHELL else ():
            try:
                if words and words[0] in LAUNCHERS:
                    LAUNCHERS[words[0]](words[1:])
                if (arguments := arguments_of(words)) is not None:
                    parse(arguments)
            except typer.Exit:  # --version, --help
                pass
            except (Exception, SystemExit) as error:
                wrong.append(f"line {block.line}: {shlex.join(words)}: {getattr(error, 'message', error)}")
    assert not wrong, "\n".join(wrong)


def test_the_parser_sees_what_is_wrong() -> None:
    (words,) = lines_of_words("torchrun --nproc-per-node 2 -m ladderize adapt a \\\n  b -x")
    with pytest.raises(BadCommandLine):
        parse(arguments_of(words) or [])


@each_page
def test_options_in_prose_exist(page: Path) -> None:
    """`--option` in a line of prose is an option of some command, or of the command named with it."""
    every = command_line().commands
    known = {name: {text for p in c.params for text in (*p.opts, *p.secondary_opts)} for name, c in every.items()}
    elsewhere = {"--version", "--help", "--debug", "--install-completion", "--no-deps", "--standalone", "--durations"}
    elsewhere |= {"--log_samples", "--model_args", "--config_file", "--nproc-per-node", "--nnodes"}
    anywhere = set().union(*known.values()) | elsewhere | OF_VLLM
    wrong = []
    for span in re.findall(r"`([^`\n]+)`", prose(page)):
        words = re.split(r"[\s=]+", span)
        options = {word for word in words if re.fullmatch(r"--[a-z][\w-]*", word)}
        command = words[1] if words[0] == "ladderize" and len(words) > 1 else words[0]
        wrong += sorted(options - (known[command] | elsewhere if command in known else anywhere))
        if words[0] == "ladderize" and len(words) > 1 and re.fullmatch(r"[a-z]+", words[1]):
            wrong += [span] * (words[1] not in every)
    assert not wrong


@each_page
def test_sweep_files_are_read(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A YAML block that describes a sweep is one: its keys, options and layouts are checked."""
    monkeypatch.chdir(tmp_path)
    for name in ("chat.jsonl", "wiki.txt"):  # data have to be there
        (tmp_path / name).write_text("")
    for block in blocks(page):
        if block.language == "yaml" and re.search(r"^layouts:", block.text, re.MULTILINE):
            document = parse_yaml(block.text)
            assert sweep_spec(document, f"{page.name}:{block.line}").layouts


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+\s+(.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@each_page
def test_links_resolve(page: Path) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(target)
    assert not wrong


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    missing = [page.name for page in PAGES if page.parent.name == "docs" and f"({page.name}" not in index]
    assert missing in ([], ["README.md"])


@each_page
def test_prose_fits_100_columns(page: Path) -> None:
    lines = [line for line in prose(page).splitlines() if not line.lstrip().startswith(("|", "![", "### `"))]
    assert not [line for line in lines if len(line) > 100 and " " in line.strip()]


@functools.cache
def texts_of_the_program() -> list[str]:
    """Every string of the package's source, with a gap where an f-string puts a value in."""
    texts = []
    for file in sorted((ROOT / "ladderize").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def occurs(message: str) -> bool:
    """Whether the parts of a message between ``...`` occur in one string of the source, in this order."""
    parts = [re.escape(part.strip()) for part in re.split(r"\.\.\.", message) if part.strip()]
    pattern = re.compile(".*?".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in texts_of_the_program())


def test_messages_of_troubleshooting_are_the_programs_own() -> None:
    messages = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(messages) >= 12
    others = {"Do you wish to run the custom code? [y/N]"}  # transformers' own
    assert not [message for message in messages if message not in others and not occurs(message)]
    assert not occurs("this ... was never said")


# the story's commands with less work, so that the test is quick
LESS = {"--max-tokens": "2k", "--samples": "16", "--epochs": "1", "--max-new-tokens": "4", "--heldout": "4"}
QUICK = {
    "adapt": ["--write=last", "--no-verify"],  # so few tokens need not win anything
    "spd": ["--no-verify"],
    "convert": ["--no-verify"],
    "bench": ["--warmup=1", "--repeat=1", "--no-check"],
    "eval": ["--windows=8"],
}


def test_the_story_runs_as_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command and every Python block of getting-started.md, in their order, on the bundled model."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MODEL, "dense")
    told = 0
    for block in blocks(STORY):
        if block.language == "python":
            exec(compile(block.text, f"{STORY.name}:{block.line}", "exec"), {"__name__": "story"})
        elif block.language in ("sh", "console"):
            for words in lines_of_words(block.text):
                if (arguments := arguments_of(words)) is not None:
                    less = [LESS.get(before, word) for before, word in zip(["", *arguments], arguments, strict=False)]
                    invoke_well(*less, *QUICK.get(arguments[0], []))
                    told += 1
    assert told >= 10


@each_page
def test_plans_in_the_pages_are_those_of_now(page: Path) -> None:
    """Whoever changes a figure of devices or links runs scripts/plans_in_docs.py."""
    text = page.read_text(encoding="utf-8")
    assert runpy.run_path(str(ROOT / "scripts" / "plans_in_docs.py"))["renewed"](text) == text


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    pytest.importorskip("matplotlib")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        import draw_layouts  # type: ignore[import-not-found]
    return draw_layouts


@pytest.mark.parametrize("name", ["LAYOUTS", "DOMINO"])
def test_the_picture_is_what_the_code_does(drawing, name):
    picture = getattr(drawing, name)
    svg = (ROOT / "docs" / f"{picture.name}.svg").read_text(encoding="utf-8")
    titles = {row.title for row in picture.rows}
    drawn = [unescape(found) for found in re.findall(r'<g id="([^"]*\|[^"]*)"', svg)]
    assert titles == {box.split("|")[0] for box in drawn}
    for row in picture.rows:
        timeline = drawing.record(row.layout, row.schedule, backward=picture.backward)
        now = [drawing.name(row, event) for event in (*timeline.spans, *timeline.messages)]
        own = [box for box in drawn if box.startswith(f"{row.title}|")]
        assert Counter(own) == Counter(now), f"{row.title}: run docs/draw_layouts.py, and look at the picture"
