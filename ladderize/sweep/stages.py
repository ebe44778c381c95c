"""The stages of a sweep. A stage is a command of ladderize. Its output is kept in a folder named by a hash of its
inputs."""

import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ladderize.adapt.methods import FULL, LORA, Method
from ladderize.commands.adapt import adapt, adapt_options
from ladderize.commands.bench import bench
from ladderize.commands.builder import GivenOptions, option_words, parsed
from ladderize.commands.convert import convert
from ladderize.commands.evaluate import evaluate
from ladderize.commands.merge import merge
from ladderize.commands.sensitivity import sensitivity
from ladderize.commands.shared import command_line
from ladderize.errors import LadderizeError, UserError
from ladderize.eval.options import EvalOptions, SensitivityOptions
from ladderize.files.documents import read_own, write_json
from ladderize.files.records import Record, read_value
from ladderize.files.work import run_digest
from ladderize.runtime.bench.options import BenchOptions, ModelChoice, check_bench_usage

Words = tuple[str, ...]  # of a command line, without the program
Given = Mapping[str, Any]  # option -> value, as a file has them
StageKind = Literal["sensitivity", "convert", "adapt", "eval", "bench"]
# The version of the code behind each stage. Raise it when the stage's output changes for the same input.
STAGE_VERSIONS: dict[StageKind, int] = {"sensitivity": 2, "convert": 1, "adapt": 4, "eval": 1, "bench": 1}
STAGES = "stages"  # the folder of their outputs
MARKER, LOG = "stage.json", "log.txt"  # in a stage's folder; the marker is written last
MODEL_FOLDER, ADAPTER_FOLDER, PREDICTIONS = "model", "adapter", "predictions"
RESULTS, SENSITIVITY_JSON, BENCH_JSON = "results.json", "sensitivity.json", "bench.json"
SAY_COMPLETE = {
    "sensitivity": SENSITIVITY_JSON,
    "bench": BENCH_JSON,
}  # documents with a field ``complete``, or written at the end
KEY_DIGITS = 16
COMMANDS = {
    "sensitivity": sensitivity,
    "convert": convert,
    "adapt": adapt,
    "merge": merge,
    "eval": evaluate,
    "bench": bench,
}
PROCESSES, FSDP = "processes", "fsdp"  # keys for starting a command
LAUNCH_KEYS = {"sensitivity": (PROCESSES,), "adapt": (PROCESSES, FSDP), "eval": (PROCESSES,)}
SHARDS = (FULL, LORA)  # methods with models that FSDP2 shards, and a batch that processes share
# options that a sweep.yaml may not give: the sweep gives them, or has no use for them
OF_THE_SWEEP = {
    "sensitivity": "model out sync_tp_size overwrite revision json",
    "convert": "src out dense recipe sensitivity dtype max_shard_size copy dry_run overwrite no_verify revision json",
    "adapt": "model out distill_from align resume dry_run show_data log_with overwrite no_verify json",
    "eval": "models out keep_predictions reference resume revision json",
    "bench": "models random_weights layout num_layers sync_tp_size engine revision train schedules seq_len out"
    " profile json",
}


@contextmanager
def errors_begin_with(where: str) -> Iterator[None]:
    """Raise errors of the block as UserErrors that begin with the place in the file."""
    try:
        yield
    except LadderizeError as error:
        text = str(error)
        raise UserError(text if text.startswith(where) else f"{where}: {text}") from None


# ---- the start of a command ----


