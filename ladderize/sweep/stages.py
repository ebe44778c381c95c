"""The stages of a sweep. A stage runs one or two functions of options, and its output is kept in a folder that is named
by a hash of all that decides it."""

import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ladderize.choices import option_words
from ladderize.commands.shared import command_line
from ladderize.console import Console

STAGES = "stages"  # the folder of their outputs
MARKER, LOG = "stage.json", "log.txt"  # in a stage's folder; the marker is written last
MODEL_FOLDER, ADAPTER, PREDICTIONS = "model", "adapter", "predictions"
RESULTS, BENCH_JSON = "results.json", "bench.json"
CONFIG_JSON = f"{MODEL_FOLDER}/config.json"
# the file in a stage's folder without which its output is not there
RESULT_OF = {"convert": CONFIG_JSON, "adapt": CONFIG_JSON, "eval": RESULTS, "bench": BENCH_JSON}
RESUMED = ("adapt", "eval")  # kinds that go on where a killed run stopped
KEY_DIGITS = 16


@dataclass(frozen=True)
class Step:
    """A command: a function, and the options that it is called with in the sweep's folder.

    processes: the number that share its work.
    variables: the environment variables that they have.
    """

    name: str
    run: Callable[[Any, Console], None]
    options: Any
    processes: int = 1
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def typed(self) -> str:
        """The command as a user types it."""
        command = [self.name, *option_words(self.options)]
        if self.processes == 1:
            return command_line(*command)
        torchrun = ["torchrun", "--standalone", "--nproc-per-node", str(self.processes), "-m", "ladderize"]
        return shlex.join([*(f"{name}={value}" for name, value in self.variables.items()), *torchrun, *command])


@dataclass(frozen=True)
class Stage:
    """Steps whose output is kept.

    title: for people.
    key: the hash of all that decides its output.
    needs: the stages whose output it reads.
    work: equal for stages that take about as long.
    """

    kind: str
    title: str
    key: str
    steps: tuple[Step, ...]
    needs: tuple["Stage", ...] = ()
    work: str = ""

    @property
    def output(self) -> str:
        """Its folder, relative to the sweep's."""
        return output_folder(self.kind, self.key)

    @property
    def model(self) -> str:
        """The model that it writes."""
        return f"{self.output}/{MODEL_FOLDER}"

    @property
    def result(self) -> str:
        """The file without which its output is not there."""
        return f"{self.output}/{RESULT_OF[self.kind]}"

    @property
    def command(self) -> str:
        """Its commands as a user types them."""
        return " && ".join(step.typed for step in self.steps)


def output_folder(kind: str, key: str) -> str:
    """Return the folder of a stage, relative to the sweep's."""
    return f"{STAGES}/{kind}-{key}"


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
    elif len(stage.steps) > 1 and (folder / MODEL_FOLDER).exists():
        shutil.rmtree(folder / MODEL_FOLDER)  # which the last step wrote, before the stage was marked as done
    folder.mkdir(parents=True, exist_ok=True)


def outputs_in(root: Path) -> list[Path]:
    """Return the folders of stages in a sweep's folder; other folders there are not its own."""
    pattern = re.compile(f"({'|'.join(RESULT_OF)})-[0-9a-f]{{{KEY_DIGITS}}}")
    return [folder for folder in (root / STAGES).glob("*/") if pattern.fullmatch(folder.name)]
