"""``ladderize generate --out``: answers to a file and texts from BOS, in a file that survives anything."""

import errno
import json
import random
import re
import shutil
import subprocess
import sys

import pyarrow
import pytest
import torch
from pyarrow import parquet

from ladderize import load
from ladderize.demo.command import MODEL
from ladderize.demo.corpus import items
from ladderize.modeling import load_tokenizer
from ladderize.runtime import generate_file
from ladderize.runtime.decode import sample
from ladderize.runtime.generate import GenerateDocument, answer_text
from ladderize.runtime.generate_file import LINES, GenerateFileDocument, append_rows
from ladderize.runtime.sampling import Sampling
from ladderize.runtime.spec import checkpoint_spec, eos_ids
from tests import warm
from tests.adapt_data.rows import PLAIN, R1, TOOLS, TURNS, one, write_jsonl
from tests.helpers import (
    ROOT,
    SHAPE,
    clearly_chosen,
    edit_json,
    invoke,
    invoke_json,
    invoke_well,
    listing,
    refusal,
    save_llama,
)

LENGTH = 12  # the most new tokens
ENDS = {5, 11}  # of the model with random weights


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return with_template(MODEL, PLAIN, tmp_path_factory.mktemp("answers") / "model")


@pytest.fixture(scope="module")
def whole(model):
    return load(model, dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(model):
    return load_tokenizer(model)


def words_of(model, out, **options):
    more = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    return ["generate", model, "--out", out, "--max-new-tokens", LENGTH, "--dtype", "float32", *more]


def command(model, prompts, out, *, batch=2, **options):
    return [*words_of(model, out, concurrency=batch, **options), "--prompt-file", prompts]


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def answer(*arguments, **options):
    invoke_well(*command(*arguments, **options))
    return rows_of(arguments[2])


def answer_of(row):
    return row["completion"] if "completion" in row else row["messages"][-1]["content"]


def prompt_ids(tokenizer, row):
    if "messages" not in row:
        return tokenizer(row["prompt"])["input_ids"]
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def expected_text(tokenizer, prompt, new):
    """What ids add to a prompt, decoded together with it: the demo's tokenizer never rewrites what was there."""
    first, both = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + new))
    return both[len(first) :]


def one_at_a_time(whole, prompt, sampling, number):
    """The new ids of one prompt: transformers' logits of the whole text for each token."""
    draws, ids = sampling.draws(1, LENGTH, number)[0], list(prompt)
    while len(ids) < len(prompt) + LENGTH and ids[-1:] != [whole.config.eos_token_id]:
        with torch.no_grad():
            logits = whole(torch.tensor([ids])).logits[:, -1]
        ids.append(int(sample(logits, sampling, draws[None, len(ids) - len(prompt)])))
    return ids[len(prompt) :]


def questions(whole, tokenizer, count, new_ids):
    """Rows of all kinds and lengths with the ids of their answers, where no answer lies on the border to another."""
    found = []
    while len(found) < count:
        genre = random.choice(("agreement", "arithmetic", "copying", "stories"))
        text = next(items(genre, 1, test=False, seed=random.randrange(1 << 30))).prompt
        turns = [{"role": "user", "content": text}]
        if random.random() < 0.5:
            turns = [{"role": "system", "content": "be kind"}, *turns]
        row = random.choice([{"prompt": text}, {"messages": turns}])
        ids = prompt_ids(tokenizer, row)
        new, sampling = new_ids(ids, len(found))
        if clearly_chosen(whole, ids, new, sampling, len(found)):
            found.append((row, new))
    return [row for row, _ in found], [ids for _, ids in found]


@pytest.fixture(scope="module")
def greedy(whole, tokenizer):
    """20 questions, what transformers' generate makes of each alone, and how it ended: not all in one way."""
    eos = tokenizer.eos_token_id

    def new_ids(ids, number):
        made = whole.generate(torch.tensor([ids]), max_new_tokens=LENGTH, do_sample=False, pad_token_id=0)
        return made[0, len(ids) :].tolist(), Sampling()

    while True:
        rows, made = questions(whole, tokenizer, 20, new_ids)
        texts = [
            (expected_text(tokenizer, prompt_ids(tokenizer, row), new), "stop" if new[-1] == eos else "length")
            for row, new in zip(rows, made, strict=True)
        ]
        if {reason for _, reason in texts} == {"stop", "length"}:
            return rows, texts