@dataclass(frozen=True)
class StageLaunch:
    """The way in which a command is started.

    processes: the number that share the work.
    fsdp: True if they shard weights, gradients and the optimizer.
    """

    processes: int = 1
    fsdp: bool = False

    @classmethod
    def of(cls, options: Given, method: str, gpus: int) -> "StageLaunch":
        """Return the launch that a section asks for.

        Without ``processes`` there are as many as there are GPUs and divide the batch.

        method: of adapt, or the command of another section.
        """
        tp_size, batch = int(options.get("tp_size", 1)), options.get("batch_size") if method in SHARDS else None
        shared = options.get(PROCESSES, 1)
        if PROCESSES not in options and tp_size == 1 and options.get("device") != "cpu":
            shared = max(n for n in range(1, max(1, gpus) + 1) if batch is None or int(batch) % n == 0)
        by_default = method in SHARDS and tp_size == 1 and shared > 1 and gpus > 0  # FSDP2 wants GPUs
        return cls(shared, options.get(FSDP, by_default))

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that accelerate launch sets for FSDP2."""
        wrapped = {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}  # else the whole model is gathered at once
        return {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **wrapped} if self.fsdp else {}

    def command(self, words: Words) -> str:
        """Return the command line as a user types it."""
        if self.processes == 1:
            return command_line(*words)
        torchrun = ["torchrun", "--standalone", "--nproc-per-node", str(self.processes), "-m", "ladderize"]
        return shlex.join([*(f"{name}={value}" for name, value in self.variables.items()), *torchrun, *words])


IN_ONE = StageLaunch()


def check_launch(options: Given, where: str, method: str) -> None:
    """Raise UserError for ``processes`` and ``fsdp`` that are not valid or do not go with the other options."""
    processes = read_value(int | None, options.get(PROCESSES), f"{where}: {PROCESSES}")
    fsdp = read_value(bool | None, options.get(FSDP), f"{where}: {FSDP}")
    tp_size, batch = int(options.get("tp_size", 1)), options.get("batch_size")
    if fsdp is not None and method not in SHARDS:
        raise UserError(f"{where}: {FSDP} has no effect on {method}; only {' and '.join(SHARDS)} shard a model")
    if fsdp and tp_size > 1:
        raise UserError(f"{where}: {FSDP} and tp_size both share the model out; leave one of them out")
    if processes is None:
        return
    if processes < 1 or processes % tp_size:
        least = "at least 1" if tp_size == 1 else f"a multiple of tp_size, which is {tp_size}"
        raise UserError(f"{where}: {PROCESSES} is {processes}, but must be {least}")
    if method in SHARDS and batch is not None and int(batch) % (processes // tp_size):
        raise UserError(
            f"{where}: batch_size {batch} must be divisible by the {processes // tp_size} processes that share it"
        )


# ---- command lines ----


def words_of(command: str, arguments: Sequence[str], own: Given, given: Given, where: str = "") -> Words:
    """Return the command line of a command.

    Raises UserError, which begins with ``where``, for an option that the command does not have, or that a file may not
    give.

    own: options that the sweep gives.
    given: options of the file.
    """
    given = computing(command, given)
    if taken := [key for key in given if key in OF_THE_SWEEP[command].split()]:
        raise UserError(f"{where}: {taken[0]} cannot be given here: the sweep decides it, or has no use for it")
    return (command, *arguments, *option_words(COMMANDS[command], command, {**given, **own}, where))


def computing(command: str, options: Given) -> dict[str, Any]:
    """Return the options that decide a result: all but those for starting the command."""
    return {key: value for key, value in options.items() if key not in LAUNCH_KEYS.get(command, ())}


def parsed_options(words: Words) -> GivenOptions:
    """Return the options that these words give to their command. Raises UsageError."""
    return parsed(COMMANDS[words[0]], words[1:])


def sensitivity_words(model: str, output: str, options: Given, mode: str, ranks: int | None, where: str = "") -> Words:
    """Return the command line that measures a sensitivity.

    mode, ranks: the mode, and the virtual ranks of spd.
    """
    own = {"mode": mode, "sync_tp_size": ranks, "out": f"{output}/{SENSITIVITY_JSON}"}
    return words_of("sensitivity", [model], own, options, where)


def check_sensitivity(options: Given, where: str) -> None:
    """Raise UserError for options of a sensitivity that are not valid."""
    with errors_begin_with(where):
        mode = str(options.get("mode", "layers"))
        words = sensitivity_words("DENSE", "OUTPUT", options, mode, 2, where)
        parsed_options(words).fill(SensitivityOptions)
        check_launch(options, where, "sensitivity")


def convert_words(model: str, output: str, recipe: Given, revision: str | None, verify: bool) -> Words:
    own = {**recipe, "revision": revision, "no_verify": not verify}
    return ("convert", model, f"{output}/{MODEL_FOLDER}", *option_words(convert, "convert", own, ""))


def adapt_words(
    model: str, output: str, method: Method, dense: str, options: Given, verify: bool, where: str = ""
) -> tuple[Words, ...]:
    """Return the commands of a stage of adaptation. An adapter is merged right away.

    dense: the teacher, unless distill_weight and hidden_weight are 0.
    """
    weights = {"distill_weight": 1, "hidden_weight": 0}
    is_taught = method not in SHARDS or any(options.get(name, value) for name, value in weights.items())
    kept = {key: value for key, value in options.items() if is_taught or key not in weights}
    own: Given = {"method": method, "distill_from": dense if is_taught else None}
    no_verify, written = {"no_verify": not verify}, f"{output}/{MODEL_FOLDER}"
    if method != LORA:
        return (words_of("adapt", [model, written], {**own, **no_verify}, kept, where),)
    adapter = f"{output}/{ADAPTER_FOLDER}"
    merging = ("merge", adapter, written, *option_words(merge, "merge", no_verify, ""))
    return words_of("adapt", [model, adapter], own, kept, where), merging


def check_adapt(method: Method, options: Given, where: str) -> None:
    """Raise UserError for options that do not go with the method."""
    with errors_begin_with(where):
        adapt_options(parsed_options(adapt_words("MODEL", "OUTPUT", method, "DENSE", options, True, where)[0]))
        check_launch(options, where, method)


def eval_words(model: str, output: str, options: Given, own: Given, where: str = "") -> Words:
    """Return the command line of an evaluation.

    own: further options that the sweep gives.
    """
    # --resume is safe: the stage's key identifies the model and the data
    return words_of("eval", [model], {**own, "out": f"{output}/{RESULTS}", "resume": True}, options, where)


def eval_options(options: Given, where: str) -> EvalOptions:
    """Return the checked options of ``ladderize eval``."""
    with errors_begin_with(where):
        made = parsed_options(eval_words("MODEL", "OUTPUT", options, {}, where)).fill(EvalOptions)
        made.check()
        check_launch(options, where, "eval")
        if made.backend == "vllm":
            raise UserError("a sweep compares predictions, which vLLM does not tell; leave backend out")
        return made


def bench_words(models: Sequence[str], output: str, options: Given, where: str = "") -> Words:
    return words_of("bench", models, {"out": f"{output}/{BENCH_JSON}"}, options, where)


def bench_options(options: Given, where: str) -> tuple[BenchOptions, str | None]:
    """Return the checked options of ``ladderize bench``, and its --link."""
    with errors_begin_with(where):
        parsed = parsed_options(bench_words(["DENSE", "MODEL"], "OUTPUT", options, where))
        made, link = parsed.fill(BenchOptions), parsed.params["link"]
        check_bench_usage(parsed.fill(ModelChoice), made, link)
        return made, link


# ---- a stage, and its folder ----


@dataclass(frozen=True)
class Stage:
    """A command whose output is kept.

    title: for people.
    identity: everything that decides its output.
    key: the hash of that.
    commands: the command lines that it runs in the sweep's folder.
    needs: keys of the stages whose output it reads.
    launch: of the first command. Later ones run in one process.
    """

    kind: StageKind
    title: str
    identity: Given
    key: str
    commands: tuple[Words, ...]
    needs: tuple[str, ...] = ()
    launch: StageLaunch = IN_ONE

    @property
    def output(self) -> str:
        """Its folder, relative to the sweep's."""
        return f"{STAGES}/{self.kind}-{self.key}"

    @property
    def runs(self) -> list[tuple[StageLaunch, Words]]:
        """Its commands, each with the way in which it is started."""
        return [(self.launch if number == 0 else IN_ONE, words) for number, words in enumerate(self.commands)]

    @property
    def command(self) -> str:
        """The commands as a user types them."""
        return " && ".join(launch.command(words) for launch, words in self.runs)


