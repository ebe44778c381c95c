"""A stage of a sweep is a command of ladderize, whose output is kept in a folder under a hash of what it depends on."""

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
from ladderize.errors import LadderizeError, UserError
from ladderize.eval.options import EvalOptions, SensitivityOptions
from ladderize.files.documents import read_own, write_json
from ladderize.files.records import Record, read_value
from ladderize.files.work import run_digest
from ladderize.runtime.bench.options import BenchOptions, ModelChoice, check_bench_usage
from ladderize.tradeoff.sweep.launch import IN_ONE, LAUNCH_KEYS, Given, StageLaunch, Words, check_launch

StageKind = Literal["sensitivity", "convert", "adapt", "eval", "bench"]
# Of the code behind each stage. Raise a stage's number when its output changes for the same input (another result,
# another form of its files): what earlier versions of ladderize kept is then made anew.
STAGE_VERSIONS: dict[StageKind, int] = {"sensitivity": 2, "convert": 1, "adapt": 4, "eval": 1, "bench": 1}
RESUMES = ("sensitivity", "convert", "adapt", "eval")  # stages that go on with what a killed run left in their folder
TIMED: StageKind = "bench"  # its times are the result, so nothing runs beside it
STAGES = "stages"  # folder of their outputs
MARKER = "stage.json"  # written when all else in the folder is complete
LOG, LOGS = "log.txt", "log*.txt"  # of the host that leads a stage; of all
MODEL_FOLDER, ADAPTER_FOLDER, PREDICTIONS = "model", "adapter", "predictions"
RESULTS, SENSITIVITY_JSON, BENCH_JSON = "results.json", "sensitivity.json", "bench.json"
SAY_COMPLETE = {"sensitivity": SENSITIVITY_JSON, "bench": BENCH_JSON}
KEY_DIGITS = 16
COMMANDS = {
    "sensitivity": sensitivity,
    "convert": convert,
    "adapt": adapt,
    "merge": merge,
    "eval": evaluate,
    "bench": bench,
}
# what a sweep.yaml may not say, since the sweep does or since it makes no stage of one
OF_THE_SWEEP = {
    "sensitivity": "model out sync_tp_size plot overwrite revision json",
    "convert": "src out dense recipe sensitivity dtype max_shard_size copy dry_run overwrite no_verify revision json",
    "adapt": "model out distill_from align resume dry_run show_data log_with overwrite no_verify json",
    "eval": "models out keep_predictions reference resume revision no_default_tasks json",
    "bench": "models random_weights layout num_layers sync_tp_size engine revision train schedules seq_len out"
    " profile json",
}


@contextmanager
def errors_begin_with(where: str) -> Iterator[None]:
    """Around a check: its error gets the place in the file in front."""
    try:
        yield
    except LadderizeError as error:
        text = str(error)
        raise UserError(text if text.startswith(where) else f"{where}: {text}") from None


def words_of(command: str, arguments: Sequence[str], own: Given, given: Given | None = None, where: str = "") -> Words:
    """The command line of a command. own: options that the sweep gives, given: those of the file. Raises UserError,
    which begins with ``where``, for an option that the command does not have, or that is not for the file to give."""
    given = computing(command, given or {})
    if taken := [key for key in given if key in OF_THE_SWEEP[command].split()]:
        raise UserError(f"{where}: {taken[0]} cannot be given here: the sweep decides it, or has no use for it")
    return (command, *arguments, *option_words(COMMANDS[command], command, {**given, **own}, where))


def computing(command: str, given: Given) -> dict[str, Any]:
    """Without what says only how the command is started, which changes nothing that it computes."""
    return {key: value for key, value in given.items() if key not in LAUNCH_KEYS.get(command, ())}


def asked_by(words: Words) -> GivenOptions:
    """What the command is given by these words. Raises UsageError."""
    return parsed(COMMANDS[words[0]], words[1:])


def sensitivity_words(model: str, output: str, given: Given, mode: str, ranks: int | None, where: str = "") -> Words:
    """mode, ranks: of the layers whose sensitivity is measured."""
    own = {"mode": mode, "sync_tp_size": ranks, "out": f"{output}/{SENSITIVITY_JSON}"}
    return words_of("sensitivity", [model], own, given, where)


