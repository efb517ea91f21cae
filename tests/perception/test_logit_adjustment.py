import copy
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from assay.perception import (
    AdditiveLogitAdjustment,
    AdjustedClassifier,
    ETFLinear,
    LogitAdjustedLoss,
    MultiplicativeLogitAdjustment,
    OneVsOneAdjuster,
    VectorScalingLoss,
    boundary_angles,
)

COUNTS = [900, 300, 100, 30, 10, 5]
NORMS = [1.5, 1.2, 1.1, 1.0, 0.9, 0.7]


@pytest.fixture
def logits():
    i, k = torch.arange(4)[:, None], torch.arange(6)[None, :]
    return 2 * torch.sin(1.3 * i + 2.1 * k) + 1.5 * torch.cos(0.7 * i * k + 0.2)


def exponential_counts(classes, imbalance=100.0):
    return imbalance ** (1 - torch.arange(classes, dtype=torch.float64) / (classes - 1))


def off_diagonal_mean(matrix):
    return matrix[~torch.eye(len(matrix), dtype=torch.bool)].mean().item()


# ---- the released adjusters (HN410/MLA-Approximates-NCDBA, utils/model_units.py) on the same input ----------------------


def test_multiplicative_agrees_with_the_released_adjuster(logits):
    released = [1.470100, 6.528390, -1.138943, 13.718223, 59.236423, -8.457906]  # × π_0^0.65: theirs is relative to N
    adjusted = MultiplicativeLogitAdjustment(COUNTS, gamma=0.65)(logits)
    torch.testing.assert_close(adjusted[0], torch.tensor(released), rtol=2e-6, atol=2e-6)


def test_additive_agrees_with_the_released_adjuster(logits):
    released = [1.871854, 4.696886, 2.325928, 5.306679, 8.080862, 5.305420]
    torch.testing.assert_close(AdditiveLogitAdjustment(COUNTS)(logits)[0], torch.tensor(released), rtol=2e-6, atol=2e-6)


@pytest.mark.filterwarnings("ignore:the distribution is too skewed")
@pytest.mark.parametrize(
    ("tau", "norms", "wins"),
    [
        (0.3, None, [[2, 3, 1, 4, 5, 0], [5, 3, 2, 4, 1, 0], [4, 1, 2, 3, 0, 5], [2, 1, 4, 3, 0, 5]]),
        (0.7, None, [[2, 2, 1, 4, 5, 1], [4, 3, 2, 5, 1, 0], [3, 1, 2, 4, 0, 5], [2, 1, 4, 3, 0, 5]]),
        (0.3, NORMS, [[2, 3, 1, 4, 5, 0], [4, 3, 2, 5, 1, 0], [3, 1, 2, 4, 0, 5], [2, 1, 4, 3, 0, 5]]),
    ],
)
def test_one_vs_one_agrees_with_the_released_adjuster(logits, tau, norms, wins):
    shares = OneVsOneAdjuster(COUNTS, tau, norms, break_ties=False)(logits)
    torch.testing.assert_close(shares, torch.tensor(wins) / 6)


def test_optimal_and_additive_angles_agree_with_the_released_code():
    optimal = [0.886077, 0.559911, 0.348102, 0.192294, 0.105414, 0.059569]
    additive = [0.886077, 0.743767, 0.598468, 0.431489, 0.266215, 0.151319]
    assert boundary_angles(COUNTS, feature_norms=NORMS)[0].tolist() == pytest.approx(optimal, abs=2e-6)
    assert boundary_angles(COUNTS, "ala", feature_norms=5.0)[0].tolist() == pytest.approx(additive, abs=2e-6)


# ---- boundary angles ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["optimal", "mla", "ala"])
def test_the_two_sides_of_a_boundary_share_the_simplex_angle(kind):
    theta = boundary_angles(COUNTS, kind, feature_norms=4.0)
    rho = math.acos(-1 / 5)
    torch.testing.assert_close(theta + theta.T, torch.full_like(theta, rho))
    torch.testing.assert_close(boundary_angles([7] * 6, kind, feature_norms=4.0), torch.full_like(theta, rho / 2))


