"""vBoN's mathematics: the best-of-N distribution, quantiles, the objectives by enumeration, and what is refused."""

import itertools
import math
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from assay.alignment.vbon.arms import Task, bon, bon_sft, kl_rl, simulated, vbon, winners
from assay.alignment.vbon.bon import bon_distribution, bon_log_prob, bon_log_ratio
from assay.alignment.vbon.cdf import RewardCDF
from assay.alignment.vbon.exact import (
    Strings,
    best_tilt,
    bon_logp,
    chain,
    counted_chain,
    kl,
    optimise,
    optimum,
    payoff,
    random_rewards,
    tilt_at_kl,
    win_rate,
)
from assay.alignment.vbon.reward import VBoNReward, kl_coefficient
from assay.alignment.vbon.study import (
    VBoNStudyConfig,
    exact_trial,
    matched_gain,
    pareto_lead,
    study,
    vbon_exact,
    winners_win_rate,
)
from assay.bench import NotApplicable, Outcome, Replicate, Verdict
from assay.bench.claims import judge

NS = (1, 2, 4, 16, 512, 10**7)


def random_case(shape, ties, seed=0):
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(shape, generator=g, dtype=torch.double)
    r = torch.randint(0, 4, shape, generator=g).double() if ties else torch.randn(shape, generator=g, dtype=torch.double)
    return p / p.sum(-1, keepdim=True), r


def small_strings(seed=0, symbols=4, length=3):
    g = torch.Generator().manual_seed(seed)
    start, moves = (torch.rand(s, generator=g, dtype=torch.double) + 0.1 for s in ((symbols,), (symbols, symbols)))
    logp = chain(start / start.sum(), moves / moves.sum(1, keepdim=True), length)
    return Strings(logp, random_rewards(symbols, length, seed))