@pytest.fixture
def prompts(greedy, tmp_path):
    return write_jsonl(tmp_path / "prompts.jsonl", greedy[0])


@pytest.mark.parametrize(("tp_size", "batch"), [(1, 64), (2, 3)])
def test_greedy_answers_are_those_of_transformers(model, greedy, prompts, tmp_path, tp_size, batch):
    """Prompts of all lengths side by side, in one batch and in several, in the file's order."""
    out, (asked, texts) = tmp_path / "out.jsonl", greedy
    words = command(model, prompts, out, batch=batch, temperature=0, tp_size=tp_size)
    document, rows = invoke_json(*words), rows_of(out)
    assert [(answer_of(row), row["finish_reason"]) for row in rows] == texts
    for row, question in zip(rows, asked, strict=True):
        assert list(row)[-3:] == ["input_ids", "loss_mask", "finish_reason"]
        if "prompt" in question:
            assert row["prompt"] == question["prompt"]
        else:
            assert row["messages"] == [*question["messages"], {"role": "assistant", "content": answer_of(row)}]
    assert document["samples"] == 20
    assert document["ended_samples"] == sum(reason == "stop" for _, reason in texts)
    assert GenerateFileDocument.from_dict(document, "stdout").to_dict().items() <= document.items()
    assert listing(tmp_path) == ["out.jsonl", "prompts.jsonl"]


def test_a_draw_depends_on_seed_number_and_step_only(model, whole, tokenizer, tmp_path):
    """By default the model's own distribution, whatever is beside an answer."""
    sampling = Sampling(temperature=1.0, seed=7)

    def new_ids(ids, number):
        return one_at_a_time(whole, ids, sampling, number), sampling

    rows, made = questions(whole, tokenizer, 10, new_ids)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", rows)
    expected = [expected_text(tokenizer, prompt_ids(tokenizer, row), new) for row, new in zip(rows, made, strict=True)]
    for number, more in enumerate([{"batch": 1}, {"batch": 7, "tp_size": 2}]):
        got = answer(model, prompts, tmp_path / f"{number}.jsonl", seed=7, **more)
        assert [answer_of(row) for row in got] == expected
    fewer = answer(model, prompts, tmp_path / "fewer.jsonl", seed=7, num_samples=3)
    assert [answer_of(row) for row in fewer] == expected[:3]
    other = answer(model, prompts, tmp_path / "other.jsonl", seed=8)
    assert [answer_of(row) for row in other] != expected


def test_rows_of_all_kinds(model, tmp_path):
    user, asked = [{"role": "user", "content": "the cat"}], {"messages": TURNS[:-1]}
    kinds = [
        {"messages": TURNS},
        {"conversations": [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "no"}]},
        {"prompt": "the cat", "completion": "no"},
        {"text": "the cat"},
    ]
    file = write_jsonl(tmp_path / "a.jsonl", kinds)
    with open(file, "a") as more:
        more.write("\n  \n")
    invoke_well(*command(model, file, tmp_path / "out.jsonl"))
    plain = [asked, {"messages": user}, {"prompt": "the cat"}, {"prompt": "the cat"}]

    def wanted(rows):
        return [{"messages": row["messages"][:-1]} if "messages" in row else {"prompt": row["prompt"]} for row in rows]

    assert wanted(rows_of(tmp_path / "out.jsonl")) == plain
    invoke_well(*command(model, file, tmp_path / "chat.jsonl"), "--chat")
    assert wanted(rows_of(tmp_path / "chat.jsonl")) == [asked, *[{"messages": user}] * 3]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(kinds[:1]), path)  # a column has one type
    assert wanted(answer(model, path, tmp_path / "parquet.jsonl")) == plain[:1]
    (tmp_path / "a.txt").write_bytes(b"the cat\r\n\n  a dog \nlast")
    (row,) = answer(model, tmp_path / "a.txt", tmp_path / "text.jsonl")
    assert row["prompt"] == "the cat\n\n  a dog \nlast"
    some = [*[{"text": "the cat"}] * 38, {"messages": TURNS[2:3]}, {"text": ""}]
    mixed = write_jsonl(tmp_path / "mixed.jsonl", random.sample(some, 40))
    assert [row["prompt"] for row in answer(model, mixed, tmp_path / "some.jsonl", batch=40)] == ["the cat"] * 38


