"""The stages of a sweep. A stage is a command of ladderize. Its output is kept in a folder named by a hash of all that
decides it."""

import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladderize.adapt.methods import FULL, LORA, Method
from ladderize.commands.adapt import adapt
from ladderize.commands.bench import bench
from ladderize.commands.builder import GivenOptions, option_words, parsed
from ladderize.commands.convert import convert
from ladderize.commands.evaluate import evaluate
from ladderize.commands.merge import merge
from ladderize.commands.shared import command_line
from ladderize.errors import LadderizeError, UserError
from ladderize.files.unfinished import run_digest

Words = tuple[str, ...]  # of a command line, without the program
Given = Mapping[str, Any]  # option -> value, as a file has them
STAGES = "stages"  # the folder of their outputs
MARKER, LOG = "stage.json", "log.txt"  # in a stage's folder; the marker is written last
MODEL_FOLDER, PREDICTIONS = "model", "predictions"
RESULTS, BENCH_JSON = "results.json", "bench.json"
KEY_DIGITS = 16
COMMANDS = {"convert": convert, "adapt": adapt, "merge": merge, "eval": evaluate, "bench": bench}
RESUMED = ("adapt", "eval")  # commands that go on where a killed run stopped
SHARDS = (FULL, LORA)  # methods with models that FSDP2 shards, and a batch that processes share


@dataclass(frozen=True)
class StageKind:
    """One of the commands that are stages.

    version: of the code behind it. Raise it when the output changes for the same input.
    result: the file in the stage's folder without which the output is not there.
    reserved: options that a sweep.yaml may not give: the sweep gives them, or has no use for them.
    """

    version: int
    result: str
    reserved: str


KINDS = {
    "convert": StageKind(
        1,
        f"{MODEL_FOLDER}/config.json",
        "src out dense dtype copy dry_run overwrite no_verify revision json",
    ),
    "adapt": StageKind(
        5,
        f"{MODEL_FOLDER}/config.json",
        "model out distill_from align dry_run log_with overwrite no_verify json",
    ),
    "eval": StageKind(1, RESULTS, "models out keep_predictions reference resume revision json backend"),
    "bench": StageKind(
        1,
        BENCH_JSON,
        "models random_weights layout num_layers sync_tp_size engine revision train out profile json",
    ),
}


@contextmanager
def errors_begin_with(where: str) -> Iterator[None]:
    """Raise errors of the block as UserErrors that begin with the place in the file."""
    try:
        yield
    except LadderizeError as error:
        text = str(error)
        raise UserError(text if text.startswith(where) else f"{where}: {text}") from None


# ---- command lines: each command's own parser reads the options of a file ----


def words_of(command: str, arguments: Sequence[str], own: Given, given: Given) -> Words:
    """Return the command line of a command. Raises UserError for an option that it does not have, or that a file may
    not give.

    own: options that the sweep gives.
    given: options of the file.
    """
    if taken := [key for key in given if key in KINDS[command].reserved.split()]:
        raise UserError(f"{taken[0]} cannot be given here: the sweep decides it, or has no use for it")
    return (command, *arguments, *option_words(COMMANDS[command], command, {**given, **own}, "options"))


def parsed_options(words: Words) -> GivenOptions:
    """Return the options that these words give to their command. Raises UsageError."""
    return parsed(COMMANDS[words[0]], words[1:])


def adapt_words(model: str, output: str, method: Method, dense: str, options: Given, verify: bool) -> tuple[Words, ...]:
    """Return the commands of a stage of adaptation. An adapter is merged right away.

    dense: the teacher, unless distill_weight is 0.
    """
    is_taught = method not in SHARDS or bool(options.get("distill_weight", 1))
    kept = {key: value for key, value in options.items() if is_taught or key != "distill_weight"}
    own: Given = {"method": method, "distill_from": dense if is_taught else None}
    no_verify, written = {"no_verify": not verify}, f"{output}/{trained_folder(method)}"
    if method != LORA:
        return (words_of("adapt", [model, written], {**own, **no_verify}, kept),)
    merging = ("merge", written, f"{output}/{MODEL_FOLDER}", *option_words(merge, "merge", no_verify, ""))
    return words_of("adapt", [model, written], own, kept), merging


