"""Rows of training data, and short ways to what becomes of them."""

import json

from ladderize.adapt.data.examples import Encoder
from ladderize.adapt.data.stream import Stream, StreamOptions, StreamPlace
from ladderize.adapt.data_specs import parse_specs
from ladderize.rows import Row
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
TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi there "},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "bye"},
]


def through_json(place):
    return StreamPlace.from_dict(json.loads(json.dumps(place.to_dict())), "a state")


def text_of(number):
    return f"row {number} " + "the cat sat on a mat. " * (1 + number % 4)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(path, count, start=0):
    return write_jsonl(path, [{"text": text_of(number)} for number in range(start, start + count)])


def options(**changed):
    return StreamOptions(**{"seq_len": 64, "vocab_size": VOCAB, **changed})


def stream(data, tokenizer, **changed):
    return Stream(parse_specs([data] if isinstance(data, str) else data), tokenizer, options(**changed))


def encode(tokenizer, values, *, seq_len=64, vocab_size=VOCAB, is_passage=False):
    return Encoder(tokenizer, seq_len, vocab_size).encode([Row(values, "there", is_passage)])[0]


def one(tokenizer, values, **changed):
    """The one example of a row; checks that nothing is wrong with it."""
    encoded = encode(tokenizer, values, **changed)
    assert encoded.problem is None, encoded.problem
    (example,) = encoded.examples
    return example


def scored_text(tokenizer, example):
    """The runs of scored tokens, decoded."""
    runs, before = [], False
    for token, counts in zip(example.ids, example.scored, strict=True):
        if counts and not before:
            runs.append([])
        if counts:
            runs[-1].append(int(token))
        before = counts
    return [tokenizer.decode(run) for run in runs]


def plain(rows):
    return [(row.ids.tolist(), row.positions.tolist(), row.targets.tolist(), row.origins) for row in rows]


def origins(rows):
    return [where for row in rows for where in row.origins]


def plain_example(example):
    return example.ids.tolist(), example.scored.tolist()