def with_template(model, template, folder):
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize("template", [PLAIN, R1], ids=["plain", "drops thoughts"])
def test_training_reads_the_ids_of_the_answers(model, prompts, tmp_path, template):
    """Of what the model was asked and what it wrote, which alone is scored; the template may give back neither."""
    folder = with_template(model, template, tmp_path / "m")
    tokenizer = load_tokenizer(folder)
    for row in answer(folder, prompts, tmp_path / "out.jsonl", temperature=0):
        asked = {**row, "messages": row["messages"][:-1]} if "messages" in row else row
        ids, scored = one(tokenizer, row, seq_len=256, vocab_size=768)
        before = prompt_ids(tokenizer, asked)
        assert ids[: len(before)] == before
        assert scored == [place >= len(before) for place in range(len(ids))]
        assert expected_text(tokenizer, before, ids[len(before) :]) == answer_of(row)
        assert (ids[-1] == tokenizer.eos_token_id) == (row["finish_reason"] == "stop")


def test_tools_are_the_templates_and_stay_in_the_answers(model, tmp_path):
    folder = with_template(model, TOOLS, tmp_path / "m")
    tokenizer, tools = load_tokenizer(folder), [{"type": "function", "function": {"name": "f"}}]
    asked = {"messages": TURNS[:2], "tools": tools, "chat_template_kwargs": {"mood": "sad"}}
    (row,) = answer(folder, write_jsonl(tmp_path / "a.jsonl", [asked]), tmp_path / "out.jsonl")
    assert {name: row[name] for name in asked} == {**asked, "messages": [*TURNS[:2], row["messages"][-1]]}
    prompt = tokenizer.apply_chat_template(
        TURNS[:2], tools=tools, mood="sad", add_generation_prompt=True, return_dict=False
    )
    assert row["input_ids"][: len(prompt)] == prompt
    assert row["loss_mask"].index(1) == len(prompt)


def test_the_space_that_an_answer_begins_with_is_kept(stories):
    """SentencePiece decodes it away where nothing is before it."""
    tokenizer = load_tokenizer(stories)
    ids = tokenizer("Once upon a time")["input_ids"]
    assert answer_text(tokenizer, ids[:3], ids[3:]) == " a time"


def from_bos(model, out, samples=10, *, batch=4, **options):
    return [*words_of(model, out, concurrency=batch, **options), "--from-bos", "--num-samples", samples]


def write(*arguments, **options):
    invoke_well(*from_bos(*arguments, **options))
    return arguments[1].read_bytes()


