"""Evaluate several models alike: lm-eval's tasks through its own HF backend, and perplexity, in one invocation."""

import difflib
import gc
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from ladderize import data
from ladderize.chat_template.renderer import ChatRenderer, RefusedConversation
from ladderize.checkpoint.model_check import check_model
from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.eval.options import EvalOptions
from ladderize.eval.perplexity import model_perplexity
from ladderize.eval.results import EvalResults, EvaluatedModel, ModelResult, Perplexity
from ladderize.files.documents import check_writable, write_json
from ladderize.layout import Layout, LayoutError
from ladderize.ranks.device import check_device

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def evaluate(
    models: Iterable[str | Path],
    options: EvalOptions,
    *,
    out: Path | None = None,
    console: Console = SILENT,
) -> EvalResults:
    """Evaluate each model with the same options, seeds and BOS handling. The first is the reference of the others.

    models: folders or hub ids. out: a JSON file that is written after every task, so that nothing is lost when a later
    one fails. Raises UserError.
    """
    options.check()
    if options.device is not None:
        check_device(options.device)
    names = [str(Path(name).expanduser()) if str(name).startswith("~") else str(name) for name in models]
    if out is not None:
        check_writable(out)
    save = (lambda content: write_json(out, content)) if out is not None else (lambda content: None)
    folders = check_before_work(names, options)
    manager = None
    if options.tasks:
        with console.stage("reading the tasks of lm-eval"), console.contained():
            manager = load_tasks(options)
    finished: list[ModelResult] = []
    add_bos: bool | None = None
    for name, folder in zip(names, folders, strict=True):
        with console.stage(f"loading {name}"), console.contained():
            model, tokenizer = open_model(name, folder, options)
        if tokenizer is not None and add_bos is None:
            add_bos = begins_with_bos(tokenizer)
        entry = ModelResult(describe_model(name, model, add_bos))
        if options.perplexity is not None:
            perplexity = measure_perplexity(model, tokenizer, options, console)
            entry = replace(entry, model=replace(entry.model, perplexity=perplexity))
            save(EvalResults(options, [*finished, entry]).to_dict())
        if manager is not None:
            harness = lm_eval_backend(name, model, tokenizer, options, add_bos)
            for number, task in enumerate(options.tasks, start=1):
                console.note(f"{name}: {task} ({number} of {len(options.tasks)})")
                with console.contained(bars=True):
                    result = run_task(harness, task, manager, options)
                entry = entry.with_task(result)
                save(EvalResults(options, [*finished, entry]).to_dict())
            del harness
        finished.append(entry)
        del model
        gc.collect()
    return EvalResults(options, finished)


def check_before_work(names: list[str], options: EvalOptions) -> list[Path]:
    """The folders of the models, all of which were checked: what is certain to fail is found before any is loaded."""
    if options.perplexity is not None:
        data.check_data_file(options.perplexity)
    return [check_model(name, options.revision) for name in names]


def load_tasks(options: EvalOptions) -> "TaskManager":
    """lm-eval's task manager, after every task was found and its data opened."""
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if options.include_path is not None and not Path(options.include_path).is_dir():
        raise UserError(f"--include-path {options.include_path} is not a folder")
    manager = TaskManager(include_path=options.include_path, include_defaults=options.include_default_tasks)
    for task in options.tasks:
        if task not in manager.all_tasks:
            near = difflib.get_close_matches(task, manager.all_tasks, n=3)
            hint = (
                f"similar names: {', '.join(near)}"
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


def open_model(
    name: str, folder: Path, options: EvalOptions
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase | None]":
    """A checked model and, if it has one, its tokenizer; errors of transformers become one sentence."""
    import torch

    from ladderize.modeling import load, load_tokenizer

    needed = bool(options.tasks) or (options.perplexity is not None and data.needs_tokenizer(options.perplexity))
    tokenizer = load_tokenizer(folder, trust_remote_code=options.trust_remote_code) if needed else None
    if options.tasks and tokenizer is None:
        raise UserError(f"{name} has no tokenizer that transformers can open, and lm-eval's tasks are text")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model = load(folder, dtype=options.dtype, device=device, trust_remote_code=options.trust_remote_code)
    except (UserError, LayoutError):
        raise
    except Exception as error:  # whatever a config of another architecture makes transformers do
        raise UserError(f"{name} cannot be loaded: {' '.join(str(error).split())[:400]}") from error
    return model, tokenizer


def describe_model(name: str, model: "PreTrainedModel", add_bos: bool | None) -> EvaluatedModel:
    """Layout, size and numerics of a loaded model."""
    import torch
    import transformers

    layout = Layout.from_config(model.config.to_dict())
    return EvaluatedModel(
        model=name,
        layout=str(layout),
        **layout.to_config(),
        parameters=model.num_parameters(),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        torch_version=torch.__version__,
        transformers_version=transformers.__version__,
        add_bos_token=add_bos,
    )


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
        return model_perplexity(model, windows, batch_size=options.batch_size, advance=advance)


def lm_eval_backend(
    name: str,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    options: EvalOptions,
    add_bos: bool | None,
) -> Any:
    """lm-eval's HF backend around a loaded model. BOS is told explicitly, the same for all models."""
    from lm_eval.models.huggingface import HFLM

    backend = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.batch_size, add_bos_token=add_bos)
    if options.apply_chat_template:
        assert tokenizer is not None
        renderer = ChatRenderer.of(tokenizer)
        if renderer is None:
            raise UserError(f"{name} has no chat template, so --apply-chat-template has nothing to apply")

        def apply(chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            """lm-eval's own method, with the limits of ours; it, too, leaves the system's turns out if they are
            refused."""
            given = {
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": not add_generation_prompt,
            }
            try:
                return renderer.render(chat_history, **given)[0]
            except RefusedConversation:
                return renderer.render([turn for turn in chat_history if turn["role"] != "system"], **given)[0]

        backend.apply_chat_template = apply
    return backend


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
