"""``ladderize generate --prompt-file``: answers are those of one prompt at a time, in a file that survives anything."""

import itertools
import json
import random
import shutil

import datasets
import pyarrow
import pytest
import torch
from pyarrow import parquet

from ladderize import answer_prompts, load
from ladderize.demo.corpus import items
from ladderize.demo.inputs import MODEL
from ladderize.errors import UsageError
from ladderize.modeling import load_tokenizer
from ladderize.runtime.decode import sample
from ladderize.runtime.requests.continuous import ContinuousBatch, StopStrings
from ladderize.runtime.sampling import Sampling
from ladderize.runtime.spec import checkpoint_spec
from ladderize.runtime.texts.answers import AnswerEnds, AnswersDocument, encode_prompts, read_prompts, text_after
from ladderize.runtime.texts.samples import SampleFile
from tests.adapt_data.rows import MARKED, PLAIN, TURNS, one, scored_text, write_jsonl
from tests.helpers import clearly_chosen, invoke, listing, make_model, one_sentence
from tests.test_corpus import failure, stop_after, work_of

LENGTH, LONG = 12, 8  # the most new tokens; letters of an answer from which stop strings are taken


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The demo's model with a chat template."""
    folder = shutil.copytree(MODEL, tmp_path_factory.mktemp("answers") / "model")
    (folder / "chat_template.jinja").write_text(PLAIN)
    return folder


