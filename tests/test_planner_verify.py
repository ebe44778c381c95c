"""``plan --verify``: what is chosen was measured, on held-out windows too, with no more measurements than allowed."""

import dataclasses
import math

import numpy as np
import pytest

from ladderize.errors import UserError
from ladderize.planning.plans.chosen_files import cost_words
from ladderize.planning.plans.costs import PlanCosts, estimate_costs
from ladderize.planning.plans.layout_choice import plan_layout
from ladderize.planning.plans.layout_space import choose_point
from ladderize.planning.plans.options import ChoiceTarget
from ladderize.planning.plans.search import verified_choice
from tests.planner_toys import FakeMeasurer, all_options, pass_seconds, random_space, sensitivity_of, target_of


def toy(layers):
    """All layouts of a random model, their front, and a budget that some faster layout is within."""
    space = random_space(layers, alike=True, pairs=False, constant=float(np.random.uniform(0, 4e-4)))
    front = space.front()
    budget = float(np.quantile(space.totals(front)[1][:-1], np.random.uniform(0.1, 0.7))) * 1.001
    return space, front, ChoiceTarget(max_ppl_increase="a budget", max_nats=budget)


def true_saving(space, target, measurer):
    """Seconds that the fastest layout within the budget saves, of all there are."""
    every = np.array(list(all_options(space.num_layers)))
    within = [measurer.truth(chosen) <= target.max_nats for chosen in every]
    return space.totals(space.dense)[0] - space.totals(every[within])[0].min()


def estimated_choice(space, front, target):
    return front[choose_point(space.speedups(front), space.totals(front)[1], target)]


def test_what_is_chosen_was_measured_and_is_within_the_budget():
    """Additive choices are often over it; these never are."""
    over, saved, refused = 0, [], 0
    for _ in range(25):
        space, front, target = toy(4)
        measurer = FakeMeasurer(space)
        limit = int(np.random.randint(2, 20))
        over += measurer.truth(estimated_choice(space, front, target)) > target.max_nats
        try:
            chosen, check = verified_choice(space, front, target, measurer, limit)
        except UserError:
            refused += 1
            continue
        assert len(measurer.asked) == check.made <= limit
        assert len(set(measurer.asked)) == len(measurer.asked)  # nothing is measured twice
        assert chosen.measured.increase <= target.max_nats
        assert check.verified == (chosen.held_out is not None)
        assert chosen in check.layouts
        assert {one.as_layout for one in check.layouts} == {layout for layout, held_out in measurer.asked}
        faster = [one for one in check.layouts if one.speedup > chosen.speedup]
        assert all(one.measured.increase > target.max_nats for one in faster)
        if limit >= 12:
            found = space.totals(space.dense)[0] - chosen.ms / 1000
            best = true_saving(space, target, measurer)
            assert found <= best * (1 + 1e-9)
            saved.append(found / best)
    assert over
    assert refused <= 12  # of 25, most of few measurements
    assert np.mean(saved) > 0.85


def test_exact_estimates_are_confirmed():
    space, front, target = toy(5)
    measurer = FakeMeasurer(space, convexity=0.0, pairs=0.0)
    chosen, check = verified_choice(space, front, target, measurer, 8)
    assert chosen.ms == pytest.approx(1000 * space.totals(estimated_choice(space, front, target))[0])
    assert check.verified
    assert check.notes == []
    assert chosen.held_out.increase == pytest.approx(chosen.estimated_nats)


def test_what_is_over_budget_on_held_out_windows_is_given_up():
    """All cost more there, so a less costly layout is measured, on both windows."""
    replaced = 0
    for _ in range(6):
        space, front, target = toy(6)
        measurer = FakeMeasurer(space, held_out=float(np.random.uniform(1.1, 1.6)))
        try:
            chosen, check = verified_choice(space, front, target, measurer, 16)
        except UserError:
            continue
        assert len(measurer.asked) == check.made <= 16
        assert chosen.measured.increase <= target.max_nats
        failed = [one for one in check.layouts if one.held_out and one.held_out.increase > target.max_nats]
        assert len(check.notes) == len(failed) + (not check.verified)
        assert chosen not in failed
        if check.verified:
            assert chosen.held_out.increase <= target.max_nats
            replaced += bool(failed)
        for one, note in zip(failed, check.notes, strict=False):
            assert one.layout in "".join(check.notes)
            assert "on held-out windows" in note
    assert replaced


