"""sensitivity.json: what ``ladderize sensitivity`` writes, and ``--spd auto`` and ``--ladder auto`` read. Imports no
torch.

S[i] = PPL(changed: blocks i..L-1) - PPL(changed: blocks i+1..L-1), arXiv 2502.20727: one sweep from the last block
backwards. A table of negative log-likelihoods, windows x (L + 1), is what everything follows from.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

from ladderize.errors import UserError
from ladderize.files.records import Record
from ladderize.layout import Layout

if TYPE_CHECKING:
    import numpy as np

INSENSITIVE = "insensitive"
CLASSES = (INSENSITIVE, "sensitive", "extremely sensitive")
FORMER_CLASSES = {"in-sensitive": INSENSITIVE}  # as files of earlier versions have it
Mode = Literal["spd", "ladder", "each", "each-ladder"]  # what is changed, in the paper's sweep or in each block alone
MODES: tuple[str, ...] = get_args(Mode)
SPD, LADDER = "spd", "ladder"  # the kinds of layers that a mode changes blocks to
POINTS = "points"  # the mode of another document, of single sync points (point_sensitivity.py)
MOST_NATS = 700.0  # of a token: the perplexity of more is no number
TAU1, TAU1_LARGE, LARGE = 0.05, 0.02, 30_000_000_000  # the paper's, and from how many parameters on the lower one holds
TAU2 = 10.0
RESAMPLES, INTERVAL = 2000, 0.95  # of the bootstrap over windows, and the part of its results between low and high


@dataclass(frozen=True)
class CalibrationData(Record):
    """The windows that were scored. sha256: of the file and the array in it. seed: of the windows that are drawn."""

    file: str
    sha256: str
    samples: int
    seq_len: int
    seed: int


@dataclass(frozen=True)
class AlignmentWindows(Record):
    """The windows that layouts were aligned on, as ``ladderize adapt --method align`` does: of the data, those that
    follow the scored ones in the order that they are drawn in. samples: to solve with; heldout, after them: to choose
    among solutions by."""

    samples: int
    heldout: int
    seq_len: int


@dataclass(frozen=True)
class BlockSensitivity(Record):
    """S of one block in perplexity, between the ends of its bootstrap interval."""

    KEYS: ClassVar = {"sensitivity_class": "class"}

    block: int
    sensitivity: float
    low: float
    high: float
    sensitivity_class: str


@dataclass(frozen=True)
class SensitivityRun(Record):
    """What was measured, on what. layout: the model's, dense. dtype: what it computed in, by torch's name. aligned: on
    what each changed model was aligned before it was scored; None: it was scored as it is."""

    LEFT_OUT: ClassVar = ("aligned",)

    model: str
    fingerprint: str
    layout: str
    parameters: int
    data: CalibrationData
    mode: str
    sync_tp_size: int | None
    dtype: str
    aligned: AlignmentWindows | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class UnfinishedSensitivity(SensitivityRun):
    """nll: of each window its summed negative log-likelihood, in nats, under each of the L + 1 models; None
    where it was not measured yet."""

    complete: bool
    nll: list[list[float | None]]


@dataclass(frozen=True)
class SensitivityDocument(SensitivityRun):
    """interval: the part of bootstrap resamples between low and high. perplexity: of the L + 1 models, the last
    dense. nll: [windows, L + 1], as in an unfinished one."""

    complete: bool
    tau1: float
    tau2: float
    interval: float
    perplexity: list[float]
    blocks: list[BlockSensitivity]
    nll: list[list[float]]

    @property
    def kind(self) -> str:
        """Of the layers that blocks were changed to: ``spd`` or ``ladder``."""
        return kind_of(self.mode)

    def check_fits(self, path: Path, num_layers: int, sync_tp_size: int | None) -> None:
        """Raise UserError unless it was measured on so many layers and, of dropped sync points where that is given, for
        so many virtual ranks. path: where it was read."""
        if len(self.blocks) != num_layers:
            raise UserError(
                f"{path} has {len(self.blocks)} blocks, but the model has {num_layers} layers; measure this model"
            )
        if self.kind == SPD and sync_tp_size not in (None, self.sync_tp_size):
            raise UserError(
                f"{path} was measured with sync_tp_size {self.sync_tp_size}, so it does not apply to"
                f" --sync-tp-size {sync_tp_size}"
            )


def alignment_words(aligned: AlignmentWindows) -> str:
    """For people, about numbers that were measured so."""
    return f"each changed model was aligned first, on {aligned.samples} other windows of {aligned.seq_len} tokens"


def changes_to_ladder(mode: str) -> bool:
    """Whether blocks become ladder blocks in this mode; else their sync points are dropped."""
    return mode.endswith("ladder")


def kind_of(mode: str) -> str:
    """The kind of layers that blocks become in a mode: ``spd`` or ``ladder``."""
    return LADDER if changes_to_ladder(mode) else SPD


def column_layouts(mode: str, num_layers: int, sync_tp_size: int | None) -> list[Layout]:
    """The L + 1 models of the table: column k < L changes blocks k..L-1 (or, with each, block k alone), column L is
    dense."""
    kind = kind_of(mode)
    ranks = sync_tp_size if kind == SPD else None
    layouts = []
    for first in range(num_layers):
        changed = [first] if mode.startswith("each") else list(range(first, num_layers))
        layouts.append(Layout.from_layers(num_layers, **{kind: changed}, sync_tp_size=ranks))
    return [*layouts, Layout.dense(num_layers)]


def perplexity_increases(perplexities: "np.ndarray", mode: str) -> "np.ndarray":
    """S of perplexities [..., L + 1]: against the next column in a sweep, against the dense one for each block
    alone."""
    return perplexities[..., :-1] - (perplexities[..., -1:] if mode.startswith("each") else perplexities[..., 1:])


def read_table(nll: list[list[float]], data: CalibrationData, columns: int, path: Path) -> "np.ndarray":
    """``nll`` of a finished measurement, which may be anybody's: [windows, columns] in nats per token.

    Raises UserError where it is none of these windows and so many models.
    """
    import numpy as np

    tokens = data.seq_len - 1
    if tokens < 1 or not nll or len(nll) != data.samples or {len(row) for row in nll} != {columns}:
        raise UserError(
            f"{path}: nll has not {columns} log-likelihoods for each of {data.samples} windows; measure it again"
        )
    table = np.array(nll) / tokens
    if not ((table >= 0) & (table < MOST_NATS)).all():
        raise UserError(f"{path}: nll holds what is no negative log-likelihood of {tokens} tokens; measure it again")
    return table


def check_follows(path: Path, name: str, found: float, right: float) -> None:
    """Raise UserError unless a file's number is the one that follows from its table: somebody has changed one."""
    if not math.isclose(found, right, rel_tol=1e-4, abs_tol=1e-6):
        raise UserError(f"{path}: {name} is {found:g}, but {right:g} follows from nll; measure it again")


