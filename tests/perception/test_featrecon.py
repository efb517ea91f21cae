"""FeatRecon's geometry, statistics and losses: against brute force, in limits, and with bad input."""

import copy
import io
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

from assay.perception import BalancedSupConLoss, FeatReconLoss, FeatureReconstructor, optimal_centers, simplex_angle
from assay.perception.featrecon.geometry import (
    aligned_simplex,
    angle_between,
    cap_overlap,
    mean_cosine,
    points_at,
    simplex_gap,
    truncated_normal,
)
from assay.perception.featrecon.losses import top_up
from assay.perception.featrecon.ring import fill, remember, ring_quantile
from assay.perception.featrecon.theory import tail_cosines


def unit(n, d, seed=0, dtype=torch.float32):
    return F.normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype), dim=1)


def clusters(counts, d=16, spread=0.5, seed=0):
    """Unit features around random unit centres."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.repeat_interleave(torch.as_tensor(counts))
    centers = unit(len(counts), d, seed + 1)
    noise = torch.randn(len(y), d, generator=generator) * spread / math.sqrt(d)
    return F.normalize(centers[y] + noise, dim=1), y


# ---- geometry ----------------------------------------------------------------------------------------------------------


def test_angles_keep_their_digits_at_both_ends():
    mu = torch.tensor([1.0, 0.0], dtype=torch.float32)
    for angle in (1e-4, 0.3, math.pi / 2, 3.0, math.pi - 1e-4):
        z = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64).float()
        assert angle_between(mu, z).item() == pytest.approx(angle, rel=1e-6)
    assert angle_between(mu, mu) == 0


@pytest.mark.parametrize(("K", "d"), [(2, 2), (3, 2), (5, 9), (10, 64)])
def test_the_aligned_simplex_is_one_and_is_the_nearest(K, d):
    centers = unit(K, d, seed=K)
    T = aligned_simplex(centers)
    gram = torch.full((K, K), -1 / (K - 1)).fill_diagonal_(1)
    torch.testing.assert_close(T @ T.T, gram, atol=1e-5, rtol=0)
    torch.testing.assert_close(aligned_simplex(T), T, atol=1e-5, rtol=0)  # a simplex is nearest to itself
    assert simplex_gap(T) < 1e-5
    agreement = (T * centers).sum()
    for seed in range(20):  # no rotation of it agrees better with the centres
        Q = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(seed)))[0]
        assert (T @ Q * centers).sum() <= agreement + 1e-5
    rotation = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(99)))[0]
    torch.testing.assert_close(aligned_simplex(centers @ rotation), T @ rotation, atol=1e-4, rtol=0)


def test_collapsed_centres_have_no_nearest_simplex():
    assert aligned_simplex(F.normalize(torch.ones(4, 8) + torch.eye(4, 8)[[0, 1, 2, 2]], dim=1)) is None
    assert aligned_simplex(torch.ones(4, 8) / math.sqrt(8)) is None
    with pytest.raises(ValueError, match="needs at least 4 feature dimensions, there are 3"):
        aligned_simplex(unit(5, 3))


def test_caps_of_half_the_simplex_angle_are_disjoint_and_linearly_separable():
    K, d = 6, 12
    T = aligned_simplex(unit(K, d))
    radius = simplex_angle(K) / 2
    y = torch.arange(K).repeat_interleave(200)
    z = points_at(T[y], torch.full((len(y),), 0.999 * radius), torch.Generator().manual_seed(0))
    assert cap_overlap(z, y, T, torch.full((K,), radius)) == 0
    assert ((z @ T.T).argmax(1) == y).all()  # the bisecting hyperplanes part them
    assert cap_overlap(z, y, T, torch.full((K,), 2.1 * radius)) > 0.3
    radii = torch.linspace(0.9, 2, K)
    by_hand = [float(angle_between(z[i], T[k]) <= radii[k]) for i in range(len(z)) for k in range(K) if k != y[i]]
    assert cap_overlap(z, y.int(), T, radii) == pytest.approx(np.mean(by_hand))
    assert cap_overlap(z, y, T, torch.full((K,), math.pi)) == 1  # of every foreign cap, not of rows with any


@pytest.mark.parametrize("function", [aligned_simplex, simplex_gap])
@pytest.mark.parametrize("centers", [torch.ones(1, 4), torch.ones(4), torch.full((3, 4), math.nan)])
def test_what_centres_must_be(function, centers):
    with pytest.raises(ValueError, match="centers must be finite"):
        function(centers)


def test_mean_cosine_against_all_pairs():
    centers = unit(7, 5)
    pairs = [float(centers[i] @ centers[j]) for i in range(7) for j in range(i)]
    assert mean_cosine(centers) == pytest.approx(np.mean(pairs), abs=1e-6)
    with pytest.raises(ValueError, match="at least 2 centres"):
        mean_cosine(centers[:1])


def test_points_lie_at_their_angles_with_length_one_in_uniform_directions():
    mu = unit(1, 32).expand(4000, -1)
    theta = torch.linspace(0, 3, 4000)
    z = points_at(mu, theta, torch.Generator().manual_seed(0))
    assert (torch.linalg.vector_norm(z.double(), dim=1) - 1).abs().max() < 2e-7
    torch.testing.assert_close(angle_between(z, mu), theta, atol=1e-5, rtol=1e-5)
    tangent = z - (z * mu).sum(1, keepdim=True) * mu
    covariance = F.normalize(tangent[1:], dim=1).T @ F.normalize(tangent[1:], dim=1) / 3999
    expected = (torch.eye(32) - mu[0][:, None] * mu[0]) / 31
    assert (covariance - expected).abs().max() < 0.005


# Inside, cut on one side, far below and far above the interval (where single precision has no mass left).
@pytest.mark.parametrize(
    ("mean", "std", "high"), [(0.5, 0.1, 1.0), (0.5, 0.4, 0.6), (-0.6, 0.1, 1.0), (1.6, 0.1, 0.8), (0.2, 2.0, 0.5)]
)
def test_truncated_normals_follow_scipys(mean, std, high):
    n = 20_000
    draw = truncated_normal(
        *(torch.full((n,), v, dtype=torch.float64) for v in (mean, std, high)), torch.Generator().manual_seed(0)
    )
    assert draw.min() >= 0
    assert draw.max() <= high
    law = stats.truncnorm(-mean / std, (high - mean) / std, loc=mean, scale=std)
    assert stats.kstest(draw.numpy(), law.cdf).pvalue > 1e-3


def test_truncated_normals_without_spread_or_mass_are_the_clipped_mean():
    mean = torch.tensor([0.3, 2.0, -1.0, 50.0, -50.0])
    std = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.1])
    draw = truncated_normal(mean, std, torch.full((5,), 0.9))
    assert draw.tolist() == pytest.approx([0.3, 0.9, 0.0, 0.9, 0.0])
    assert torch.isfinite(truncated_normal(torch.full((1000,), 3.0), torch.full((1000,), 0.1), torch.full((1000,), 0.8))).all()


# ---- theorem 2 ---------------------------------------------------------------------------------------------------------


def test_tail_centres_collapse_as_the_ratio_grows_and_not_at_a_low_temperature():
    assert tail_cosines([1, 3, 10, 30, 100]) == pytest.approx([-1 / 3, -0.087, 0.347, 0.890, 1.0], abs=2e-3)
    assert tail_cosines([10, 100, 300], tau=0.5) == pytest.approx([0.013, 0.63, 0.98], abs=5e-3)
    assert tail_cosines([1000], tau=0.1)[0] == pytest.approx(-0.006, abs=2e-3)


def test_optimal_centres_beat_every_perturbation():
    counts = torch.tensor([50, 5, 5, 1])
    u = optimal_centers(counts, tau=0.7)

    def loss(u):
        total = 0.0
        for k, n in enumerate(counts.tolist()):
            weights = [m - (j == k) for j, m in enumerate(counts.tolist())]
            total += n / 61 * math.log(sum(w * math.exp(float(u[k] @ u[j]) / 0.7) for j, w in enumerate(weights)))
        return total

    best = loss(u)
    for seed in range(30):
        noise = torch.randn(u.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert loss(F.normalize(u + 0.05 * noise, dim=1)) > best
    with pytest.raises(ValueError, match="tau must be positive"):
        optimal_centers(counts, tau=0)
    with pytest.raises(ValueError, match="class 1 has 0"):
        optimal_centers([5, 0])


# ---- statistics --------------------------------------------------------------------------------------------------------


def test_the_ring_keeps_the_last_angles_of_each_class():
    size, ring, rows = torch.tensor([3, 5]), torch.zeros(2, 5), torch.zeros(2, dtype=torch.long)
    generator, history = torch.Generator().manual_seed(0), {0: [], 1: []}
    for _ in range(30):
        y = torch.randint(2, (int(torch.randint(1, 12, (), generator=generator)),), generator=generator)
        angle = torch.rand(len(y), generator=generator)
        for k, a in zip(y.tolist(), angle.tolist(), strict=True):
            history[k].append(a)
        remember(ring, rows, size, angle, y, torch.bincount(y, minlength=2))
        for k in (0, 1):
            held = min(len(history[k]), int(size[k]))
            assert sorted(ring[k, :held].tolist()) == pytest.approx(sorted(history[k][-held:] if held else []))
        quantiles = ring_quantile(ring, rows, size, 0.9)
        for k in (0, 1):
            if history[k]:
                assert quantiles[k].item() == pytest.approx(np.quantile(history[k][-int(size[k]) :], 0.9), abs=1e-6)
    assert ring_quantile(ring, torch.zeros_like(rows), size, 0.9).tolist() == [0, 0]


def test_a_whole_data_set_in_the_ring_keeps_its_quantiles():
    y = torch.tensor([0] * 1000 + [1] * 7)
    angle = torch.rand(1007, generator=torch.Generator().manual_seed(0))
    ring, rows, size = torch.zeros(2, 256), torch.zeros(2, dtype=torch.long), torch.tensor([256, 8])
    fill(ring, rows, size, angle, y, torch.bincount(y))
    for k, tolerance in ((0, 0.01), (1, 1e-6)):
        assert ring_quantile(ring, rows, size, 0.95)[k].item() == pytest.approx(np.quantile(angle[y == k], 0.95), abs=tolerance)


def test_fitted_statistics_against_the_formulas():
    counts = [80, 60, 6, 4, 1]
    z, y = clusters(counts)
    rec = FeatureReconstructor(5, 16, counts, alpha=0.9, head_classes=[0, 1], q=2, shrinkage=10, bound=False).fit(z, y)
    mean, std, seen = [], [], []
    for k in range(5):
        mu = F.normalize(z[y == k].sum(0), dim=0)
        torch.testing.assert_close(rec.centers[k], mu, atol=1e-5, rtol=0)
        phi = angle_between(z[y == k], mu)
        mean.append(phi.mean().item())
        std.append(phi.std(correction=0).item())
        seen.append(np.quantile(phi, 0.9))
    for k in (0, 1):
        assert rec.mean_angle[k].item() == pytest.approx(mean[k], abs=1e-4)
        assert rec.radii[k].item() == pytest.approx(seen[k], abs=1e-4)
    for k in (2, 3, 4):
        gamma = counts[k] / (counts[k] + 10) if counts[k] > 1 else 0.0  # one row: the heads' statistics entirely
        a = gamma * mean[k] + (1 - gamma) * (mean[0] + mean[1]) / 2
        s = gamma * std[k] + (1 - gamma) * (std[0] + std[1]) / 2
        assert rec.mean_angle[k].item() == pytest.approx(a, abs=1e-4)
        assert rec.std_angle[k].item() == pytest.approx(s, abs=1e-4)
        assert rec.radii[k].item() == pytest.approx(a + stats.norm.ppf(0.9) * s, abs=1e-4)


def test_a_tail_class_borrows_from_the_heads_with_the_closest_centres():
    centers = F.normalize(torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0.1, 1.0, 0.2, 0]]), dim=1)
    y = torch.tensor([0] * 200 + [1] * 200 + [2])
    spread = torch.tensor([0.02, 0.3, 0.0])
    z = F.normalize(centers[y] + spread[y][:, None] * torch.randn(401, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    rec = FeatureReconstructor(3, 4, [200, 200, 1], q=1).fit(z, y)
    assert rec.mean_angle[2] == rec.mean_angle[1]
    assert rec.mean_angle[2] > 5 * rec.mean_angle[0]


def test_auto_heads_are_above_the_average_and_a_balanced_set_has_no_tail():
    assert FeatureReconstructor(4, 8, [90, 40, 5, 1]).is_head.tolist() == [True, True, False, False]
    assert FeatureReconstructor(3, 8, [7, 7, 7]).is_head.all()
    assert FeatureReconstructor(4, 8, [5, 90, 1, 40], head_classes=np.int64(2)).is_head.tolist() == [False, True, False, True]
    assert FeatureReconstructor(4, 8, [5, 90, 1, 40], head_classes=2).is_head.tolist() == [False, True, False, True]


def test_running_statistics_approach_those_of_the_whole_set():
    counts = [600, 300, 30]
    z, y = clusters(counts)
    whole = FeatureReconstructor(3, 16, counts, alpha=0.9).fit(z, y)
    running = FeatureReconstructor(3, 16, counts, alpha=0.9, momentum=0.99)
    generator = torch.Generator().manual_seed(0)
    assert not running.ready
    for _ in range(4):
        for rows in torch.randperm(930, generator=generator).split(93):
            running.update(z[rows], y[rows])
    assert running.ready
    assert int(running.refreshes) == 4
    assert angle_between(running.centers, whole.centers).max() < 0.03
    torch.testing.assert_close(running.mean_angle, whole.mean_angle, atol=0.02, rtol=0)
    torch.testing.assert_close(running.radii, whole.radii, atol=0.06, rtol=0)


def test_a_class_that_a_batch_lacks_keeps_its_statistics():
    z, y = clusters([20, 20, 20])
    rec = FeatureReconstructor(3, 16, [20, 20, 20])
    rec.update(z, y)
    before = rec.sum_z[2].clone(), rec.weight[2].clone()
    rec.update(z[y < 2], y[y < 2])
    assert torch.equal(rec.sum_z[2], before[0])
    assert torch.equal(rec.weight[2], before[1])


def test_radii_stop_at_half_the_simplex_angle_and_two_classes_have_none():
    z, y = unit(300, 24), torch.arange(300) % 6  # no class structure: angles near 90°
    half = simplex_angle(6) / 2
    assert FeatureReconstructor(6, 24, [50] * 6).fit(z, y).radii.tolist() == pytest.approx([half] * 6)
    free = FeatureReconstructor(6, 24, [50] * 6, bound=False).fit(z, y)
    assert (free.radii > half).all()
    two = FeatureReconstructor(2, 24, [150, 150])
    assert two.half_simplex == pytest.approx(math.pi / 2)
    with_bound, spread = two.fit(z, y % 2).radii, two.spread
    torch.testing.assert_close(with_bound, spread.clamp_max(math.pi / 2))


# ---- generation --------------------------------------------------------------------------------------------------------


def test_samples_have_their_counts_lie_in_their_caps_and_follow_the_seed():
    z, y = clusters([100, 40, 8], spread=0.8)
    rec = FeatureReconstructor(3, 16, [100, 40, 8]).fit(z, y)
    new, owner = rec.sample([3, 0, 5000], torch.Generator().manual_seed(0))
    assert torch.bincount(owner).tolist() == [3, 0, 5000]
    assert (torch.linalg.vector_norm(new.double(), dim=1) - 1).abs().max() < 2e-7
    angle = angle_between(new, rec.centers[owner])
    assert (angle <= rec.radii[owner] + 1e-5).all()
    mean, std, r = (x[2].item() for x in (rec.mean_angle, rec.std_angle, rec.radii))
    law = stats.truncnorm(-mean / std, (r - mean) / std, loc=mean, scale=std)
    assert stats.kstest(angle[owner == 2].double().numpy(), law.cdf).pvalue > 1e-3
    assert torch.equal(rec.sample([3, 0, 5000], torch.Generator().manual_seed(0))[0], new)
    assert not torch.equal(rec.sample([3, 0, 5000], torch.Generator().manual_seed(1))[0], new)
    assert torch.bincount(rec.sample(100)[1], minlength=3).tolist() == [0, 60, 92]
    assert len(rec.sample(50)[1]) == 10 + 42


def test_eta_moves_the_centres_drawn_around_to_the_simplex_over_its_ramp():
    z, y = clusters([50, 50, 50])
    gaps = [simplex_gap(FeatureReconstructor(3, 16, [50] * 3, eta=eta).fit(z, y).targets) for eta in (0.0, 0.3, 0.6, 1.0)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] == pytest.approx(simplex_gap(FeatureReconstructor(3, 16, [50] * 3).fit(z, y).centers))
    assert gaps[-1] < 1e-5
    rec = FeatureReconstructor(3, 16, [50] * 3, eta=1.0, warmup=2, ramp=4)
    seen = []
    for _ in range(7):
        rec.update(z, y)
        seen.append(simplex_gap(rec.targets))
    assert seen[0] == pytest.approx(simplex_gap(rec.centers), abs=1e-5)  # warming up: not moved
    assert all(b < a for a, b in itertools.pairwise(seen[:5]))
    assert max(seen[4:]) < 1e-5
    collapsed = FeatureReconstructor(3, 16, [50] * 3, eta=1.0).fit(z[:1].expand(150, -1), y)
    torch.testing.assert_close(collapsed.targets, collapsed.centers)  # which simplex is not decided: left alone


def test_separability_says_when_tails_collapse():
    T = aligned_simplex(unit(6, 12))
    y = torch.arange(6).repeat_interleave(torch.tensor([100, 100, 5, 5, 5, 5]))

    def after(centers):
        noise = 0.05 * torch.randn(len(y), 12, generator=torch.Generator().manual_seed(0))
        return FeatureReconstructor(6, 12, torch.bincount(y)).fit(F.normalize(centers[y] + noise, dim=1), y).separability()

    good, bad = after(T), after(T[[0, 1, 2, 2, 2, 2]])
    assert good["simplex_gap"] < 0.1
    assert good["overlapping_pairs"] == 0
    assert good["smallest_gap"] > 0
    assert good["tail_cosine"] == pytest.approx(-0.2, abs=0.1)
    assert bad["tail_cosine"] > 0.9
    assert bad["overlapping_pairs"] == pytest.approx(6 / 15)
    assert bad["smallest_gap"] < 0
    with pytest.raises(RuntimeError, match="class 0 has no centre yet"):
        FeatureReconstructor(3, 8, [3, 2, 1]).separability()


def test_class_temperatures_grow_with_the_cap_within_their_limits():
    z, y = clusters([100, 100, 100], spread=0.4)
    rec = FeatureReconstructor(3, 16, [100] * 3).fit(z, y)
    rec.spread.copy_(rec.half_simplex * torch.tensor([0.1, 0.8, 9.0]))
    assert rec.temperatures(0.1).tolist() == pytest.approx([0.05, 0.08, 0.15])
    assert FeatureReconstructor(3, 16, [100] * 3).temperatures(0.1).tolist() == pytest.approx([0.1] * 3)


# ---- losses ------------------------------------------------------------------------------------------------------------


def contrast_by_hand(z, y, columns, labels, tau, balanced):
    """Anchor by anchor, exactly as written."""
    each = []
    for i in range(len(z)):
        others = [j for j in range(len(columns)) if j != i]
        positives = [j for j in others if labels[j] == y[i]]
        if not positives:
            continue
        sims = {j: float(z[i] @ columns[j]) / tau for j in others}
        if balanced:
            denominator = 0.0
            for k in set(labels[others].tolist()):
                members = [j for j in others if labels[j] == k]
                denominator += sum(math.exp(sims[j]) for j in members) / len(members)
        else:
            denominator = sum(math.exp(s) for s in sims.values())
        each.append(-sum(sims[j] - math.log(denominator) for j in positives) / len(positives))
    return sum(each) / len(each)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("extra", [True, False])
def test_contrast_against_loops(balanced, extra):
    z, y = unit(12, 6, dtype=torch.float64), torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4])
    criterion = BalancedSupConLoss(0.3, balanced=balanced)
    if not extra:
        assert criterion(z, y).item() == pytest.approx(contrast_by_hand(z, y, z, y, 0.3, balanced), rel=1e-5)
        return
    more, owner, centers = unit(5, 6, 1, torch.float64), torch.tensor([3, 2, 2, 3, 1]), unit(5, 6, 2, torch.float64)
    columns, labels = torch.cat([z, more, centers]), torch.cat([y, owner, torch.arange(5)])
    expected = contrast_by_hand(z, y, columns, labels, 0.3, balanced)
    assert criterion(z, y, more, owner, centers).item() == pytest.approx(expected, rel=1e-5)


def test_with_classes_of_one_size_averaging_is_a_constant():
    """The anchors' class has n + 1 rows, n without the anchor, every other class n: the denominators differ by n."""
    n = 4
    z, y, more = unit(n + 1, 6), torch.zeros(n + 1, dtype=torch.long), unit(3 * n, 6, 1)
    owner = 1 + torch.arange(3 * n) % 3
    plain, balanced = (BalancedSupConLoss(0.5, balanced=b)(z, y, more, owner).item() for b in (False, True))
    assert plain - balanced == pytest.approx(math.log(n), rel=1e-5)
    alone = BalancedSupConLoss(0.5)(unit(2, 4), torch.tensor([0, 0]))
    assert alone.item() == pytest.approx(0.0, abs=1e-6)  # one positive and nothing else


