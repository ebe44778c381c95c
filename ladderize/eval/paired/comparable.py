"""Whether two models were asked the same: else nothing is compared, and the message says what differs. Imports no
torch."""

from collections.abc import Mapping
from typing import Any

from ladderize.errors import UserError
from ladderize.eval.paired.answers import HASHES, Answers
from ladderize.eval.paired.entry import ComparedModel

ADVICE = "evaluate both models alike, best in one `ladderize eval`"
PERPLEXITY = "perplexity"  # named where tasks are
# parts of lm-eval's result that hold for all tasks, and what they are called
SETTINGS = {
    "chat_template_sha": "chat template",
    "system_instruction_sha": "system instruction",
    "fewshot_as_multiturn": "few-shot examples as turns",
}
PER_TASK_SETTINGS = {"versions": "version", "n-shot": "number of few-shot examples"}
CONFIGURED = {"output_type": "type of request", "generation_kwargs": "generation settings", "repeats": "repeats"}


def common_tasks(reference: ComparedModel, other: ComparedModel, *, common: bool) -> tuple[list[str], list[str]]:
    """The tasks (and ``perplexity``) of both, and of one only. Raises UserError unless they are the same ones, or
    ``common``, or where there is nothing that both have."""
    ours, theirs = _measured(reference), _measured(other)
    both = [task for task in ours if task in theirs]
    only = {reference.where: [t for t in ours if t not in both], other.where: [t for t in theirs if t not in both]}
    alone = [f"only {where} has {_list(tasks)}" for where, tasks in only.items() if tasks]
    if not ours or not theirs:
        raise UserError(f"{(other if ours else reference).where} holds no results; evaluate the model first")
    if not both:
        raise UserError(f"nothing was measured of both models: {', '.join(alone)}; {ADVICE}")
    if alone and not common:
        raise UserError(f"not the same tasks: {', '.join(alone)}; {ADVICE}, or pass --common to compare what both have")
    return [task for task in both if task != PERPLEXITY], [task for tasks in only.values() for task in tasks]


def check_same(what: str, reference: ComparedModel, other: ComparedModel, ours: Any, theirs: Any) -> None:
    """Raise UserError, which shows both, where one of the settings is another."""
    if ours != theirs:
        raise UserError(
            f"not the same {what}: {_short(ours)} in {reference.where}, {_short(theirs)} in {other.where}; {ADVICE}"
        )


def check_settings(reference: ComparedModel, other: ComparedModel, tasks: list[str]) -> None:
    """Raise UserError where the models were asked under other settings."""
    if not tasks:
        return
    for key, what in SETTINGS.items():
        if key in reference.harness and key in other.harness:  # else one is ours; other prompts are found out below
            check_same(what, reference, other, reference.harness[key], other.harness[key])
    if reference.model is not None and other.model is not None:
        ours, theirs = reference.model.add_bos_token, other.model.add_bos_token
        check_same("BOS token in front of texts", reference, other, ours, theirs)
    if reference.options is not None and other.options is not None:
        asked = (reference.options.apply_chat_template, other.options.apply_chat_template)
        check_same("chat template (--apply-chat-template)", reference, other, *asked)
    for task in tasks:
        for part, what in PER_TASK_SETTINGS.items():
            check_same(f"{what} of {task}", reference, other, reference.of_task(part, task), other.of_task(part, task))
        configs = [entry.object_of_task("configs", task) for entry in (reference, other)]
        for key, what in CONFIGURED.items():
            check_same(f"{what} of {task}", reference, other, *(config.get(key) for config in configs))


def check_same_samples(reference: ComparedModel, other: ComparedModel, task: str) -> None:
    """Raise UserError unless both answered the same documents of a task, with the same prompts."""
    ours, theirs = reference.answers[task], other.answers[task]
    check_same(f"filters of {task}", reference, other, sorted(ours), sorted(theirs))
    for name, answers in ours.items():
        _check_answers(reference, other, task, answers, theirs[name])


def _check_answers(reference: ComparedModel, other: ComparedModel, task: str, ours: Answers, theirs: Answers) -> None:
    between = f"{reference.where} and {other.where}"
    if len(ours.doc_ids) != len(theirs.doc_ids):
        raise UserError(
            f"not the same samples of {task}: {len(ours.doc_ids):,} in {reference.where}, {len(theirs.doc_ids):,} in"
            f" {other.where}, as another --limit makes; {ADVICE}"
        )
    if ours.doc_ids != theirs.doc_ids:
        odd = min(set(ours.doc_ids) ^ set(theirs.doc_ids))
        raise UserError(f"not the same samples of {task}: only one of {between} has doc_id {odd}; {ADVICE}")
    for key, what in HASHES.items():
        places = [
            place
            for place, pair in enumerate(zip(ours.hashes[key], theirs.hashes[key], strict=True))
            if pair[0] != pair[1]
        ]
        if places:
            raise UserError(
                f"not the same {what} of {task}: {len(places):,} of {len(ours.doc_ids):,} differ between {between}"
                f" (the first has doc_id {ours.doc_ids[places[0]]}){_reason(what)}; {ADVICE}"
            )


def _reason(what: str) -> str:
    return ", as other few-shot examples, another chat template or BOS token make" if what == "prompts" else ""


def evaluation_remarks(reference: ComparedModel, other: ComparedModel) -> list[str]:
    """What a difference between the models may come from as well: how they were computed."""
    if reference.model is None or other.model is None:
        ours, theirs = (
            {key: _config(entry).get(key) for key in ("model_dtype", "batch_size")} for entry in (reference, other)
        )
    else:
        ours, theirs = (
            {"dtype": model.dtype, "device": model.device.partition(":")[0], **_backend(model)}
            for model in (reference.model, other.model)
        )
    return [
        f"the reference was evaluated with {key} {ours[key]}, the other model with {key} {theirs[key]}"
        for key in ours
        if ours[key] is not None and theirs[key] is not None and ours[key] != theirs[key]
    ]


def _backend(model: Any) -> Mapping[str, Any]:
    return {key: getattr(model, key, None) for key in ("backend", "tp_size")}


def _config(entry: ComparedModel) -> Mapping[str, Any]:
    config = entry.harness.get("config")
    return config if isinstance(config, Mapping) else {}


def _measured(entry: ComparedModel) -> list[str]:
    has_perplexity = entry.model is not None and entry.model.perplexity is not None
    return [*entry.answers, *([PERPLEXITY] if has_perplexity else [])]


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else text[:40] + "..."


def _list(tasks: list[str]) -> str:
    return ", ".join(tasks[:5]) + (f" and {len(tasks) - 5} more" if len(tasks) > 5 else "")
