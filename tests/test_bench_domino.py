"""``bench --schedule domino``: prefill in parts, checked against the reference, with every message accounted for."""

import json

import pytest
import torch

from ladderize.errors import UsageError, UserError
from ladderize.runtime.bench import trace
from ladderize.runtime.bench.cost_model import covers
from ladderize.runtime.bench.messages import expected_messages
from ladderize.runtime.bench.options import BenchOptions, ModelChoice, check_bench_usage
from ladderize.runtime.bench.trace import Flight, Overlap, cpu_flights
from ladderize.runtime.collectives.observed import Recording
from ladderize.runtime.schedule import SEQUENTIAL, Schedule
from ladderize.runtime.shards import Shape
from tests.helpers import SHAPE, invoke, make_model, one_sentence

QUICK = ["--prompt-len", 9, "--output-len", 3, "--repeat", 2, "--warmup", 1, "--threads", 1]


@pytest.fixture
def shape(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SHAPE, "model_type": "llama"}))
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("domino") / "m"
    make_model("mixed", max_position_embeddings=160).save_pretrained(folder)
    return folder


# ---- the cost model, with several messages on their way ----


def by_hand(times, alone):
    """Replays moments one after the other; each message's own stall, found by looking at the whole link."""
    events = sorted([(s, 0, k) for k, (s, _) in enumerate(times)] + [(w, 1, k) for k, (_, w) in enumerate(times)])
    clock, free, done, stalls = 0.0, float("-inf"), {}, {}
    before = events[0][0]
    for moment, kind, k in events:
        clock += moment - before
        before = moment
        if kind == 0:
            done[k] = free = max(clock, free) + alone[k]
        else:
            stalls[k] = max(0.0, done[k] - clock)
            clock += stalls[k]
    return stalls


def test_one_message_at_a_time_hides_what_lies_between():
    assert covers([(0.0, 5.0), (6.0, 6.0), (7.0, 9.0)], [3.0, 2.0, 4.0]) == [5.0, 0.0, 2.0]


def test_two_messages_share_the_link():
    """Both are started at once: the second begins when the first is through, so that 4 ms of compute hide 4 of 6."""
    found = covers([(0.0, 4.0), (0.0, 4.0)], [3.0, 3.0])
    assert [min(one, 3.0) for one in found] == [3.0, 1.0]


def test_stalls_of_random_schedules():
    numbers = torch.Generator().manual_seed(int(torch.randint(1 << 30, ())))
    for _ in range(50):
        count = int(torch.randint(1, 9, (), generator=numbers))
        # float64: no two moments are equal
        starts, gaps, alone = torch.rand(3, count, generator=numbers, dtype=torch.float64)
        starts, alone = starts.cumsum(0).tolist(), (alone * 2).tolist()
        waits = sorted(start + 3 * gap for start, gap in zip(starts, gaps.tolist(), strict=True))
        times = list(zip(starts, waits, strict=True))
        stalls = by_hand(times, alone)
        hidden = [min(a, cover) for a, cover in zip(alone, covers(times, alone), strict=True)]
        assert sum(alone) - sum(hidden) == pytest.approx(sum(stalls.values()))


# ---- traces ----


def span(name, ts, dur, **extra):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1, **extra}


def test_waiting_for_another_message_is_no_compute():
    events = [span("all-reduce: start", 0, 10), span("all-reduce: start", 20, 10), span("all-reduce: wait", 100, 900),
              span("all-reduce: wait", 1100, 5)]  # fmt: skip
    first, second = cpu_flights(events, [2000, 2000])
    assert first.covered == 100 - 10 - 10  # what lies between, without the other's start
    assert second.covered == 1100 - 30 - 900


def test_flights_of_nothing():
    assert Overlap.of_flights([]) == Overlap(0.0, 0.0, 0.0)
    assert Overlap.of_flights([Flight(0, 4000, 1000)]).share == 0.25


def test_passes_are_told_apart(monkeypatch):
    """A message belongs to the pass in which it was started, also where that pass runs twice."""
    flights = [Flight(5, 100, 10), Flight(19, 100, 20), Flight(20, 100, 50), Flight(45, 100, 90), Flight(90, 100, 0)]
    events = [
        span("forward", 0, 20, cat="user_annotation"),
        span("backward", 20, 20, cat="user_annotation"),
        span("forward", 40, 20, cat="user_annotation"),
        span("backward", 0, 100, cat="gpu_user_annotation"),
    ]
    monkeypatch.setattr(trace, "_traced_flights", lambda *arguments: (flights, events))
    found = trace.trace_passes(None, ("forward", "backward"), None, None, None, None)
    assert (found["forward"].in_flight_ms, found["forward"].under_compute_ms) == (0.3, 0.12)
    assert (found["backward"].in_flight_ms, found["backward"].under_compute_ms) == (0.1, 0.05)


# ---- whole runs ----