def test_the_number_of_rows_of_a_foreign_class_does_not_matter():
    """Fifty equal rows of a head class weigh in the denominator like one; in the plain loss they do not."""
    z, y, foreign = unit(2, 8), torch.tensor([0, 0]), unit(1, 8, 5)

    def beside(criterion, rows):
        return criterion(z, y, foreign.expand(rows, -1), torch.ones(rows, dtype=torch.long)).item()

    balanced, plain = BalancedSupConLoss(0.5), BalancedSupConLoss(0.5, balanced=False)
    assert beside(balanced, 50) == pytest.approx(beside(balanced, 1), rel=1e-5)
    assert beside(plain, 50) > beside(plain, 1) + 1


def test_gradients_of_the_contrast():
    y = torch.tensor([0, 0, 1, 1, 2, 0])
    more, owner = unit(3, 4, 7), torch.tensor([2, 1, 5])
    z = unit(6, 4, dtype=torch.float64).requires_grad_()  # double precision stays double
    for balanced in (True, False):
        criterion = BalancedSupConLoss(0.5, balanced=balanced, check=False)
        assert torch.autograd.gradcheck(lambda rows, loss=criterion: loss(rows, y, more, owner), z)


def test_rows_without_a_positive_are_left_out_with_zero_gradient():
    z = unit(3, 4).requires_grad_()
    loss = BalancedSupConLoss()(z, torch.arange(3))
    loss.backward()
    assert loss == 0
    assert torch.equal(z.grad, torch.zeros(3, 4))
    alone = unit(1, 4).requires_grad_()
    BalancedSupConLoss()(alone, torch.tensor([0])).backward()
    assert torch.equal(alone.grad, torch.zeros(1, 4))