@pytest.fixture(scope="module")
def whole(model):
    return load(model, dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(model):
    return load_tokenizer(model)


def command(model, prompts, out, *, batch=2, **options):
    more = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    return ["generate", model, "--prompt-file", prompts, "--out", out, "--batch-size", batch, "--max-new-tokens",
            LENGTH, "--dtype", "float32", *more]  # fmt: skip


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def answer(*arguments, **options):
    """The rows that a run writes."""
    outcome = invoke(*command(*arguments, **options))
    assert outcome.code == 0, outcome.stderr
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


def some_text(*genres):
    return next(items(random.choice(genres), 1, test=False, seed=random.randrange(1 << 30))).prompt


def questions(whole, tokenizer, count, new_ids):
    """Rows of all kinds and lengths with the ids of their answers, where no answer lies on the border to another."""
    found = []
    while len(found) < count:
        text = some_text("agreement", "arithmetic", "copying", "stories")
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
    """20 questions, and what transformers' generate makes of each alone. Some answers end, some are cut off, and two
    are long."""

    def new_ids(ids, number):
        made = whole.generate(torch.tensor([ids]), max_new_tokens=LENGTH, do_sample=False, pad_token_id=0)
        return made[0, len(ids) :].tolist(), Sampling()

    while True:
        rows, made = questions(whole, tokenizer, 20, new_ids)
        texts = texts_of(tokenizer, rows, made)
        if {reason for _, reason in texts} == {"stop", "length"} and sum(len(text) > LONG for text, _ in texts) > 1:
            return rows, made


def texts_of(tokenizer, rows, made):
    eos = tokenizer.eos_token_id
    return [
        (expected_text(tokenizer, prompt_ids(tokenizer, row), new), "stop" if new[-1] == eos else "length")
        for row, new in zip(rows, made, strict=True)
    ]


@pytest.fixture(scope="module")
def texts(greedy, tokenizer):
    """Of the same, their answers and how they ended."""
    return texts_of(tokenizer, *greedy)


@pytest.fixture
def prompts(greedy, tmp_path):
    return write_jsonl(tmp_path / "prompts.jsonl", greedy[0])


# ---- what is answered ----


@pytest.mark.parametrize(("tp_size", "batch"), [(1, 2), (1, 64), (2, 3)])
def test_greedy_answers_are_those_of_transformers(model, greedy, texts, prompts, tmp_path, tp_size, batch):
    """Prompts of all lengths side by side, in one group and in several, in the file's order."""
    out = tmp_path / "out.jsonl"
    outcome = invoke(*command(model, prompts, out, batch=batch, temperature=0, tp_size=tp_size, threads=1), "--json")
    assert outcome.code == 0, outcome.stderr
    document, rows = json.loads(outcome.stdout), rows_of(out)
    assert [(answer_of(row), row["finish_reason"]) for row in rows] == texts
    for row, question in zip(rows, greedy[0], strict=True):
        if "prompt" in question:
            assert list(row) == ["prompt", "completion", "finish_reason"]
            assert row["prompt"] == question["prompt"]
        else:
            assert list(row) == ["messages", "finish_reason"]
            assert row["messages"] == [*question["messages"], {"role": "assistant", "content": answer_of(row)}]
    assert {reason for _, reason in texts} == {"stop", "length"}
    assert document["samples"] == 20
    assert document["cut_off_samples"] == sum(reason == "length" for _, reason in texts)
    assert document["output_tokens"] == sum(map(len, greedy[1]))
    assert document["tp_size"] == tp_size
    assert document["output_tokens_per_s"] > 0
    assert AnswersDocument.from_dict(document, "stdout").to_dict().items() <= document.items()
    assert listing(tmp_path) == ["out.jsonl", "out.jsonl.run.json", "prompts.jsonl"]


def test_a_draw_depends_on_seed_number_and_step_only(model, whole, tokenizer, tmp_path):
    """By default the model's own distribution; whatever is beside an answer, and on however many ranks."""
    sampling = Sampling(temperature=1.0, seed=7)
    rows, made = questions(
        whole, tokenizer, 10, lambda ids, number: (one_at_a_time(whole, ids, sampling, number), sampling)
    )
    prompts = write_jsonl(tmp_path / "prompts.jsonl", rows)
    expected = [expected_text(tokenizer, prompt_ids(tokenizer, row), new) for row, new in zip(rows, made, strict=True)]
    for number, more in enumerate([{"batch": 1}, {"batch": 7}, {"batch": 4, "tp_size": 2}]):
        got = answer(model, prompts, tmp_path / f"{number}.jsonl", seed=7, **more)
        assert [answer_of(row) for row in got] == expected
    fewer = answer(model, prompts, tmp_path / "fewer.jsonl", seed=7, num_samples=3)
    assert [answer_of(row) for row in fewer] == expected[:3]
    other = answer(model, prompts, tmp_path / "other.jsonl", seed=8)
    assert [answer_of(row) for row in other] != expected


def test_rows_of_all_kinds(model, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    user = [{"role": "user", "content": "the cat"}]
    kinds = [
        {"messages": TURNS},
        {"conversations": [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "no"}]},
        {"prompt": "the cat", "completion": "no"},
        {"text": "the cat"},
    ]
    file = write_jsonl(tmp_path / "a.jsonl", kinds)
    with open(file, "a") as more:
        more.write("\n  \n")
    outcome = invoke(*command(model, file, tmp_path / "out.jsonl"))
    assert "3 of 4 rows have an answer already, which is left out" in outcome.stderr
    plain = [{"messages": TURNS[:-1]}, {"messages": user}, {"prompt": "the cat"}, {"prompt": "the cat"}]
    formatted = [{"messages": TURNS[:-1]}, *[{"messages": user}] * 3]

    def wanted(rows):
        return [{"messages": row["messages"][:-1]} if "messages" in row else {"prompt": row["prompt"]} for row in rows]

    assert wanted(rows_of(tmp_path / "out.jsonl")) == plain
    chats = invoke(*command(model, file, tmp_path / "chat.jsonl"), "--chat")
    assert chats.code == 0
    assert wanted(rows_of(tmp_path / "chat.jsonl")) == formatted
    for number, kind in enumerate(kinds):  # a column of a parquet file has one type
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([kind]), path)
        assert wanted(answer(model, path, tmp_path / f"parquet{number}.jsonl")) == [plain[number]]
    (tmp_path / "a.txt").write_bytes(b"the cat\r\n\n  a dog \nlast")
    lines = answer(model, tmp_path / "a.txt", tmp_path / "lines.jsonl")
    assert [row["prompt"] for row in lines] == ["the cat", "  a dog ", "last"]


def test_a_template_sees_the_day_that_training_shows_it(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}")
    write_jsonl(tmp_path / "a.jsonl", [{"messages": TURNS}])
    prompts = read_prompts(tmp_path / "a.jsonl", chat=False, samples=None)
    (ids,) = encode_prompts(checkpoint_spec(str(folder), tp_size=1), prompts, LENGTH)
    assert load_tokenizer(folder).decode(ids) == "26 Jul 2024"


def test_training_scores_the_answers_and_nothing_else(model, texts, prompts, tmp_path):
    """With the ids that the model itself made behind what it was asked."""
    rows = answer(model, prompts, tmp_path / "out.jsonl", temperature=0)
    assert [answer_of(row) for row in rows] == [text for text, _ in texts]
    for template in (PLAIN, MARKED + "{% if add_generation_prompt %}<assistant>{% endif %}"):
        tokenizer = load_tokenizer(model)
        tokenizer.chat_template = template
        for row in rows:
            ids, scored = one(tokenizer, row, seq_len=256, vocab_size=768)
            assert scored_text(tokenizer, (ids, scored)) == [answer_of(row) + tokenizer.eos_token]
            before = prompt_ids(tokenizer, {**row, "messages": row["messages"][:-1]} if "messages" in row else row)
            assert ids[: len(before)] == before
            assert scored == [place >= len(before) for place in range(len(ids))]


