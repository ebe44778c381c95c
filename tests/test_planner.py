"""The planner: the exact front against brute force, costs from sensitivity files, and what is chosen."""

import itertools
import math

import numpy as np
import pytest

from ladderize.errors import UsageError, UserError
from ladderize.files.documents import write_json
from ladderize.layout import DROPPED, OVERLAPPED
from ladderize.planning.plans.costs import PlanCosts, estimate_costs, read_accuracy_costs
from ladderize.planning.plans.document import PlanChoice
from ladderize.planning.plans.layout_choice import plan_layout
from ladderize.planning.plans.layout_space import (
    LAYER_OPTIONS,
    LayoutSpace,
    choose_point,
    chosen_options,
    option_seconds,
)
from tests.planner_toys import all_options, pass_seconds, random_seconds, random_space, sensitivity_of, target_of


def brute_front(costs: LayoutSpace) -> list[tuple[float, float]]:
    """(seconds, nats) of the front, of every layout there is."""
    offered = [np.flatnonzero(np.isfinite(row)).tolist() for row in costs.nats]
    points = sorted(costs.totals(chosen) for chosen in itertools.product(*offered))
    front: list[tuple[float, float]] = []
    for seconds, nats in points:
        if front and nats >= front[-1][1] - 1e-9:
            continue
        if front and seconds <= front[-1][0] * (1 + 1e-9):
            front.pop()
        front.append((seconds, nats))
    return front


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("alike", [False, True])
def test_front_is_that_of_brute_force(layers, alike):
    """With interactions, random subsets of offered options, and times that are alike in all layers or not."""
    for _ in range(4 if layers < 5 else 2):
        costs = random_space(layers, alike=alike, offered=0.8)
        np.testing.assert_allclose(np.stack(costs.totals(costs.front()), 1), brute_front(costs), rtol=1e-9, atol=1e-10)


def test_front_of_many_layers_is_undominated_and_ends_with_dense():
    costs = random_space(80, alike=True)
    front_seconds, front_nats = costs.totals(costs.front())
    assert (np.diff(front_seconds) > 0).all()
    assert (np.diff(front_nats) < 0).all()
    assert front_nats[-1] <= 0  # dense, or what is as good
    assert front_seconds[-1] <= costs.seconds[:, 0].sum()
    # no random layout is better than the front
    rng = np.random.default_rng(np.random.randint(1 << 30))
    for _ in range(200):
        chosen = rng.integers(0, len(LAYER_OPTIONS), 80) * (rng.random(80) < rng.random())
        chosen[0] %= 3
        seconds, nats = costs.totals(chosen)
        as_fast = front_seconds <= seconds * (1 + 1e-9)
        assert front_nats[as_fast].min() <= nats + 1e-9


def greedy(costs, budget):
    """Seconds of taking the change that saves most for its cost, again and again."""
    chosen = np.zeros(costs.num_layers, int)
    while True:
        here_seconds, here_nats = costs.totals(chosen)
        best = None
        for layer in range(costs.num_layers):
            for option in np.flatnonzero(np.isfinite(costs.nats[layer])):
                other = chosen.copy()
                other[layer] = option
                seconds, nats = costs.totals(other)
                if seconds < here_seconds and nats <= budget:
                    ratio = (here_seconds - seconds) / max(nats - here_nats, 1e-12)
                    best = max(best or (0, None), (float(ratio), tuple(other)))
        if best is None:
            return here_seconds
        chosen = np.array(best[1])


def test_greedy_by_ratio_is_never_better():
    for _ in range(20):
        costs = random_space(4, alike=True, pairs=False)
        budget = np.random.uniform(0.2, 1) * costs.nats[np.isfinite(costs.nats)].max()
        seconds, nats = costs.totals(costs.front())
        assert greedy(costs, budget) >= seconds[nats <= budget + 1e-9].min() * (1 - 1e-9)


