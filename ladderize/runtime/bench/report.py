"""bench.json in words: one table, and what to know when reading it."""

from pathlib import Path
from typing import Any

from ladderize.console import human_bytes, table


def summary(document: dict[str, Any]) -> str:
    """The table that ``ladderize bench`` prints."""
    lines = [_line(row, label) for row, label in zip(document["rows"], labels(document["rows"]), strict=True)]
    ranks = document["rows"][0]["tp_size"]
    how = (
        f"EMULATED: rank 0 of {ranks}, {document['link']['name']}"
        if document["emulated"]
        else f"{ranks} rank{'s' * (ranks > 1)}, {document['backend']}"
    )
    options = document["options"]
    text = [
        (
            f"{how}; prompt {options['prompt_len']}, output {options['output_len']}, medians of {options['repeat']}"
            " interleaved rounds"
        ),
        table(lines, right=[key for key in lines[0] if key != "model"]),
    ]
    if any(row["weights"] == "random" for row in document["rows"]):
        text.append("Weights are random: these are times only.")
    if outside := document["message_bytes_outside_link_range"]:
        text.append(
            f"Beyond the sizes that {document['link']['name']} was measured at, so taken from its fit: messages of"
            f" {_range(outside)}."
        )
    unchecked = sorted(
        {
            row["model"]
            for row in document["rows"]
            if row["weights"] != "random" and row["kind"] == "model" and not row["checked"]
        }
    )
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


def labels(rows: list[dict[str, Any]]) -> list[str]:
    """The last part of each model's name, or all of it where that would not tell models apart."""
    short = {row["model"]: Path(row["model"]).name for row in rows}
    unique = len(set(short.values())) == len(short)
    return [short[row["model"]] if unique else row["model"] for row in rows]


def _line(row: dict[str, Any], label: str) -> dict[str, str]:
    line = {
        "model": label + (" (emulated)" if row["emulated"] else ""),
        "batch": str(row["batch_size"]),
        "prefill ms": f"{row['prefill_ms']:.2f}",
        "speed-up": f"{row['speedup_prefill']:.3f}x",
        "waited": "",
        "decode ms": f"{row['decode_ms_per_token']:.3f}",
        "speed-up ": f"{row['speedup_decode']:.3f}x",
        "waited ": "",
        "hid, of": "",
        "tokens/s": f"{row['output_tokens_per_s']:.1f}",
        "reduces": "",
    }
    if "communication" in row:
        prefill, decode = row["communication"]["prefill"], row["communication"]["decode"]
        line |= {
            "waited": f"{prefill['exposed_ms']:.2f}",
            "waited ": f"{decode['exposed_ms']:.3f}",
            "hid, of": (
                f"{min(max(0.0, decode['hidden_ms']), decode['alone_ms']):.3f}, {decode['alone_ms']:.3f}"
                if decode["alone_ms"]
                else ""
            ),
            "reduces": str(decode["all_reduces"]),
        }
    if "overlap" in row:
        line["under compute"] = f"{row['overlap']['share']:.0%}"
    return line