@pytest.mark.parametrize(("kind", "strength"), [("mla", 0.45), ("ala", 1.0), ("optimal", 0.45)])
def test_a_feature_on_the_boundary_ties(kind, strength):
    """Walk in the plane of two simplex directions: at the stated angle the rule is undecided, on both sides it is not."""
    counts, norm = [60, 40, 25, 15], 3.0
    rule = {
        "mla": MultiplicativeLogitAdjustment(counts, strength),
        "ala": AdditiveLogitAdjustment(counts, strength),
        "optimal": OneVsOneAdjuster(counts, strength, break_ties=False),
    }[kind]
    W = ETFLinear(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).weight
    theta = boundary_angles(counts, kind, strength=strength, feature_norms=norm)
    for k, other in [(0, 1), (2, 3), (0, 3), (3, 1)]:
        across = W[other] - (W[other] @ W[k]) * W[k]
        across = across / across.norm()
        for offset, winner in [(-1e-3, k), (1e-3, other)]:
            angle = theta[k, other] + offset
            z = norm * (angle.cos() * W[k] + angle.sin() * across)
            scores = rule((W @ z)[None])[0]
            if kind == "optimal":
                mine, theirs = (W @ z)[k] * rule.kappa[k, other], (W @ z)[other] * rule.kappa[other, k]
                assert (mine > theirs) == (winner == k)
            else:
                assert (scores[k] > scores[other]) == (winner == k)


def test_optimal_share_is_inverse_to_the_root_of_the_counts():
    theta = boundary_angles(COUNTS)
    assert (theta[3, 1] / theta[1, 3]).item() == pytest.approx(math.sqrt(300 / 30))


def test_sign_safe_kappa_is_the_papers():
    with pytest.warns(UserWarning, match="too skewed for 6 classes"):
        rule = OneVsOneAdjuster(COUNTS, 0.7, NORMS)
    theta = boundary_angles(COUNTS, strength=0.7, feature_norms=NORMS)
    assert theta.max() > math.pi / 2  # where 1/cos θ changes its sign
    torch.testing.assert_close(rule.kappa.double(), theta.sin() - theta.T.sin() / 5, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("classes", "expected", "low", "high"), [(10, 0.028, 0.47, 0.52), (100, 0.021, 0.38, 0.45), (1000, 0.024, 0.38, 0.43)]
)
def test_multiplicative_approximates_the_optimum_near_the_predicted_exponent(classes, expected, low, high):
    """Log-log slope π/4 at equal counts and 1 far out: the matching γ lies in [π/4 τ, τ] and falls with K."""
    n = exponential_counts(classes)
    best = boundary_angles(n)

    def error(gamma):
        return off_diagonal_mean((boundary_angles(n, "mla", strength=gamma) - best).abs())

    assert error(0.45) == pytest.approx(expected, abs=6e-4)
    grid = [g / 100 for g in range(20, 81)]
    assert low <= min(grid, key=error) <= high
    additive = [
        off_diagonal_mean((boundary_angles(n, "ala", strength=tau, feature_norms=m) - best).abs())
        for tau in (0.5, 1.0, 2.0)
        for m in (3.0, 5.0, 10.0)
    ]
    assert error(0.45) < min(additive)


def test_limits_of_the_exponent_for_many_classes():
    r = torch.tensor([1.0 + 1e-4, 1e4], dtype=torch.float64)
    tangent = torch.tan(0.5 * math.pi * r / (1 + r))  # optimal boundary, ρ = π/2
    slope = tangent.log() / r.log()
    assert slope[0].item() == pytest.approx(math.pi / 4, abs=1e-4)
    assert slope[1].item() == pytest.approx(1.0, abs=0.06)


def test_multiplicative_boundary_ignores_feature_length_and_two_classes_do_not_move():
    short, long = (boundary_angles(COUNTS, "mla", feature_norms=m) for m in (1.0, 50.0))
    assert torch.equal(short, long)
    torch.testing.assert_close(boundary_angles([100, 1], "mla"), torch.full((2, 2), math.pi / 2, dtype=torch.float64))