def test_greedy_by_ratio_is_worse_somewhere():
    """Why there is a dynamic programme: the cheaper change saves more for its cost, and leaves too little for the
    other, which takes the whole budget and saves more."""
    budget, part = np.random.uniform(0.1, 1), np.random.uniform(0.05, 0.6)
    costs = LayoutSpace(np.full((2, 6), 2.0), np.full((2, 6), np.inf), np.zeros((1, 6, 6)))
    costs.nats[:, 0] = 0
    costs.nats[:, 1], costs.seconds[:, 1] = (part * budget, budget), (2 - 1.5 * part, 1)
    seconds, nats = costs.totals(costs.front())
    assert seconds[nats <= budget].min() == pytest.approx(3)
    assert greedy(costs, budget) == pytest.approx(4 - 1.5 * part)


def test_options_and_layouts_are_the_same():
    for layers in (1, 2, 3):
        seen = set()
        for chosen in all_options(layers):
            layout = random_space(layers, alike=True).layout(chosen)
            assert chosen_options(layout) == list(chosen)
            assert (layout.sync_tp_size == 2) == (DROPPED in layout.attention_sync)
            seen.add(layout)
        assert len(seen) == 3 * 6 ** (layers - 1)


# ---- costs of a sensitivity file ----


def test_costs_of_single_changes_and_pairs():
    layers = 3
    sensitivity = sensitivity_of(layers, sync_tp_size=2, pairs=True)
    costs = estimate_costs(sensitivity, "s.json")
    known = {(cost.layers, *cost.steps): cost.nats for cost in sensitivity.costs}
    for layer, (number, (entering, attention)) in itertools.product(range(layers), enumerate(LAYER_OPTIONS)):
        if number == 0:
            assert costs.nats[layer, 0] == 0
        elif layer == 0 and entering == OVERLAPPED:
            assert costs.nats[0, number] == math.inf
        else:
            assert costs.nats[layer, number] == max(0.0, known[(layer,), (entering, attention)])
    for (places, *steps), nats in known.items():
        if len(places) == 2:
            chosen = np.zeros(layers, int)
            for layer, step in zip(places, steps, strict=True):
                chosen[layer] = LAYER_OPTIONS.index(step)
            options = LayoutSpace(np.zeros((layers, 6)), costs.nats, costs.pairs)
            alone = [costs.nats[layer, chosen[layer]] for layer in places]
            assert options.totals(chosen)[1] == pytest.approx(max(nats, *alone))
    assert not costs.pairs[:, 0].any()
    assert not costs.pairs[:, :, 0].any()
    assert costs.notes == []


def test_what_was_not_measured_is_not_offered():
    sensitivity = sensitivity_of(4, sync_tp_size=None, pairs=False)
    costs = estimate_costs(sensitivity, "s.json")
    for number, (_, attention) in enumerate(LAYER_OPTIONS):
        assert np.isinf(costs.nats[:, number]).all() == (attention == DROPPED)
    assert not costs.pairs.any()
    assert ["pairs" in note for note in costs.notes] == [True, False]
    assert ["dropped" in note for note in costs.notes] == [False, True]
    space = LayoutSpace(np.tile(random_seconds(), (4, 1)), costs.nats, costs.pairs)
    assert not any(space.layout(chosen).spd_layers for chosen in space.front())


def test_files_of_others_are_refused(tmp_path):
    path = tmp_path / "points.json"
    write_json(path, sensitivity_of(3, sync_tp_size=2, pairs=False).to_dict())
    right = {"num_layers": 3, "fingerprint": "this", "sync_tp_size": 2}
    assert read_accuracy_costs(path, **right).sync_tp_size == 2
    assert read_accuracy_costs(path, **right | {"fingerprint": None, "sync_tp_size": None}).sync_tp_size == 2
    for wrong, message in (
        ({"num_layers": 4}, "3 layers, but this one has 4"),
        ({"fingerprint": "other"}, "measured on another model"),
        ({"sync_tp_size": 4}, "was measured with sync_tp_size 2.*--sync-tp-size 4"),
    ):
        with pytest.raises(UserError, match=message):
            read_accuracy_costs(path, **right | wrong)
    write_json(path, sensitivity_of(3, sync_tp_size=None, pairs=False).to_dict())
    with pytest.raises(UserError, match="has no dropped sync points"):
        read_accuracy_costs(path, **right)


# ---- targets and choices ----