def trained_folder(method: Method) -> str:
    """Return the folder that a method writes, in a stage's folder."""
    return "adapter" if method == LORA else MODEL_FOLDER


# ---- a stage ----


@dataclass(frozen=True)
class Stage:
    """A command whose output is kept.

    title: for people.
    key: the hash of all that decides its output.
    commands: the command lines that it runs in the sweep's folder.
    needs: the stages whose output it reads.
    processes: the number that share the work of the first command.
    fsdp: True if they shard weights, gradients and the optimizer.
    """

    kind: str
    title: str
    key: str
    commands: tuple[Words, ...]
    needs: tuple["Stage", ...] = ()
    processes: int = 1
    fsdp: bool = False

    @property
    def output(self) -> str:
        """Its folder, relative to the sweep's."""
        return f"{STAGES}/{self.kind}-{self.key}"

    @property
    def work(self) -> tuple[str, str]:
        """Its kind and how the model is adapted: stages that have these in common take about as long."""
        return self.kind, self.title.partition("+")[2]

    @property
    def model(self) -> str:
        """The model that it writes."""
        return f"{self.output}/{MODEL_FOLDER}"

    @property
    def result(self) -> str:
        """The file without which its output is not there."""
        return f"{self.output}/{KINDS[self.kind].result}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that accelerate launch sets for FSDP2."""
        wrapped = {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}  # else the whole model is gathered at once
        return {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **wrapped} if self.fsdp else {}

    def is_shared(self, words: Words) -> bool:
        """Return True for a command that several processes share; an adapter is merged in one."""
        return self.processes > 1 and words == self.commands[0]

    def typed(self, words: Words) -> str:
        """Return one of its commands as a user types it."""
        if not self.is_shared(words):
            return command_line(*words)
        torchrun = ["torchrun", "--standalone", "--nproc-per-node", str(self.processes), "-m", "ladderize"]
        return shlex.join([*(f"{name}={value}" for name, value in self.variables.items()), *torchrun, *words])

    @property
    def command(self) -> str:
        """The commands as a user types them."""
        return " && ".join(map(self.typed, self.commands))


def make_stage(
    kind: str,
    title: str,
    identity: Given,
    commands: Callable[[str], tuple[Words, ...]],
    needs: tuple[Stage, ...] = (),
    processes: int = 1,
    fsdp: bool = False,
) -> Stage:
    """Return a stage with its hash as key.

    identity: everything that decides the output.
    commands: called with the folder for its output; returns its command lines.
    """
    key = run_digest({"stage": kind, "version": KINDS[kind].version, **identity})[:KEY_DIGITS]
    return Stage(kind, title, key, commands(f"{STAGES}/{kind}-{key}"), needs, processes, fsdp)


# ---- its folder ----


def is_finished(stage: Stage, root: Path) -> bool:
    """Return True if a stage's output is complete: its marker was written, and its result is there."""
    return (root / stage.output / MARKER).is_file() and (root / stage.result).is_file()


def make_folder(stage: Stage, root: Path) -> None:
    """Make the folder of a stage that is about to run.

    The work of a killed run is kept where the command goes on with it. An output whose result was deleted is removed.
    """
    folder = root / stage.output
    if folder.exists() and ((folder / MARKER).exists() or stage.kind not in RESUMED):
        shutil.rmtree(folder)
    elif stage.commands[-1][0] == "merge" and (folder / MODEL_FOLDER).exists():
        shutil.rmtree(folder / MODEL_FOLDER)  # which merge wrote, before the stage was marked as done
    folder.mkdir(parents=True, exist_ok=True)


def outputs_in(root: Path) -> list[Path]:
    """Return the folders of stages in a sweep's folder; other folders there are not its own."""
    kinds = "|".join(KINDS)
    pattern = re.compile(f"({kinds})-[0-9a-f]{{{KEY_DIGITS}}}")
    return [folder for folder in (root / STAGES).glob("*/") if pattern.fullmatch(folder.name)]


def remove_others(root: Path, kept: set[str]) -> None:
    """Remove the outputs of stages in a sweep's folder but those ``kept``."""
    for folder in outputs_in(root):
        if f"{STAGES}/{folder.name}" not in kept:
            shutil.rmtree(folder)
