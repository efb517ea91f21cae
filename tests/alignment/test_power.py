"""POWER's mathematics: margins, losses, labels, and the bandit against brute force and published limits."""

import copy
import pickle

import pytest
import torch
from torch.nn import functional as F

from assay.alignment import DynamicLabels, POWERBandit, power_loss, power_margin, update_labels
from assay.alignment.power.bandit import count_matrices
from assay.alignment.power.rivals import ABSENT, RIVALS, gradient_of, problems, solve


def pairs(n=6, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    up, down = (-20 * torch.rand(n, generator=g, dtype=dtype) for _ in range(2))
    w_up, w_down = (0.05 + torch.rand(n, generator=g, dtype=dtype) for _ in range(2))
    return up, down, w_up, w_down


# ---- the loss ----------------------------------------------------------------------------------------------------------


def test_the_margin_is_the_difference_of_robust_rewards():
    up, down, w_up, w_down = pairs()
    reward = [3.0 * w * (1 + logp) for w, logp in ((w_up, up), (w_down, down))]
    torch.testing.assert_close(power_margin(up, down, w_up, w_down, 3.0), reward[0] - reward[1])


def test_equal_weights_and_no_likelihood_are_simpo_with_zero_margin():
    up, down, *_ = pairs()
    w = torch.full_like(up, 1 / 7)
    expected = -F.logsigmoid(2.0 * (up / 7 - down / 7))
    torch.testing.assert_close(power_loss(up, down, w, w, beta=2.0, eta=0.0), expected)


def test_labels_of_one_change_nothing_and_the_slope_is_sigma_less_the_label():
    up, down, w_up, w_down = (t.requires_grad_() for t in pairs())
    plain = power_loss(up, down, w_up, w_down, eta=0.3)
    torch.testing.assert_close(power_loss(up, down, w_up, w_down, eta=0.3, labels=torch.ones(6)), plain)
    labels = torch.rand(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    margin = power_margin(up, down, w_up, w_down, 2.0)
    slope = torch.autograd.grad(power_loss(up, down, w_up, w_down, 2.0, 0.0, labels).sum(), up)[0]
    torch.testing.assert_close(slope, (margin.sigmoid() - labels) * 2.0 * w_up)


def test_a_label_that_equals_the_belief_is_silent_but_the_likelihood_goes_on():
    up, down, w_up, w_down = pairs()
    up.requires_grad_()
    labels = power_margin(up, down, w_up, w_down, 2.0).sigmoid()
    assert torch.autograd.grad(power_loss(up, down, w_up, w_down, 2.0, 0.0, labels).sum(), up)[0].abs().max() < 1e-12
    pull = torch.autograd.grad(power_loss(up, down, w_up, w_down, 2.0, 0.1, labels).sum(), up)[0]
    torch.testing.assert_close(pull, -0.2 * w_up)
    gated = torch.autograd.grad(power_loss(up, down, w_up, w_down, 2.0, 0.1, labels, gate_sft=True).sum(), up)[0]
    torch.testing.assert_close(gated, -0.2 * w_up * labels.detach())


def test_gradcheck():
    up, down, w_up, w_down = (t.requires_grad_() for t in pairs())
    labels = torch.linspace(0, 1, 6, dtype=torch.float64)
    other = (-torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))).requires_grad_()

    def loss(u, d, o):
        return power_loss(u, d, w_up, w_down, 2.0, 0.3, labels, logp_baseline=o, w_baseline=w_down, gate_sft=True)

    assert torch.autograd.gradcheck(loss, (up, down, other))


def test_a_baseline_answer_takes_the_chosen_ones_place():
    up, down, w_up, w_down = pairs()
    same = power_loss(up, down, w_up, w_down, logp_baseline=up, w_baseline=w_up)
    torch.testing.assert_close(same, power_loss(up, down, w_up, w_down))
    lower = power_loss(up, down, w_up, w_down, 2.0, 0.1, logp_baseline=up - 1, w_baseline=w_up)
    torch.testing.assert_close(lower - same, 0.2 * w_up)
    with pytest.raises(ValueError, match="belong together"):
        power_loss(up, down, w_up, w_down, logp_baseline=up)