# ---- the distribution --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True])
def test_it_is_what_drawing_n_and_keeping_the_best_gives(ties):
    """All 5³ draws of three strings, each draw's mass shared evenly among its best places."""
    p, r = random_case((5,), ties, seed=3)
    expected = torch.zeros(5, dtype=torch.double)
    for draw in itertools.product(range(5), repeat=3):
        best = [y for y in draw if r[y] == max(r[list(draw)])]
        for y in best:
            expected[y] += p[list(draw)].prod() / len(best)
    torch.testing.assert_close(bon_distribution(p, r, 3), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("n", NS[:-1])  # at 10⁷ the rounding of F alone is 10⁻¹⁶ · N
def test_it_sums_to_one_and_n_equal_to_1_is_the_reference(n, ties):
    p, r = random_case((3, 40), ties)
    d = bon_distribution(p, r, n)
    torch.testing.assert_close(d.sum(-1), torch.ones(3, dtype=torch.double), rtol=0, atol=1e-10)
    if n == 1:
        torch.testing.assert_close(d, p)


def test_only_the_order_of_rewards_matters():
    p, r = random_case((3, 40), ties=True)
    assert torch.equal(bon_distribution(p, r, 8), bon_distribution(p, r.exp(), 8))
    assert torch.equal(bon_distribution(p, r, 8), bon_distribution(p, r * 5 - 2, 8))


def test_strings_without_mass_get_none_and_rows_broadcast():
    p = torch.tensor([0.5, 0.0, 0.5])
    r = torch.tensor([[0.0, 9.0, 1.0], [1.0, -9.0, 0.0]])
    torch.testing.assert_close(bon_distribution(p, r, 2), torch.tensor([[0.25, 0, 0.75], [0.75, 0, 0.25]]).double())


def test_the_log_ratio_against_four_hundred_digits():
    mp = pytest.importorskip("mpmath")
    mp.mp.dps = 400  # e⁻⁷⁰⁰ beside 1
    worst = 0.0
    for logp, log_cdf, n in itertools.product((-1e-9, -0.1, -5, -60, -699.9, -700.0), (0, -1e-4, -3, -40.0, -math.inf), NS):
        F = mp.mpf(0) if log_cdf == -math.inf else mp.e ** mp.mpf(log_cdf)
        T = mp.e ** mp.mpf(logp)
        exact = float(mp.log(((F + T) ** n - F**n) / T))
        got = bon_log_ratio(torch.tensor(logp, dtype=torch.double), torch.tensor(log_cdf, dtype=torch.double), n).item()
        worst = max(worst, abs(got - exact) / max(1.0, abs(exact)))
    assert worst < 1e-12


def test_the_log_ratio_beyond_the_floats():
    """There T ≪ F/N to the last digit (log N + (N − 1) log F), or F ≪ T and the string is as good as the worst."""
    logp = torch.tensor([-701.0, -5e3, -math.inf], dtype=torch.double)
    ratio = bon_log_ratio(logp, torch.tensor(-0.25, dtype=torch.double), 16)
    torch.testing.assert_close(ratio, torch.full((3,), math.log(16) - 3.75, dtype=torch.double), rtol=0, atol=1e-13)
    assert bon_log_ratio(torch.tensor(-1.0).double(), torch.tensor(-2e3).double(), 4).item() == pytest.approx(-3, abs=1e-13)


def test_the_binomial_sum_of_the_paper():
    p, r = random_case((30,), ties=False)
    F = torch.tensor([p[r < x].sum() for x in r])
    n = 16
    by_sum = sum(math.comb(n, i) * F ** (n - i) * p**i for i in range(1, n + 1))
    torch.testing.assert_close(bon_log_prob(p.log(), F.log(), n).exp(), by_sum)


def test_long_strings_have_log_n_plus_n_minus_1_log_f():
    ratio = bon_log_ratio(torch.tensor([-50.0]), torch.tensor([-2.0]), 16)
    assert ratio.item() == pytest.approx(math.log(16) - 30, abs=1e-5)
    assert ratio.dtype == torch.float32


def test_the_log_ratio_has_the_right_gradient_everywhere():
    logp = torch.tensor([-0.3, -4.0, -20.0, -60.0, -800.0], dtype=torch.double, requires_grad=True)
    log_cdf = torch.tensor([-0.5, -0.1, -2.0, -1.0, -1.0], dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: bon_log_ratio(a, b, 5), (logp, log_cdf))
    worst = torch.tensor(-math.inf, dtype=torch.double)
    assert torch.autograd.grad(bon_log_ratio(logp[0], worst, 5), logp)[0].tolist() == [4, 0, 0, 0, 0]


def test_known_facts_of_continuous_rewards():
    """Under best-of-N F is Beta(N, 1): E log F = −1/N, win rate N/(N + 1), KL log N − (N − 1)/N."""
    size, n = 200_000, 8
    p = torch.full((size,), 1 / size, dtype=torch.double)
    r = torch.arange(size).double()
    d = bon_distribution(p, r, n)
    F = r / size
    assert (d[1:] * F[1:].log()).sum().item() == pytest.approx(-1 / n, abs=1e-4)
    assert (d * (F + 0.5 / size)).sum().item() == pytest.approx(n / (n + 1), abs=1e-4)
    assert (d * (d / p).clamp_min(1e-300).log()).sum().item() == pytest.approx(math.log(n) - (n - 1) / n, abs=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bon_log_ratio(torch.tensor(-1.0), torch.tensor(-1.0), 0), "n must be a whole number of at least 1, got 0"),
        (lambda: bon_log_ratio(torch.tensor(-1.0), torch.tensor(-1.0), 2.0), "whole number"),
        (lambda: bon_log_ratio(torch.tensor(-1.0), torch.tensor(0.1), 2), r"F must lie in \[0, 1\]"),
        (lambda: bon_log_ratio(torch.tensor(-1.0), torch.tensor(math.nan), 2), "log_cdf must be at most 0"),
        (lambda: bon_log_ratio(torch.tensor(-9), torch.tensor(-1), 2), "log_cdf must be of a floating type, got torch.int64"),
        (lambda: bon_log_ratio(torch.tensor(1.0), torch.tensor(-1.0), 2), "ref_logp must be at most 0"),
        (lambda: bon_log_ratio(torch.tensor(-1.0), torch.tensor(-1.0), 2, log_tie_mass=torch.tensor(-2.0)), "ties with itself"),
        (lambda: bon_distribution(torch.tensor([0.5, 0.6]), torch.tensor([0.0, 1.0]), 2), "sum to one"),
        (lambda: bon_distribution(torch.tensor([0.5, 0.5]), torch.tensor([0.0, math.nan]), 2), "NaN"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_estimated_f_of_one_is_used_as_it_comes():
    assert bon_log_ratio(torch.tensor(-1.0), torch.tensor(0.0), 4).item() > 1.0  # F̂ + T > 1


# ---- quantiles ---------------------------------------------------------------------------------------------------------


def test_quantiles_are_those_of_a_loop_over_ragged_tables():
    rng = np.random.default_rng(0)
    cdf = RewardCDF()
    tables = {f"p{i}": rng.integers(0, 30, size=rng.integers(2, 60)).tolist() for i in range(20)}
    for prompt, rewards in tables.items():
        cdf.add(prompt, rewards)
    prompts = [f"p{i}" for i in rng.integers(0, 20, 200)]
    rewards = rng.integers(-2, 33, 200).tolist()
    loop = [(sum(x < r for x in tables[p]) + 1) / (len(tables[p]) + 1) for p, r in zip(prompts, rewards, strict=True)]
    torch.testing.assert_close(cdf.log_cdf(prompts, rewards).exp(), torch.tensor(loop, dtype=torch.double))
    cdf.smoothing = "none"
    assert cdf.log_cdf(["p0"], [-5]).item() == -math.inf


def test_quantiles_tell_float64_rewards_apart_and_ignore_scale():
    cdf, scaled = RewardCDF(), RewardCDF()
    near = [1.0, 1.0 + 1e-12, 1.0 + 2e-12]
    cdf.add("p", near)
    assert cdf.log_cdf(["p"] * 3, near).exp().tolist() == pytest.approx([0.25, 0.5, 0.75])
    rewards = np.random.default_rng(0).normal(size=50)
    cdf.add("q", rewards.tolist())
    scaled.add("q", np.exp(rewards).tolist())
    asked = rewards[:10] + 0.01
    assert torch.equal(cdf.log_cdf(["q"] * 10, asked.tolist()), scaled.log_cdf(["q"] * 10, np.exp(asked).tolist()))


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_table_survives_a_file(tmp_path, ending):
    cdf = RewardCDF()
    cdf.add("one\u2028line", [0.1, 1 / 3])
    cdf.add([{"role": "user", "content": "hi"}], [1.0, 2.0, 3.0])
    cdf.sampling = {"temperature": 1.0, "max_new_tokens": 20}
    cdf.save(tmp_path / f"t.{ending}")
    back = RewardCDF.load(tmp_path / f"t.{ending}")
    assert back._rewards == cdf._rewards
    assert back.sampling == cdf.sampling
    assert [{"role": "user", "content": "hi"}] in back


def test_what_a_table_refuses(tmp_path):
    cdf = RewardCDF()
    cdf.add("p", [1.0])
    with pytest.raises(ValueError, match="no rewards were given for the prompt 'q'"):
        cdf.add("q", [])
    with pytest.raises(ValueError, match="NaN for 1 of 2"):
        cdf.add("q", [1.0, math.nan])
    with pytest.raises(ValueError, match="returned None"):
        cdf.add("q", [None])
    with pytest.raises(ValueError, match=r"no rewards are known for the prompt 'x'.*RewardCDF.sample"):
        cdf.log_cdf(["p", "x"], [1.0, 2.0])
    with pytest.raises(ValueError, match="at least 2 rewards a prompt, 'p' has 1"):
        cdf.log_cdf(["p"], [1.0])
    with pytest.raises(ValueError, match="2 rewards for 1 completions"):
        cdf.log_cdf(["p"], [1.0, 2.0])
    with pytest.raises(ValueError, match="smoothing must be"):
        RewardCDF("none at all")
    with pytest.raises(ValueError, match=r"\.jsonl or \.parquet"):
        cdf.save(tmp_path / "t.csv")
    (tmp_path / "t.jsonl").write_text('{"prompt": "p"}\n')
    with pytest.raises(ValueError, match="row 1: 'prompt' and 'rewards'"):
        RewardCDF.load(tmp_path / "t.jsonl")
    with pytest.warns(UserWarning, match="cdf_samples ≥ 60"):
        cdf.warn_if_coarse(16)


# ---- the reward --------------------------------------------------------------------------------------------------------


def word_count(prompts, completions, **_):
    return [len(c.split()) for c in completions]


def test_rewards_of_the_three_bounds():
    cdf = RewardCDF()
    cdf.add("p", [1, 2, 3])
    asked, answers = ["p", "p"], ["a b c", "a"]
    log_f = cdf.log_cdf(asked, [3, 1])
    logp = torch.tensor([-3.0, -20.0])
    for bound, expected in {
        "l1": log_f,
        "exact": bon_log_ratio(logp.double(), log_f, 4) / 4,
        "jensen": 3 / 8 * (log_f + logp),
    }.items():
        reward = VBoNReward(word_count, cdf, bound, 4, lambda prompts, ids: logp)
        assert reward(asked, answers) == pytest.approx(expected.tolist())
        assert reward.beta == (1 / 3 if bound == "l1" else 1 / 4)


def test_what_the_reward_refuses():
    cdf = RewardCDF()
    cdf.add("p", [1, 2])
    for n in (1, 0, True, 2.5):
        with pytest.raises(ValueError, match="at least 2"):
            kl_coefficient(n, "l1")
    with pytest.raises(ValueError, match="bound must be one of"):
        VBoNReward(word_count, cdf, "l2")
    with pytest.raises(ValueError, match="needs ref_logp_fn"):
        VBoNReward(word_count, cdf, "exact")
    with pytest.raises(ValueError, match="must be callable"):
        VBoNReward("reward-model", cdf)
    with pytest.raises(ValueError, match="NaN for 1 of 1"):
        VBoNReward(lambda prompts, completions: [math.nan], cdf)(["p"], ["a"])


# ---- the objectives by enumeration -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 16])
def test_the_exact_objective_leads_to_best_of_n(n):
    strings = small_strings()
    assert kl(optimum(strings, "exact", n), bon_logp(strings, n)) < 1e-12
    assert kl(optimise(strings, "exact", n, steps=200, lr=0.1)[0], bon_logp(strings, n)) < 1e-8


def test_every_objective_is_climbed_to_its_closed_form():
    strings = small_strings(1)
    for objective in ("l1", "exact", "jensen", "kl-rl"):
        logp, values = optimise(strings, objective, 4, 0.7, steps=300, lr=0.1)
        assert kl(logp, optimum(strings, objective, 4, 0.7)) < 1e-10
        assert all(later >= earlier - 1e-12 for earlier, later in itertools.pairwise(values))


def test_the_objectives_are_lower_bounds_of_each_other():
    """E log π_bon + H is at least the i = 1 bound and Jensen's, for any policy."""
    strings, n = small_strings(2), 4
    policy = torch.randn(64, dtype=torch.double, generator=torch.Generator().manual_seed(0)).log_softmax(0)
    J = -kl(policy, bon_logp(strings, n))
    for objective in ("l1", "jensen"):
        reward, beta = payoff(strings, objective, n, 1.0)
        keep = torch.arange(64) != strings.rewards.argmin()  # its log F is a floor, no bound
        inside = torch.where(keep, policy, -torch.inf).log_softmax(0)
        value = (inside.exp() * reward).sum().item() / beta - kl(inside, strings.ref_logp)
        constant = (
            math.log(n) if objective == "l1" else math.log(n) + np.mean([math.log(math.comb(n, i)) for i in range(1, n + 1)])
        )
        assert value + constant <= -kl(inside, bon_logp(strings, n)) + 1e-9
    assert J <= 0


def test_vbon_ignores_the_scale_of_rewards_and_kl_rl_does_not():
    strings = small_strings(3)
    twin = Strings(strings.ref_logp, strings.rewards.exp())
    for bound in ("l1", "exact", "jensen"):
        assert torch.equal(optimise(strings, bound, 4, steps=20)[0], optimise(twin, bound, 4, steps=20)[0])
    assert not torch.allclose(optimise(strings, "kl-rl", steps=20)[0], optimise(twin, "kl-rl", steps=20)[0], atol=1e-3)


def test_at_the_same_kl_the_tilt_of_the_raw_reward_has_the_highest_mean_reward_and_is_matched():
    strings = small_strings(4)
    ours = optimum(strings, "l1", 8)
    tilt, beta = tilt_at_kl(strings, kl(ours, strings.ref_logp))
    assert kl(tilt, strings.ref_logp) == pytest.approx(kl(ours, strings.ref_logp), rel=1e-9)
    assert (tilt.exp() * strings.rewards).sum() >= (ours.exp() * strings.rewards).sum()
    teacher = bon_logp(strings, 8)
    assert kl(ours, teacher) < kl(best_tilt(strings, teacher)[0], teacher)
    assert beta > 0


def test_a_chain_counted_from_text():
    start, moves = counted_chain("abababac", 3, smoothing=0.0)
    assert start.tolist() == [0.5, 0.375, 0.125]  # a, b, all else
    assert moves[0].tolist() == [0, 0.75, 0.25]
    assert chain(*counted_chain("hello world", 8), 4).exp().sum().item() == pytest.approx(1, abs=1e-12)


def test_win_rate_and_winners_by_hand():
    strings = Strings(torch.tensor([0.5, 0.5]).double().log(), torch.tensor([0.0, 1.0]).double())
    assert win_rate(strings.ref_logp, strings) == pytest.approx(0.5)
    assert win_rate(torch.tensor([0.0, 1.0]).double().log(), strings) == pytest.approx(0.75)

    class Table:
        prompts, texts, rewards = ("p",), [["a", "b", "c", "d", "e"]], np.array([[1.0, 2.0, 4.0, 3.0, 9.0]])

    assert winners(Table, 2) == [["b", "c"]]
    with pytest.raises(ValueError, match="too few for the best of 6"):
        winners(Table, 6)


def test_the_check_by_drawing_notices_a_wrong_distribution(monkeypatch):
    strings = small_strings(5)
    tied = Strings(strings.ref_logp, strings.rewards.round())
    assert simulated(tied, 4, 100_000, seed=0) < 5
    wrong = bon_logp(tied, 5)
    monkeypatch.setattr("assay.alignment.vbon.arms.bon_logp", lambda strings, n: wrong)
    assert simulated(tied, 4, 100_000, seed=0) > 50


# ---- the study ---------------------------------------------------------------------------------------------------------


def reviews(**frontiers):
    """A replicate whose arms have these points ``[(KL, win rate), …]``."""
    outcomes = {
        name.replace("_", "-"): Outcome({}, {"frontier": tuple(zip(*points, strict=True))})
        for name, points in frontiers.items()
    }
    return Replicate("reviews/0", 0, VBoNStudyConfig(), outcomes)


def tilt(kl):
    """The optimum for a Gaussian reward at that KL."""
    return kl, NormalDist().cdf(math.sqrt(kl))


def finding(text, *replicates):
    (claim,) = [claim for claim in study.claims if text in claim.text]
    return judge(claim, replicates)


def test_the_gain_at_the_same_kl_is_none_for_a_rival_on_the_same_curve_however_far_apart_its_points():
    few = [tilt(0.1), tilt(4.0)]
    assert matched_gain(reviews(vbon=[tilt(0.5), tilt(2.0)], kl_rl=few)) == pytest.approx(0, abs=1e-9)
    assert matched_gain(reviews(vbon=[tilt(0.05)], kl_rl=few)) == pytest.approx(0, abs=1e-9)  # between the reference and them
    # best-of-N-shaped policies: .768, .863 and .950 at ½, 1 and 2 nats
    assert matched_gain(reviews(vbon=[(0.5, 0.768), (1, 0.863), (2, 0.950)], kl_rl=few)) == pytest.approx(1.9, abs=0.1)


def test_a_point_is_on_the_front_unless_a_trained_one_has_less_kl_and_more_wins():
    sft = [(0.1, 0.55)]
    assert pareto_lead(reviews(vbon=[(0.5, 0.7), (2, 0.9)], kl_rl=[(0.6, 0.65), (3, 0.95)], bon_sft=sft)) == 0
    assert pareto_lead(reviews(vbon=[(0.5, 0.7), (2, 0.9)], kl_rl=[(0.6, 0.65), (1, 0.95)], bon_sft=sft)) == -0.5
    assert pareto_lead(reviews(vbon=[(0.5, 0.7)], kl_rl=[(0.6, 0.65)], bon_sft=[(0.6, 0.55)])) == 1


def test_what_reviews_lack_closes_the_claims_about_reviews_alone():
    assert not study.gates
    weak = reviews(vbon=[(0.1, 0.52), (0.5, 0.7)], kl_rl=[(0.01, 0.5), (1, 0.6)], bon_sft=[(0.1, 0.5)])
    exact = Replicate("exact/0", 0, VBoNStudyConfig(), {"vbon": Outcome({"order_change": 0.0})})
    assert finding("to the bit", weak, exact).verdict is Verdict.HOLDS
    assert "vBoN has learnt" in finding("wins at least as often as KL-RL", weak, exact).reason
    assert "vBoN has learnt" in finding("share of its points", weak, exact).reason
    apart = reviews(vbon=[(0.1, 0.6), (0.5, 0.7)], kl_rl=[(0.2, 0.5), (1, 0.6)], bon_sft=[(0.1, 0.5)])
    assert "bracket" in finding("wins at least as often as KL-RL", apart, exact).reason
    assert finding("share of its points", apart, exact).verdict is Verdict.HOLDS


def test_the_enumerated_trial_judges_every_n_by_the_point_meant_for_it():
    config = VBoNStudyConfig(exact_ns=(2, 4), exact_betas=(4.0, 1.0), exact_steps=200, draws=20_000, headline=4)
    strings = small_strings(6)
    found = {}
    for name, arm in {"vbon": vbon, "vbon-exact": vbon_exact, "kl-rl": kl_rl, "bon-sft": bon_sft, "bon": bon}.items():
        log = SimpleNamespace(arm=name, seed=0, metric=lambda *_: None)
        found[name] = exact_trial(arm, strings, config, log)
    for n in (2, 4):
        assert found["vbon"][f"to_bon@{n}"] == pytest.approx(kl(optimum(strings, "l1", n), bon_logp(strings, n)), rel=1e-6)
        assert found["vbon-exact"][f"to_bon@{n}"] < 1e-9
    assert found["bon"]["to_bon@2"] == 0
    assert found["vbon"]["order_change"] == 0 < 1e-3 < found["kl-rl"]["order_change"]
    assert found["vbon"]["kl"] == found["vbon"]["kl@4"]
    assert found["bon"]["sum_error_tied"] < 1e-12
    assert found["bon"]["simulation_tied"] < 5
    with pytest.raises(NotApplicable, match="on real text"):
        vbon_exact(Task((4,), (1.0,), 4, 1))


def test_winners_are_not_compared_with_the_answers_they_beat_to_win():
    table = np.array([[1.0, 2.0, 4.0, 3.0]])
    winners = np.array([[2.0, 4.0]])  # of 1, 2 and of 4, 3
    assert winners_win_rate(winners, table, 2) == 0.5  # 2 loses to both of 4, 3; 4 beats 1 and 2
    with pytest.raises(ValueError, match="4 answers a prompt leave none that the best of 4"):
        winners_win_rate(winners[:, 1:], table, 4)