def test_class_temperatures_enter_row_by_row():
    z, y = unit(8, 5), torch.arange(8) % 2
    same = BalancedSupConLoss(9.0)(z, y, taus=torch.tensor([0.3, 0.3]))
    assert same.item() == pytest.approx(BalancedSupConLoss(0.3)(z, y).item(), rel=1e-6)
    mixed = BalancedSupConLoss(9.0)(z, y, taus=torch.tensor([0.3, 0.6]))
    assert mixed.item() != pytest.approx(same.item(), rel=1e-3)


def test_low_temperatures_do_not_overflow():
    z, y = unit(64, 8).requires_grad_(), torch.arange(64) % 4
    loss = BalancedSupConLoss(1e-3)(z, y)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(z.grad).all()


def reconstruction(counts=(40, 20, 4), d=8, **options):
    z, y = clusters(list(counts), d)
    rec = FeatureReconstructor(len(counts), d, counts, **options)
    return FeatReconLoss(rec, counts), rec, z, y


def test_the_whole_loss_is_its_parts():
    criterion, rec, z, y = reconstruction()
    logits = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    prior = torch.tensor([40, 20, 4]) / 64
    first = criterion(logits, z, y)
    assert first["classification"].item() == pytest.approx(F.cross_entropy(logits + prior.log(), y).item(), rel=1e-5)
    assert first["contrast"].item() == pytest.approx(BalancedSupConLoss()(z, y).item(), rel=1e-5)  # nothing known yet
    assert first["synthetic"] == 0
    rec.fit(z, y)
    second = criterion(logits, z, y, torch.Generator().manual_seed(3))
    wanted = top_up(y, 3, 128)
    assert wanted.tolist() == [0, 20, 36]
    new, owner = rec.sample(wanted, torch.Generator().manual_seed(3))
    expected = BalancedSupConLoss()(z, y, new, owner, rec.centers)
    assert second["contrast"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert second["synthetic"] == 56
    assert second["loss"].item() == pytest.approx(second["classification"].item() + expected.item(), rel=1e-5)
    criterion.kappa = 0.25
    again = criterion(logits, z, y, torch.Generator().manual_seed(3))
    assert again["loss"].item() == pytest.approx(second["classification"].item() + 0.25 * expected.item(), rel=1e-5)


def test_views_are_stacked():
    criterion, rec, z, y = reconstruction()
    rec.fit(z, y)
    criterion.budget = 0.0
    logits = torch.zeros(64, 3)
    twice = criterion(torch.cat([logits, logits]), torch.cat([z, z]), y)
    assert twice["loss"].item() == pytest.approx(
        criterion(torch.cat([logits] * 2), torch.cat([z] * 2), y.repeat(2))["loss"].item()
    )


def test_synthetic_features_carry_no_gradient_and_real_ones_do():
    criterion, rec, z, y = reconstruction()
    rec.fit(z, y)
    z = z.requires_grad_()
    criterion(torch.zeros(64, 3), z, y)["loss"].backward()
    assert z.grad.abs().sum() > 0
    assert not any(p.requires_grad for p in criterion.parameters())
    assert not rec.sample([1, 1, 1])[0].requires_grad


def test_topping_up_lifts_to_one_level_within_the_budget():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        K = int(torch.randint(2, 20, (), generator=generator))
        y = torch.randint(K, (30,), generator=generator).clamp_max(int(torch.randint(K, (), generator=generator)))
        budget = int(torch.randint(0, 100, (), generator=generator))
        rows = torch.bincount(y, minlength=K)
        wanted = top_up(y, K, budget, generator)
        full = (rows.max() - rows).sum()
        assert wanted.sum() == min(budget, full)
        assert (wanted >= 0).all()
        lifted = (rows + wanted)[wanted > 0]
        if len(lifted):
            assert lifted.max() - lifted.min() <= 1
            assert (rows + wanted).max() == rows.max()
    assert top_up(torch.tensor([0, 0]), 3, 9, allowed=torch.tensor([True, True, False])).tolist() == [0, 2, 0]


def test_training_with_it_separates_the_tail():
    """Six noisy clusters: the projection learns to tell them apart, whatever their counts."""
    torch.manual_seed(0)
    counts = [60, 30, 12, 6, 4, 3]
    x, y = clusters(counts, 12, spread=0.6)
    net, head = nn.Linear(12, 8), nn.Linear(8, 6)
    rec = FeatureReconstructor(6, 8, counts)
    criterion = FeatReconLoss(rec, counts)
    optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()], 0.03)
    losses, cosines = [], []
    for _ in range(60):
        h = net(x)
        z = F.normalize(h, dim=1)
        terms = criterion(head(h), z, y)
        optimizer.zero_grad()
        terms["loss"].backward()
        optimizer.step()
        rec.update(z, y)
        losses.append(terms["loss"].item())
        cosines.append(rec.separability()["tail_cosine"])
    assert terms["synthetic"] > 100
    assert losses[-1] < 0.5 * losses[0]
    assert cosines[-1] < cosines[0]
    assert (head(net(x)).argmax(1) == y).double().mean() > 0.9