def test_half_precision_is_raised_before_the_difference():
    up = torch.tensor([-3.0], dtype=torch.bfloat16)
    w = torch.ones(1, dtype=torch.bfloat16)
    loss = power_loss(up, up, w, w, beta=10.0, eta=0.0, labels=torch.tensor([0.501]))
    assert loss.dtype == torch.float32
    far = power_loss(torch.tensor([-1e4]), torch.tensor([0.0]), torch.ones(1), torch.ones(1), beta=10.0, eta=0.0)
    assert torch.isfinite(far).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"beta": 0.0}, "beta must be positive"), ({"beta": float("nan")}, "beta"), ({"eta": -0.1}, "eta must be at least 0")],
)
def test_settings_out_of_range(change, message):
    with pytest.raises(ValueError, match=message):
        power_loss(*pairs(), **change)


def test_shapes_must_agree():
    up, down, w_up, w_down = pairs()
    with pytest.raises(ValueError, match=r"one shape, got .*w_rejected \(5,\)"):
        power_loss(up, down, w_up, w_down[:5])
    with pytest.raises(ValueError, match="labels"):
        power_loss(up, down, w_up, w_down, labels=torch.ones(5))


# ---- labels ------------------------------------------------------------------------------------------------------------


def test_one_visit_only_scales_the_preference_gradient():
    """After one visit from 1, ``ℓ − σ(m) = (1 − γ)(1 − σ(m))``."""
    up, down, w_up, w_down = pairs()
    up.requires_grad_()
    margin = power_margin(up, down, w_up, w_down, 2.0)
    labels = update_labels(torch.ones(6, dtype=torch.float64), margin, 0.3)
    once = torch.autograd.grad(power_loss(up, down, w_up, w_down, 2.0, 0.0, labels).sum(), up)[0]
    plain = torch.autograd.grad(power_loss(up, down, w_up, w_down, 2.0, 0.0).sum(), up)[0]
    torch.testing.assert_close(once, 0.7 * plain, rtol=0, atol=1e-6)


def test_labels_come_to_rest_at_the_belief():
    labels, margins = DynamicLabels(3, gamma=0.2), torch.tensor([-2.0, 0.0, 3.0])
    for _ in range(200):
        labels.step([0, 1, 2], margins)
    torch.testing.assert_close(labels.labels, margins.sigmoid(), rtol=0, atol=1e-6)
    assert labels.below(0.5) == [0]
    assert labels.visits.tolist() == [200] * 3


def test_the_store_goes_by_id_whatever_the_order():
    ids = ["c", "a", "b"]
    one, two = DynamicLabels(ids, 0.3), DynamicLabels(ids, 0.3)
    one.step(["a", "b", "c"], torch.tensor([1.0, 2.0, 3.0]))
    two.step(["c", "a"], torch.tensor([3.0, 1.0]))
    out = two.step(["b"], torch.tensor([2.0]))
    torch.testing.assert_close(one.labels, two.labels)
    torch.testing.assert_close(out, two.of(["b"]))
    torch.testing.assert_close(one.labels, update_labels(torch.ones(3), torch.tensor([3.0, 1.0, 2.0]), 0.3))


def test_a_pair_that_comes_twice_at_once_is_visited_twice():
    together, apart = DynamicLabels(2, 0.3), DynamicLabels(2, 0.3)
    together.step([1, 1, 0], torch.tensor([0.5, 0.5, -1.0]))
    for i, m in ((1, 0.5), (0, -1.0), (1, 0.5)):
        apart.step([i], torch.tensor([m]))
    torch.testing.assert_close(together.labels, apart.labels)
    assert together.visits.tolist() == [1, 2]
    forth, back = DynamicLabels(1, 0.3), DynamicLabels(1, 0.3)
    forth.step([0, 0], torch.tensor([2.0, -2.0]))
    back.step([0, 0], torch.tensor([-2.0, 2.0]))
    torch.testing.assert_close(forth.labels, back.labels)


def test_ids_may_be_a_tensor_and_margins_half_precision():
    labels = DynamicLabels(torch.tensor([7, 5]), 0.5)
    labels.step(torch.tensor([5]), torch.tensor([-1.0], dtype=torch.bfloat16))
    torch.testing.assert_close(labels.labels, torch.tensor([1.0, 0.5 + 0.5 * torch.tensor(-1.0).sigmoid().item()]))
    torch.testing.assert_close(update_labels(torch.ones(1), torch.tensor([-1.0]).bfloat16(), 0.5), labels.of([5]))
    assert labels.step([], torch.zeros(0)).shape == (0,)


