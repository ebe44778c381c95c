"""Evaluate several models alike: lm-eval's tasks through its own HF backend, and perplexity, in one invocation."""

import difflib
import gc
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from ladderize import data
from ladderize.console import Console, UserError
from ladderize.eval.perplexity import Perplexity, perplexity
from ladderize.layout import Layout

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# the parts of lm-eval's result that hold one entry for each task
PER_TASK = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")


@dataclass(frozen=True)
class EvalOptions:
    """What is the same for all models. ``limit``: samples per task. ``perplexity``: a file for ``ladderize.data``."""

    tasks: tuple[str, ...] = ()
    include_path: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    batch_size: int = 8
    dtype: str = "auto"
    device: str | None = None
    revision: str | None = None
    seed: int = 0
    trust_remote_code: bool = False
    perplexity: str | None = None
    seq_len: int | None = None
    include_default_tasks: bool = True  # False: only include_path, which spares indexing lm-eval's thousands of tasks


def evaluate_models(
    models: Iterable[str],
    options: EvalOptions,
    *,
    console: Console,
    save: Callable[[Mapping[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Evaluate each model with the same options, seeds and BOS handling.

    ``save`` gets the document after every task, so that nothing is lost when a later one fails. Returns it at the end:
    ``models`` holds lm-eval's own schema for each model, with our data under the key ``ladderize``.
    """
    names = [str(Path(name).expanduser()) if name.startswith("~") else name for name in models]
    check_before_work(names, options)
    with console.contained():
        manager = load_tasks(options) if options.tasks else None
    document: dict[str, Any] = {"options": asdict(options), "models": []}
    add_bos: bool | None = None
    for name in names:
        with console.contained():
            model, tokenizer = open_model(name, options)
        entry: dict[str, Any] = {"ladderize": {"model": name, **describe(model)}}
        document["models"].append(entry)
        if tokenizer is not None and add_bos is None:
            add_bos = begins_with_bos(tokenizer)
        entry["ladderize"]["add_bos_token"] = add_bos
        if options.perplexity is not None:
            entry["ladderize"]["perplexity"] = asdict(measure_perplexity(model, tokenizer, options, console))
            save(document)
        if manager is not None:
            harness = wrap(name, model, tokenizer, options, add_bos)
            for number, task in enumerate(options.tasks, start=1):
                console.status(f"{name}: {task} ({number} of {len(options.tasks)})")
                with console.contained():
                    result = run_task(harness, task, manager, options)
                merge(entry, result)
                save(document)
            del harness
        del model
        gc.collect()
    return document


def check_before_work(names: list[str], options: EvalOptions) -> None:
    """Find what is certain to fail before any model is loaded."""
    if not options.tasks and options.perplexity is None:
        raise UserError("nothing to evaluate: name --tasks, or a file for --perplexity")
    if options.perplexity is not None:
        data.check_data_file(options.perplexity)
    for name in names:
        if Path(name).exists():
            if options.revision is not None:
                raise UserError(f"{name} is a local folder, which has no revisions; leave --revision out")
            if not (Path(name) / "config.json").is_file():
                raise UserError(f"{name} holds no config.json; it is not a Hugging Face checkpoint")
        elif name.count("/") > 1 or name.startswith((".", "/", "~")):
            raise UserError(f"{name} does not exist; name a checkpoint folder or a hub id")


def load_tasks(options: EvalOptions) -> "TaskManager":
    """lm-eval's task manager, after every task was found and its data opened."""
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if options.include_path is not None and not Path(options.include_path).is_dir():
        raise UserError(f"--include-path {options.include_path} is no folder")
    manager = TaskManager(include_path=options.include_path, include_defaults=options.include_default_tasks)
    for task in options.tasks:
        if task not in manager.all_tasks:
            near = difflib.get_close_matches(task, manager.all_tasks, n=3)
            hint = (
                f"near names: {', '.join(near)}"
                if near
                else "lm-eval's `lm_eval ls tasks` lists them, --include-path adds your own"
            )
            raise UserError(f"there is no task {task!r}; {hint}")
    for task in options.tasks:
        try:
            loaded = manager.load([task])["tasks"]
        except Exception as error:  # a task may run any code to get its data
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"the task {task!r} cannot be loaded, most likely because its data set is not here: {reason}"
            ) from error
        fixed = [name for name, entry in loaded.items() if entry.get_config("num_fewshot") == 0]
        if options.num_fewshot and fixed:
            raise UserError(
                f"--num-fewshot has no effect on {fixed[0]}, which fixes it at 0; leave it out, or leave the task out"
            )
    return manager


def open_model(name: str, options: EvalOptions) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase | None]":
    """A model and, if it has one, its tokenizer; errors of transformers become one sentence."""
    import torch
    from transformers import AutoTokenizer

    from ladderize.modeling import load

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    common = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    try:
        model = load(name, dtype=options.dtype, device=device, **common)  # type: ignore[arg-type]
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        raise UserError(f"{name} cannot be loaded: {' '.join(str(error).split())[:400]}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **common)
    except (OSError, ValueError):
        tokenizer = None
        if options.tasks:
            raise UserError(
                f"{name} has no tokenizer that transformers can open, and lm-eval's tasks are text"
            ) from None
    return model, tokenizer


def describe(model: "PreTrainedModel") -> dict[str, Any]:
    """Layout, size and numerics of a loaded model."""
    import torch
    import transformers

    layout = Layout.from_config(model.config.to_dict())
    return {
        "layout": str(layout),
        **layout.to_config(),
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "torch_version": torch.__version__,
        "transformers_version": transformers.__version__,
    }


def begins_with_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether this tokenizer by itself puts BOS in front of a text."""
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def measure_perplexity(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None", options: EvalOptions, console: Console
) -> Perplexity:
    """Perplexity of ``options.perplexity`` in windows of ``options.seq_len``."""
    assert options.perplexity is not None
    documents = data.read_documents(options.perplexity, tokenizer, vocab_size=model.config.vocab_size)
    longest = model.config.max_position_embeddings
    seq_len = options.seq_len or data.default_seq_len(documents, options.perplexity, longest)
    if not 2 <= seq_len <= longest:
        raise UserError(f"--seq-len {seq_len} must be between 2 and the {longest} positions of {model.name_or_path}")
    windows = data.windows(documents, seq_len)
    with console.progress("perplexity", len(windows)) as advance:
        return perplexity(model, windows, batch_size=options.batch_size, advance=advance)


def wrap(
    name: str,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    options: EvalOptions,
    add_bos: bool | None,
) -> Any:
    """lm-eval's HF backend around a loaded model. BOS is told explicitly, the same for all models."""
    from lm_eval.models.huggingface import HFLM

    if options.apply_chat_template and not getattr(tokenizer, "chat_template", None):
        raise UserError(f"{name} has no chat template, so --apply-chat-template cannot be done")
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.batch_size, add_bos_token=add_bos)


def run_task(harness: Any, task: str, manager: "TaskManager", options: EvalOptions) -> dict[str, Any]:
    """One task (or group) with lm-eval's ``simple_evaluate``; the seeds are set anew for each."""
    from lm_eval import simple_evaluate

    # lm-eval asks git about the current folder, which says nothing of us, and git complains where there is no
    # repository
    with mock.patch("lm_eval.evaluator.get_git_commit_hash", return_value=None):
        return simple_evaluate(  # type: ignore[return-value]
            model=harness,
            tasks=[task],
            task_manager=manager,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            batch_size=options.batch_size,
            apply_chat_template=options.apply_chat_template,
            log_samples=False,
            random_seed=options.seed,
            numpy_random_seed=options.seed,
            torch_random_seed=options.seed,
            fewshot_random_seed=options.seed,
        )


def merge(entry: dict[str, Any], result: Mapping[str, Any]) -> None:
    """Add one task's result to a model's entry, in lm-eval's own schema."""
    for key, value in result.items():
        if key in PER_TASK and isinstance(value, dict):
            entry.setdefault(key, {}).update(value)
        else:
            entry.setdefault(key, value)


def comparison(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """Rows task x model: value, standard error, and the difference to the first model."""
    entries = document["models"]
    names = short_names([entry["ladderize"]["model"] for entry in entries])
    measured = [
        {(task, metric): (value, stderr) for task, metric, value, stderr in measurements(entry)} for entry in entries
    ]
    rows = []
    for task, metric in dict.fromkeys(key for values in measured for key in values):
        base = measured[0].get((task, metric))
        first = True
        for name, values in zip(names, measured, strict=True):
            if (task, metric) not in values:
                continue
            value, stderr = values[task, metric]
            rows.append(
                {
                    "task": task if first else "",
                    "metric": metric if first else "",
                    "model": name,
                    "value": f"{value:.4f}",
                    "stderr": "" if stderr is None else f"{stderr:.4f}",
                    "difference": "" if values is measured[0] or base is None else f"{value - base[0]:+.4f}",
                }
            )
            first = False
    return rows


def short_names(models: list[str]) -> list[str]:
    """The last part of each path, where these differ; else the whole."""
    last = [Path(model).name for model in models]
    return last if len(set(last)) == len(last) else models


def measurements(entry: Mapping[str, Any]) -> list[tuple[str, str, float, float | None]]:
    """(task, metric, value, stderr) of one model, perplexity first; metrics as lm-eval names them, without its filter's
    ``none``."""
    found: list[tuple[str, str, float, float | None]] = []
    ours = entry["ladderize"].get("perplexity")
    if ours:
        found.append(("perplexity", "perplexity", ours["perplexity"], ours["stderr"]))
    for task, values in entry.get("results", {}).items():
        for key, value in values.items():
            metric, _, filtered = key.partition(",")
            if "_stderr" in key or not isinstance(value, int | float) or not filtered:
                continue
            stderr = values.get(f"{metric}_stderr,{filtered}")
            name = metric if filtered == "none" else f"{metric} ({filtered})"
            found.append((task, name, float(value), stderr if isinstance(stderr, float) else None))
    return found