# ---- as part of a program ----------------------------------------------------------------------------------------------


def test_state_survives_saving_copying_pickling_and_other_dtypes():
    criterion, rec, z, y = reconstruction()
    rec.fit(z, y)
    file = io.BytesIO()
    torch.save(criterion.state_dict(), file)
    file.seek(0)
    other, *_ = reconstruction()
    other.load_state_dict(torch.load(file, weights_only=True))
    for twin in (other, copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion))):
        a, b = (c(torch.zeros(64, 3), z, y, torch.Generator().manual_seed(1))["loss"] for c in (criterion, twin))
        assert torch.equal(a, b)
        assert twin.reconstructor.ready
    double = copy.deepcopy(criterion).double()
    loss = double(torch.zeros(64, 3, dtype=torch.float64), z.double(), y)["loss"]
    assert torch.isfinite(loss)
    double.reconstructor.update(z.double(), y)
    assert "eta=0" in repr(rec)
    assert "kappa=1" in repr(criterion)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_a_narrow_model_the_statistics_stay_wide(dtype):
    criterion, rec, z, y = reconstruction()
    rec.update(z, y)
    twin = copy.deepcopy(criterion)
    nn.ModuleList([twin]).to(dtype)
    assert all(torch.equal(a, b) for a, b in zip(criterion.state_dict().values(), twin.state_dict().values(), strict=True))
    assert twin.double().reconstructor.sum_z.dtype == torch.float64
    twin.to(dtype)
    twin.reconstructor.update(z.to(dtype), y)
    terms = twin(torch.zeros(64, 3, dtype=dtype), F.normalize(z, dim=1).to(dtype), y)
    assert terms["synthetic"] > 0
    assert torch.isfinite(terms["loss"])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_of_every_integer_type(dtype):
    def losses(y):
        criterion, rec, z, _ = reconstruction()
        rec.update(z, y)
        first = criterion(torch.zeros(64, 3), z, y, torch.Generator().manual_seed(0))["loss"]
        rec.fit(z, y)
        return [first, criterion(torch.zeros(64, 3), z, y, torch.Generator().manual_seed(0))["loss"]]

    y = reconstruction()[3]
    assert losses(y.to(dtype)) == losses(y)
    z = unit(64, 8)
    assert BalancedSupConLoss()(z, y.to(dtype), z, y.to(dtype)) == BalancedSupConLoss()(z, y, z, y)


