"""Rows of training data, and short ways to what becomes of them."""

import json
from types import SimpleNamespace

from ladderize.adapt.examples import Encoder
from ladderize.adapt.training_data import open_data, pack
from ladderize.console import SILENT
from ladderize.data.rows import tell_left_out
from tests.helpers import ROOT

DEMO = ROOT / "ladderize" / "demo" / "model"
VOCAB = 527
BOS, EOS = 0, 1

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{%"
    " endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
# as Qwen3's does: what an assistant thought stays only behind the last question, and the last turn always has a place
# for it
QWEN3 = """{%- set ns = namespace(question=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set thought, answer = '', m.content %}
    {%- if m.role == 'assistant' and '</think>' in m.content %}
        {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
        {%- set answer = m.content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' and loop.index0 > ns.question and (loop.last or thought) %}
        {{- '<think>\n' + thought + '\n</think>\n\n' }}
    {%- endif %}
    {{- answer + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
# as DeepSeek-R1's does: it asks for a thought, and leaves it out of every finished turn
R1 = """{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<A>{{ m.content.split('</think>')[-1]
| trim }}{{ eos_token }}{% else %}{% if m.role == 'user' %}<U>{% endif %}{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<A><think>\\n' }}{% endif %}"""
TOOLS = """{{ bos_token }}{% if mood is defined %}{{ mood }}{% endif %}{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}
{%- endif %}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi there "},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "bye"},
]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def opened(data, tokenizer, *, eval_data=(), **changed):
    given = {"seq_len": 64, "vocab_size": VOCAB, "seed": 3, "eval_names": eval_data, **changed}
    train, heldout, counts = open_data([data] if isinstance(data, str) else data, tokenizer, **given)
    return SimpleNamespace(train=train, heldout=heldout, counts=counts)


def encode(tokenizer, row, *, seq_len=64, vocab_size=VOCAB):
    """The examples of a row: ids and which are scored; without those that lost all that is. Raises its problem."""
    found = Encoder(tokenizer, seq_len, vocab_size, "there")({name: [value] for name, value in row.items()}, [0])
    tell_left_out("there", found["problem"], SILENT)
    examples = zip(found["input_ids"], found["scored"], strict=True)
    return [(ids.tolist(), scored.tolist()) for ids, scored in examples if len(ids)]


def one(tokenizer, row, **changed):
    (example,) = encode(tokenizer, row, **changed)
    return example


def scored_text(tokenizer, example):
    runs, before = [], False
    for token, counts in zip(*example, strict=True):
        if counts and not before:
            runs.append([])
        if counts:
            runs[-1].append(int(token))
        before = counts
    return [tokenizer.decode(run) for run in runs]


def packed(ids, scored, seq_len):
    columns = pack(ids, scored, seq_len)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def examples_of(rows):
    """The examples of packed rows, sorted: ids, and the targets of all but their last token."""
    found = []
    for row in rows:
        begin = 0
        for length in row["lengths"]:
            part = slice(begin, begin + length)
            found.append((list(row["input_ids"][part]), list(row["targets"][part])))
            begin += length
        assert begin == len(row["input_ids"]) == len(row["targets"])
    return sorted(found)