def check_sensitivity(given: Given, where: str) -> None:
    """Raises UserError."""
    with errors_begin_with(where):
        words = sensitivity_words("DENSE", "OUTPUT", given, str(given.get("mode", "layers")), 2, where)
        asked_by(words).fill(SensitivityOptions)
        check_launch(given, where, "sensitivity")


def convert_words(model: str, output: str, recipe: Given, revision: str | None, verify: bool) -> Words:
    own = {**recipe, "revision": revision, "no_verify": not verify}
    return words_of("convert", [model, f"{output}/{MODEL_FOLDER}"], own)


def adapt_words(
    model: str, output: str, method: Method, dense: str, given: Given, verify: bool, where: str = ""
) -> tuple[Words, ...]:
    """An adapter is merged right away. dense: the teacher, unless distill_weight and hidden_weight are 0."""
    weights = {"distill_weight": 1, "hidden_weight": 0}
    is_taught = method not in (FULL, LORA) or any(given.get(name, value) for name, value in weights.items())
    kept = {key: value for key, value in given.items() if is_taught or key not in weights}
    own: Given = {"method": method, "distill_from": dense if is_taught else None}
    no_verify, written = {"no_verify": not verify}, f"{output}/{MODEL_FOLDER}"
    if method != LORA:
        return (words_of("adapt", [model, written], {**own, **no_verify}, kept, where),)
    adapter = f"{output}/{ADAPTER_FOLDER}"
    return words_of("adapt", [model, adapter], own, kept, where), words_of("merge", [adapter, written], no_verify)


def check_adapt(method: Method, given: Given, where: str) -> None:
    """Raises UserError."""
    with errors_begin_with(where):
        adapt_options(asked_by(adapt_words("MODEL", "OUTPUT", method, "DENSE", given, True, where)[0]))
        check_launch(given, where, method)


def eval_words(model: str, output: str, given: Given, own: Given, where: str = "") -> Words:
    """own: more options."""
    given = dict(given)
    if "include_default_tasks" in given:
        are_known = read_value(bool, given.pop("include_default_tasks"), f"{where}: include_default_tasks")
        own = {"no_default_tasks": not are_known, **own}
    # the stage's key vouches for the model and the data
    return words_of("eval", [model], {**own, "out": f"{output}/{RESULTS}", "resume": True}, given, where)


def eval_options(given: Given, where: str) -> EvalOptions:
    """Raises UserError."""
    with errors_begin_with(where):
        options = asked_by(eval_words("MODEL", "OUTPUT", given, {}, where)).fill(EvalOptions)
        options.check()
        check_launch(given, where, "eval")
        if options.backend == "vllm":
            raise UserError("a sweep compares predictions, which vLLM does not tell; leave backend out")
        return options


def bench_words(models: Sequence[str], output: str, given: Given, where: str = "") -> Words:
    return words_of("bench", models, {"out": f"{output}/{BENCH_JSON}"}, given, where)


def bench_options(given: Given, where: str) -> tuple[BenchOptions, str | None]:
    """With --link. Whether they go together is checked too, of any two models. Raises UserError."""
    with errors_begin_with(where):
        asked = asked_by(bench_words(["DENSE", "MODEL"], "OUTPUT", given, where))
        options, link = asked.fill(BenchOptions), asked.params["link"]
        check_bench_usage(asked.fill(ModelChoice), options, link)
        return options, link


# ---- a stage, and its folder ----