@pytest.mark.slow
def test_compiled_it_gives_the_same():
    criterion, rec, z, y = reconstruction()
    rec.fit(z, y)
    criterion.budget = 0.0
    expected = criterion(torch.zeros(64, 3), z, y)["loss"]
    found = torch.compile(criterion, backend="eager")(torch.zeros(64, 3), z, y)["loss"]
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_under_autocast_the_contrast_keeps_its_digits():
    criterion, rec, z, y = reconstruction()
    rec.fit(z, y)
    criterion.budget = 0.0
    plain = criterion(torch.zeros(64, 3), z, y)["contrast"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert criterion(torch.zeros(64, 3), z, y)["contrast"].item() == pytest.approx(plain.item(), rel=1e-6)
        narrow = criterion(torch.zeros(64, 3), z.bfloat16(), y)["contrast"]
    assert narrow.item() == pytest.approx(plain.item(), rel=0.02)


# ---- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_counts": [5, 0, 1]}, "class 1 has 0"),
        ({"class_counts": [5, -2, 1]}, "class 1 has -2"),
        ({"class_counts": [5, 1.5, 1]}, "class 1 has 1.5"),
        ({"class_counts": [5.0, math.nan, 1]}, "class 1 has nan"),
        ({"class_counts": [5, 1]}, "must hold 3 numbers, got 2"),
        ({"class_counts": [[5, 1, 1]]}, "must be a vector"),
        ({"alpha": 0.0}, r"alpha must lie in \(0, 1\), got 0"),
        ({"alpha": 1.0}, r"alpha must lie in \(0, 1\), got 1"),
        ({"alpha": math.nan}, r"alpha must lie in \(0, 1\), got nan"),
        ({"eta": 1.5}, "eta must lie in"),
        ({"eta": 0.5, "feature_dim": 2, "num_classes": 4, "class_counts": [4, 3, 2, 1]}, "needs feature_dim ≥ 3, got 2"),
        ({"feature_dim": 1}, "feature_dim must be at least 2"),
        ({"momentum": 1.0}, "momentum must lie below 1"),
        ({"shrinkage": -1.0}, "shrinkage must lie in"),
        ({"q": 0}, "q must be at least 1"),
        ({"warmup": 0}, "warmup must be at least 1"),
        ({"warmup": 1.5}, "warmup must be at least 1 and a whole number"),
        ({"feature_dim": 8.5}, "feature_dim must be at least 2 and a whole number"),
        ({"head_classes": "all"}, "head_classes must be 'auto'"),
        ({"head_classes": 0}, "head_classes must name 1 to 3"),
        ({"head_classes": [3]}, r"indices in \[0, 3\)"),
    ],
)
def test_what_a_reconstructor_refuses(options, message):
    settings = {"num_classes": 3, "feature_dim": 8, "class_counts": [5, 2, 1], **options}
    with pytest.raises(ValueError, match=message):
        FeatureReconstructor(**settings)


