import math

import numpy as np
import pytest
from scipy import stats

from assay.bench import Claim, Outcome, Replicate, Verdict, above, at_least, at_most, below, between, steps_to
from assay.bench.claims import closed_gates, confidence_interval, judge


def replicates(*values):
    return [Replicate(str(i), i, None, {"arm": Outcome({"x": v})} if v is not None else {}) for i, v in enumerate(values)]


def x(r):
    return r["arm"].x


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((1.0, 2.0, 3.0), Verdict.HOLDS),
        ((4.0, 5.0), Verdict.FAILS),
        ((1.0, 5.0), Verdict.MIXED),
        ((1.0, None), Verdict.INCONCLUSIVE),
        ((math.nan, 1.0), Verdict.INCONCLUSIVE),
        ((math.inf, math.inf), Verdict.FAILS),
        ((1.0, math.inf), Verdict.MIXED),
    ],
)
def test_verdicts(values, verdict):
    finding = judge(Claim("x is small", x, holds=at_most(3)), replicates(*values))
    assert finding.verdict is verdict
    assert bool(finding.reason) == (verdict is Verdict.INCONCLUSIVE)


def test_a_claim_without_a_bound_is_reported_and_needs_a_value():
    assert judge(Claim("x", x), replicates(1.0, None)).verdict is Verdict.REPORTED
    assert judge(Claim("x", x), replicates(None)).verdict is Verdict.INCONCLUSIVE


def test_a_closed_gate_turns_every_verdict_and_names_itself():
    gate = judge(Claim("it trained", x, holds=at_least(0.5)), replicates(0.4, 0.9))
    reason = closed_gates([gate])
    assert "it trained (needs ≥ 0.5, was 0.4, 0.9)" in reason
    for bound in (at_most(10), at_most(0)):
        finding = judge(Claim("c", x, holds=bound), replicates(0.4, 0.9), closed_gate=reason)
        assert (finding.verdict, finding.reason) == (Verdict.INCONCLUSIVE, reason)


def test_a_claims_own_gate_closes_that_claim_only():
    gate = Claim("it trained", x, holds=at_least(0.5))
    claim = Claim("c", x, holds=at_most(10), gates=(gate,))
    assert judge(claim, replicates(0.6, 0.9)).verdict is Verdict.HOLDS
    finding = judge(claim, replicates(0.4, 0.9))
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "it trained (needs ≥ 0.5, was 0.4, 0.9)" in finding.reason
    assert judge(Claim("other", x, holds=at_most(10)), replicates(0.4, 0.9)).verdict is Verdict.HOLDS
    with pytest.raises(ValueError, match="a gate needs a bound"):
        Claim("c", x, gates=(Claim("unbounded", x),))


def test_an_unmeasured_gate_is_closed():
    gate = judge(Claim("it trained", x, holds=at_least(0.5)), replicates(0.9, None))
    assert "not measured" in closed_gates([gate])


def test_a_gate_that_applies_nowhere_is_open():
    assert closed_gates([judge(Claim("only on images", lambda r: None, holds=at_least(1)), replicates(1.0))]) == ""


def test_none_leaves_a_replicate_out():
    claim = Claim("odd ones", lambda r: r["arm"].x if r.seed % 2 else None, holds=at_most(3))
    finding = judge(claim, replicates(9.0, 1.0, 9.0, 2.0))
    assert finding.verdict is Verdict.HOLDS
    assert finding.values == {"1": 1.0, "3": 2.0}
    assert judge(Claim("never", lambda r: None, holds=at_most(3)), replicates(1.0)).verdict is Verdict.INCONCLUSIVE


def test_an_error_in_a_statistic_is_that_claims_alone():
    finding = judge(Claim("broken", lambda r: 1 / 0, holds=at_most(3)), replicates(1.0))
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "ZeroDivisionError" in finding.reason


def test_a_wrong_metric_name_is_answered_with_the_right_ones():
    with pytest.raises(AttributeError, match="no metric is called 'loss'; metrics: x"):
        _ = replicates(1.0)[0]["arm"].loss


@pytest.mark.parametrize(
    ("bound", "inside", "outside", "text"),
    [
        (at_most(1), (1, 0, -math.inf), (1.001, math.inf, math.nan), "≤ 1"),
        (at_least(1), (1, 2), (0.999,), "≥ 1"),
        (below(1), (0.999,), (1,), "< 1"),
        (above(1), (1.001,), (1,), "> 1"),
        (between(0, 1), (0, 1, 0.5), (-0.1, 1.1), "0 to 1"),
    ],
)
def test_bounds(bound, inside, outside, text):
    assert all(v in bound for v in inside)
    assert not any(v in bound for v in outside)
    assert str(bound) == text


def test_between_refuses_bounds_upside_down():
    with pytest.raises(ValueError, match="low must not exceed high"):
        between(1, 0)


def test_interval_is_students():
    values = [1.0, 2.0, 4.0, 4.5]
    expected = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert confidence_interval(values) == pytest.approx(expected)
    assert confidence_interval([1.0]) is None
    assert confidence_interval([1.0, math.inf]) is None


def test_steps_to_interpolates_and_takes_the_first_crossing():
    outcome = Outcome({}, {"val_loss": ([0, 10, 20, 30], [3.0, 2.0, 2.5, 1.0])})
    assert steps_to(outcome, 2.5) == 5.0
    assert steps_to(outcome, 2.0) == 10.0
    assert steps_to(outcome, 1.75) == 25.0
    assert steps_to(outcome, 3.5) == 0.0
    assert steps_to(outcome, 0.5) == math.inf