def make_stage(
    kind: StageKind,
    title: str,
    identity: Given,
    commands: Callable[[str], tuple[Words, ...]],
    needs: tuple[str, ...] = (),
    launch: StageLaunch = IN_ONE,
) -> Stage:
    """Return a stage with its hash as key.

    commands: called with the folder for its output; returns its command lines.
    """
    key = run_digest({"stage": kind, "version": STAGE_VERSIONS[kind], **identity})[:KEY_DIGITS]
    return Stage(kind, title, identity, key, commands(f"{STAGES}/{kind}-{key}"), needs, launch)


@dataclass(frozen=True)
class FinishedStage(Record):
    """The marker of a complete output.

    seconds: the time that it took; None where the command was run by hand.
    files: bytes of each file that belongs to it, by path in the folder.
    """

    stage: str
    key: str
    title: str
    command: str
    seconds: float | None
    identity: dict[str, Any]
    files: dict[str, int]


def finished_stage(stage: Stage, root: Path) -> FinishedStage | None:
    """Return the marker of a complete output; None: a file is missing, or has another size.

    Added files do not matter. A document that is complete by itself, and lies there alone, needs no marker: its command
    was run by hand.
    """
    folder = root / stage.output
    if not folder.is_dir():
        return None
    files, content = stage_files(folder), read_own(folder / MARKER)
    if not content:
        document = read_own(folder / SAY_COMPLETE[stage.kind]) if stage.kind in SAY_COMPLETE else {}
        is_complete = (
            bool(document) and document.get("complete", True) is True and not document.get("failed") and len(files) == 1
        )
        return _marker(stage, files, None) if is_complete else None
    try:
        marker = FinishedStage.from_dict(content, folder / MARKER)
    except UserError:
        return None
    return marker if marker.key == stage.key and marker.files.items() <= files.items() else None


def mark_finished(stage: Stage, root: Path, seconds: float) -> None:
    """Write the marker, last of all."""
    folder = root / stage.output
    write_json(folder / MARKER, _marker(stage, stage_files(folder), seconds).to_dict())


def _marker(stage: Stage, files: dict[str, int], seconds: float | None) -> FinishedStage:
    return FinishedStage(stage.kind, stage.key, stage.title, stage.command, seconds, dict(stage.identity), files)


def make_folder(stage: Stage, root: Path) -> None:
    """Make the folder of a stage that is about to run.

    The work of a killed run is kept if the stage can go on with it. A damaged output is removed.
    """
    folder = root / stage.output
    folder.mkdir(parents=True, exist_ok=True)
    if stage.kind == "bench" or (folder / MARKER).exists():
        for entry in folder.iterdir():
            if entry.name != LOG:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def remove_others(root: Path, kept: set[str]) -> None:
    """Remove the outputs of stages in a sweep's folder but those ``kept``."""
    for folder in (root / STAGES).glob("*/"):
        if f"{STAGES}/{folder.name}" not in kept:
            shutil.rmtree(folder)


def stage_files(folder: Path) -> dict[str, int]:
    """Return the size of each file in a stage's folder, by its path, but the log's and the marker's."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    named = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    return {name: size for name, size in named.items() if name not in (LOG, MARKER)}