@pytest.mark.parametrize("method", ["update", "fit"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda z, y: (1.01 * z, y), "unit vectors, a row's length is off by 0.01"),
        (lambda z, y: (z.clone().index_fill_(0, torch.tensor([1, 2]), math.nan), y), "finite, 2 of 7 rows"),
        (lambda z, y: (z[:, :5], y), r"shape \(n, 8\)"),
        (lambda z, y: (z[0], y), r"shape \(n, 8\)"),
        (lambda z, y: (z.long(), y), "floating point of shape"),
        (lambda z, y: (z, y + 1), r"y must lie in \[0, 3\), got 1..3"),
        (lambda z, y: (z, y - 1), r"y must lie in \[0, 3\), got -1"),
        (lambda z, y: (z, y[:-1]), "must hold 7 class indices, got 6"),
        (lambda z, y: (z, y.float()), "class indices, got torch.float32"),
    ],
)
def test_what_statistics_refuse_and_keep(method, change, message):
    rec = FeatureReconstructor(3, 8, [5, 2, 1])
    z, y = unit(7, 8), torch.tensor([0, 1, 2, 0, 0, 1, 0])
    before = copy.deepcopy(rec.state_dict())
    with pytest.raises(ValueError, match=message):
        getattr(rec, method)(*change(z, y))
    assert all(torch.equal(before[k], v) for k, v in rec.state_dict().items())


