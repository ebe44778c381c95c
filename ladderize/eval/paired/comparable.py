"""Whether two models were asked the same: else nothing is compared, and the message says what differs. Imports no
torch."""

from collections.abc import Mapping
from typing import Any

from ladderize.errors import UserError
from ladderize.eval.paired.samples import HASHES, ComparedModel

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
    ours, theirs = (
        [*entry.samples, *([PERPLEXITY] if entry.model is not None and entry.model.perplexity is not None else [])]
        for entry in (reference, other)
    )
    both = [task for task in ours if task in theirs]
    only = {reference.where: [t for t in ours if t not in both], other.where: [t for t in theirs if t not in both]}
    alone = [f"only {where} has {_list(tasks)}" for where, tasks in only.items() if tasks]
    if not ours or not theirs:
        raise UserError(f"{(other if ours else reference).where} holds no results; evaluate the model first")
    if not both:
        raise UserError(f"nothing was measured of both models: {', '.join(alone)}; {ADVICE}")
    if alone and not common:
        raise UserError(f"not the same tasks: {', '.join(alone)}; {ADVICE}, or pass --common to compare what both have")
    return both, [task for tasks in only.values() for task in tasks]


def check_same(what: str, reference: ComparedModel, other: ComparedModel, ours: Any, theirs: Any) -> None:
    """Raise UserError, which shows both, where one of the settings is another."""
    if ours != theirs:
        raise UserError(
            f"not the same {what}: {_short(ours)} in {reference.where}, {_short(theirs)} in {other.where}; {ADVICE}"
        )


def check_settings(reference: ComparedModel, other: ComparedModel, tasks: list[str]) -> None:
    """Raise UserError where the models were asked under other settings."""
    both = (reference, other)
    if not tasks:
        return
    for key, what in SETTINGS.items():
        if key in reference.harness and key in other.harness:  # else one is ours; other prompts are found out below
            check_same(what, *both, *(entry.harness[key] for entry in both))
    if reference.model is not None and other.model is not None:
        check_same("BOS token in front of texts", *both, reference.model.add_bos_token, other.model.add_bos_token)
    if reference.options is not None and other.options is not None:
        asked = (reference.options.apply_chat_template, other.options.apply_chat_template)
        check_same("chat template (--apply-chat-template)", *both, *asked)
    for task in tasks:
        for part, what in PER_TASK_SETTINGS.items():
            check_same(f"{what} of {task}", *both, *(entry.of_task(part, task) for entry in both))
        for key, what in CONFIGURED.items():
            check_same(f"{what} of {task}", *both, *(e.object_of_task("configs", task).get(key) for e in both))


def check_same_samples(reference: ComparedModel, other: ComparedModel, task: str) -> None:
    """Raise UserError unless both answered the same documents of a task, with the same prompts."""
    check_same(f"filters of {task}", reference, other, *(sorted(entry.samples[task]) for entry in (reference, other)))
    between = f"{reference.where} and {other.where}"
    for name, ours in reference.samples[task].items():
        theirs = other.samples[task][name]
        if len(ours) != len(theirs):
            raise UserError(
                f"not the same samples of {task}: {len(ours):,} in {reference.where}, {len(theirs):,} in {other.where},"
                f" as another --limit makes; {ADVICE}"
            )
        if len(odd := ours.index.symmetric_difference(theirs.index)):
            raise UserError(f"not the same samples of {task}: only one of {between} has doc_id {odd[0]}; {ADVICE}")
        for key, what in HASHES.items():
            if len(differ := ours.index[ours[key] != theirs[key]]):
                reason = ", as other few-shot examples, another chat template or BOS token make"
                raise UserError(
                    f"not the same {what} of {task}: {len(differ):,} of {len(ours):,} differ between {between} (the"
                    f" first has doc_id {differ[0]}){reason if what == 'prompts' else ''}; {ADVICE}"
                )


def evaluation_remarks(reference: ComparedModel, other: ComparedModel) -> list[str]:
    """What a difference between the models may come from as well: how they were computed."""
    both = (reference, other)
    if reference.model is None or other.model is None:
        configs = [entry.harness.get("config") for entry in both]
        ours, theirs = (
            {key: config.get(key) for key in ("model_dtype", "batch_size") if isinstance(config, Mapping)}
            for config in configs
        )
    else:
        ours, theirs = (
            {key: getattr(model, key, None) for key in ("dtype", "device", "backend", "tp_size")}
            | {"device": model.device.partition(":")[0]}
            for model in (reference.model, other.model)
        )
    return [
        f"the reference was evaluated with {key} {ours[key]}, the other model with {key} {theirs[key]}"
        for key in ours
        if ours[key] is not None and theirs.get(key) not in (None, ours[key])
    ]


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else text[:40] + "..."


def _list(tasks: list[str]) -> str:
    return ", ".join(tasks[:5]) + (f" and {len(tasks) - 5} more" if len(tasks) > 5 else "")
