"""``ladderize generate --from-bos``: samples that depend on their number only, in a file that survives anything."""

import errno
import json
import os
import random
import sys

import pytest
import torch

from ladderize import load
from ladderize.demo.inputs import MODEL
from ladderize.files.temporaries import lock_folder
from ladderize.modeling import load_tokenizer
from ladderize.runtime.decode import Generator, Sampling
from ladderize.runtime.spec import checkpoint_spec, eos_ids
from ladderize.runtime.texts.corpus import CorpusDocument
from ladderize.runtime.texts.samples import SampleFile
from tests import warm
from tests.helpers import SHAPE, clearly_chosen, edit_json, invoke, listing, make_model, one_sentence, save_llama

EOS = 5
LENGTH = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random weights, no tokenizer, and texts that end now and then. No draw of the first 13 samples falls on the
    border between two tokens, where rounding decides."""
    sampling, is_clear = Sampling(temperature=1.0), False
    while not is_clear:
        place = tmp_path_factory.mktemp("corpus")
        folder = save_llama(place / "model", seed=int(torch.randint(1 << 30, ())), eos_token_id=EOS)
        whole, rows = load(folder), ids_of(write(folder, place / "self.jsonl", 13))
        is_clear = all(clearly_chosen(whole, row[:1], row[1:], sampling, number) for number, row in enumerate(rows))
    return folder


def command(model, out, samples=10, *, batch=4, **options):
    more = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    return ["generate", model, "--from-bos", "--num-samples", samples, "--out", out, "--batch-size", batch,
            "--max-new-tokens", LENGTH, "--dtype", "float32", "--threads", 1, *more]  # fmt: skip


def write(*arguments, **options):
    outcome = invoke(*command(*arguments, **options))
    assert outcome.code == 0, outcome.stderr
    return arguments[1].read_bytes()


def ids_of(content):
    return [json.loads(line)["input_ids"] for line in content.decode().splitlines()]


def failure(arguments):
    return one_sentence(invoke(*arguments))


def test_a_line_is_ids_from_bos_to_eos(model, tmp_path):
    outcome = invoke(*command(model, tmp_path / "self.jsonl", 40), "--json")
    assert "no tokenizer: the lines get input_ids without text" in outcome.stderr
    document, rows = json.loads(outcome.stdout), ids_of((tmp_path / "self.jsonl").read_bytes())
    assert listing(tmp_path) == ["self.jsonl", "self.jsonl.run.json"]
    assert len(rows) == document["samples"] == 40
    assert document["tokens"] == sum(len(row) - 1 for row in rows)
    assert {row[0] for row in rows} == {SHAPE["bos_token_id"]}
    ended = [row for row in rows if row[-1] == EOS]
    assert document["eos_share"] == len(ended) / 40
    assert len(ended) < 40  # how many more than none depends on the random weights
    assert all(EOS not in row[1:-1] for row in rows)
    assert {len(row) for row in rows if row not in ended} == {LENGTH + 1}
    assert all("text" not in json.loads(line) for line in (tmp_path / "self.jsonl").open())
    assert document["schema_version"] == 1
    assert document["layout"] == "4 layers: dense"
    assert document["output_tokens_per_s"] > 0
    assert CorpusDocument.from_dict(document, "stdout").to_dict().items() <= document.items()


def test_text_is_the_ids_without_special_tokens(tmp_path):
    content = write(MODEL, tmp_path / "self.jsonl", 6, max_new_tokens=200)
    eos = eos_ids(checkpoint_spec(str(MODEL), tp_size=1))
    tokenizer = load_tokenizer(MODEL)
    lines = [json.loads(line) for line in content.decode().splitlines()]
    assert any(line["input_ids"][-1] in eos for line in lines)
    for line in lines:
        assert list(line) == ["text", "input_ids"]
        assert line["text"] == tokenizer.decode(line["input_ids"], skip_special_tokens=True)
        assert line["text"]
        assert "<s>" not in line["text"]
        assert "</s>" not in line["text"]


def test_a_sample_depends_on_its_number_and_the_seed_only(model, tmp_path):
    rows = ids_of(write(model, tmp_path / "whole.jsonl", 10, batch=8))
    long = [row for row in rows if len(row) > 8]  # two texts that end at once can be the same by chance
    assert len({tuple(row) for row in long}) == len(long)
    for batch in (1, 3):
        assert ids_of(write(model, tmp_path / f"{batch}.jsonl", 10, batch=batch)) == rows
    assert ids_of(write(model, tmp_path / "fewer.jsonl", 5, batch=8)) == rows[:5]
    assert not any(row in long for row in ids_of(write(model, tmp_path / "other.jsonl", 10, seed=1)))


def test_two_ranks_make_the_same(model, tmp_path):
    one = write(model, tmp_path / "one.jsonl", 10)
    arguments = [part for part in command(model, tmp_path / "two.jsonl", 10) if part not in ("--threads", 1)]
    outcome = invoke(*arguments, "--tp-size", 2, "--json")
    assert outcome.code == 0, outcome.stderr
    assert json.loads(outcome.stdout)["tp_size"] == 2
    assert (tmp_path / "two.jsonl").read_bytes() == one


def test_a_batch_ends_when_all_that_is_wanted_of_it_has(model, tmp_path, monkeypatch):
    steps = 0
    step = Generator.decode_one_token

    def counted(self, tokens):
        nonlocal steps
        steps += 1
        return step(self, tokens)

    monkeypatch.setattr(Generator, "decode_one_token", counted)
    rows = ids_of(write(model, tmp_path / "self.jsonl", 10, batch=4))
    assert steps == sum(max(map(len, rows[first : first + 4])) - 2 for first in (0, 4, 8))


# ---- unfinished work ----


def stop_after(monkeypatch, samples):
    """Let a run fail like a full disk once so many samples are written."""
    append = SampleFile.append

    def append_or_fail(self, rows):
        if self.samples >= samples:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, rows)

    monkeypatch.setattr(SampleFile, "append", append_or_fail)


def work_of(out):
    return out.with_name(out.name + ".ladderize-work")


@pytest.fixture
def unfinished(model, tmp_path, monkeypatch):
    """OUT of a run that was stopped after 8 of 10 samples, and what it would have been."""
    whole = write(model, tmp_path / "whole.jsonl")
    with monkeypatch.context() as patch:
        stop_after(patch, 8)
        assert "no space left on device" in failure(command(model, tmp_path / "self.jsonl"))
    assert listing(tmp_path) == ["self.jsonl.ladderize-work", "whole.jsonl", "whole.jsonl.run.json"]
    assert listing(work_of(tmp_path / "self.jsonl")) == ["run.json", "samples.jsonl"]
    assert len(ids_of((work_of(tmp_path / "self.jsonl") / "samples.jsonl").read_bytes())) == 8
    return tmp_path / "self.jsonl", whole


def test_goes_on_wherever_the_part_ends(model, unfinished):
    out, whole = unfinished
    work = work_of(out)
    part, about = work / "samples.jsonl", work / "run.json"
    saved = about.read_bytes()
    for keep in [0, 1, len(whole) - 1, len(whole), *random.sample(range(2, len(whole) - 1), 6)]:
        work.mkdir(exist_ok=True)
        part.write_bytes(whole[:keep])
        about.write_bytes(saved)
        assert write(model, out) == whole, keep
        assert not work.exists()
        out.unlink()
    work.mkdir()
    part.write_bytes(whole[: len(whole) // 2] + b"\0" * 100 + b"\n" + whole)  # a power failure
    about.write_bytes(saved)
    assert write(model, out) == whole


def test_goes_on_in_batches_of_another_size_and_to_more_samples(model, unfinished, monkeypatch):
    out, whole = unfinished
    rows = ids_of(whole)
    written = []
    append = SampleFile.append
    monkeypatch.setattr(SampleFile, "append", lambda self, rows: (written.append(len(rows)), append(self, rows)))
    more = ids_of(write(model, out, 13, batch=5))
    assert written == [2, 3]  # 8 and 9, then 10 to 12: nothing is made twice
    assert more[:10] == rows
    assert len(more) == 13


def test_work_of_another_run_is_not_gone_on_with(model, unfinished):
    out, _ = unfinished
    message = failure(command(model, out, seed=1, temperature=0.5))
    assert "of a run with another seed and temperature; delete it, or choose another --out" in message
    assert "another ignore_eos;" in failure([*command(model, out), "--ignore-eos"])
    assert "holds 8 samples already" in failure(command(model, out, 7))
    (work_of(out) / "run.json").unlink()
    assert "is not empty and not a folder of unfinished work; choose another --out" in failure(command(model, out))
    assert len(ids_of((work_of(out) / "samples.jsonl").read_bytes())) == 8


def test_killed_between_the_rename_and_the_end(model, unfinished, monkeypatch):
    out, whole = unfinished
    about = work_of(out) / "run.json"
    with monkeypatch.context() as patch:
        patch.setattr(SampleFile, "remove", lambda self: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            invoke(*command(model, out))
    assert out.read_bytes() == whole
    assert about.exists()
    assert "already exists" in failure(command(model, out, 11))
    assert write(model, out) == whole
    assert not work_of(out).exists()


def test_killed_after_all_but_before_the_end(model, unfinished):
    """The same command finds that it is done, and no other command does."""
    out, whole = unfinished
    assert write(model, out) == whole
    outcome = invoke(*command(model, out))
    assert (outcome.code, "10 samples are already there" in outcome.stderr) == (0, True)
    for other in ([*command(model, out), "--seed", 5], command(model, out, 9)):
        assert "already exists" in failure(other)
    out.write_bytes(whole[:-1])  # somebody's by now
    assert "already exists" in failure(command(model, out))
    assert out.read_bytes() == whole[:-1]


def test_kill_9_at_any_moment(model, tmp_path):
    out, samples = tmp_path / "self.jsonl", 120
    part = work_of(out) / "samples.jsonl"
    arguments = [sys.executable, "-m", "ladderize", *map(str, command(model, out, samples))]
    process = warm.WarmProcess(arguments)
    most = random.uniform(0, 0.7) * samples
    warm.wait_until(lambda: part.exists() and part.read_bytes().count(b"\n") >= most, process)
    process.kill()
    process.communicate()
    whole = write(model, tmp_path / "whole.jsonl", samples)
    assert not out.exists() or out.read_bytes() == whole  # a fast run may have come to its end
    assert write(model, out, samples) == whole
    assert listing(tmp_path) == [name + end for name in ("self.jsonl", "whole.jsonl") for end in ("", ".run.json")]


def test_a_second_run_does_not_touch_the_firsts_work(model, unfinished):
    out, _ = unfinished
    before = listing(out.parent)
    lock = lock_folder(work_of(out))
    assert "another run is using" in failure(command(model, out))
    os.close(lock)
    assert listing(out.parent) == before


def test_a_finished_file_is_replaced_only_if_asked_for(model, tmp_path):
    out = tmp_path / "self.jsonl"
    out.write_text("precious")
    assert "already exists; choose another name, or pass --overwrite" in failure(command(model, out))
    assert out.read_text() == "precious"
    assert invoke(*command(model, out), "--overwrite").code == 0
    assert len(ids_of(out.read_bytes())) == 10
    assert listing(tmp_path) == ["self.jsonl", "self.jsonl.run.json"]


# ---- what is wrong ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is nothing to continue: give --prompt TEXT, --prompt-file FILE to answer many, or --from-bos"),
        (["-p", "x", "--num-samples", 3], "--num-samples has no effect without --from-bos"),
        (["-p", "x", "--out", "x.jsonl"], "--out has no effect without --from-bos"),
        (["-p", "x", "--batch-size", 3], "--batch-size has no effect without --from-bos"),
        (["-p", "x", "--overwrite"], "--overwrite has no effect without --from-bos"),
        (["-p", "x", "--temperature", "inf"], "--temperature must be a finite number of at least 0, not inf"),
        (["--from-bos", "--out", "x.jsonl"], "--from-bos needs --num-samples N"),
        (["--from-bos", "--num-samples", 3], "--from-bos needs --out FILE"),
        (["--from-bos", "--num-samples", 3, "--out", "x.txt"], "--out x.txt must end in .jsonl"),
        (["--from-bos", "--num-samples", 3, "--out", "x.jsonl", "-p", ""], "leave --prompt out"),
        (["--from-bos", "--num-samples", 3, "--out", "x.jsonl", "--chat"], "leave --chat out"),
        (
            ["--from-bos", "--num-samples", 3, "--out", "x.jsonl", "--temperature", 0],
            "would give the same text every time",
        ),
    ],
)
def test_bad_usage(arguments, message):
    outcome = invoke("generate", MODEL, *arguments)
    assert message in one_sentence(outcome)
    assert outcome.code == 2


def test_bad_models_and_places(tmp_path, monkeypatch):
    model = save_llama(tmp_path / "src")
    out = tmp_path / "self.jsonl"
    before = listing(tmp_path)
    assert "does not exist" in failure(command(model, tmp_path / "nowhere" / "self.jsonl"))
    assert "exceed the model's 64 positions" in failure(command(model, out, max_new_tokens=64))
    assert invoke(*command(model, out, 1, max_new_tokens=63)).code == 0
    out.unlink()
    out.with_name("self.jsonl.run.json").unlink()
    edit_json(model / "generation_config.json", bos_token_id=None)
    edit_json(model / "config.json", bos_token_id=1000)
    assert "bos_token_id is 1000, but the model has 97 tokens" in failure(command(model, out))
    edit_json(model / "config.json", bos_token_id=None)
    assert "has no BOS token" in failure(command(model, out))
    edit_json(model / "config.json", bos_token_id=1)
    monkeypatch.setattr(
        "ladderize.runtime.decode.Generator.prefill", lambda self, prompts: torch.full((len(prompts), 5), torch.nan)
    )
    assert "the model's logits are NaN or infinite" in failure(command(model, out))
    assert listing(tmp_path) == before  # a run that made nothing leaves nothing


def test_a_converted_model_is_sampled_with_a_remark(tmp_path):
    make_model("mixed").save_pretrained(tmp_path / "m")
    outcome = invoke(*command(tmp_path / "m", tmp_path / "self.jsonl", 2))
    assert outcome.code == 0
    assert "these are its samples, not those of the dense model" in outcome.stderr
    assert outcome.stdout.startswith("2 samples, ")