@pytest.mark.parametrize("batch", ["1", "3"])
def test_a_domino_prefill_is_checked_and_counted(checkpoint, batch, tmp_path):
    more = ["--schedule", "domino", "--domino-chunks", 3, "--domino-columns", 2, "--baselines", "sequential,no-comm"]
    outcome = invoke(
        "bench", checkpoint, *QUICK, *more, "--batch-size", batch, "--emulate-tp", 2, "--link", "900,1", "--json"
    )
    assert outcome.code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert document["options"]["schedule"] == "domino"
    assert document["options"]["domino_chunks"] == 3
    (check,) = document["checks"].values()
    assert check["logit_difference"] < check["tolerance"]
    assert check["greedy_tokens"] == 5 * 33  # two texts, equal and padded, and one by itself
    own, silent, plain = document["rows"]
    assert [row["schedule"] for row in (own, silent, plain)] == ["domino", "domino", "sequential"]
    assert plain["kind"] != "model"
    # 2 dropped of 8, 3 parts of 2 columns; the same bytes in all
    assert own["communication"]["prefill"]["all_reduces"] == 6 * 6
    assert plain["communication"]["prefill"]["all_reduces"] == 6
    assert own["communication"]["prefill"]["bytes"] == plain["communication"]["prefill"]["bytes"]
    assert own["communication"]["decode"]["all_reduces"] == 6
    assert own["communication"]["prefill"]["hideable_ms"] > 0


def test_two_real_ranks(checkpoint):
    outcome = invoke("bench", checkpoint, *QUICK, "--tp-size", 2, "--schedule", "domino", "--repeat", 1)
    assert outcome.code == 0, outcome.stderr
    assert "prefill by domino (2 chunks)" in outcome.stdout
    assert "Reference check of m: passed" in outcome.stdout


def test_parts_in_a_wrong_order_are_not_timed(checkpoint, monkeypatch):
    from ladderize.runtime import model

    right = model.join_parts
    monkeypatch.setattr(model, "join_parts", lambda results, rows: right(results[::-1], rows))
    arguments = ["--emulate-tp", 2, "--link", "1,1", "--schedule", "domino", "--batch-size", 2]
    message = one_sentence(invoke("bench", checkpoint, *QUICK, *arguments))
    assert "off the fp32 reference" in message


def test_a_message_that_is_left_out(shape, monkeypatch):
    class Forgetful(Recording):
        def all_reduce_async(self, x):
            forgotten.append(len(forgotten) != 6)
            return super().all_reduce_async(x) if forgotten[-1] else self.inner.all_reduce_async(x)

    forgotten = []

    monkeypatch.setattr("ladderize.runtime.bench.inference.Recording", Forgetful)
    arguments = ["--emulate-tp", 2, "--link", "1,1", "--schedule", "domino", "--batch-size", 3, "--layout", "dense"]
    message = one_sentence(invoke("bench", "--random-weights", shape, *arguments, *QUICK))
    # 2 rows and 1 row: 9 messages each
    assert "a prefill completed 17 all-reduces" in message
    assert "asks for 18 all-reduces (9 of 576 bytes and 9 of 1152 bytes)" in message


def test_expected_messages_of_uneven_parts():
    shape = Shape.from_config({**SHAPE, "hidden_size": 8}, tp_size=2, rank=1)
    whole = Shape.from_config({**SHAPE, "hidden_size": 8}, tp_size=2, rank=1, replicate_vocab=True)
    # 5 rows of 10 tokens in parts of 2, 2 and 1: 3 sums of 4 column parts, and the embedding's
    domino = Schedule("domino", 3, 4)
    assert expected_messages(shape, 3, 4, domino, 5, 10) == {160: 24, 640: 2, 80: 12, 320: 1}
    assert expected_messages(shape, 3, 4, domino, 1, 10) == {32: 12, 128: 1, 24: 24, 96: 2}
    assert expected_messages(whole, 3, 2, SEQUENTIAL, 5, 10) == {800: 3}


# ---- what is refused ----


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--schedule", "domino"], 2, "--schedule domino hides communication, and one rank has none"),
        (["--domino-chunks", 3, "--tp-size", 2], 2, "--domino-chunks has no effect without --schedule domino"),
        (["--domino-columns", 1, "--tp-size", 2], 2, "--domino-columns has no effect without --schedule domino"),
        (["--schedule", "domino", "--tp-size", 2, "--domino-chunks", 1], 2, "--domino-chunks"),
        (["--schedule", "magic"], 2, "magic"),
        (["--schedule", "domino", "--tp-size", 2, "--domino-chunks", 4, "--batch-size", "8,3"], 1, "3 rows (--batch"),
        (["--schedule", "domino", "--tp-size", 2, "--domino-chunks", 10], 1, "one row of 9 tokens (--prompt-len)"),
        (["--schedule", "domino", "--tp-size", 2, "--domino-columns", 5], 1, "does not divide the hidden size 32"),
        (["--schedule", "domino", "--tp-size", 2, "--baselines", "parallel"], 2, "--baselines parallel runs seq"),
        (["--baselines", "sequential"], 2, "--baselines sequential has no effect without --schedule domino"),
        (["--schedules", "domino"], 2, "--schedules has no effect without --train"),
        (["--seq-len", 9], 2, "--seq-len has no effect without --train"),
    ],
)
def test_bad_arguments(shape, arguments, code, message):
    outcome = invoke("bench", "--random-weights", shape, *QUICK, *arguments)
    assert message in one_sentence(outcome)
    assert outcome.code == code


def test_options_from_python():
    choice = ModelChoice(models=("a",))
    with pytest.raises(UsageError, match="no effect without --schedule domino"):
        check_bench_usage(choice, BenchOptions(tp_size=2, domino_chunks=2), None)
    with pytest.raises(UserError):
        check_bench_usage(choice, BenchOptions(tp_size=2, schedule="domino", domino_chunks=1), None)
    with pytest.raises(UsageError, match="--schedule magic is not one of"):
        BenchOptions(schedule="magic")
    options = BenchOptions(tp_size=2, schedule="domino", domino_chunks=4, domino_columns=2)
    assert options.prefill_schedule == Schedule("domino", 4, 2)
    assert BenchOptions.from_dict(options.to_dict(), "x") == options
