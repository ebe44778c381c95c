"""The runtime's answers: scores of endings and continuations of prompts against one text at a time, and what ends
ranks that wait for jobs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from ladderize import load
from ladderize.checkpoint.opening import read_config
from ladderize.errors import UserError
from ladderize.layout import LayoutError
from ladderize.runtime.collectives.shm import MOST_VIEWS
from ladderize.runtime.decode import GrowingRope, rope_table
from ladderize.runtime.requests import reading
from ladderize.runtime.requests.continuous import Prompt, continue_prompts
from ladderize.runtime.requests.options import RequestOptions
from ladderize.runtime.requests.scoring import Ending, score_endings
from ladderize.runtime.requests.service import check_request, open_service
from ladderize.runtime.sampling import Sampling
from tests.helpers import LAYOUTS, ROOT, SHAPE, all_gone, clearly_chosen, fresh_rng, make_model, save_llama
from tests.oracle import Oracle, assert_likeliest
from tests.warm import PATIENCE

# ---- packing ----


def random_sequences(rng: np.random.Generator) -> list[np.ndarray]:
    """A few texts, with others that begin like them, end early or are the same."""
    found = [rng.integers(3, 9, rng.integers(1, 30))]
    for _ in range(int(rng.integers(1, 20))):
        like = found[rng.integers(len(found))]
        kept = like[: rng.integers(0, len(like) + 1)]
        found.append(np.concatenate([kept, rng.integers(3, 9, rng.integers(0 if len(kept) else 1, 12))]))
    return found


def test_a_packed_row_shows_every_token_what_its_own_text_shows_it():
    rng = fresh_rng()
    joined = 0
    for _ in range(30):
        sequences = random_sequences(rng)
        limit = int(rng.integers(8, 80))
        rows = reading.share_prefixes(sequences, limit, lambda tokens: tokens * (50 + tokens))
        assert sorted(number for row in rows for number in row.paths) == list(range(len(sequences)))
        assert [len(row.tokens) for row in rows] == sorted((len(row.tokens) for row in rows), reverse=True)
        for row in rows:
            assert len(row.tokens) <= max(limit, *(len(sequences[number]) for number in row.paths))
            length = reading.padded(len(row.tokens))
            seen = reading.ancestors(row, length)
            for number, path in row.paths.items():
                assert [row.tokens[place] for place in path] == sequences[number].tolist()
                assert [row.depths[place] for place in path] == list(range(len(path)))
                for position, place in enumerate(path):
                    assert set(np.flatnonzero(seen[place])) == set(path[: position + 1].tolist())
            assert all(set(np.flatnonzero(seen[place])) == {place} for place in range(len(row.tokens), length))
            if row.is_chain:
                np.testing.assert_array_equal(
                    seen[: len(row.tokens), : len(row.tokens)], np.tri(len(row.tokens), dtype=bool)
                )
        joined += len(sequences) - len(rows)
        for batch in reading.row_batches(rows, limit):
            assert len(batch) == 1 or len(batch) * reading.padded(len(batch[0].tokens)) <= limit
    assert joined, "nothing was shared"


def test_answers_of_one_question_share_it_and_other_questions_stay_apart():
    """100 tokens of a question are computed once for four answers; questions that share BOS alone are not joined."""
    question, other = np.arange(3, 103), np.concatenate([[3], np.arange(200, 299)])
    answers = [np.concatenate([context, [answer, 5]]) for context in (question, other) for answer in range(300, 304)]
    rows = reading.share_prefixes(answers, 2048, lambda tokens: tokens * (20 + tokens))
    assert [len(row.tokens) for row in rows] == [100 + 4 * 2] * 2


# ---- scores and continuations ----


def oracle_of(model):
    """Logits of one text [n, vocab], by the slow loop of tests/oracle.py."""
    oracle = Oracle(model.state_dict(), model.config)
    return lambda ids: oracle(torch.as_tensor(ids)[None])[0][0]


def random_endings(rng: np.random.Generator, longest: int) -> list[Ending]:
    """Like multiple choice: a few contexts, several answers to each; and a whole text, one token, and a repetition."""
    endings = []
    for _ in range(4):
        context = rng.integers(3, SHAPE["vocab_size"], rng.integers(1, 20))
        for _ in range(int(rng.integers(1, 4))):
            answer = rng.integers(3, SHAPE["vocab_size"], rng.integers(1, 8))
            endings.append(Ending(np.concatenate([context, answer]), len(answer)))
    whole = rng.integers(3, SHAPE["vocab_size"], longest)
    return [*endings, Ending(whole, longest - 1), Ending(whole[:2], 1), Ending(endings[0].ids, 1)]


def differing(ours: list[list[int]], theirs: list[list[int]]) -> int:
    """How many texts differ. One of them may: where two tokens are as likely, or a drawn number lies between two, the
    last bit of a logit decides, and rows that run beside a text change it."""
    return sum(one != other for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_answers_equal_one_text_at_a_time(name, tp_size, tmp_path):
    """Vocabulary split (97 rows, so with padding), endings joined, rows reused; a budget that cuts long texts."""
    rng = fresh_rng()
    model = make_model(name)
    model.save_pretrained(tmp_path)
    logits_of = oracle_of(model)
    endings = random_endings(rng, 40)
    prompts = [Prompt(i, rng.integers(3, 97, rng.integers(1, 30)).tolist(), int(rng.integers(1, 7))) for i in range(6)]
    options = RequestOptions(tp_size=tp_size, rows=2, token_budget=int(rng.integers(16, 90)), threads=1)
    done: list[int] = []
    with open_service(check_request(str(tmp_path), options), options) as service:
        scores = service.ask(score_endings, endings, advance=done.append)
        made = service.ask(continue_prompts, prompts, advance=done.append)
    assert sum(done) == len(endings) + len(prompts)
    for ending, total, greedy in zip(endings, scores.sums, scores.greedy, strict=True):
        rows = logits_of(ending.ids[:-1])[-ending.scored :].double().log_softmax(-1)
        targets = torch.from_numpy(ending.ids[-ending.scored :])
        assert abs(float(rows.gather(1, targets[:, None]).sum()) - total) < 1e-3
        assert bool((rows.argmax(-1) == targets).all()) == greedy
    for prompt, new in zip(prompts, made, strict=True):
        assert len(new) == prompt.max_new_tokens
        assert_likeliest(logits_of, prompt.ids, new)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("plain"), seed=int(torch.randint(1 << 30, ())))


def opened(folder: Path, **options: object):
    chosen = RequestOptions(**{"threads": 1, "rows": 3, **options})
    return open_service(check_request(str(folder), chosen), chosen)


def test_many_prompts_go_through_few_rows(plain):
    """Rows of every length beginning and ending all the time: greedy and sampled together, and EOS."""
    rng = fresh_rng()
    # the same text whatever runs beside it: each prompt alone is the reference
    sampled = Sampling(temperature=1.3, top_k=20, top_p=0.9, seed=int(rng.integers(1000)))
    prompts = [
        Prompt(i, rng.integers(3, 97, rng.integers(1, 30)).tolist(), int(rng.integers(1, 25)), s)
        for i, s in enumerate([Sampling(), sampled] * 8)
    ]
    with opened(plain, rows=5, token_budget=64) as many, opened(plain, rows=1) as one:
        together = many.ask(continue_prompts, prompts)
        assert differing(together, [one.ask(continue_prompts, [prompt])[0] for prompt in prompts]) <= 1
    assert [len(new) for new in together] == [prompt.max_new_tokens for prompt in prompts]


def kept_views(worker, advance):
    return len(getattr(worker.reader.model.collectives, "views", ()))


def test_nothing_grows_with_the_lengths_of_texts(plain):
    """Shared memory keeps views of its messages, by shape: 0.1 GB of them after a task, with 8 ranks."""
    lengths = range(17, 60)  # over the budget: each text by itself
    with opened(plain, tp_size=2, token_budget=16) as service:
        service.ask(score_endings, [Ending(np.arange(length) % 8, length - 1) for length in lengths])
        assert service.ask(kept_views) <= MOST_VIEWS + 4  # and those of the last text


def test_positions_that_no_text_has_take_no_memory(tmp_path):
    """Models of a million positions are there; a table for all of these would take gigabytes and seconds."""
    folder = save_llama(tmp_path / "model", max_position_embeddings=2**31)
    ids, rope = np.arange(40) % 8, GrowingRope(read_config(folder), 2**31, torch.device("cpu"))
    with opened(folder) as service:
        found = service.ask(score_endings, [Ending(ids[:20], 19), Ending(ids, 39)])
        made = service.ask(continue_prompts, [Prompt(0, ids.tolist(), 5)])
    with opened(folder, max_length=64) as service:
        again = service.ask(score_endings, [Ending(ids[:20], 19), Ending(ids, 39)])
        assert found.sums.tolist() == again.sums.tolist()
        assert made == service.ask(continue_prompts, [Prompt(0, ids.tolist(), 5)])
    assert [len(rope(positions)) for positions in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    assert torch.equal(rope(1)[:50], rope_table(read_config(folder), 50, torch.device("cpu")))
    assert len(GrowingRope(read_config(folder), 10, torch.device("cpu"))(9)) == 10


def test_a_text_ends_with_eos(plain, tmp_path):
    rng = fresh_rng()
    whole, is_clear = load(plain), False
    with opened(plain) as service:
        while not is_clear:
            prompts = [Prompt(i, rng.integers(3, 97, 5).tolist(), 12) for i in range(8)]
            free = service.ask(continue_prompts, prompts)
            is_clear = clearly_chosen(whole, prompts[0].ids, free[0])
    eos = free[0][3]
    for path in plain.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{eos}, 96]}}')
    with opened(tmp_path) as service:
        ended = service.ask(continue_prompts, prompts)
    stops = [next((i + 1 for i, token in enumerate(new) if token in (eos, 96)), len(new)) for new in free]
    assert differing(ended, [new[:stop] for new, stop in zip(free, stops, strict=True)]) <= 1
    assert len(ended[0]) < 12


def test_weights_that_make_nan_are_an_error(tmp_path):
    model = make_model("dense")
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    model.save_pretrained(tmp_path)
    with opened(tmp_path, tp_size=2) as service, pytest.raises(UserError, match="NaN or infinite"):
        service.ask(score_endings, [Ending(np.array([4, 5, 6]), 2)])
    with opened(tmp_path) as service, pytest.raises(UserError, match="NaN or infinite"):
        service.ask(continue_prompts, [Prompt(0, [4, 5], 3)])


# ---- ranks that wait ----


def misbehave(worker, rank, how, advance):
    """End rank ``rank``, or keep it busy and interrupt process ``how``, which waits for it."""
    if worker.group.rank == rank:
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "fail":
            raise ValueError("enough")
        os.kill(how, signal.SIGINT)  # Ctrl-C
        time.sleep(3600)
    worker.group.barrier()


@pytest.mark.parametrize(("rank", "how", "message"), [(0, "die", "killed by SIGKILL"), (1, "die", "rank 1 was killed"),
    (0, "fail", "ValueError: enough"), (1, "fail", "rank 1 failed: ValueError")])  # fmt: skip
def test_a_rank_that_ends_is_one_sentence_and_leaves_nothing(plain, rank, how, message):
    service = opened(plain, tp_size=2)
    processes = service.ranks.processes
    with pytest.raises(UserError, match=message):
        service.ask(misbehave, rank, how)
    assert not any(process.is_alive() for process in processes)
    with pytest.raises(UserError, match="the ranks have ended"):
        service.ask(score_endings, [])


def test_a_rank_that_ends_between_jobs_is_noticed(plain):
    with opened(plain, tp_size=2) as service:
        os.kill(service.ranks.processes[1].pid, signal.SIGKILL)
        service.ranks.processes[1].join(PATIENCE)
        with pytest.raises(UserError, match="rank 1 was killed by SIGKILL"):
            service.ask(score_endings, [Ending(np.array([4, 5]), 1)])


def test_ctrl_c_during_a_job_ends_the_ranks(plain, request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started the tests with &
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    service = opened(plain, tp_size=2)
    with pytest.raises(KeyboardInterrupt):
        service.ask(misbehave, 0, os.getpid())
    assert not any(process.is_alive() for process in service.ranks.processes)


PARENT = """
import sys
sys.path.insert(0, {root!r})
from ladderize.runtime.requests.service import check_request, open_service
from ladderize.runtime.requests.options import RequestOptions
if __name__ == "__main__":
    options = RequestOptions(tp_size=2, threads=1)
    service = open_service(check_request({model!r}, options), options)
    print(*(process.pid for process in service.ranks.processes), flush=True)
"""


def test_a_parent_that_forgets_to_close_leaves_no_rank(plain, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(root=str(ROOT), model=str(plain)))
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    assert all_gone(pids)


def test_what_cannot_be_is_refused_before_anything_starts(plain):
    for options, message in [
        ({"tp_size": 3}, "--tp-size 3"),
        ({"max_length": 65}, "max_length 65 exceeds the 64 positions"),
    ]:
        with pytest.raises((UserError, LayoutError), match=message):
            opened(plain, **options)