# ---- where answers end ----


class Bytes:
    """A tokenizer of which every byte is a token."""

    def decode(self, ids, skip_special_tokens=False):
        return bytes(ids).decode(errors="replace")


def pieces_of(tokenizer, text):
    """Ids that spell a text as a model might: tokens of the pieces that chance has cut it into."""
    cuts = sorted(random.sample(range(1, len(text)), min(len(text) - 1, random.randrange(6))))
    pieces = [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]
    return [one for piece in pieces for one in tokenizer(piece, add_special_tokens=False)["input_ids"]]


def test_a_stop_string_is_seen_with_the_token_that_completes_it(tokenizer):
    seen = 0
    for _ in range(200):
        text = some_text("agreement", "stories")
        if random.random() < 0.5:
            ids, decoder = list((text + "naïve 🙂!").encode()), Bytes()
        else:
            ids, decoder = pieces_of(tokenizer, text), tokenizer
        spelled = decoder.decode(ids)
        begin = random.randrange(len(spelled))
        stops = (spelled[begin : begin + random.randrange(1, 12)], "never")
        ends = StopStrings(decoder, stops)
        first = next(n for n in range(1, len(ids) + 1) if any(stop in decoder.decode(ids[:n]) for stop in stops))
        assert [ends.end(ids[:n]) for n in range(1, first + 1)] == [False] * (first - 1) + [True]
        seen += first > 1
    assert seen


def test_answers_are_cut_before_the_first_stop_string(model, greedy, texts, prompts, tmp_path):
    """Strings taken out of the answers: within a token, over several, and at the very beginning."""
    free = [text for text, _ in texts]
    long = [text for text in free if len(text) > LONG]
    middle, beginning = long[0][3:8], long[1][:2]
    spelled = {stop: sum(stop in text for text in free) for stop in (middle, beginning)}
    assert all(spelled.values())
    rows = answer(model, prompts, tmp_path / "out.jsonl", temperature=0, stop=middle, batch=8)
    assert [answer_of(row) for row in rows] == [text.partition(middle)[0] for text in free]
    outcome = invoke(
        *command(model, prompts, tmp_path / "both.jsonl", temperature=0), "--stop", middle, "--stop", beginning
    )
    assert outcome.code == 0
    for row, (text, reason) in zip(rows_of(tmp_path / "both.jsonl"), texts, strict=True):
        cut = min((text.index(stop) for stop in (middle, beginning) if stop in text), default=None)
        assert answer_of(row) == text[:cut]
        assert row["finish_reason"] == (reason if cut is None else "stop")
    assert "" in [answer_of(row) for row in rows_of(tmp_path / "both.jsonl")]


def test_a_stop_string_may_be_a_special_token(tokenizer):
    ids = tokenizer("the cat")["input_ids"]
    ends = AnswerEnds(tokenizer, eos=(), stops=(tokenizer.eos_token,))
    assert ends.text(ids, [*ids[1:], tokenizer.eos_token_id]) == (tokenizer.decode(ids[1:]), "stop")
    assert ends.text(ids, ids[1:]) == (tokenizer.decode(ids[1:]), "length")


def test_eos_is_no_part_of_an_answer_even_where_it_is_no_special_token(tokenizer):
    ids = tokenizer("the cat")["input_ids"]
    assert AnswerEnds(tokenizer, eos=(ids[-1],), stops=()).text(ids, ids[1:]) == (tokenizer.decode(ids[1:-1]), "stop")


def test_the_space_that_an_answer_begins_with_is_kept(stories):
    """SentencePiece decodes it away where nothing is before it."""
    tokenizer = load_tokenizer(stories)
    ids = tokenizer("Once upon a time")["input_ids"]
    assert text_after(tokenizer, ids[:3], ids[3:]) == " a time"
    assert AnswerEnds(tokenizer, (), (" a",)).text(ids[:3], ids[3:]) == ("", "stop")


# ---- unfinished work ----


@pytest.fixture
def lines(tmp_path):
    """20 texts to continue."""
    rows = [{"prompt": some_text("agreement", "copying", "stories")} for _ in range(20)]
    return write_jsonl(tmp_path / "lines.jsonl", rows)