def test_estimates_tell_where_the_windows_to_choose_on_do_not():
    """There all layouts cost nothing; on held-out windows so much more than estimated that the fastest fails."""
    for _ in range(4):
        space, front, _ = toy(6)
        nats = space.totals(front)[1]
        within = np.flatnonzero((nats > 0) & (space.speedups(front) > 1 + 1e-6))
        wanted = within[len(within) // 2 :]
        factor = float(np.random.uniform(1.2, 3))
        target = ChoiceTarget(max_ppl_increase="a budget", max_nats=factor * float(nats[wanted[0]]) * 1.001)
        measurer = FakeMeasurer(space, convexity=0.0, pairs=0.0, held_out=factor, blind=True)
        measurer.truth = lambda chosen, space=space: float(space.totals(np.asarray(chosen))[1])
        chosen, check = verified_choice(space, front, target, measurer, 20)
        assert check.verified, check
        assert 0 < chosen.held_out.increase <= target.max_nats
        assert len([one for one in check.layouts if one.held_out]) == 2  # the first failed, and told how much less


def test_how_sure_held_out_windows_are_is_said():
    space, front, target = toy(5)
    for stderr, doubts in ((0.0, 0), (100.0, 1)):
        measurer = FakeMeasurer(space, convexity=0.0, pairs=0.0, stderr=stderr)
        chosen, check = verified_choice(space, front, target, measurer, 8)
        assert (check.verified, check.borderline) == (True, bool(doubts))
        said = [note for note in check.notes if f"with a standard error of {stderr:.4f}" in note]
        assert len(check.notes) == len(said) == doubts
        percent = 100 * math.expm1(chosen.held_out.increase)
        error = math.exp(chosen.held_out.increase) * 100 * stderr
        assert cost_words(chosen).endswith(f"{percent:+.2f}% (standard error {error:.2f}) on 32 held-out windows")


def test_none_that_holds_is_refused_and_none_that_could_be_confirmed_is_said():
    """Held-out windows say no to all. Where costs are less than sums, several are within the budget before."""
    refused = unverified = 0
    for _ in range(100):
        if refused and unverified:
            break
        space, front, target = toy(4)
        limit = int(np.random.randint(2, 17))
        convexity = float(np.random.choice([0.5, -0.5 / np.max(space.totals(front)[1])]))
        measurer = FakeMeasurer(space, convexity=convexity, pairs=0.0, held_out=100.0)
        try:
            chosen, check = verified_choice(space, front, target, measurer, limit)
        except UserError as error:
            assert "stays within --max-ppl-increase a budget" in str(error)  # noqa: PT017
            least = float(str(error).partition("the least increase is ")[2].partition(" nats")[0])
            assert least >= target.max_nats - 1e-4
            refused += 1
            continue
        if check.verified:  # one that costs less than nothing, a hundred times
            assert chosen.held_out.increase <= target.max_nats
            continue
        assert chosen.held_out is None
        assert chosen.measured.increase <= target.max_nats
        assert "was not measured on held-out windows" in check.notes[-1]
        assert ("of --verify did not suffice" in check.notes[-1]) == (check.made + 2 > limit)
        assert "where it costs as much more there, it is over budget too" in check.notes[-1]
        unverified += 1
    assert refused
    assert unverified


def test_the_most_accurate_that_is_fast_enough():
    better = 0
    for _ in range(30):
        space, front, _ = toy(4)
        target = target_of(None, float(1 + np.random.uniform(0.2, 0.9) * (space.speedups(front)[0] - 1)))
        measurer = FakeMeasurer(space, pairs=3.0)
        chosen, check = verified_choice(space, front, target, measurer, 10)
        assert check.verified
        assert len(measurer.asked) == check.made <= 10
        assert chosen.speedup >= target.min_speedup * (1 - 1e-6)
        assert chosen.measured.increase == min(one.measured.increase for one in check.layouts)
        additive = measurer.truth(estimated_choice(space, front, target))
        assert chosen.measured.increase <= additive + 1e-9
        better += chosen.measured.increase < additive - 1e-6
    assert better


def test_of_many_layers():
    space, front, target = toy(24)
    measurer = FakeMeasurer(space)
    chosen, check = verified_choice(space, front, target, measurer, 12)
    assert len(measurer.asked) == check.made <= 12
    assert chosen.measured.increase <= target.max_nats
    assert chosen.speedup > 1


def untold(truth):
    """Layouts of these costs whose estimates say nothing: all are 0, as of random weights on few windows."""
    constant = float(np.random.uniform(0, 4e-4))
    return dataclasses.replace(truth, nats=np.where(np.isfinite(truth.nats), 0.0, np.inf), constant=constant)


def test_estimates_that_say_nothing():
    """About as much is saved as by as many of the fastest layout's last layers as the budget allows, and the
    measurements are used."""
    shares = []
    for _ in range(8):
        layers = int(np.random.randint(8, 25))
        truth = random_space(layers, alike=True, pairs=False)
        measurer, space = FakeMeasurer(truth), untold(truth)
        front = space.front()
        suffixes = [np.where(np.arange(layers) < first, 0, front[0]) for first in range(layers)]
        budget = np.random.uniform(1.01, 9) * measurer.truth(suffixes[-1])
        longest = next(one for one in suffixes if measurer.truth(one) <= budget)
        target = ChoiceTarget(max_ppl_increase="a budget", max_nats=budget)
        chosen, check = verified_choice(space, front, target, measurer, 16)
        assert chosen.measured.increase <= budget
        assert check.verified
        dense, best = float(space.totals(space.dense)[0]), float(space.totals(longest)[0])
        shares.append(min((dense - chosen.ms / 1000) / (dense - best), 1.0))
    assert np.mean(shares) >= 0.9


def test_half_is_given_back_where_nothing_tells_what_held_out_windows_cost():
    for _ in range(2):
        truth = random_space(int(np.random.randint(8, 25)), alike=True, pairs=False)
        truth.nats[1:] = truth.nats[1]
        measurer, space = FakeMeasurer(truth, convexity=0.0, pairs=0.0, held_out=2.0), untold(truth)
        front = space.front()
        budget = np.random.uniform(2.01, 9) * truth.nats[-1, front[0, -1]]
        target = ChoiceTarget(max_ppl_increase="a budget", max_nats=budget)
        chosen, check = verified_choice(space, front, target, measurer, 16)
        assert check.verified
        assert 2 * chosen.measured.increase == pytest.approx(chosen.held_out.increase)
        assert 0 < chosen.held_out.increase <= budget


def test_a_verified_plan():
    points = estimate_costs(sensitivity_of(4, sync_tp_size=2, pairs=False), "s.json")
    costs = random_space(4, alike=True)
    costs.nats[:] = points.nats
    measurer = FakeMeasurer(costs)
    what = (pass_seconds(), 15, "decode", target_of("60%"), PlanCosts(points, None, 2))
    choice = plan_layout(*what, measurer=measurer, limit=12)
    assert choice.statement == "verified on held-out windows"
    checked = dataclasses.replace(choice.verification, borderline=True)
    doubted = dataclasses.replace(choice, verification=checked)
    assert doubted.statement == "borderline on held-out windows"
    assert choice.chosen.nats == choice.chosen.held_out.increase <= math.log(1.6)
    assert choice.verification.made == len(measurer.asked)