def test_additive_boundary_of_short_features_is_clamped():
    theta = boundary_angles(COUNTS, "ala", feature_norms=0.1)
    assert torch.isfinite(theta).all()
    assert theta[0, 5].item() == pytest.approx(math.acos(-1 / 5) / 2 - math.pi / 2)


# ---- adjusters ---------------------------------------------------------------------------------------------------------


def random_logits(rows=200, classes=6, seed=0, **kwargs):
    return 3 * torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed), **kwargs)


def test_zero_strength_and_equal_counts_change_nothing():
    s = random_logits()
    assert torch.equal(MultiplicativeLogitAdjustment(COUNTS, 0.0)(s), s)
    assert torch.equal(MultiplicativeLogitAdjustment([3] * 6, 1.3)(s), s)
    assert torch.equal(AdditiveLogitAdjustment(COUNTS, 0.0)(s), s)
    assert torch.equal(AdditiveLogitAdjustment([3] * 6)(s).argmax(-1), s.argmax(-1))
    assert torch.equal(OneVsOneAdjuster(COUNTS, 0.0)(s).argmax(-1), s.argmax(-1))
    assert torch.equal(OneVsOneAdjuster([3] * 6, 0.7, break_ties=False)(s).argmax(-1), s.argmax(-1))


def test_scale_of_counts_and_logits():
    s = random_logits()
    ten_times = [10 * n for n in COUNTS]
    for rule in (MultiplicativeLogitAdjustment, AdditiveLogitAdjustment):
        torch.testing.assert_close(rule(COUNTS)(s), rule(ten_times)(s))
    rule = MultiplicativeLogitAdjustment(COUNTS)
    torch.testing.assert_close(rule(7 * s), 7 * rule(s))  # homogeneous; additive is not
    assert not torch.equal(AdditiveLogitAdjustment(COUNTS)(7 * s).argmax(-1), AdditiveLogitAdjustment(COUNTS)(s).argmax(-1))


def test_additive_ignores_a_constant_and_multiplicative_does_unless_centred():
    s = random_logits(dtype=torch.float64)
    c = 5 + s[:, :1]
    for rule in (AdditiveLogitAdjustment(COUNTS), MultiplicativeLogitAdjustment(COUNTS, center="shift")):
        assert torch.equal(rule(s + c).argmax(-1), rule(s).argmax(-1))
    plain = MultiplicativeLogitAdjustment(COUNTS)
    assert not torch.equal(plain(s + c).argmax(-1), plain(s).argmax(-1))


def test_multiplying_probabilities_is_additive_adjustment():
    s = random_logits(dtype=torch.float64)
    n = torch.tensor(COUNTS, dtype=torch.float64)
    probabilities = s.softmax(-1) * (n.sum() / n) ** 0.8
    adjusted = AdditiveLogitAdjustment(COUNTS, 0.8)(s).softmax(-1)
    torch.testing.assert_close(adjusted, probabilities / probabilities.sum(-1, keepdim=True), rtol=1e-6, atol=1e-9)


@pytest.mark.filterwarnings("ignore:the distribution is too skewed")
@pytest.mark.parametrize("block", [1, 50, 2**18])
@pytest.mark.parametrize("norms", [None, NORMS])
def test_one_vs_one_equals_the_brute_force(monkeypatch, block, norms):
    from assay.perception.logit_adjustment import one_vs_one

    monkeypatch.setattr(one_vs_one, "_BLOCK", block)
    s = random_logits(rows=23, dtype=torch.float64)
    rule = OneVsOneAdjuster(COUNTS, 0.6, norms, break_ties=False)
    kappa = rule.kappa.double()
    expected = (s[:, :, None] * kappa > s[:, None, :] * kappa.T).sum(-1).double() / 6
    torch.testing.assert_close(rule(s), expected)
    # Breaking ties keeps the order of the wins and adds less than half a win.
    broken = OneVsOneAdjuster(COUNTS, 0.6, norms)(s)
    assert ((broken - expected) * 6).min() >= 0
    assert ((broken - expected) * 6).max() < 0.5


