"""A stage of a sweep is a command of ladderize: here are its words, which the command's own parser and checks judge."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ladderize.adapt.methods import FULL, LORA, Method
from ladderize.commands.adapt import adapt, adapt_options
from ladderize.commands.bench import bench
from ladderize.commands.builder import GivenOptions, option_words, parsed
from ladderize.commands.convert import convert
from ladderize.commands.evaluate import evaluate
from ladderize.commands.merge import merge
from ladderize.commands.sensitivity import sensitivity
from ladderize.convert.sensitivity_file import changes_to_ladder
from ladderize.errors import LadderizeError, UserError
from ladderize.eval.options import EvalOptions, SensitivityOptions
from ladderize.files.records import read_value
from ladderize.runtime.bench.options import BenchOptions, ModelChoice, check_bench_usage

MODEL_FOLDER, ADAPTER_FOLDER = "model", "adapter"  # in a stage's folder
RESULTS, SENSITIVITY_JSON, BENCH_JSON, PREDICTIONS = "results.json", "sensitivity.json", "bench.json", "predictions"
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
    "sensitivity": "model out sync_tp_size pairs plot overwrite revision json",
    "convert": "src out dense recipe sensitivity dtype max_shard_size copy dry_run overwrite no_verify revision json",
    "adapt": "model out distill_from align preset resume keep show_data show_data_rows log_with log_dir plot work_dir"
    " overwrite no_verify revision json",
    "eval": "models out keep_predictions reference resume revision no_default_tasks json",
    "bench": "models random_weights layout num_layers sync_tp_size engine revision train schedules seq_len out plot"
    " profile json",
}
Words = tuple[str, ...]  # of a command line, without the program
Given = Mapping[str, Any]  # option -> value, as a file has them


@contextmanager
def errors_begin_with(where: str) -> Iterator[None]:
    """Around a check: its error gets the place in the file in front."""
    try:
        yield
    except LadderizeError as error:
        text = str(error)
        raise UserError(text if text.startswith(where) else f"{where}: {text}") from None


def words_of(command: str, arguments: Sequence[str], given: Given, where: str = "") -> Words:
    """The command line of a command with the options ``given``. Raises UserError, which begins with ``where``, for
    one that it does not have."""
    return (command, *arguments, *option_words(COMMANDS[command], command, given, where))


def asked_by(words: Words) -> GivenOptions:
    """What the command is given by these words. Raises UsageError."""
    return parsed(COMMANDS[words[0]], words[1:])


def check_of_user(command: str, given: Given, where: str) -> None:
    """Raise UserError for an option that the sweep gives by itself."""
    for key in given:
        if key in OF_THE_SWEEP[command].split():
            raise UserError(f"{where}: {key} cannot be given here: the sweep decides it, or has no use for it")


def sensitivity_words(model: str, output: str, given: Given, mode: str, ranks: int | None, where: str = "") -> Words:
    """mode, ranks: of the layers whose sensitivity is measured."""
    own = {"mode": mode, "sync_tp_size": ranks, "out": f"{output}/{SENSITIVITY_JSON}"}
    return words_of("sensitivity", [model], {**given, **own}, where)


def check_sensitivity(given: Given, where: str) -> None:
    """Raises UserError."""
    check_of_user("sensitivity", given, where)
    with errors_begin_with(where):
        mode = str(given.get("mode", "ladder"))
        words = sensitivity_words("DENSE", "OUTPUT", given, mode, None if changes_to_ladder(mode) else 2, where)
        asked_by(words).fill(SensitivityOptions)


def convert_words(model: str, output: str, recipe: Given, revision: str | None, verify: bool) -> Words:
    own = {"revision": revision, "no_verify": not verify}
    return words_of("convert", [model, f"{output}/{MODEL_FOLDER}"], {**recipe, **own})


def adapt_words(
    model: str, output: str, method: Method, dense: str, given: Given, verify: bool, where: str = ""
) -> tuple[Words, ...]:
    """An adapter is merged right away. dense: the teacher, unless distill_weight and hidden_weight are 0."""
    weights = {"distill_weight": 1, "hidden_weight": 0}
    is_taught = method not in (FULL, LORA) or any(given.get(name, value) for name, value in weights.items())
    kept = {key: value for key, value in given.items() if is_taught or key not in weights}
    no_verify, written = {"no_verify": not verify}, f"{output}/{MODEL_FOLDER}"
    own = {"method": method, "distill_from": dense if is_taught else None, **kept}
    if method != LORA:
        return (words_of("adapt", [model, written], {**own, **no_verify}, where),)
    adapter = f"{output}/{ADAPTER_FOLDER}"
    return words_of("adapt", [model, adapter], own, where), words_of("merge", [adapter, written], no_verify)


def check_adapt(method: Method, given: Given, where: str) -> None:
    """Raises UserError."""
    check_of_user("adapt", given, where)
    with errors_begin_with(where):
        adapt_options(asked_by(adapt_words("MODEL", "OUTPUT", method, "DENSE", given, True, where)[0]))


def eval_words(model: str, output: str, given: Given, where: str = "") -> Words:
    own = dict(given)
    if "include_default_tasks" in own:
        are_known = read_value(bool, own.pop("include_default_tasks"), f"{where}: include_default_tasks")
        own["no_default_tasks"] = not are_known
    # the stage's key vouches for the model and the data
    return words_of("eval", [model], {**own, "out": f"{output}/{RESULTS}", "resume": True}, where)


def eval_options(given: Given, where: str) -> EvalOptions:
    """Raises UserError."""
    check_of_user("eval", given, where)
    with errors_begin_with(where):
        options = asked_by(eval_words("MODEL", "OUTPUT", given, where)).fill(EvalOptions)
        options.check()
        if options.backend == "vllm":
            raise UserError("a sweep compares predictions, which vLLM does not tell; say backend: runtime, or hf")
        return options


def bench_words(models: Sequence[str], output: str, given: Given, where: str = "") -> Words:
    return words_of("bench", models, {**given, "out": f"{output}/{BENCH_JSON}"}, where)


def bench_options(given: Given, where: str) -> tuple[BenchOptions, str | None]:
    """With --link. Whether they go together is checked too, of any two models. Raises UserError."""
    check_of_user("bench", given, where)
    with errors_begin_with(where):
        asked = asked_by(bench_words(["DENSE", "MODEL"], "OUTPUT", given, where))
        options, link = asked.fill(BenchOptions), asked.params["link"]
        check_bench_usage(asked.fill(ModelChoice), options, link)
        return options, link
