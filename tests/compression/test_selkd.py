"""Transport plans against optimal transport's own library, by brute force, at their limits; labels in and out."""

import math

import pytest
import torch
from torch.nn import functional as F

from assay.compression import plan_divergence, predict_open, released_plan, remap_labels, transport_plan
from assay.compression.selkd.plans import column_potential, log_row_mass
from assay.compression.selkd.released import released_plan_loss

B, K, EPS = 32, 6, 4.0


def logits(rows=B, columns=K, seed=0, scale=5.0, dtype=torch.float64):
    return scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def class_counts(rows=B, columns=K, seed=0):
    labels = torch.randint(columns, (rows,), generator=torch.Generator().manual_seed(seed))
    return labels, torch.bincount(labels, minlength=columns).double()


# -- the three constraint sets ------------------------------------------------------------------------------------------


def test_without_column_sums_it_is_ordinary_distillation():
    student, teacher = logits(seed=1).requires_grad_(), logits(seed=2)
    ours = plan_divergence(transport_plan(teacher), transport_plan(student), EPS)
    usual = EPS**2 * F.kl_div(
        (student / EPS).log_softmax(1), (teacher / EPS).softmax(1), reduction="batchmean"
    )  # Hinton's, at T = ε
    torch.testing.assert_close(ours, usual, rtol=0, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(loss, student) for loss in (ours, usual)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_sinkhorn_agrees_with_pot():
    ot = pytest.importorskip("ot")
    z = logits()
    _, b = class_counts()
    plan = transport_plan(z, col_mass=b, n_iter=100).exp()
    peer = ot.sinkhorn(torch.ones(B).numpy(), b.numpy(), (-z).numpy(), EPS, stopThr=1e-14, numItermax=5000)
    torch.testing.assert_close(plan, torch.from_numpy(peer), rtol=0, atol=1e-9)


def test_an_absent_class_has_an_empty_column_and_changes_no_other():
    ot = pytest.importorskip("ot")
    z, present = logits(), [0, 2, 3, 5]
    b = torch.zeros(K, dtype=torch.float64)
    b[present] = torch.tensor([10.0, 4.0, 17.0, 1.0], dtype=torch.float64)
    plan = transport_plan(z, col_mass=b, n_iter=200)
    assert (plan[:, [1, 4]] == -math.inf).all()
    torch.testing.assert_close(plan[:, present], transport_plan(z[:, present], col_mass=b[present], n_iter=200))
    peer = ot.sinkhorn(torch.ones(B).numpy(), b[present].numpy(), (-z[:, present]).numpy(), EPS, stopThr=1e-14)
    torch.testing.assert_close(plan[:, present].exp(), torch.from_numpy(peer), rtol=0, atol=1e-7)


@pytest.mark.parametrize("m", [1, 7, 20, 31, 32])
def test_the_partial_plan_agrees_with_pot(m):
    ot = pytest.importorskip("ot")
    z = logits()
    plan = transport_plan(z, rows="le", total=m).exp()
    # columns that may take everything are no constraint
    peer = ot.partial.entropic_partial_wasserstein(
        torch.ones(B).numpy(), torch.full((K,), float(m)).numpy(), (-z).numpy(), EPS, m=m, numItermax=20_000, stopThr=1e-14
    )
    torch.testing.assert_close(plan, torch.from_numpy(peer).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0, 200.0])
@pytest.mark.parametrize("m", [0.3, 1, 7.5, 31, 32])
def test_the_partial_plan_keeps_its_constraints(scale, m):
    plan = transport_plan(logits(scale=scale), rows="le", total=m).exp()
    assert plan.sum() == pytest.approx(m, rel=1e-9)
    assert plan.sum(1).max() <= 1 + 1e-12
    # the multiplier by bisection instead of by sorting
    log_z = (logits(scale=scale) / EPS).logsumexp(1)
    low, high = -log_z.max() - 50, -log_z.min() + 50
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (middle + log_z).clamp(max=0).exp().sum() < m else (low, middle)
    torch.testing.assert_close(plan.sum(1), (low + log_z).clamp(max=0).exp(), rtol=0, atol=1e-9)


def test_with_all_of_the_mass_the_partial_plan_is_softmax_and_so_is_its_gradient():
    for z in (logits(), logits(scale=0.0), logits()[:1].expand(B, K).clone()):  # ties too
        z.requires_grad_()
        full, usual = transport_plan(z, rows="le", total=B), transport_plan(z)
        torch.testing.assert_close(full, usual)
        weight = logits(seed=9)
        grads = [torch.autograd.grad((weight * plan).sum(), z)[0] for plan in (full, usual)]
        torch.testing.assert_close(*grads)


