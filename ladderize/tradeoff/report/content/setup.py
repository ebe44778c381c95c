"""On what machines and with which versions a report's numbers were made."""

from dataclasses import dataclass

from ladderize.console import human_bytes
from ladderize.tradeoff.report.content.documents import FoundDocuments


@dataclass(frozen=True)
class SetupFact:
    """One document. name: its file; facts: (what, value)."""

    name: str
    facts: list[tuple[str, str]]


def setup_facts(found: FoundDocuments) -> list[SetupFact]:
    """Of every document that measured something; evaluations that were made alike are one."""
    facts: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for results in found.results:
        for entry in results.document.models[:1]:
            model = entry.model
            key = (
                ("ladderize", results.version),
                ("torch", model.torch_version),
                ("transformers", model.transformers_version),
                ("lm-eval", str(entry.harness.get("lm_eval_version", "not used"))),
                ("device", f"{model.device}, {model.dtype}"),
                ("tasks", ", ".join(results.document.options.tasks) or "none"),
                ("samples for each task", str(results.document.options.limit or "all")),
                ("perplexity on", results.document.options.perplexity or "nothing"),
            )
            facts.setdefault(key, []).append(_place(results.path.parent.name, results.path.name))
    for bench in found.benches:
        environment, document = bench.document.environment, bench.document
        pairs = [
            ("ladderize", bench.version),
            ("torch", environment.torch),
            ("transformers", environment.transformers),
            ("python", environment.python),
            ("system", environment.system),
            (
                "processor",
                f"{environment.processor}, {environment.cores} cores; threads a rank: {environment.threads_per_rank}",
            ),
            ("communication", _communication(bench.document.emulated, document.backend, document.link)),
            ("rounds", f"{document.options.repeat}, after {document.options.warmup} to warm up"),
            ("complete", "yes" if document.complete else "no: it was interrupted"),
        ]
        if environment.gpus:
            memory = human_bytes(environment.gpu_memory_bytes or 0)
            pairs.insert(6, ("GPUs", f"{len(environment.gpus)} x {environment.gpus[0]}, {memory}"))
            pairs.insert(7, ("CUDA, NCCL", f"{environment.cuda}, {environment.nccl}"))
        facts.setdefault(tuple(pairs), []).append(_place(bench.path.parent.name, bench.path.name))
    for plan in found.plans:
        planned = plan.document
        link = planned.link
        pairs = [
            ("ladderize", plan.version),
            ("figures", " and ".join(dict.fromkeys(row.basis for row in planned.rows)) + ": nothing ran"),
            ("device", f"{planned.device.name} ({planned.device.source})"),
            ("link", f"{link.name} ({link.source})" if link is not None else "none: one rank"),
            *((f"link with {one.ranks} ranks", one.derived) for one in planned.links if one.derived is not None),
            ("engine assumed", f"{planned.engine.name} ({planned.engine.source})"),
        ]
        facts.setdefault(tuple(pairs), []).append(_place(plan.path.parent.name, plan.path.name))
    return [SetupFact(_some_names(names), list(pairs)) for pairs, names in facts.items()]


def _some_names(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 3 else ""
    return ", ".join(names[: 2 if more else 3]) + more


def _place(folder: str, name: str) -> str:
    return f"{folder}/{name}"


def _communication(emulated: bool, backend: str, link: object) -> str:
    if emulated and link is not None:
        return f"emulated link {getattr(link, 'name', '')} ({getattr(link, 'source', '')})"
    return backend