def test_no_gradient_passes_through_labels():
    margins = torch.tensor([0.3], requires_grad=True)
    assert not DynamicLabels(1).step([0], margins).requires_grad
    assert not update_labels(torch.ones(1), margins, 0.1).requires_grad


def test_labels_round_trip_and_refuse_other_pairs():
    labels = DynamicLabels(["a", "b"], 0.5)
    labels.step(["a"], torch.tensor([-1.0]))
    other = DynamicLabels(["a", "b"], 0.5)
    other.load_state_dict(labels.state_dict())
    assert torch.equal(other.labels, labels.labels)
    for clone in (copy.deepcopy(labels), pickle.loads(pickle.dumps(labels))):
        assert torch.equal(clone.step(["b"], torch.zeros(1)), torch.tensor([0.75]))
    with pytest.raises(ValueError, match="other pairs"):
        DynamicLabels(["a", "c"], 0.5).load_state_dict(labels.state_dict())
    with pytest.raises(ValueError, match="other pairs"):
        DynamicLabels(3, 0.5).load_state_dict(labels.state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2, 1],), "1 are repeated, among them 1"),
        ((["a", None],), "1 have none"),
        (([],), "at least one pair"),
        ((3, 1.0), r"gamma must be in \[0, 1\)"),
        ((3, 0.1, 1.5), "init must be in"),
        ((3, 0.1, torch.ones(2)), "one for each of 3"),
        ((0,), "at least one pair"),
        ((3, 0.1, float("nan")), "init must be in"),
    ],
)
def test_labels_refuse(arguments, message):
    with pytest.raises(ValueError, match=message):
        DynamicLabels(*arguments)


def test_a_nan_margin_and_an_unknown_id_change_nothing():
    labels = DynamicLabels(["a", "b"], 0.5)
    with pytest.raises(FloatingPointError, match="1 of 2 margins"):
        labels.step(["a", "b"], torch.tensor([0.0, float("nan")]))
    with pytest.raises(KeyError, match="'z'"):
        labels.step(["z"], torch.zeros(1))
    with pytest.raises(KeyError, match="ids must be in"):
        DynamicLabels(2).step(torch.tensor([2]), torch.zeros(1))
    for mask in (torch.tensor([True, False]), torch.tensor([0.0, 1.0])):
        with pytest.raises(KeyError, match="whole numbers"):
            DynamicLabels(2).step(mask, torch.zeros(2))
    for margins in (torch.zeros(1), torch.zeros(2, 1)):
        with pytest.raises(ValueError, match="one margin for each of 2 ids"):
            labels.step(["a", "b"], margins)
    with pytest.raises(ValueError, match="one shape"):
        update_labels(torch.ones(3), torch.zeros(3, 1), 0.1)
    assert labels.labels.tolist() == [1, 1]
    assert labels.visits.tolist() == [0, 0]


# ---- bandits -----------------------------------------------------------------------------------------------------------

LUCKY = [(0, 1, 60), (1, 0, 40), (2, 0, 1)]


def by_autograd(pairs, theta0, beta, eta, gamma, *, w, gate=False, initial=False, onpolicy=False, steps=60, lr=0.5):
    """The tabular problem with the loss of the language models, one pair at a time."""
    theta, w = torch.tensor(theta0, dtype=torch.float64), torch.tensor(w, dtype=torch.float64)
    labels, start, total = [1.0] * len(pairs), theta.softmax(-1), sum(n for *_, n in pairs)
    for _ in range(steps):
        theta.requires_grad_()
        logp = theta.log_softmax(-1)
        loss = torch.zeros((), dtype=torch.float64)
        for i, (a, b, n) in enumerate(pairs):
            up, down, w_up, w_down = logp[a : a + 1], logp[b : b + 1], w[a : a + 1], w[b : b + 1]
            m = power_margin(up, down, w_up, w_down, beta)
            labels[i] = update_labels(torch.tensor([labels[i]], dtype=torch.float64), m, gamma).item()
            label = torch.tensor([labels[i]], dtype=torch.float64)
            loss = (
                loss + n / total * power_loss(up, down, w_up, w_down, beta, 0 if initial else eta, label, gate_sft=gate).sum()
            )
        if initial:
            loss = loss - eta * beta * (start * w * logp).sum()
        if onpolicy:
            loss = loss + eta * beta * (logp.exp() * w).sum()
        (slope,) = torch.autograd.grad(loss, theta)
        theta = (theta - lr * slope).detach()
    return theta.softmax(-1), torch.tensor(labels, dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gate_sft": True},
        {"baseline": "initial"},
        {"weights": [0.5, 1.0, 2.0]},
        {"weights": [0.5, 1.0, 2.0], "onpolicy_weight_term": True},
    ],
)
def test_the_bandit_is_the_language_models_loss(options):
    fit = POWERBandit(steps=60, **options).fit(LUCKY, [0.0, 0.5, -1.0], beta=1.5, eta=0.2, gamma=0.05)
    policy, labels = by_autograd(
        LUCKY, [0.0, 0.5, -1.0], 1.5, 0.2, 0.05,
        w=options.get("weights", [1.0, 1.0, 1.0]), gate=options.get("gate_sft", False),
        initial=options.get("baseline") == "initial", onpolicy=options.get("onpolicy_weight_term", False),
    )  # fmt: skip
    torch.testing.assert_close(fit.policy[0], policy, rtol=0, atol=1e-12)
    torch.testing.assert_close(fit.labels[0], labels, rtol=0, atol=1e-12)


