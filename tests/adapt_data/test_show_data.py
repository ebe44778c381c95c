"""--show-data: a batch for people, and for programs."""

import json

from ladderize.adapt.data.packing import batch_document, segments, show_batch
from ladderize.adapt.data.stream import fixed_rows
from ladderize.adapt.data_specs import parse_specs
from tests.adapt_data.rows import (
    PLAIN,
    TURNS,
    options,
    write_jsonl,
)


def test_a_batch_for_people(tmp_path, chat):
    tokenizer = chat(PLAIN)
    rows = [{"messages": TURNS}, {"prompt": "two\nlines\t", "completion": " sat"}, {"input_ids": [5] * 600}]
    packed = fixed_rows(parse_specs([write_jsonl(tmp_path / "a.jsonl", rows)]), tokenizer, options(seq_len=700))
    text = show_batch(packed, tokenizer)
    assert "<assistant>[[hi there </s>]]<user>and?<assistant>[[bye</s>]]" in text
    assert r"two\nlines\t[[ sat</s>]]" in text
    assert "... 100 tokens left out ..." in text
    lines = text.splitlines()
    assert lines[2] == f"row 1: {len(packed[0])} tokens, {sum(packed[0].targets != -100)} scored, 3 examples"
    assert [line.split(": ")[0].rpartition("/")[2] for line in lines[3::2]] == [
        "a.jsonl, line 3",
        "a.jsonl, line 1",
        "a.jsonl, line 2",
    ]
    (row,) = batch_document(packed, tokenizer)
    assert json.loads(json.dumps(row)) == row
    assert [part["tokens"] for part in row["examples"]] == [part.stop - part.start for part in segments(packed[0])]
    chat_part = row["examples"][1]
    assert "".join(run["text"] for run in chat_part["text"] if run["scored"]) == "hi there </s>bye</s>"
    assert chat_part["scored_tokens"] == sum(chat_part["scored"])
    assert row["scored_tokens"] == sum(part["scored_tokens"] for part in row["examples"])


def test_a_batch_without_a_tokenizer(tmp_path):
    rows = fixed_rows(
        parse_specs([write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]}])]),
        None,
        options(),
    )
    assert show_batch(rows, None).splitlines()[-1].strip() == "5[[ 6]] 7"
    assert batch_document(rows, None)[0]["examples"][0]["text"] is None
