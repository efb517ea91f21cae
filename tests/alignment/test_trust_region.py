"""The losses and the update of the reference: mathematics, agreement with TRL's own, low precision, bad input."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from assay.alignment import ReferenceUpdater, mismatched_kl, tr_dpo_loss, tr_ipo_loss, tr_kto_loss
from assay.alignment.trust_region.lora import average_product
from assay.alignment.trust_region.updater import tensors_of


def wide(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


QUADRUPLE = (wide(-3.5, -10.25, -7.0), wide(-4.0, -9.0, -12.5), wide(-4.25, -10.0, -6.5), wide(-3.75, -8.5, -14.0))

# ---- losses ----------------------------------------------------------------------------------------------------------


def test_losses_agree_with_the_authors_code():
    """turbo-llm/turbo-alignment at 72e737d, trainers/dpo.py, beta 0.3, on the same four tensors in float64."""
    pol_chosen, pol_rejected, ref_chosen, ref_rejected = QUADRUPLE
    exactly = {"rtol": 0, "atol": 1e-14}
    dpo = wide(0.554355244468527, 0.656350140826795, 1.037487950485886)
    smoothed = wide(0.614355244468527, 0.671350140826795, 0.917487950485886)
    ipo = wide(0.444444444444445, 2.006944444444445, 13.444444444444446)
    chosen, rejected = (
        wide(0.462570154656250, 0.537429845343750, 0.556013890544620),
        wide(0.481258784121465, 0.462570154656250, 0.610639233949222),
    )
    torch.testing.assert_close(tr_dpo_loss(*QUADRUPLE, 0.3), dpo, **exactly)
    torch.testing.assert_close(tr_dpo_loss(*QUADRUPLE, 0.3, label_smoothing=0.2), smoothed, **exactly)
    torch.testing.assert_close(tr_ipo_loss(*QUADRUPLE, 0.3), ipo, **exactly)
    # their KTO takes the other side's mean log-ratio for z
    z_of_rejected, z_of_chosen = (pol_rejected - ref_rejected).mean(), (pol_chosen - ref_chosen).mean()
    yes, no = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)
    torch.testing.assert_close(tr_kto_loss(pol_chosen, ref_chosen, yes, z_of_rejected, 0.3), chosen, **exactly)
    torch.testing.assert_close(tr_kto_loss(pol_rejected, ref_rejected, no, z_of_chosen, 0.3), rejected, **exactly)


def losses(quadruple):
    labels = torch.tensor([True, False, True])
    lengths = torch.tensor([3, 1, 2])
    return [
        tr_dpo_loss(*quadruple, 0.5, 0.1),
        tr_ipo_loss(*quadruple, 0.5, lengths, lengths + 1),
        tr_kto_loss(quadruple[0], quadruple[2], labels, (quadruple[1] - quadruple[3]).mean(), 0.5, 2.0, 0.5),
    ]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradients(which):
    policy = [t.clone().requires_grad_() for t in QUADRUPLE[:2]]

    def of_policy(chosen, rejected):
        z = (QUADRUPLE[1] - QUADRUPLE[3]).mean()  # detached in the loss, so held fixed here
        if which == 2:
            return tr_kto_loss(chosen, QUADRUPLE[2], torch.tensor([True, False, True]), z, 0.5) + 0 * rejected
        return losses((chosen, rejected, *QUADRUPLE[2:]))[which]

    assert torch.autograd.gradcheck(of_policy, policy)


def test_no_gradient_reaches_the_reference_or_the_kl():
    quadruple = [t.clone().requires_grad_() for t in QUADRUPLE]
    kl = (quadruple[0] - quadruple[2]).mean()
    sum(loss.sum() for loss in losses(quadruple)).backward()
    assert quadruple[2].grad is None
    assert quadruple[3].grad is None
    pol = QUADRUPLE[0].clone().requires_grad_()
    loss = tr_kto_loss(pol.detach(), QUADRUPLE[2], torch.tensor([True, True, False]), (pol - QUADRUPLE[2]).mean(), 0.5)
    assert not loss.requires_grad
    assert kl.requires_grad  # it was the loss that cut it


def test_a_reference_at_the_policy_resets_the_margin():
    """Δ = 0: DPO's gradient weight is ½, IPO is at its target's distance, KTO at half."""
    chosen, rejected = QUADRUPLE[:2]
    here = (chosen, rejected, chosen, rejected)
    torch.testing.assert_close(tr_dpo_loss(*here, 0.7), torch.full_like(chosen, 2.0).log())
    torch.testing.assert_close(tr_ipo_loss(*here, 0.25), torch.full_like(chosen, 4.0))
    torch.testing.assert_close(
        tr_kto_loss(chosen, chosen, torch.tensor([True, False, True]), 0.0), torch.full_like(chosen, 0.5)
    )


def test_invariances():
    """A constant on both answers of policy or reference drops out of Δ; smoothing by ½ is symmetric in the answers."""
    shifted = (QUADRUPLE[0] + 3, QUADRUPLE[1] + 3, QUADRUPLE[2] - 2, QUADRUPLE[3] - 2)
    swapped = (QUADRUPLE[1], QUADRUPLE[0], QUADRUPLE[3], QUADRUPLE[2])
    torch.testing.assert_close(tr_dpo_loss(*QUADRUPLE, 0.4), tr_dpo_loss(*shifted, 0.4))
    torch.testing.assert_close(tr_ipo_loss(*QUADRUPLE, 0.4), tr_ipo_loss(*shifted, 0.4))
    torch.testing.assert_close(tr_dpo_loss(*QUADRUPLE, 0.4, 0.5), tr_dpo_loss(*swapped, 0.4, 0.5))
    one = torch.ones(3)
    torch.testing.assert_close(tr_ipo_loss(*QUADRUPLE, 0.4, one, one), tr_ipo_loss(*QUADRUPLE, 0.4))


def test_a_negative_kl_counts_as_zero():
    labels = torch.tensor([True, False, True])
    args = (QUADRUPLE[0], QUADRUPLE[2], labels)
    torch.testing.assert_close(tr_kto_loss(*args, -5.0), tr_kto_loss(*args, 0.0))
    assert mismatched_kl(QUADRUPLE[2], QUADRUPLE[2] + 1) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tr_dpo_loss(*QUADRUPLE, beta=0), "beta must be a positive number"),
        (lambda: tr_ipo_loss(*QUADRUPLE, beta=float("nan")), "beta must be a positive number"),
        (lambda: tr_dpo_loss(*QUADRUPLE, label_smoothing=0.6), r"label_smoothing must be in \[0, 0.5\]"),
        (lambda: tr_dpo_loss(*QUADRUPLE[:3], wide(1.0)), "one number a row"),
        (lambda: tr_ipo_loss(*QUADRUPLE, chosen_len=torch.ones(3)), "given together"),
        (lambda: tr_ipo_loss(*QUADRUPLE, 0.1, torch.zeros(3), torch.ones(3)), "at least 1"),
        (
            lambda: tr_kto_loss(*QUADRUPLE[:2], torch.ones(3), 0.0, desirable_weight=-1),
            "desirable_weight and undesirable_weight must be",
        ),
        (
            lambda: tr_kto_loss(*QUADRUPLE[:2], torch.ones(3), 0.0, undesirable_weight=float("nan")),
            "desirable_weight and undesirable_weight must be",
        ),
        (lambda: tr_kto_loss(*QUADRUPLE[:2], torch.tensor([1, -1, 1]), 0.0), "labels must be"),
        (lambda: tr_kto_loss(*QUADRUPLE[:2], torch.ones(3), torch.ones(3)), r"kl must be one number .* got \(3,\)"),
        (lambda: tr_ipo_loss(*QUADRUPLE, 0.1, torch.ones(3), torch.ones(2)), r"'rejected_len': \(2,\)"),
        (lambda: mismatched_kl(wide(1.0), wide(2.0)), "at least 2 answers"),
    ],
)
def test_losses_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_empty_batch_has_no_losses():
    nothing = torch.zeros(0)
    assert tr_dpo_loss(*[nothing] * 4).shape == (0,)
    assert tr_ipo_loss(*[nothing] * 4, 0.1, nothing, nothing).shape == (0,)
    assert tr_kto_loss(nothing, nothing, nothing.bool(), 0.0).shape == (0,)


# ---- the update ------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding and a head that share a weight, and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def two(kind=lambda: nn.Linear(3, 2), dtype=torch.float32):
    torch.manual_seed(0)
    return kind().to(dtype), kind().to(dtype)


def test_soft_and_hard_updates():
    policy, reference = two(Tied)
    before, policy.norm.running_mean[:] = copy.deepcopy(reference), torch.arange(4.0)
    ReferenceUpdater(policy, reference, alpha=0.25, every=1).step()
    for new, old, pol in zip(reference.parameters(), before.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(new, 0.25 * pol + 0.75 * old)  # the tied weight once, not twice
    assert torch.equal(reference.norm.running_mean, before.norm.running_mean)
    ReferenceUpdater(policy, reference, mode="hard", every=1).step()
    assert all(torch.equal(a, b) for a, b in zip(policy.state_dict().values(), reference.state_dict().values(), strict=True))
    assert not reference.training
    assert not any(p.requires_grad for p in reference.parameters())
    assert all(p.requires_grad for p in policy.parameters())


def test_equals_trls_own_update():
    trl = pytest.importorskip("trl.trainer.callbacks")
    policy, reference = two(Tied)
    theirs = copy.deepcopy(reference)
    updater = ReferenceUpdater(policy, reference, alpha=0.6, every=1)
    for _ in range(3):
        with torch.no_grad():
            for p in policy.parameters():
                p.add_(torch.randn(p.shape))
        updater.step()
        trl.SyncRefModelCallback._sync_target_model(policy, theirs, 0.6)
    for ours, other in zip(reference.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("every", "start", "expected"), [(np.int64(3), 0, [3, 6, 9]), (2, 5, [6, 8, 10]), (1, 0, list(range(1, 11)))]
)
def test_schedule(every, start, expected):
    updater = ReferenceUpdater(*two(), every=every, start_step=start)
    assert [t for t in range(1, 11) if updater.step()] == expected
    assert updater.syncs == len(expected)


def test_a_budget_lets_only_spent_updates_pass():
    updater = ReferenceUpdater(*two(), every=2, kl_budget=1.0)
    assert [updater.step(drift=d) for d in (5.0, 0.5, 0.0, 1.5, 0.0, -2.0)] == [False, False, False, True, False, True]


def test_lag_behind_a_steady_policy_is_what_theory_says():
    """Moving by 1 a step, the reference settles τ/α behind just before an update, and τ(1−α)/α just after."""
    policy, reference = {"w": torch.zeros(1, dtype=torch.float64)}, {"w": torch.zeros(1, dtype=torch.float64)}
    updater = ReferenceUpdater(policy, reference, alpha=0.4, every=5)
    before = after = None
    for _ in range(500):
        policy["w"] += 1
        lag = (policy["w"] - reference["w"]).item()
        if updater.step():
            before, after = lag, (policy["w"] - reference["w"]).item()
    assert before == pytest.approx(5 / 0.4)
    assert after == pytest.approx(5 * 0.6 / 0.4)


def test_masters_keep_what_bf16_would_lose():
    """Steps of 0.1 % of the weights: a bf16 reference without masters stands still, with them it arrives."""
    start = torch.full((64,), 1.0)
    ends = {}
    for master in (torch.float32, None):
        reference = {"w": start.to(torch.bfloat16)}
        policy = {"w": start * 1.02}
        updater = ReferenceUpdater(policy, reference, alpha=0.05, every=1, master_dtype=master)
        for _ in range(200):
            updater.step()
        ends[master] = reference["w"].float().mean().item()
    assert ends[torch.float32] == pytest.approx(1.02, abs=0.004)
    assert ends[None] < 1.016


def test_a_reference_of_another_type_is_averaged_wide_and_rounded_once():
    policy, reference = {"w": torch.randn(100)}, {"w": torch.randn(100).to(torch.bfloat16)}
    expected = torch.lerp(reference["w"].float(), policy["w"], 0.3).to(torch.bfloat16)
    ReferenceUpdater(policy, reference, alpha=0.3, every=1, master_dtype=None).step()
    assert torch.equal(reference["w"], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_on_where_it_stopped(dtype):
    def advance(policy, updater, steps):
        for _ in range(steps):
            with torch.no_grad():
                for p in policy.parameters():
                    p.add_(torch.randn(p.shape, generator=noise).to(p) / 50)
            updater.step()

    policy, reference = two(dtype=dtype)
    other = copy.deepcopy(reference)
    noise = torch.Generator().manual_seed(1)
    whole = ReferenceUpdater(policy, reference, alpha=0.5, every=3)
    advance(policy, whole, 4)
    stored = pickle.loads(pickle.dumps(whole.state_dict()))
    resumed = ReferenceUpdater(policy, other, alpha=0.5, every=3)
    resumed.load_state_dict(stored)
    noise_state = noise.get_state()
    kept = copy.deepcopy(policy)
    advance(policy, whole, 5)
    policy.load_state_dict(kept.state_dict())
    noise.set_state(noise_state)
    advance(policy, resumed, 5)
    assert (whole.steps, whole.syncs) == (resumed.steps, resumed.syncs) == (9, 3)
    assert all(torch.equal(a, b) for a, b in zip(reference.parameters(), other.parameters(), strict=True))


def test_wrappers_names_do_not_matter():
    policy, reference = two()
    wrapped = nn.Module()
    wrapped.module = policy
    ReferenceUpdater(wrapped, reference, mode="hard", every=1).step()
    assert torch.equal(policy.weight, reference.weight)
    assert list(tensors_of(torch.compile(policy))) == list(tensors_of(policy))


def test_a_policy_that_blew_up_leaves_the_reference_alone():
    policy, reference = two()
    before = copy.deepcopy(reference.state_dict())
    updater = ReferenceUpdater(policy, reference, every=1)
    with torch.no_grad():
        policy.bias[1] = float("inf")
    with pytest.raises(FloatingPointError, match=r"1 of 2 tensors, first bias"):
        updater.step()
    assert all(torch.equal(before[k], v) for k, v in reference.state_dict().items())
    assert updater.syncs == 0


def refused():
    policy, reference = two()
    fit = (policy, reference)
    half_shared = copy.deepcopy(policy)
    half_shared.weight = policy.weight
    return {
        "that is mode='hard'": lambda: ReferenceUpdater(*fit, alpha=1.0),
        r"alpha must be in \(0, 1\)": lambda: ReferenceUpdater(*fit, alpha=0.0),
        "alpha must be in": lambda: ReferenceUpdater(*fit, alpha=1.2),
        "mode must be 'soft' or 'hard'": lambda: ReferenceUpdater(*fit, mode="medium"),
        "at least 1, got 0": lambda: ReferenceUpdater(*fit, every=0),
        "whole number": lambda: ReferenceUpdater(*fit, every=1.5),
        "start_step must be": lambda: ReferenceUpdater(*fit, start_step=-1),
        "start_step must be a whole number": lambda: ReferenceUpdater(*fit, start_step=float("nan")),
        "master_dtype must be": lambda: ReferenceUpdater(*fit, master_dtype=torch.int32),
        "kl_budget must be": lambda: ReferenceUpdater(*fit, kl_budget=0.0),
        "another object than policy": lambda: ReferenceUpdater(policy, policy),
        "share the memory of weight": lambda: ReferenceUpdater(policy, half_shared),
        "same parameters; 1 are in one only, as bias": lambda: ReferenceUpdater(policy, nn.Linear(3, 2, bias=False)),
        r"weight is \(2, 3\) in the policy and \(2, 4\)": lambda: ReferenceUpdater(policy, nn.Linear(4, 2)),
        "no parameters": lambda: ReferenceUpdater(policy, nn.ReLU()),
        "low_rank names no tensor": lambda: ReferenceUpdater(*fit, low_rank=[("weight", "nothing")]),
        r"needs step\(drift": lambda: ReferenceUpdater(*fit, kl_budget=1.0, every=1).step(),
        "the stored state": lambda: ReferenceUpdater(*fit).load_state_dict({"steps": 1, "syncs": 0, "reference": {}}),
    }


@pytest.mark.parametrize("message", refused())
def test_updater_refuses(message):
    with pytest.raises(ValueError, match=message):
        refused()[message]()


# ---- LoRA products ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(12, 3, 9), (2, 4, 9), (12, 4, 2)], ids=["wide", "narrow out", "narrow in"])
def test_average_of_products_is_the_best_fit_of_its_rank(shape):
    out, rank, into = shape
    generator = torch.Generator().manual_seed(0)
    A, A_ref = torch.randn(2, rank, into, generator=generator, dtype=torch.float64)
    B, B_ref = torch.randn(2, out, rank, generator=generator, dtype=torch.float64)
    target = 0.6 * B @ A + 0.4 * B_ref @ A_ref
    new_A, new_B = average_product(A, B, A_ref, B_ref, 0.6)
    U, S, Vt = torch.linalg.svd(target, full_matrices=False)
    torch.testing.assert_close(new_B @ new_A, (U[:, :rank] * S[:rank]) @ Vt[:rank])
    by_factors = (0.6 * B + 0.4 * B_ref) @ (0.6 * A + 0.4 * A_ref)
    assert torch.linalg.norm(new_B @ new_A - target) < torch.linalg.norm(by_factors - target)
    torch.testing.assert_close(by_factors - target, -0.24 * (B - B_ref) @ (A - A_ref))  # what averaging factors costs


def test_average_with_a_fresh_adapter_is_exact():
    """B_ref = 0 and A shared, as at the start of a run: the average has rank r, and both ways give it."""
    A, B = torch.randn(2, 7, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    new_A, new_B = average_product(A, B, A, torch.zeros_like(B), 0.5)
    torch.testing.assert_close(new_B @ new_A, 0.5 * B @ A)


def test_updater_averages_products_where_it_is_told():
    A, B = torch.randn(2, 7), torch.randn(5, 2)
    policy = {"A": A, "B": B, "bias": torch.ones(5)}
    reference = {"A": torch.randn(2, 7).to(torch.bfloat16), "B": torch.randn(5, 2).to(torch.bfloat16), "bias": torch.zeros(5)}
    A_ref, B_ref = reference["A"].float(), reference["B"].float()
    updater = ReferenceUpdater(policy, reference, alpha=0.5, every=1, low_rank=[("A", "B")])
    updater.step()
    want_A, want_B = average_product(A, B, A_ref, B_ref, 0.5)
    state = updater.state_dict()["reference"]
    torch.testing.assert_close(state["B"] @ state["A"], want_B @ want_A)
    assert state["A"].dtype == torch.float32
    assert torch.equal(reference["A"], state["A"].to(torch.bfloat16))
    assert torch.equal(reference["bias"], torch.full((5,), 0.5))
    with pytest.raises(ValueError, match="factors do not fit"):
        average_product(A, B.T, A, B.T, 0.5)