def test_runs_in_a_batch_are_the_runs_one_by_one():
    eta, gamma = torch.tensor([0.0, 0.1, 1.0]), torch.tensor([0.02, 0.0, 0.1])
    counts = [(0, 1, torch.tensor([60, 6, 3])), (1, 0, 40), (2, 0, torch.tensor([1, 0, 5]))]
    fit = POWERBandit(steps=50, at=(10, 50)).fit(counts, [0.0, 0.0, -3.0], beta=1.0, eta=eta, gamma=gamma)
    for i in range(3):
        mine = [(a, b, int(torch.as_tensor(n).expand(3)[i])) for a, b, n in counts]
        alone = POWERBandit(steps=50).fit(mine, [0.0, 0.0, -3.0], beta=1.0, eta=eta[i], gamma=gamma[i])
        torch.testing.assert_close(fit.policy[i], alone.policy[0])
    assert torch.equal(fit.path[50], fit.policy)
    assert fit.path[10].shape == (3, 3)


def test_frozen_labels_leave_the_likelihood_alone_in_charge():
    """POWER-DL's end point is the distribution of chosen answers; with the initial baseline it is the initial policy."""
    chosen = POWERBandit(steps=20_000).fit(LUCKY, [0.0, 0.0, -3.0], beta=1.0, eta=0.1, gamma=0.02).policy[0]
    torch.testing.assert_close(chosen, torch.tensor([60, 40, 1]).double() / 101, rtol=0, atol=1e-3)
    start = torch.tensor([0.0, 0.0, -3.0]).double().softmax(-1)
    back = POWERBandit(baseline="initial", steps=20_000).fit(LUCKY, [0.0, 0.0, -3.0], beta=1.0, eta=0.1, gamma=0.5).policy[0]
    torch.testing.assert_close(back, start, rtol=0, atol=2e-3)


def test_labels_at_one_half_learn_nothing_at_equal_odds():
    fit = POWERBandit(init=0.5, steps=200).fit([(0, 1, 1)], [0.0, 0.0], eta=0.0, gamma=0.1)
    torch.testing.assert_close(fit.policy[0], torch.tensor([0.5, 0.5]).double())


def test_a_policy_as_baseline_and_the_order_of_the_update():
    q = [0.2, 0.3, 0.5]
    fit = POWERBandit(baseline=torch.tensor(q), steps=20_000).fit([(0, 1, 1)], [0.0] * 3, eta=1.0, gamma=0.9)
    torch.testing.assert_close(fit.policy[0], torch.tensor(q).double(), rtol=0, atol=1e-3)
    before, after = (
        POWERBandit(update=u, steps=1).fit([(0, 1, 1)], [0.0, 0.0], eta=0.0, gamma=0.5).policy for u in ("before", "after")
    )
    assert after[0, 0] > before[0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr must be positive"),
        ({"baseline": "best"}, "baseline must be"),
        ({"baseline": "initial", "gate_sft": True}, "gate_sft needs"),
        ({"update": "never"}, "update must be"),
        ({"steps": 10, "at": (4, 11)}, r"at must name steps of 1 … 10, got \[11\]"),
    ],
)
def test_bandits_refuse_options(options, message):
    with pytest.raises(ValueError, match=message):
        POWERBandit(**options)