def ids_of(content):
    return [json.loads(line)["input_ids"] for line in content.decode().splitlines()]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Random weights, no tokenizer, and texts that end now and then. No draw of the first 13 samples falls on the
    border between two tokens, where rounding decides."""
    sampling, is_clear = Sampling(temperature=1.0), False
    while not is_clear:
        place = tmp_path_factory.mktemp("corpus")
        folder = save_llama(place / "model", seed=int(torch.randint(1 << 30, ())), eos_token_id=[*ENDS])
        whole, rows = load(folder), ids_of(write(folder, place / "self.jsonl", 13))
        is_clear = all(clearly_chosen(whole, row[:1], row[1:], sampling, number) for number, row in enumerate(rows))
    return folder


def test_a_line_is_ids_from_bos_to_eos(source, tmp_path):
    document, lines = invoke_json(*from_bos(source, tmp_path / "self.jsonl", 40)), rows_of(tmp_path / "self.jsonl")
    assert listing(tmp_path) == ["self.jsonl"]
    assert len(lines) == document["samples"] == 40
    assert document["ended_samples"] == sum(line["finish_reason"] == "stop" for line in lines)
    for line in lines:
        assert list(line) == ["input_ids", "finish_reason"]
        first, *between, last = line["input_ids"]
        assert first == SHAPE["bos_token_id"]
        assert ENDS.isdisjoint(between)
        assert line["finish_reason"] == ("stop" if last in ENDS else "length")
        assert last in ENDS or len(between) == LENGTH - 1


def lines_of(out):
    return out.with_name(f"{out.name}.ladderize-work") / LINES


@pytest.fixture
def unfinished(source, tmp_path, monkeypatch):
    """OUT of a run that was stopped after 8 of 10 samples, and what it would have been."""
    whole = write(source, tmp_path / "whole.jsonl")
    out = tmp_path / "self.jsonl"

    def append_or_fail(path, rows):
        if path.exists() and len(rows_of(path)) >= 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        append_rows(path, rows)

    with monkeypatch.context() as patch:
        patch.setattr(generate_file, "append_rows", append_or_fail)
        assert "no space left on device" in refusal(*from_bos(source, out))
    assert listing(tmp_path) == ["self.jsonl.ladderize-work", "whole.jsonl"]
    assert len(rows_of(lines_of(out))) == 8
    return out, whole


def test_goes_on_wherever_the_lines_end(source, unfinished, tmp_path_factory):
    out, whole = unfinished
    kept = shutil.copytree(lines_of(out).parent, tmp_path_factory.mktemp("kept") / "work")
    ends = [0, 1, len(whole) - 1, len(whole), *random.sample(range(2, len(whole) - 1), 2)]
    power_failure = whole[: len(whole) // 2] + b"\0" * 100 + b"\n" + whole
    for left in [*(whole[:end] for end in ends), power_failure]:
        lines_of(out).write_bytes(left)
        assert write(source, out) == whole, left
        assert listing(out.parent) == ["self.jsonl", "whole.jsonl"]
        out.unlink()
        shutil.copytree(kept, lines_of(out).parent)


def test_goes_on_in_batches_of_another_size_and_to_more_samples(source, unfinished, monkeypatch):
    out, whole = unfinished
    assert "unfinished work of a run with another seed (0, now 1)" in refusal(*from_bos(source, out, seed=1))
    written = []
    monkeypatch.setattr(
        generate_file, "append_rows", lambda path, rows: (written.append(len(rows)), append_rows(path, rows))
    )
    more = ids_of(write(source, out, 13, batch=5))
    assert written == [2, 3]  # 8 and 9, then 10 to 12: nothing is made twice
    assert more[:10] == ids_of(whole)
    assert len(more) == 13


def test_kill_9_at_any_moment(source, tmp_path):
    out, samples = tmp_path / "self.jsonl", 120
    process = warm.WarmProcess([sys.executable, "-m", "ladderize", *map(str, from_bos(source, out, samples))])
    most, lines = random.uniform(0, 0.7) * samples, lines_of(out)
    warm.wait_until(lambda: lines.exists() and lines.read_bytes().count(b"\n") >= most, process)
    process.kill()
    process.communicate()
    whole = write(source, tmp_path / "whole.jsonl", samples)
    if out.exists():  # a fast run may have come to its end
        assert out.read_bytes() == whole
    else:
        assert write(source, out, samples) == whole
    assert listing(tmp_path) == ["self.jsonl", "whole.jsonl"]


FILE, BOS = ["--prompt-file", "x.jsonl"], ["--from-bos", "--num-samples", 3]


USAGE = {
    "give one of --prompt TEXT, --prompt-file FILE to answer many, or --from-bos": [],
    "--from-bos needs --num-samples N": ["--from-bos", "--out", "x.jsonl"],
    "need --out FILE": FILE,
    "it takes no --chat, and a --temperature above 0": [*BOS, "--out", "x.jsonl", "--temperature", 0],
}


@pytest.mark.parametrize("message", USAGE)
def test_bad_usage(message):
    assert message in refusal("generate", MODEL, *USAGE[message], code=2)


def test_files_that_cannot_be_used(model, tmp_path):
    path, out = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    too_long = '{"text": "' + "the cat " * 300 + '"}\n'
    for line, message in (('\n{"text"\n', "line 3: is not JSON"), (too_long, "line 2: a prompt of")):
        path.write_text('{"text": "x"}\n' + line)
        assert message in refusal(*command(model, path, out))
    out.write_text("precious")
    assert "already exists; choose another name, or delete it" in refusal(*command(model, path, out))
    assert out.read_text() == "precious"
    assert listing(tmp_path) == ["a.jsonl", "out.jsonl"]


def test_a_run_that_made_nothing_leaves_nothing(model, prompts, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    before, message = listing(tmp_path), refusal(*command(MODEL, prompts, out))
    assert re.search("prompts.jsonl, line .*: the tokenizer has no chat template, which a conversation needs", message)
    monkeypatch.setattr("ladderize.runtime.decode.are_sound", lambda logits: torch.tensor(False))
    assert "the model's logits are NaN or infinite" in refusal(*command(model, prompts, out))
    assert listing(tmp_path) == before


GREEDY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


def distribution(logits, sampling):
    """What sampling promises, the slow way: the probability of each token."""
    scaled = logits / sampling.temperature
    if sampling.top_k:
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], -torch.inf)
    probabilities = scaled.softmax(-1)
    kept, total = torch.zeros_like(probabilities), 0.0
    for index in probabilities.argsort(descending=True):
        if total >= sampling.top_p and total:
            break
        kept[index] = probabilities[index]
        total += float(probabilities[index])
    return kept / kept.sum()


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(1.0, top_p=0.6), Sampling(1.5, top_k=7, top_p=0.8), Sampling(1.0, top_p=0.0)]
)
def test_samples_have_the_promised_distribution(sampling):
    logits = torch.randn(12)
    draws = (torch.arange(20000) + 0.5) / 20000  # every part of the unit interval alike: no chance in this test
    found = torch.bincount(sample(logits.expand(20000, -1), sampling, draws), minlength=12) / 20000
    torch.testing.assert_close(found, distribution(logits, sampling), atol=2e-4, rtol=0)


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 1e-46, 5e-324])
@pytest.mark.parametrize("limits", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_a_tiny_temperature_is_greedy(temperature, limits):
    logits = torch.randn(4, 50) * 10
    assert torch.equal(sample(logits, Sampling(temperature, **limits), torch.rand(4)), logits.argmax(-1))


def test_logits_of_16_bits_keep_their_order():
    """Two that differ, and whose differences from the best are the same number in bfloat16."""
    logits = torch.tensor([[20.0, 0.1001, 0.1021, 0.0]], dtype=torch.bfloat16)
    drawn = sample(logits.expand(9, -1), Sampling(100.0, top_k=2), torch.linspace(0, 0.99, 9))
    assert set(drawn.tolist()) == {0, 2}


def test_eos_ids_are_all_of_generation_config(llama):
    edit_json(llama / "config.json", eos_token_id=5)
    (llama / "generation_config.json").unlink(missing_ok=True)
    spec = checkpoint_spec(str(llama), tp_size=1)
    assert eos_ids(spec) == (5,)
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert eos_ids(spec) == (7, 8)


def test_weights_that_are_no_numbers(tmp_path):
    model = load(MODEL)
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    model.save_pretrained(tmp_path / "m")
    for path in MODEL.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "m")
    words = ("-p", "the cat", "--max-new-tokens", 4)
    assert "the model's logits are NaN or infinite" in refusal("generate", tmp_path / "m", *words)


def test_generate_streams_the_models_text(stories):
    outcome = invoke_well("generate", stories, "--prompt", "", "--max-new-tokens", 40)
    assert outcome.stdout.startswith(GREEDY)


def test_joins_a_group_that_torchrun_started(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m"]
    command = ["generate", MODEL, "-p", "the cat", "-p", "a", "--max-new-tokens", "6", "--dtype", "float32", "--json"]
    words, how = [*launcher, "ladderize", *command, "--tp-size", "2"], {"timeout": warm.PATIENCE, "cwd": ROOT}
    outcome = subprocess.run(words, capture_output=True, text=True, **how)
    assert outcome.returncode == 0, outcome.stderr
    document, alone = json.loads(outcome.stdout), json.loads(invoke(*command).stdout)  # one document: rank 0's
    assert [text["new_ids"] for text in document["texts"]] == [text["new_ids"] for text in alone["texts"]]
    assert document["tp_size"] == 2
    assert GenerateDocument.from_dict(document, "stdout").to_dict().items() <= document.items()


def test_bad_arguments():
    words = ("generate", MODEL, "-p", "the cat")
    assert "--top-k has no effect with --temperature 0" in refusal(*words, "--top-k", "4", code=2)
    assert "exceed the model's" in refusal(*words, "--max-new-tokens", "5000")
