"""Where a run's results go: results.json after every task, and the samples beside it."""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ladderize.errors import UserError
from ladderize.eval.evaluation.samples import former_samples, remove_samples, samples_folder, write_samples
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import EvalResults, EvaluatedModel, ModelResult
from ladderize.files.documents import check_writable, read_own, write_json
from ladderize.files.regular import inside, resolved
from ladderize.files.temporaries import temporary_folder


@dataclass
class Output:
    """The results so far. out: their file, if there is one. parent: the folder that paths of samples are relative to.
    writes: whether this process is the one that writes."""

    options: EvalOptions
    out: Path | None
    parent: Path
    writes: bool
    finished: list[ModelResult] = field(default_factory=list)
    _begun: bool = False
    _earlier: dict[str, ModelResult] = field(default_factory=dict)

    def resume(self) -> None:
        """Go on with what an earlier run of the same models and options left in ``out``, if it did."""
        if self.out is None or not (content := read_own(self.out)):
            return
        try:
            results = EvalResults.from_dict(content, self.out)
        except UserError:
            return
        if results.options == self.options:
            self._earlier = {entry.model.model: entry for entry in results.models if self._has_samples(entry)}
            self._begun = bool(self._earlier)  # its samples stay

    def earlier(self, described: EvaluatedModel) -> ModelResult:
        """An entry with the tasks that an earlier run finished of this model, and with its new description."""
        known = self._earlier.get(described.model)
        return replace(known, model=described) if known is not None else ModelResult(described)

    def _has_samples(self, entry: ModelResult) -> bool:
        found = [inside(self.parent, name) for name in entry.samples.values()]
        return all(path is not None and path.is_file() for path in found)

    def save(self, *unfinished: ModelResult, comparisons: Iterable[dict[str, Any]] = ()) -> EvalResults:
        """Write what there is, so that nothing is lost when something later fails."""
        results = EvalResults(self.options, [*self.finished, *unfinished], list(comparisons))
        if self.out is not None and self.writes:
            former = [] if self._begun else former_samples(self.out)
            write_json(self.out, results.to_dict())
            remove_samples(former)  # which nothing names any more
            self._begun = True
        return results

    def with_task(
        self, entry: ModelResult, result: Mapping[str, Any], samples: Mapping[str, Iterable[Mapping[str, Any]]]
    ) -> ModelResult:
        """``entry`` with a task of lm-eval, whose samples are on the disk before results.json names them."""
        if not self.writes:
            return entry.with_task(result, {})
        if not self._begun:  # or an earlier run's results.json would for a moment name this run's samples
            self.save(entry)
        folder = samples_folder(self.out) if self.out is not None else self.parent / "samples"
        entry = entry.with_task(result, write_samples(folder, len(self.finished), entry.model.model, samples))
        self.save(entry)
        return entry


@contextlib.contextmanager
def open_output(options: EvalOptions, out: Path | None, *, writes: bool) -> Iterator[Output]:
    """Check that ``out`` can be written; without it samples live in a folder that is removed at the end."""
    with contextlib.ExitStack() as stack:
        if out is not None:
            out = resolved(out, "--out ")
            check_output(out)
            parent = out.parent
        elif writes:
            parent = stack.enter_context(temporary_folder("eval"))
        else:
            parent = Path(tempfile.gettempdir())
        yield Output(options, out, parent, writes)


def check_output(out: Path) -> None:
    """Raise UserError unless results and samples can be written."""
    check_writable(out)
    folder = samples_folder(out)
    if out == folder:
        raise UserError(f"--out {out} has the name of the folder of its samples; name a file that ends in .json")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {out}: its samples belong into {folder}, which is a file; name another --out")