@pytest.mark.parametrize(
    ("pairs", "settings", "message"),
    [
        ([(0, 0, 1)], {}, "two different arms"),
        ([(0, 3, 1)], {}, r"arms of 0 … 1"),
        ([], {}, "at least one pair"),
        ([(0, 1, -1)], {}, "counts must be"),
        ([(0, 1, 0)], {}, "counts must be"),
        ([(0, 1, float("inf"))], {}, "counts must be finite"),
        ([(0, 1, float("nan"))], {}, "counts must be finite"),
        ([(0, 1, 1)], {"beta": 0.0}, "beta must be positive"),
        ([(0, 1, 1)], {"gamma": torch.tensor([0.1, 1.0])}, "gamma must be"),
    ],
)
def test_bandits_refuse_problems(pairs, settings, message):
    with pytest.raises(ValueError, match=message):
        POWERBandit().fit(pairs, [0.0, 0.0], **settings)


def test_bandits_refuse_weights_and_baselines_of_the_wrong_kind():
    for weights in ([1.0, 0.0], [1.0, float("inf")], [1.0]):
        with pytest.raises(ValueError, match="weights must be positive and finite"):
            POWERBandit(weights=weights).fit([(0, 1, 1)], [0.0, 0.0])
    for q in ([0.5, 0.6], [1.5, -0.5], [1.0]):
        with pytest.raises(ValueError, match="2 probabilities that sum to 1"):
            POWERBandit(baseline=torch.tensor(q)).fit([(0, 1, 1)], [0.0, 0.0])


def test_a_diverged_run_is_reported():
    with pytest.raises(FloatingPointError, match="1 of 1 runs have diverged"):
        POWERBandit(steps=5).fit([(0, 1, 1)], [float("inf"), 0.0])


# ---- rivals ------------------------------------------------------------------------------------------------------------


def rival_loss(rival, logp, logp0, counts, flip):
    """Each rival as its paper writes it, for autograd."""
    ratio = logp - logp0
    phi = {"plain": logp, "ratio": ratio, "chi": ratio + ratio.exp(), "odds": logp - torch.log1p(-logp.exp())}[rival.link]
    h = phi @ (counts.winner - counts.loser).T
    m, s = rival.beta * h, F.logsigmoid
    each = {
        "sigmoid": -s(m),
        "smoothed": -(1 - flip) * s(m) - flip * s(-m),
        "robust": (-(1 - flip) * s(m) + flip * s(-m)) / (1 - 2 * flip),
        "squared": (h - 1 / (2 * rival.beta)) ** 2,
        "ropo": 4 * 14 / 15**2 * (-s(m) + 14 * (-m).sigmoid()),
        "none": 0 * m,
    }[rival.slope]
    return (counts.share * each).sum() - rival.sft * (counts.share @ counts.winner * logp).sum()


@pytest.mark.parametrize("name", RIVALS)
def test_a_rivals_slope_is_its_losses(name):
    g = torch.Generator().manual_seed(0)
    counts = count_matrices([(0, 1, 3), (2, 1, 1), (1, 0, 2)], 3)
    logp0 = torch.randn(1, 3, generator=g, dtype=torch.float64).log_softmax(-1)
    logp = torch.randn(1, 3, generator=g, dtype=torch.float64).log_softmax(-1).requires_grad_()
    (expected,) = torch.autograd.grad(rival_loss(RIVALS[name], logp, logp0, counts, 0.2), logp)
    torch.testing.assert_close(gradient_of(RIVALS[name], counts, logp0, 0.2)(logp.detach()), expected)


def test_sft_ends_at_the_chosen_shares_and_absent_arms_stay_absent():
    bandits = problems()
    policy = solve(RIVALS["sft"], bandits, steps=4000, lr=0.5, flip=0.2)[4000]
    torch.testing.assert_close(policy[0], torch.tensor([60, 40, 1, 0]).double() / 101, rtol=0, atol=1e-4)
    torch.testing.assert_close(policy[3], torch.tensor([60, 140, 1, 25]).double() / 226, rtol=0, atol=2e-3)
    assert (bandits.theta0 == ABSENT).sum() == 3
    assert policy[:3, 3].max() == 0