def test_targets():
    assert target_of("2%").max_ppl_increase == "2%"
    assert target_of("2%", dense_nll=1.0).max_nats == pytest.approx(math.log(1.02))
    expected = math.log((math.exp(1.5) + 0.1) / math.exp(1.5))
    assert target_of("0.1", dense_nll=1.5).max_nats == pytest.approx(expected)
    assert target_of(None, 1.25).max_nats is None
    for increase, speedup, message in (
        (None, None, "give --max-ppl-increase or --min-speedup"),
        ("2%", 1.2, "give one of them"),
        ("0", None, "not an increase"),
        ("-1%", None, "not an increase"),
        ("two", None, "not an increase"),
        ("nan", None, "not an increase"),
        ("inf", None, "not an increase"),
        (None, 1.0, "above 1"),
        (None, math.nan, "above 1"),
        (None, math.inf, "above 1"),
    ):
        with pytest.raises(UsageError, match=message):
            target_of(increase, speedup)


def test_phases_are_mixed():
    seconds = pass_seconds()
    steps = int(np.random.randint(1, 600))
    for phase, parts in (("prefill", (1, 0)), ("decode", (0, 1)), ("end_to_end", (1, steps))):
        constant, layer = option_seconds(seconds, steps, phase)
        expected = sum(times * seconds[name].constant for name, times in zip(seconds, parts, strict=True))
        assert constant == pytest.approx(expected)
        for number, option in enumerate(LAYER_OPTIONS):
            expected = sum(times * seconds[name].layer[option] for name, times in zip(seconds, parts, strict=True))
            assert layer[number] == pytest.approx(expected)


def test_choice_is_that_of_brute_force():
    for _ in range(10):
        space = random_space(3, alike=True, constant=float(np.random.uniform(0, 1e-3)))
        front = space.front()
        every = np.array(list(all_options(3)))
        speedups, nats = space.speedups(every), space.totals(every)[1]
        front_speedups, front_nats = space.speedups(front), space.totals(front)[1]
        budget = max(float(np.random.choice(nats[speedups > 1])), 0.0) * 1.001 + 1e-6  # pairs can be below 0
        target = target_of(f"{100 * math.expm1(budget):.12f}%")
        point = choose_point(front_speedups, front_nats, target)
        assert front_speedups[point] == pytest.approx(speedups[nats <= target.max_nats].max())
        least = float(np.random.uniform(1.0001, speedups.max()))
        point = choose_point(front_speedups, front_nats, target_of(None, least))
        assert front_nats[point] == pytest.approx(nats[speedups >= least].min(), abs=1e-10)


def test_what_nothing_meets_says_what_would():
    speedups, nats = np.array([1.4, 1.2, 1.0]), np.array([0.3, 0.0123, 0.0])
    with pytest.raises(UserError, match=r"least increase is 1.24% \(1.200x\)"):
        choose_point(speedups, nats, target_of("1%"))
    assert choose_point(speedups, nats, target_of("1.24%")) == 1
    with pytest.raises(UserError, match=r"fastest is 1.400x, with an increase of the perplexity of 35%"):
        choose_point(speedups, nats, target_of(None, 1.5))
    with pytest.raises(UserError, match="no layout is faster than the dense one"):
        choose_point(np.array([1.0, 0.9]), np.zeros(2), target_of(None, 1.5))


def test_a_plan_goes_to_json_and_back():
    points = estimate_costs(sensitivity_of(4, sync_tp_size=2, pairs=True), "s.json")
    choice = plan_layout(pass_seconds(), 15, "end_to_end", target_of("40%"), PlanCosts(points, None, 2))
    assert PlanChoice.from_dict(choice.to_dict(), "plan.json") == choice
    assert choice.statement == "not verified"
    assert choice.chosen.estimated_nats <= choice.target.max_nats
    speeds = [point.speedup for point in choice.front]
    assert speeds == sorted(speeds, reverse=True)
    assert choice.front[-1].nats == 0  # the dense layout, or one that noise makes as good
    assert choice.chosen.speedup in speeds
    assert choice.chosen.ms * choice.chosen.speedup == pytest.approx(choice.dense_ms)