def test_no_mass_is_a_zero_plan():
    z = logits().requires_grad_()
    plan = transport_plan(z, rows="le", total=0)
    assert (plan == -math.inf).all()
    loss = plan_divergence(plan, plan, EPS)
    assert loss == 0
    assert (torch.autograd.grad(loss, z, allow_unused=True)[0] == 0).all()


def test_rows_sum_to_one_after_any_number_of_iterations():
    _, b = class_counts()
    for n in (1, 2, 5):
        plan = transport_plan(logits(scale=30), col_mass=b, n_iter=n).exp()
        torch.testing.assert_close(plan.sum(1), torch.ones(B, dtype=torch.float64))


def test_columns_sum_to_their_mass():
    _, b = class_counts()
    plan = transport_plan(logits(), col_mass=b, n_iter=100).exp()
    torch.testing.assert_close(plan.sum(0), b, rtol=0, atol=1e-9)


def test_samples_as_columns_summed_by_label_are_classes_as_columns():
    """The released code's B × B problem (unit marginals, columns the batch's own labels) is the B × K one."""
    z = logits(scale=3)
    labels, b = class_counts()
    square = transport_plan(z[:, labels], col_mass=torch.ones(B, dtype=torch.float64), n_iter=100).exp()
    summed = torch.zeros(B, K, dtype=torch.float64).index_add_(1, labels, square)
    torch.testing.assert_close(summed, transport_plan(z, col_mass=b, n_iter=100).exp(), rtol=0, atol=1e-9)


# -- invariances --------------------------------------------------------------------------------------------------------


def test_what_the_balanced_plan_does_not_see():
    """A constant added to a sample or to a class is taken up by the marginals."""
    z = logits()
    _, b = class_counts()
    rows, columns = logits(B, 1, seed=3), logits(1, K, seed=4)
    plans = [transport_plan(x, col_mass=b, n_iter=300) for x in (z, z + rows, z + columns)]
    torch.testing.assert_close(plans[0], plans[1], rtol=0, atol=1e-9)
    torch.testing.assert_close(plans[0], plans[2], rtol=0, atol=1e-9)


def test_order_of_samples_and_classes_does_not_matter():
    z, rows, columns = logits(), torch.randperm(B), torch.randperm(K)
    _, b = class_counts()
    for kind in ({"col_mass": b, "n_iter": 20}, {"rows": "le", "total": 11}):
        permuted = {**kind, "col_mass": b[columns]} if "col_mass" in kind else kind
        expected = transport_plan(z, **kind)[rows][:, columns]
        torch.testing.assert_close(transport_plan(z[rows][:, columns], **permuted), expected)


def test_temperature_scales_logits():
    z = logits()
    torch.testing.assert_close(
        transport_plan(z, rows="le", total=5, eps=2.0), transport_plan(z * 3, rows="le", total=5, eps=6.0)
    )


# -- derivatives and dtypes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"col_mass": torch.tensor([3.0, 1.0, 2.0]), "n_iter": 4},
        {"col_mass": torch.tensor([4.0, 0.0, 2.0]), "n_iter": 4},
        {"rows": "le", "total": 2.5},
        {"rows": "le", "total": 5},
    ],
)
def test_gradients(kind):
    z = logits(6, 3, seed=5).requires_grad_()

    def entropy(z):
        log_plan = transport_plan(z, **kind)
        finite = log_plan.masked_fill(log_plan == -math.inf, 0)
        return finite, log_plan.exp()

    assert torch.autograd.gradcheck(entropy, (z,))


def test_iterations_in_and_outside_the_logarithm_agree():
    z = logits()
    _, b = class_counts()
    b[2] += b[4]
    b[4] = 0
    outside = column_potential(z / EPS, b, 7)
    inside = column_potential((z / EPS).requires_grad_(), b, 7)
    free = (outside - inside)[b > 0]  # g is determined up to a constant
    torch.testing.assert_close(free, free[:1].expand_as(free))
    assert outside[4] == inside[4] == -math.inf


def test_iterations_stop_where_they_move_nothing_beyond_rounding_and_not_before():
    z, (_, b) = logits(scale=3, dtype=torch.float32), class_counts()
    exact = transport_plan(z.double(), col_mass=b, n_iter=500).exp()
    torch.testing.assert_close(transport_plan(z, col_mass=b, n_iter=10**9).exp().double(), exact, rtol=0, atol=1e-6)
    slow = logits(scale=60)  # far from its column sums: each iteration asked for is done
    done = [transport_plan(slow, col_mass=b, n_iter=n) for n in (20, 40)]
    for n, plan in zip((20, 40), done, strict=True):
        inside = column_potential((slow / EPS).requires_grad_(), b, n).detach()
        torch.testing.assert_close(plan, (slow / EPS + inside).log_softmax(1))
    assert (done[0] - done[1]).abs().max() > 1e-3