@pytest.fixture
def unfinished(model, lines, tmp_path, monkeypatch):
    """OUT of a run that was stopped after the first 16 of 20 answers, and what it would have been."""
    answer(model, lines, tmp_path / "whole.jsonl")
    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        stop_after(patch, 16)
        assert "no space left on device" in failure(command(model, lines, out))
    assert listing(tmp_path) == ["lines.jsonl", "out.jsonl.ladderize-work", "whole.jsonl", "whole.jsonl.run.json"]
    assert len(rows_of(work_of(out) / "samples.jsonl")) == 16
    return out, (tmp_path / "whole.jsonl").read_bytes()


def test_goes_on_wherever_the_part_ends(model, lines, unfinished):
    out, whole = unfinished
    work = work_of(out)
    about = (work / "run.json").read_bytes()
    line = whole.splitlines(keepends=True)
    for keep in [0, 1, len(b"".join(line[:16])), len(whole) - 1, len(whole), random.randrange(2, len(whole) - 1)]:
        work.mkdir(exist_ok=True)
        (work / "samples.jsonl").write_bytes(whole[:keep])
        (work / "run.json").write_bytes(about)
        outcome = invoke(*command(model, lines, out), "--json")
        assert outcome.code == 0, outcome.stderr
        document = json.loads(outcome.stdout)
        assert out.read_bytes() == whole, keep
        assert document["resumed_samples"] == whole[:keep].count(b"\n")
        assert document["cut_off_samples"] == sum(row["finish_reason"] == "length" for row in rows_of(out))
        assert not work.exists()
        out.unlink()


def test_a_group_is_always_computed_as_a_whole(model, lines, unfinished, monkeypatch):
    """Whatever of it was written: only then are its products, and their rounding, the same."""
    out, whole = unfinished
    run, computed = ContinuousBatch.run, []
    monkeypatch.setattr(
        ContinuousBatch,
        "run",
        lambda self, prompts, advance: (
            computed.append([prompt.number for prompt in prompts]),
            run(self, prompts, advance),
        )[1],
    )
    (work_of(out) / "samples.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:5]))
    answer(model, lines, out)
    assert out.read_bytes() == whole
    assert computed == [list(range(16)), list(range(16, 20))]


def test_goes_on_in_batches_of_another_size_and_to_more_rows(model, lines, unfinished, tmp_path):
    out, _ = unfinished
    shutil.copytree(work_of(out), work_of(tmp_path / "fewer.jsonl"))
    assert answer(model, lines, out, batch=5)[:16] == rows_of(tmp_path / "whole.jsonl")[:16]
    fewer = answer(model, lines, tmp_path / "fewer.jsonl", num_samples=18)
    assert fewer[:16] == rows_of(tmp_path / "whole.jsonl")[:16]
    assert len(fewer) == 18


def test_work_of_another_run_is_not_gone_on_with(model, lines, unfinished, tmp_path):
    out, _ = unfinished
    before = (work_of(out) / "samples.jsonl").read_bytes()
    for more, key in [(["--seed", 1], "seed"), (["--stop", "x"], "stop"), (["--chat"], "chat")]:
        message = failure([*command(model, lines, out), *more])
        assert f"unfinished work of a run with another {key}; delete it, or choose another --out" in message
    with open(lines, "a") as file:
        file.write('{"prompt": "one more"}\n')
    assert "a run with another prompt_file;" in failure(command(model, lines, out))
    folder = shutil.copytree(model, tmp_path / "m")
    (folder / "chat_template.jinja").write_text(PLAIN + " ")
    assert "a run with another prompt_file and tokenizer;" in failure(command(folder, lines, out))
    assert (work_of(out) / "samples.jsonl").read_bytes() == before
    assert not out.exists()


def test_prompts_that_vanish_meanwhile_are_not_missed(model, lines, tmp_path, monkeypatch):
    append = SampleFile.append

    def append_and_unlink(self, records):
        (tmp_path / "lines.jsonl").unlink(missing_ok=True)
        append(self, records)

    monkeypatch.setattr(SampleFile, "append", append_and_unlink)
    assert len(answer(model, lines, tmp_path / "out.jsonl")) == 20


def test_the_prompts_are_not_replaced_by_their_answers(model, lines):
    message = failure([*command(model, lines, lines), "--overwrite"])
    assert "is the --prompt-file; choose another name" in message


# ---- what is wrong ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "x.jsonl", "-p", ""], "--prompt-file brings the prompts; leave --prompt out"),
        ([], "--prompt-file needs --out FILE"),
        (["--out", "x.txt"], "--out x.txt must end in .jsonl"),
        (["--out", "x.jsonl", "--from-bos"], "leave --prompt-file out"),
        (["--out", "x.jsonl", "--stop", ""], "--stop is empty"),
        (["--out", "x.jsonl", "--compile"], "--compile has no effect with --prompt-file"),
        (["--out", "x.jsonl", "--replicate-vocab", "--tp-size", 2], "--replicate-vocab has no effect with"),
        (["--out", "x.jsonl", "--temperature", 0, "--top-k", 3], "--top-k has no effect with --temperature 0"),
    ],
)
def test_bad_usage(arguments, message):
    outcome = invoke("generate", MODEL, "--prompt-file", "x.jsonl", *arguments)
    assert message in one_sentence(outcome)
    assert outcome.code == 2