@dataclass(frozen=True)
class Stage:
    """identity: everything that decides its output; key: its hash. commands: what it runs, in the sweep's folder: words
    without the program. needs: keys of the stages whose output it reads. title: for people. amount: tokens that it
    trains on, where that is known. launch: of the command that gives the stage its name; what follows runs alone."""

    kind: StageKind
    title: str
    identity: Mapping[str, Any]
    key: str
    commands: tuple[Words, ...]
    needs: tuple[str, ...] = ()
    amount: int | None = None
    launch: StageLaunch = IN_ONE

    @classmethod
    def of(
        cls,
        kind: StageKind,
        title: str,
        identity: Mapping[str, Any],
        commands: Callable[[str], tuple[Words, ...]],
        needs: tuple[str, ...] = (),
        amount: int | None = None,
        launch: StageLaunch = IN_ONE,
    ) -> "Stage":
        """commands: of the folder for its output."""
        key = run_digest({"stage": kind, "version": STAGE_VERSIONS[kind], **identity})[:KEY_DIGITS]
        return cls(kind, title, identity, key, commands(f"{STAGES}/{kind}-{key}"), needs, amount, launch)

    @property
    def output(self) -> str:
        """Its folder, relative to the sweep's."""
        return f"{STAGES}/{self.kind}-{self.key}"

    @property
    def runs(self) -> list[tuple[StageLaunch, Words]]:
        """Its commands, each with the way in which it is started."""
        return [(self.launch if words[0] == self.kind else IN_ONE, words) for words in self.commands]

    @property
    def command(self) -> str:
        """The same as a user types it."""
        return " && ".join(launch.command(words) for launch, words in self.runs)


@dataclass(frozen=True)
class FinishedStage(Record):
    """The marker of a complete output. seconds: None where the command was run by hand. files: path in the folder ->
    bytes, of everything that belongs to it."""

    stage: str
    key: str
    version: int
    title: str
    command: str
    seconds: float | None
    amount: int | None
    bytes: int
    identity: dict[str, Any]
    files: dict[str, int]


def read_marker(folder: Path) -> FinishedStage | None:
    """What the marker of a stage's folder says; None where there is none that can be read."""
    content = read_own(folder / MARKER)
    try:
        return FinishedStage.from_dict(content, folder / MARKER) if content else None
    except UserError:
        return None


def finished_stage(stage: Stage, root: Path) -> FinishedStage | None:
    """The marker of a stage's complete output: nothing of it may be missing, or of another size. What somebody added is
    no reason to make it anew. A document that says itself that it is complete, and lies there alone, needs none: its
    command was run by hand, and would do all of it again."""
    folder = root / stage.output
    marker = read_marker(folder)
    if marker is None and set(files := stage_files(folder)) == {SAY_COMPLETE.get(stage.kind)}:
        found = [read_own(folder / name) for name in files]
        is_complete = all(one and one.get("complete", True) is True and not one.get("failed") for one in found)
        return _marker(stage, files, None) if is_complete else None
    if marker is None or marker.key != stage.key or marker.stage != stage.kind:
        return None
    return marker if marker.files.items() <= stage_files(folder).items() else None


def mark_finished(stage: Stage, root: Path, seconds: float) -> None:
    """Write the marker, last of all."""
    folder = root / stage.output
    write_json(folder / MARKER, _marker(stage, stage_files(folder), seconds).to_dict())


def _marker(stage: Stage, files: dict[str, int], seconds: float | None) -> FinishedStage:
    return FinishedStage(
        stage=stage.kind,
        key=stage.key,
        version=STAGE_VERSIONS[stage.kind],
        title=stage.title,
        command=stage.command,
        seconds=seconds,
        amount=stage.amount,
        bytes=sum(files.values()),
        identity=dict(stage.identity),
        files=files,
    )


def prepare(stage: Stage, root: Path) -> None:
    """Make the folder of a stage that is about to run. What a killed run left is kept where the stage goes on with it;
    an output that was complete, and is not any more, is not."""
    folder = root / stage.output
    folder.mkdir(parents=True, exist_ok=True)
    if stage.kind not in RESUMES or (folder / MARKER).exists():
        for entry in folder.iterdir():
            if not entry.match(LOGS):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def remove_others(root: Path, kept: set[str]) -> None:
    """Remove the outputs of stages in a sweep's folder but those ``kept``."""
    for folder in (root / STAGES).glob("*/"):
        if f"{STAGES}/{folder.name}" not in kept:
            shutil.rmtree(folder)


def stage_files(folder: Path) -> dict[str, int]:
    """Everything in a stage's folder but its logs and the marker, with its size."""
    logs = list(folder.glob(LOGS))
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MARKER and path not in logs
    }