def test_logits_far_apart_do_not_overflow():
    z = torch.tensor([[1e4, 0.0, -1e4], [0.0, 1e4, 0.0], [-1e4, 0.0, 1e4]])
    plan = transport_plan(z, col_mass=torch.ones(3), n_iter=20)
    torch.testing.assert_close(plan.exp(), torch.eye(3))
    with torch.no_grad():  # a class that every sample's logits speak against, still has to get its mass
        skewed = transport_plan(torch.tensor([[500.0, 0.0]] * 4), col_mass=torch.tensor([1.0, 3.0]), eps=1.0)
    torch.testing.assert_close(skewed.exp(), torch.tensor([[0.25, 0.75]] * 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(dtype):
    z = logits(dtype=torch.float32).to(dtype)
    _, b = class_counts()
    plan = transport_plan(z, col_mass=b)
    assert plan.dtype == torch.float32
    torch.testing.assert_close(plan, transport_plan(z.float(), col_mass=b))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(transport_plan(z.float(), col_mass=b), plan)


# -- the authors' loop --------------------------------------------------------------------------------------------------


def test_alternating_projections_lose_the_row_masses_where_every_row_starts_above_one():
    log_z, m = torch.linspace(0, 3, 8), torch.tensor(3.0)
    torch.testing.assert_close(log_row_mass(log_z, m, "alternate").exp(), torch.full((8,), 3 / 8))
    exact = log_row_mass(log_z, m).exp()
    assert (exact.diff() > 0).all()
    assert exact.sum() == pytest.approx(3)


def test_alternating_projections_reach_the_plan_from_below():
    log_z, m = -torch.linspace(0, 4, 8, dtype=torch.float64), torch.tensor(4.0, dtype=torch.float64)
    exact = log_row_mass(log_z, m)
    gaps = [(log_row_mass(log_z, m, "alternate", n) - exact).abs().max().item() for n in (1, 8, 200)]
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-6


# Values of the released functions (machoshi/SelKD at d3bdd2f, helper/loops.py `sinkhorn` and `pot`), run on a CPU.
EXAMPLE = torch.tensor([[1.0, 2, 0, -1], [0, 1, 3, 2], [2, -1, 1, 0]])
SINKHORN = [[0.3213216, 0.4484404, 0.2302370], [0.4484404, 0.2302369, 0.3213216], [0.2302370, 0.3213215, 0.4484404]]
POT = [[0.1945040, 0.3206828, 0.1514798], [0.2794860, 0.1695168, 0.2176639], [0.1398879, 0.2306361, 0.2961426]]
POT_TIMES_4 = [[0.0761302, 0.5625299, 0.0280067], [0.4434939, 0.0600204, 0.1631523], [0.0234127, 0.1729977, 0.4702564]]


def test_the_released_plans_are_reproduced():
    labels = torch.tensor([0, 2, 1])
    plan = released_plan(EXAMPLE, labels, "closed", classes=4)
    torch.testing.assert_close(plan, torch.tensor(SINKHORN), rtol=0, atol=2e-6)
    labels = torch.tensor([0, 57, 1])  # two of classes 0 … 2, one beyond
    torch.testing.assert_close(released_plan(EXAMPLE, labels, "open", classes=3), torch.tensor(POT), rtol=0, atol=2e-6)
    plan = released_plan(4 * EXAMPLE, labels, "open", classes=3, n_iter=8)
    torch.testing.assert_close(plan, torch.tensor(POT_TIMES_4), rtol=0, atol=2e-6)
    assert labels.tolist() == [0, 57, 1]  # the released code overwrites them


def test_the_released_losses_are_reproduced():
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(7, 21, generator=generator), 3 * torch.randn(7, 100, generator=generator)
    closed, open_ = torch.tensor([0, 3, 3, 19, 7, 0, 11]), torch.tensor([0, 3, 45, 19, 7, 99, 11])
    assert released_plan_loss(student, teacher, closed, "closed", classes=20).item() == pytest.approx(0.00180081, rel=1e-3)
    assert released_plan_loss(student, teacher, open_, "open", classes=20).item() == pytest.approx(80.704445, rel=1e-5)


def test_the_released_kernel_prefers_what_the_logits_speak_against():
    labels = torch.arange(3)
    confident = 10 * torch.eye(3)
    assert (released_plan(confident, labels, "closed", classes=3).diagonal() < 0.1).all()
    assert (transport_plan(confident, col_mass=torch.ones(3)).exp().diagonal() > 0.8).all()


def test_bad_input_of_the_released_formulas():
    with pytest.raises(ValueError, match="kind must be"):
        released_plan(EXAMPLE, torch.zeros(3, dtype=torch.long), "half", classes=3)
    with pytest.raises(ValueError, match="C ≥ 5, open"):
        released_plan(EXAMPLE, torch.zeros(3, dtype=torch.long), "open", classes=4)
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 3\)"):
        released_plan(EXAMPLE, torch.tensor([0, 1, 3]), "closed", classes=3)


# -- labels -------------------------------------------------------------------------------------------------------------


def test_labels_there_and_back():
    selected = [14, 3, 8]
    labels = torch.tensor([[3, 8], [14, 5], [-1, 100]])
    targets = remap_labels(labels, selected, open_set=True)
    assert targets.tolist() == [[1, 2], [0, 3], [3, 3]]
    assert labels.tolist() == [[3, 8], [14, 5], [-1, 100]]
    back = predict_open(F.one_hot(targets, 4).float(), selected)
    assert back.tolist() == [[3, 8], [14, -1], [-1, -1]]
    assert remap_labels(torch.tensor([8, 14]), selected, open_set=False).tolist() == [2, 0]
    assert remap_labels(torch.tensor([], dtype=torch.long), selected, open_set=False).tolist() == []


@pytest.mark.parametrize(
    ("selected", "message"),
    [
        ([3, 3], "distinct"),
        ([-1, 2], "≥ 0"),
        ([], "at least one"),
        ([1.5], "whole numbers"),
        (3, "whole numbers"),
        (torch.tensor(3), "whole numbers"),
        ([True, False], "whole numbers"),
        (torch.tensor([1, 1]), "distinct"),
    ],
)
def test_bad_selections(selected, message):
    with pytest.raises(ValueError, match=f"selected must be.*{message}"):
        remap_labels(torch.tensor([3]), selected, open_set=True)
    with pytest.raises(ValueError, match=f"selected must be.*{message}"):
        predict_open(torch.zeros(1, 2), selected)


def test_bad_labels():
    with pytest.raises(ValueError, match="2 of 3 are not"):
        remap_labels(torch.tensor([3, 4, 99]), [3, 8], open_set=False)
    with pytest.raises(ValueError, match="got -100"):
        remap_labels(torch.tensor([3, -100]), [3, 8], open_set=True)
    with pytest.raises(ValueError, match=r"integers, got torch\.float32"):
        remap_labels(torch.tensor([3.0]), [3, 8], open_set=True)
    with pytest.raises(ValueError, match=r"\(\*, 3\) for 2 selected"):
        predict_open(torch.zeros(4, 2), [3, 8])
    with pytest.raises(ValueError, match="must not be NaN"):
        predict_open(torch.full((1, 3), math.nan), [3, 8])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eps": 0.0}, "eps must be positive"),
        ({"eps": math.inf}, "eps must be positive"),
        ({"rows": "ge"}, "rows must be"),
        ({"rows": "le"}, "needs total"),
        ({"total": 3}, "takes no total"),
        ({"rows": "le", "total": 3, "col_mass": torch.ones(K)}, "no col_mass"),
        ({"rows": "le", "total": B + 1}, r"total must be a number in \[0, 32\]"),
        ({"rows": "le", "total": math.nan}, "total must be"),
        ({"rows": "le", "total": torch.ones(2)}, "total must be"),
        ({"col_mass": torch.ones(K)}, "must sum to the number of rows, 32, got 6"),
        ({"col_mass": torch.ones(K - 1)}, r"col_mass must be \(6,\)"),
        ({"col_mass": torch.tensor([-1.0, 33, 0, 0, 0, 0])}, "≥ 0"),
        ({"n_iter": 0}, "n_iter must be at least 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        transport_plan(logits(), **arguments)


def test_bad_logits():
    with pytest.raises(ValueError, match=r"logits must be \(B, classes\) and not empty, got shape \(0, 3\)"):
        transport_plan(torch.zeros(0, 3))
    with pytest.raises(ValueError, match=r"got shape \(3,\)"):
        transport_plan(torch.zeros(3))
    with pytest.raises(ValueError, match=r"floating point, got torch\.int64"):
        transport_plan(torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="finite, 2 of 6 values are not"):
        transport_plan(torch.tensor([[1.0, math.nan, 0], [0, -math.inf, 0]]))