def test_stop_strings_are_for_files():
    assert "--stop has no effect without --prompt-file" in failure(["generate", MODEL, "-p", "x", "--stop", "."])
    arguments = ["generate", MODEL, "--from-bos", "--num-samples", 2, "--out", "x.jsonl", "--stop", "."]
    assert "--stop has no effect without --prompt-file" in failure(arguments)
    with pytest.raises(UsageError, match="--batch-size must be at least 1"):
        answer_prompts(MODEL, "x.jsonl", "y.jsonl", batch_size=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "x", "a.csv must end in one of .jsonl, .parquet, .txt"),
        ("a.jsonl", None, "does not exist"),
        ("a.jsonl", "\n\n", "a.jsonl holds no prompts"),
        ("a.txt", "  \n", "a.txt holds no prompts"),
        ("a.jsonl", '{"text": "x"}\n\n{"text"\n', "a.jsonl, line 3: is not JSON"),
        ("a.jsonl", '{"text": "x"}\n[]\n', "a.jsonl, line 2: not an object with named values"),
        ("a.jsonl", '{"completion": "x"}\n', "line 1: has completion; a row needs messages, conversations, prompt or"),
        ("a.jsonl", '{"prompt": 3}\n', "line 1: its prompt is not a string"),
        ("a.jsonl", '{"messages": []}\n', "line 1: its messages are not a list of turns"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}\n', "line 1: turn 1 of its messages has no role and content"),
        (
            "a.jsonl",
            '{"messages": [{"role": "assistant", "content": "x"}]}\n',
            "line 1: its messages are the assistant's alone, so there is nothing to answer",
        ),
        ("a.jsonl", '{"text": "x"}\n{"text": "' + "the cat " * 300 + '"}\n', "line 2: a prompt of"),
        ("a.txt", b"x\n\xff\n", "a.txt, line 2 is not UTF-8 text"),
        ("a.parquet", "no", "cannot be read as parquet"),
    ],
)
def test_files_that_cannot_be_used(model, tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = listing(tmp_path)
    assert message in failure(command(model, path, tmp_path / "out.jsonl"))
    assert listing(tmp_path) == before


def test_models_and_numbers_that_cannot_be_used(model, prompts, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    before = listing(tmp_path)
    assert "asks for more than the 20 prompts of" in failure(command(model, prompts, out, num_samples=21))
    assert "does not exist" in failure(command(model, prompts, tmp_path / "nowhere" / "out.jsonl"))
    message = failure(command(MODEL, prompts, out))
    assert ": " + str(MODEL) + " has no chat template, which a conversation needs (and --chat)" in message
    assert "prompts.jsonl, line " in message
    folder = shutil.copytree(model, tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    assert "the chat template refuses the conversation (no system)" in failure(command(folder, prompts, out))
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert "has no tokenizer, and generate needs one" in failure(command(folder, prompts, out))
    shutil.rmtree(folder)
    monkeypatch.setattr("ladderize.runtime.requests.continuous.are_sound", lambda logits: torch.tensor(False))
    assert "the model's logits are NaN or infinite" in failure(command(model, prompts, out))
    assert listing(tmp_path) == before  # a run that made nothing leaves nothing


def test_a_converted_model_answers_with_a_remark(tmp_path):
    make_model("mixed", vocab_size=768).save_pretrained(tmp_path / "m")
    for path in MODEL.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "m")
    (tmp_path / "a.txt").write_text("the cat\n")
    outcome = invoke(*command(tmp_path / "m", tmp_path / "a.txt", tmp_path / "out.jsonl"))
    assert outcome.code == 0
    assert "these are its answers, not those of the dense model" in outcome.stderr
    assert outcome.stdout.startswith("1 answers, ")