@pytest.mark.filterwarnings("ignore:the distribution is too skewed")
def test_ties_go_to_the_multiplicative_winner():
    s = random_logits(rows=20_000)
    wins = OneVsOneAdjuster(COUNTS, 0.9, break_ties=False)(s)
    tied = (wins == wins.amax(-1, keepdim=True)).sum(-1) > 1
    assert tied.sum() > 20
    favour = MultiplicativeLogitAdjustment(COUNTS, 0.9)(s).masked_fill(wins < wins.amax(-1, keepdim=True), -math.inf)
    assert torch.equal(OneVsOneAdjuster(COUNTS, 0.9)(s).argmax(-1)[tied], favour.argmax(-1)[tied])


def test_multiplicative_approximates_one_vs_one_on_collapsed_features():
    """The paper's claim in its own model: simplex directions, a spread around them, fifty classes."""
    generator = torch.Generator().manual_seed(1)
    counts = exponential_counts(50)
    W = ETFLinear(64, 50, generator=generator).weight
    labels = torch.arange(50).repeat(200)
    z = W[labels] + 0.15 * torch.randn(len(labels), 64, generator=generator)
    s = z @ W.T
    reference = OneVsOneAdjuster(counts, 0.5)(s).argmax(-1)
    plain = (s.argmax(-1) == reference).double().mean()
    multiplicative = (MultiplicativeLogitAdjustment(counts, 0.45)(s).argmax(-1) == reference).double().mean()
    additive = (AdditiveLogitAdjustment(counts, 1.0)(s).argmax(-1) == reference).double().mean()
    assert multiplicative > 0.93
    assert multiplicative > max(plain, additive) + 0.05


@pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 3, 6), (0, 6)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_shapes_and_dtypes(shape, dtype):
    s = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for rule in (MultiplicativeLogitAdjustment(COUNTS), AdditiveLogitAdjustment(COUNTS)):
        assert rule(s).shape == shape
        assert rule(s).dtype == dtype
    assert OneVsOneAdjuster(COUNTS, 0.2)(s).shape == shape


@pytest.mark.parametrize("cls", [MultiplicativeLogitAdjustment, AdditiveLogitAdjustment, OneVsOneAdjuster])
def test_state_copies_and_moves(cls):
    s = random_logits()
    rule = cls(COUNTS, 0.3)
    for twin in (copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))):
        assert torch.equal(twin(s), rule(s))
    other = cls([1, 2, 3, 4, 5, 6], 0.1)
    other.load_state_dict(rule.state_dict())
    assert torch.equal(other(s), rule(s))
    assert rule.double()(s.double()).dtype == torch.float64
    assert "0.3" in repr(rule)
    assert not list(rule.parameters())


def test_gradients_flow_through_the_differentiable_rules():
    s = random_logits(rows=3, dtype=torch.float64).requires_grad_()
    for rule in (MultiplicativeLogitAdjustment(COUNTS, center="shift").double(), AdditiveLogitAdjustment(COUNTS).double()):
        assert torch.autograd.gradcheck(rule, s)


def test_compiles_to_one_graph():
    s = random_logits()
    rule = MultiplicativeLogitAdjustment(COUNTS)
    compiled = torch.compile(rule, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(s), rule(s))


# ---- tuning ------------------------------------------------------------------------------------------------------------