Complete = TypeVar("Complete", bound=SensitivityRun)


def read_complete(kind: type[Complete], content: Mapping[str, Any], path: Path) -> Complete:
    """The document of a measurement that was finished; raises UserError for any other content."""
    if content.get("complete") is not True:
        raise UserError(f"{path} is not complete; run `ladderize sensitivity` again to resume it")
    document = kind.from_dict(content, path)
    if document.sync_tp_size is not None and document.sync_tp_size < 1:
        raise UserError(f"{path}: sync_tp_size is {document.sync_tp_size}, but must be a positive integer")
    if not document.fingerprint:
        raise UserError(f"{path}: fingerprint is '', but must be the text that identifies a model")
    return document


def block_document(
    run: SensitivityRun, nll: list[list[float]], *, tau1: float | None = None, tau2: float = TAU2
) -> SensitivityDocument:
    """What a whole table says of blocks. nll: as in the document. tau1: by default the paper's for the model's size."""
    import numpy as np

    tau1 = default_tau1(run.parameters) if tau1 is None else tau1
    perplexities, blocks = block_sensitivities(np.array(nll), run.data.seq_len - 1, run.mode, tau1=tau1, tau2=tau2)
    return SensitivityDocument(
        **vars(run),
        complete=True,
        tau1=tau1,
        tau2=tau2,
        interval=INTERVAL,
        perplexity=perplexities,
        blocks=blocks,
        nll=nll,
    )


def run_of(document: SensitivityRun, **changes: Any) -> SensitivityRun:
    """What was measured, on what, of a document that says more; with other values."""
    return SensitivityRun(**{own.name: getattr(document, own.name) for own in fields(SensitivityRun)} | changes)


def block_sensitivities(
    table: "np.ndarray", tokens: int, mode: str, *, tau1: float, tau2: float
) -> tuple[list[float], list[BlockSensitivity]]:
    """Perplexities [L + 1], and S of each block with its bootstrap interval over windows and its class.

    table: [windows, L + 1] in nats; tokens: scored in each window.
    """
    import numpy as np

    perplexities = np.exp(table.mean(0) / tokens)
    resampled = perplexity_increases(np.exp(window_resamples(table) / tokens), mode)
    values = perplexity_increases(perplexities, mode).tolist()
    blocks = [
        BlockSensitivity(block, value, low=low, high=high, sensitivity_class=classify(value, tau1, tau2))
        for block, (value, low, high) in enumerate(zip(values, *interval_ends(resampled), strict=True))
    ]
    return perplexities.tolist(), blocks


def window_resamples(table: "np.ndarray") -> "np.ndarray":
    """The mean of each column [windows, K] in each bootstrap resample of the windows: [RESAMPLES, K]."""
    import numpy as np

    count = len(table)
    counts = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return counts @ table / count


def interval_ends(resampled: "np.ndarray") -> tuple[list[float], list[float]]:
    """The lower and the upper end of each column's interval [RESAMPLES, K]."""
    import numpy as np

    low, high = np.quantile(resampled, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2], axis=0)
    return low.tolist(), high.tolist()


def default_tau1(parameters: int) -> float:
    return TAU1_LARGE if parameters >= LARGE else TAU1


def classify(sensitivity: float, tau1: float, tau2: float) -> str:
    """The paper's three classes: dropped as they are, distilled, regrouped and distilled."""
    return CLASSES[(sensitivity > tau1) + (sensitivity > tau2)]
