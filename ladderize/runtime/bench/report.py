"""bench.json in words: one table, and what to know when reading it."""

from collections.abc import Sequence
from pathlib import Path

from ladderize.console import human_bytes, table
from ladderize.runtime.bench.document import BenchDocument, BenchRow


def bench_summary(document: BenchDocument) -> str:
    """The table that ``ladderize bench`` prints."""
    lines = [_line(row, label) for row, label in zip(document.rows, row_labels(document.rows), strict=True)]
    ranks, link = document.rows[0].tp_size, document.link
    group = (
        f"EMULATED: rank 0 of {ranks}, {link.name}"
        if link is not None
        else f"{ranks} rank{'s' * (ranks > 1)}, {document.backend}"
    )
    options = document.options
    text = [
        (
            f"{group}; prompt {options.prompt_len}, output {options.output_len}, medians of {options.repeat}"
            " interleaved rounds"
        ),
        table(lines, right=[key for key in lines[0] if key != "model"]),
    ]
    if any(row.is_random for row in document.rows):
        text.append("Weights are random: these are times only.")
    if link is not None and (outside := document.message_bytes_outside_link_range):
        text.append(
            f"Beyond the sizes that {link.name} was measured at, so taken from its fit: messages of {_range(outside)}."
        )
    unchecked = sorted({row.model for row in document.rows if row.is_model and not (row.is_random or row.checked)})
    if unchecked:
        text.append(f"Not checked against a reference: {', '.join(unchecked)}.")
    text.append(
        "decode ms and reduces (all-reduces of the layers): per step, one token of each row. waited: ms over the same"
        " model without"
    )
    text.append("communication; hid, of: ms of the collectives' own time that did not show, of all of it.")
    return "\n".join(text)


def _range(sizes: list[int]) -> str:
    return human_bytes(sizes[0]) if len(sizes) == 1 else f"{human_bytes(sizes[0])} to {human_bytes(sizes[-1])}"


def row_labels(rows: Sequence[BenchRow]) -> list[str]:
    """The last part of each model's name, or all of it where that would not tell models apart."""
    short = {row.model: Path(row.model).name for row in rows}
    unique = len(set(short.values())) == len(short)
    return [short[row.model] if unique else row.model for row in rows]


def _line(row: BenchRow, label: str) -> dict[str, str]:
    line = {
        "model": label + (" (emulated)" if row.emulated else ""),
        "batch": str(row.batch_size),
        "prefill ms": f"{row.prefill_ms:.2f}",
        "speed-up": f"{row.speedup_prefill:.3f}x",
        "waited": "",
        "decode ms": f"{row.decode_ms_per_token:.3f}",
        "speed-up ": f"{row.speedup_decode:.3f}x",
        "waited ": "",
        "hid, of": "",
        "tokens/s": f"{row.output_tokens_per_s:.1f}",
        "reduces": "",
    }
    if row.communication is not None:
        prefill, decode = row.communication["prefill"], row.communication["decode"]
        hidden = min(max(0.0, decode.hidden_ms), decode.alone_ms)
        line |= {
            "waited": f"{prefill.exposed_ms:.2f}",
            "waited ": f"{decode.exposed_ms:.3f}",
            "hid, of": f"{hidden:.3f}, {decode.alone_ms:.3f}" if decode.alone_ms else "",
            "reduces": str(decode.all_reduces),
        }
    if row.overlap is not None:
        line["under compute"] = f"{row.overlap.share:.0%}"
    return line