def test_tuned_takes_the_best_of_the_grid():
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(6).repeat(100)
    s = F.one_hot(targets, 6) * 2.0 + torch.randn(600, 6, generator=generator) + torch.tensor(COUNTS).log() / 2
    grid = (0.0, 0.25, 0.5, 1.0)

    def balanced(predicted):
        return np.mean([(predicted[targets == k] == k).double().mean().item() for k in range(6)])

    for cls, name in ((AdditiveLogitAdjustment, "tau"), (MultiplicativeLogitAdjustment, "gamma"), (OneVsOneAdjuster, "tau")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chosen = getattr(cls.tuned(COUNTS, s, targets, grid=grid), name).item()
            scores = {value: balanced(cls(COUNTS, value)(s).argmax(-1)) for value in grid}
        assert scores[chosen] == max(scores.values())
        assert chosen == min(value for value in grid if scores[value] == max(scores.values()))
    shift = AdditiveLogitAdjustment.tuned(COUNTS, s, targets, grid=grid)
    assert shift.tau.item() == 0.5  # what was added to the logits


@pytest.mark.filterwarnings("ignore:the best strength is the largest")
def test_tuned_maximises_a_metric_of_ones_own():
    s = random_logits().abs()
    targets = torch.arange(200) % 6

    def rare(predicted, _):
        return (predicted == 5).double().mean().item()

    tuned = MultiplicativeLogitAdjustment.tuned(COUNTS, s, targets, grid=(0.0, 0.5, 2.0), metric=rare)
    assert tuned.gamma.item() == 2.0


def test_negative_winners_and_two_classes_are_warned_about():
    s = random_logits().abs()
    targets = torch.arange(200) % 6
    with pytest.warns(UserWarning, match="negative on 100% of the rows"):
        MultiplicativeLogitAdjustment.tuned(COUNTS, -1 - s, targets)
    with pytest.warns(UserWarning, match="two classes"):
        MultiplicativeLogitAdjustment.tuned([9, 1], s[:, :2], targets % 2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        MultiplicativeLogitAdjustment.tuned(COUNTS, s, targets)
    assert [str(warning.message) for warning in said] == []


def test_two_classes_with_opposite_logits_never_change():
    s = random_logits(classes=1)
    s = torch.cat([s, -s], 1)
    assert torch.equal(MultiplicativeLogitAdjustment([1000, 1], 3.0)(s).argmax(-1), s.argmax(-1))


# ---- wrapper, losses, head ---------------------------------------------------------------------------------------------


def test_wrapper_adjusts_in_evaluation_only_and_can_drop_the_bias():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
    rule = MultiplicativeLogitAdjustment(COUNTS)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    wrapped = AdjustedClassifier(model, rule)
    assert torch.equal(wrapped.train()(x), model(x))
    assert torch.equal(wrapped.eval()(x), rule(model(x)))
    without = copy.deepcopy(AdjustedClassifier(model, rule, drop_bias="2").eval())
    torch.testing.assert_close(without(x), rule(F.linear(model[:2](x), model[2].weight)))
    for name in ("1", "head"):
        with pytest.raises(ValueError, match="drop_bias must name"):
            AdjustedClassifier(model, rule, drop_bias=name)


def test_losses_against_their_formula():
    s, y = random_logits(rows=50, dtype=torch.float64), torch.arange(50) % 6
    n = torch.tensor(COUNTS, dtype=torch.float64)
    torch.testing.assert_close(
        LogitAdjustedLoss(COUNTS, 0.7).double()(s, y), F.cross_entropy(s + 0.7 * (n / n.sum()).log(), y), rtol=1e-6, atol=0
    )
    expected = F.cross_entropy(s * (n / 900) ** 0.3 + 1.2 * (n / n.sum()).log(), y, reduction="none")
    torch.testing.assert_close(
        VectorScalingLoss(COUNTS, 0.3, 1.2, reduction="none").double()(s, y), expected, rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(VectorScalingLoss(COUNTS, 0, 0)(s, y), F.cross_entropy(s, y))
    assert torch.autograd.gradcheck(lambda z: VectorScalingLoss(COUNTS, 0.3).double()(z, y), s.requires_grad_())


def test_loss_and_post_hoc_form_undo_each_other():
    """Training on s + τ log π and testing on s is testing (s + τ log π) − τ log π: adjusting again counts twice."""
    s, y = random_logits(dtype=torch.float64), torch.arange(200) % 6
    log_prior = (torch.tensor(COUNTS) / sum(COUNTS)).log()
    loss = LogitAdjustedLoss(COUNTS)(s, y)
    torch.testing.assert_close(loss, F.cross_entropy(s + log_prior, y), rtol=1e-6, atol=0)
    torch.testing.assert_close(AdditiveLogitAdjustment(COUNTS)(s + log_prior), s, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("features", "classes"), [(64, 10), (10, 10), (9, 10), (1, 2), (300, 100)])
def test_etf_head_is_a_simplex(features, classes):
    head = ETFLinear(features, classes, scale=2.5, dtype=torch.float64)
    gram = head.weight @ head.weight.T / 2.5**2
    expected = classes / (classes - 1) * (torch.eye(classes, dtype=torch.float64) - 1 / classes)
    torch.testing.assert_close(gram, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(head.weight.sum(0), torch.zeros(features, dtype=torch.float64), rtol=0, atol=1e-12)
    assert not list(head.parameters())
    assert "weight" in head.state_dict()
    x = torch.randn(3, features, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(head, x)


def test_etf_orientation_follows_the_generator():
    a, b, c = (ETFLinear(8, 4, generator=torch.Generator().manual_seed(s)).weight for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.allclose(a, c)


# ---- bad input ---------------------------------------------------------------------------------------------------------

RULES = [MultiplicativeLogitAdjustment, AdditiveLogitAdjustment, OneVsOneAdjuster, LogitAdjustedLoss, VectorScalingLoss]


@pytest.mark.parametrize("make", [*RULES, boundary_angles])
@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([5, 0, 3], "class 1 has 0"),
        ([5, 2, -3], "class 2 has -3"),
        ([float("nan"), 2, 0], "class 0 has nan, and 1 more"),
        ([4], "at least 2 classes"),
        ([[4, 3], [2, 1]], "must be a vector"),
    ],
)
def test_bad_counts_are_named(make, counts, message):
    with pytest.raises(ValueError, match=message):
        make(counts)


@pytest.mark.parametrize("make", RULES)
def test_another_number_of_classes_is_refused(make):
    rule = make([4, 3, 2])
    arguments = (torch.zeros(2, 5), torch.zeros(2).long())[: 2 if "Loss" in make.__name__ else 1]
    with pytest.raises(ValueError, match=r"\(\*, 3\) for 3 class counts, got shape \(2, 5\)"):
        rule(*arguments)


@pytest.mark.parametrize("cls", [MultiplicativeLogitAdjustment, AdditiveLogitAdjustment, OneVsOneAdjuster])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_are_counted(cls, bad):
    s = random_logits()
    s[3, 2] = s[7, 0] = bad
    with pytest.raises(ValueError, match="2 of 1200 values"):
        cls(COUNTS, 0.2)(s)
    assert cls(COUNTS, 0.2, check=False)(s).shape == s.shape


def test_a_masked_class_stays_masked():
    s = random_logits()
    s[:, 4] = -math.inf
    assert (MultiplicativeLogitAdjustment(COUNTS)(s)[:, 4] == -math.inf).all()
    assert (AdditiveLogitAdjustment(COUNTS)(s)[:, 4] == -math.inf).all()


def test_overflow_of_a_narrow_dtype_is_told_apart():
    with pytest.raises(ValueError, match=r"do not fit torch\.float16"):
        MultiplicativeLogitAdjustment([10**6, 10, 1], 1.0)(torch.full((1, 3), 100.0, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("cls", [MultiplicativeLogitAdjustment, OneVsOneAdjuster])
def test_probabilities_are_not_logits(cls, dtype):
    s, rule = random_logits(), cls(COUNTS, 0.2)
    with pytest.raises(ValueError, match="these are log-probabilities"):
        rule(s.log_softmax(-1).to(dtype))
    with pytest.raises(ValueError, match="these are probabilities"):
        rule(s.softmax(-1).to(dtype))
    AdditiveLogitAdjustment(COUNTS)(s.log_softmax(-1))
    rule(-s.abs())  # a batch of negative logits is unwise, but no log-probabilities


def test_other_arguments_are_checked():
    s, y = random_logits(), torch.arange(200) % 6
    with pytest.raises(ValueError, match="gamma must be finite and at least 0, got -1"):
        MultiplicativeLogitAdjustment(COUNTS, -1)
    with pytest.raises(ValueError, match="center must be None or 'shift'"):
        MultiplicativeLogitAdjustment(COUNTS, center="mean")
    with pytest.raises(ValueError, match="floating point"):
        MultiplicativeLogitAdjustment(COUNTS)(torch.ones(2, 6, dtype=torch.long))
    with pytest.raises(ValueError, match="at least 3 classes"):
        OneVsOneAdjuster([5, 1])
    with pytest.raises(ValueError, match="one number for each of 6 classes"):
        OneVsOneAdjuster(COUNTS, feature_norms=[1.0, 2.0])
    with pytest.raises(ValueError, match="feature_norms must be positive"):
        OneVsOneAdjuster(COUNTS, feature_norms=[1.0, 2.0, 3.0, 0.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="'ala' needs feature_norms"):
        boundary_angles(COUNTS, "ala")
    with pytest.raises(ValueError, match="kind must be one of"):
        boundary_angles(COUNTS, "best")
    with pytest.raises(ValueError, match="need in_features ≥ 9, got 8"):
        ETFLinear(8, 10)
    with pytest.raises(ValueError, match="scale must be positive"):
        ETFLinear(8, 4, scale=0)
    with pytest.raises(ValueError, match="reduction must be"):
        LogitAdjustedLoss(COUNTS, reduction="max")
    with pytest.raises(ValueError, match="must lie in"):
        MultiplicativeLogitAdjustment.tuned(COUNTS, s, y + 1)
    with pytest.raises(ValueError, match="200 class indices"):
        AdditiveLogitAdjustment.tuned(COUNTS, s, y[:9])
    with pytest.raises(ValueError, match="at least one value"):
        AdditiveLogitAdjustment.tuned(COUNTS, s, y, grid=())
    with pytest.raises(ValueError, match="metric must be"):
        AdditiveLogitAdjustment.tuned(COUNTS, s, y, metric="accuracy")


@pytest.mark.parametrize("break_ties", [True, False])
def test_one_vs_one_over_a_masked_class_is_one_vs_one_over_the_rest(break_ties):
    s = random_logits()
    s[:, 4] = -math.inf
    rule = OneVsOneAdjuster(COUNTS, 0.2, break_ties=break_ties)
    scores = rule(s)
    assert torch.isfinite(scores).all()
    assert (scores[:, 4] == 0).all()
    low = s.clone()
    low[:, 4] = s[torch.isfinite(s)].min() - 1e6
    assert torch.equal(scores.argmax(-1), OneVsOneAdjuster(COUNTS, 0.2, break_ties=False)(low).argmax(-1)) or break_ties


def test_the_additive_rule_keeps_the_bias():
    with pytest.raises(ValueError, match="drop_bias does not go with AdditiveLogitAdjustment"):
        AdjustedClassifier(torch.nn.Linear(4, 3), AdditiveLogitAdjustment([9, 3, 1]), drop_bias="")


@pytest.mark.filterwarnings("ignore:the best strength is the largest")
def test_tuned_takes_arrays():
    s, y = random_logits(), torch.arange(len(random_logits())) % 6
    for cls in (MultiplicativeLogitAdjustment, AdditiveLogitAdjustment, OneVsOneAdjuster):
        assert isinstance(cls.tuned(COUNTS, s.numpy(), y.numpy(), grid=(0.1, 0.2)), cls)


# ---- what a few rows can prove -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [MultiplicativeLogitAdjustment, OneVsOneAdjuster, AdditiveLogitAdjustment])
@pytest.mark.parametrize(
    "row",
    [
        [0.2, 0.5, 0.3],  # sums to one by chance
        [-1.0, -2.0, -0.7586],  # so do its exponentials, nearly
        [0.0, 0.0, 1.0],
        [0.0, -20.0, -20.0],
    ],
)
def test_one_row_proves_nothing_however_often_it_comes(cls, row):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for logits in (torch.tensor(row), torch.tensor([row]), torch.tensor([row] * 50)):
            assert cls([4, 3, 2], 0.1)(logits).shape == logits.shape


@pytest.mark.parametrize(
    ("dtype", "needed"), [(torch.float64, 3), (torch.float32, 3), (torch.float16, 7), (torch.bfloat16, 14)]
)
def test_the_rows_needed_follow_from_the_precision(dtype, needed):
    s = random_logits(rows=40, classes=3)
    rule = MultiplicativeLogitAdjustment([4, 3, 2], 0.1)
    for values, message in ((s.softmax(-1), "these are prob"), (s.log_softmax(-1), "these are log-prob")):
        rule(values[: needed - 1].to(dtype))
        for rows in (needed, 40):
            with pytest.raises(ValueError, match=message):
                rule(values[:rows].to(dtype))


def test_logits_near_the_simplex_are_logits():
    s = random_logits(rows=16, classes=3).softmax(-1)
    rule = MultiplicativeLogitAdjustment([4, 3, 2], 0.1)
    near = s * (1 + 1e-4 * torch.arange(16)[:, None])  # sums to 1.0015 at most: no softmax in single precision does
    for logits in (near, s.log() - 1e-3):
        adjusted = rule(logits)
        assert adjusted.shape == logits.shape
        assert not torch.equal(adjusted, logits)


def test_the_additive_rule_warns_of_probabilities_and_takes_their_logarithm():
    s = random_logits()
    rule = AdditiveLogitAdjustment(COUNTS)
    with pytest.warns(UserWarning, match="adding belongs to logits or log-probabilities"):
        rule(s.softmax(-1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(rule(s.log_softmax(-1)).argmax(-1), rule(s).argmax(-1))
        AdditiveLogitAdjustment(COUNTS, check=False)(s.softmax(-1))


# ---- one way of tuning -------------------------------------------------------------------------------------------------


def test_the_end_of_the_grid_is_warned_about():
    targets = torch.arange(6).repeat(100)
    s = (
        F.one_hot(targets, 6) * 2.0
        + torch.randn(600, 6, generator=torch.Generator().manual_seed(0))
        + torch.tensor(COUNTS).log()
    )
    with pytest.warns(UserWarning, match=r"the largest of the grid, 0\.4: widen it"):
        AdditiveLogitAdjustment.tuned(COUNTS, s, targets, grid=(0.0, 0.2, 0.4))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        AdditiveLogitAdjustment.tuned(COUNTS, s, targets)
        AdditiveLogitAdjustment.tuned(COUNTS, s, targets, grid=(0.4,))  # nothing was searched
    assert [str(warning.message) for warning in said] == []


def test_grids_are_as_fine_for_the_optimum_as_for_what_approximates_it():
    assert OneVsOneAdjuster.grid == MultiplicativeLogitAdjustment.grid
    assert OneVsOneAdjuster.grid[:3] == (0.0, 0.05, 0.1)
    assert max(OneVsOneAdjuster.grid) == 2.0


@pytest.mark.filterwarnings("ignore:the distribution is too skewed", "ignore:the best strength is the largest")
def test_options_reach_the_tuned_rule():
    s, y = random_logits().abs(), torch.arange(200) % 6
    assert MultiplicativeLogitAdjustment.tuned(COUNTS, s, y, grid=(0.1, 0.2), center="shift").center == "shift"
    tuned = OneVsOneAdjuster.tuned(COUNTS, s, y, grid=(0.2,), feature_norms=NORMS)
    assert torch.equal(tuned.cosine, OneVsOneAdjuster(COUNTS, 0.2, NORMS).cosine)
    with pytest.raises(TypeError, match="centre"):
        AdditiveLogitAdjustment.tuned(COUNTS, s, y, centre="shift")