def test_what_draws_refuse():
    rec = FeatureReconstructor(3, 8, [5, 2, 1])
    with pytest.raises(ValueError, match="class 1 has no centre yet"):
        rec.sample([0, 1, 0])
    rec.update(unit(8, 8), torch.tensor([0, 1, 2, 0, 0, 0, 0, 1]))
    with pytest.raises(ValueError, match="class 2 has -1"):
        rec.sample([0, 1, -1])
    with pytest.raises(ValueError, match="must hold 3 numbers"):
        rec.sample([0, 1])
    with pytest.raises(ValueError, match="counts must be at least 0"):
        rec.sample(-5)
    assert rec.sample([0, 0, 0])[0].shape == (0, 8)
    assert len(rec.sample(np.int64(6))[1]) == len(rec.sample(6)[1]) == 1 + 4 + 5
    with pytest.raises(ValueError, match="at least one row"):
        rec.fit(unit(2, 8)[:0], torch.zeros(0, dtype=torch.long))


def test_what_losses_refuse():
    criterion, rec, z, y = reconstruction()
    logits = torch.zeros(64, 3)
    bad = logits.clone()
    bad[3, 1] = math.nan
    with pytest.raises(ValueError, match="logits must be finite"):
        criterion(bad, z, y)
    with pytest.raises(ValueError, match="unit vectors"):
        criterion(logits, 2 * z, y)
    with pytest.raises(ValueError, match="finite, 1 of 64"):
        criterion(logits, z.index_fill(0, torch.tensor([5]), math.nan), y)
    with pytest.raises(ValueError, match=r"got \(63, 3\) and \(64, 8\)"):
        criterion(logits[:-1], z, y)
    with pytest.raises(ValueError, match=r"for the B = 50 labels"):
        criterion(logits, z, y[:50])
    with pytest.raises(ValueError, match="y must lie in"):
        criterion(logits, z, y + 1)
    with pytest.raises(ValueError, match="as many as the reconstructor has classes, got 2"):
        FeatReconLoss(rec, [5, 2])
    with pytest.raises(ValueError, match="kappa must lie in"):
        FeatReconLoss(rec, [40, 20, 4], kappa=-1)
    contrast = BalancedSupConLoss()
    with pytest.raises(ValueError, match="belong together"):
        contrast(z, y, extra_z=z)
    with pytest.raises(ValueError, match="extra_z must hold unit vectors"):
        contrast(z, y, 3 * z, y)
    with pytest.raises(ValueError, match="centers must be floating point of shape"):
        contrast(z, y, centers=unit(3, 5))
    with pytest.raises(ValueError, match=r"y must lie in \[0, 2\)"):
        contrast(z, y, centers=unit(2, 8))
    with pytest.raises(ValueError, match=r"y must lie in \[0, 2\)"):
        contrast(z, y, taus=torch.ones(2))
    with pytest.raises(ValueError, match="taus must be finite and positive"):
        contrast(z, y, taus=torch.tensor([1.0, 0.0, 1.0]))
    for tau in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="tau must lie in"):
            BalancedSupConLoss(tau)
