"""The results of an evaluation on disk, each kept as soon as it is there.

Beside results.json lies a model's answer to each question. A sample is one line of JSON in the layout of lm-eval's
``--log_samples``, so lm-eval's tools and ``datasets`` read these files too.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ladderize.choices import flag, identity
from ladderize.console import strict_json
from ladderize.errors import UserError
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import ComparisonDocument, EvalResults, ModelResult
from ladderize.files.documents import check_writable, read_own, write_json
from ladderize.files.regular import inside, resolved
from ladderize.files.temporaries import replacement

MOST_NAME = 80  # characters of a model's or a task's name in a file's name


class Output:
    """The results so far, with their samples. Raises UserError where they cannot be written.

    out: their file.
    writes: this process writes it.
    models: the entries so far by name.
    """

    def __init__(self, options: EvalOptions, out: Path, *, writes: bool) -> None:
        self.options: dict[str, Any] = strict_json(identity(options))
        self.names, self.writes = [str(name) for name in options.models], writes
        self.models: dict[str, ModelResult] = {}
        self.out = resolved(out, "--out ")
        check_writable(self.out, inputs=[options.perplexity])
        self.folder = self.out.with_name(f"{self.out.stem}.samples")
        if self.out == self.folder or self.folder.is_file():
            raise UserError(
                f"--out {self.out}: its samples belong into {self.folder}; name a file whose samples can lie beside it"
            )

    def earlier(self) -> dict[str, ModelResult]:
        """Return the entries that an earlier run with the same options left in ``out``, with all their samples.

        Raises UserError where it had other options, or models that are not named now: their results would be lost.
        """
        try:
            results = EvalResults.from_dict(read_own(self.out), self.out)
        except UserError:
            return {}
        changed = [flag(name) for name, value in self.options.items() if results.options.get(name) != value]
        if changed:
            raise UserError(f"{self.out} is of an eval with another {' and '.join(changed)}; name another --out")
        models = {entry.model.model: entry for entry in results.models}
        missing = models.keys() - {*self.names}
        if missing:
            raise UserError(f"{self.out} also has {', '.join(missing)}; name all its models, or another --out")
        for name, entry in [*models.items()]:
            paths = [inside(self.out.parent, file) for file in entry.samples.values()]
            if not all(path is not None and path.is_file() for path in paths):
                del models[name]
        return models

    def add_task(self, name: str, result: dict[str, Any]) -> None:
        """Add the results of a task. Its samples are on disk, in whole files, before results.json names them."""
        samples, written = result.pop("samples"), dict[str, str]()
        if self.writes:
            folder = self.folder / _as_name(name, Path(name).name)
            folder.mkdir(parents=True, exist_ok=True)
            for task, answers in samples.items():
                path = folder / f"{_as_name(task, task)}.jsonl"
                with replacement(path) as file:
                    for sample in answers:
                        file.write(json.dumps(_as_logged(sample), ensure_ascii=False, allow_nan=False) + "\n")
                written[task] = path.relative_to(self.out.parent).as_posix()
            self.models[name] = self.models[name].with_task(result, written)
            self.save()

    def save(self, comparisons: Sequence[ComparisonDocument] = ()) -> EvalResults:
        """Write and return the results so far."""
        models = [self.models[name] for name in self.names if name in self.models]
        results = EvalResults(self.options, models, [*comparisons])
        if self.writes:
            write_json(self.out, results.to_dict())
        return results


def _as_logged(sample: Mapping[str, Any]) -> Any:
    """Return a sample as lm-eval's ``--log_samples`` writes it; NaN and infinity, which JSON lacks, become null."""
    from lm_eval.utils import sanitize_list

    arguments = {}
    for number, texts in enumerate(sample["arguments"]):
        arguments[f"gen_args_{number}"] = {f"arg_{position}": text for position, text in enumerate(texts)}
    answers = {key: sanitize_list(sample[key]) for key in ("resps", "filtered_resps")}
    return strict_json({**sample, "arguments": arguments, **answers, "target": str(sample["target"])})


def _as_name(text: str, shown: str) -> str:
    """Return a file's name: ``shown``, with a hash of ``text`` where it is not the whole text."""
    name = re.sub(r"[^\w.-]", "_", shown)[:MOST_NAME].lstrip(".")
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
