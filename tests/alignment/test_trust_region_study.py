"""The study's exact language, and the pieces that read quality at equal distance."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from assay.alignment.trust_region.arms import dpo_loss, fixed_dpo, ipo_loss, simpo_loss, soft_dpo
from assay.alignment.trust_region.frontier import frontier, gain_at_equal_kl, shared_bins
from assay.alignment.trust_region.readings import (
    EQUAL_BETA,
    OVER,
    envelope_gain,
    frontier_gain,
    further,
    learns,
    lower_beta_gain,
    on,
    smaller_fall,
)
from assay.alignment.trust_region.study import study
from assay.alignment.trust_region.tree import GRUs, climb, fixed_or_moving, grow, measure
from assay.bench.claims import Outcome, Replicate, Verdict, judge

SHAPE = {"vocabulary": 3, "length": 4, "hidden": 8, "sft_sequences": 20, "sft_steps": 20, "pairs": 40, "sharpness": 1.0}


@pytest.fixture(scope="module")
def tree():
    return grow(seed=0, **SHAPE)


def by_length(loss):
    return lambda *args: loss(*args, args[-1])


def run(tree, loss=dpo_loss, betas=(0.1,), mode="fixed", alpha=0.5, every=2, steps=8, **more):
    options = {"lr": 1e-2, "batch": 8, "seed": 0, "points": 2, **more}
    return climb(tree, by_length(loss), betas, steps=steps, updater=fixed_or_moving(mode, alpha, every), **options)


def test_every_sequence_has_its_probability():
    policy = GRUs(2, 3, 8)
    grid = torch.cartesian_prod(*[torch.arange(3)] * 4)
    torch.testing.assert_close(policy(grid).exp().sum(1), torch.ones(2))
    prefixes = grid[:, :-1].unique(dim=0)  # the network is causal: a prefix has the mass of what goes on from it
    whole = policy(grid).exp().view(2, len(prefixes), 3).sum(2)
    torch.testing.assert_close(policy(prefixes).exp(), whole)


def test_the_network_is_a_gru():
    policy, gru = GRUs(1, 3, 8), torch.nn.GRU(8, 8, batch_first=True)
    with torch.no_grad():
        gru.weight_ih_l0.copy_(policy.input[0].T)
        gru.weight_hh_l0.copy_(policy.recur[0].T)
        gru.bias_ih_l0.copy_(policy.bias[0, 0])
        gru.bias_hh_l0.zero_()
    sequences = torch.tensor([[0, 1, 2, 0], [2, 2, 1, 1]])
    inputs = torch.tensor([[3, 0, 1, 2], [3, 2, 2, 1]])
    states, _ = gru(policy.embed[0][inputs])
    expected = (states @ policy.out[0]).log_softmax(-1).gather(2, sequences[..., None])[..., 0].sum(1)
    torch.testing.assert_close(policy(sequences)[0], expected)


def test_the_start_is_where_everything_is_zero(tree):
    point = measure(tree, tree.policy)
    torch.testing.assert_close(point.gold, torch.zeros(1), rtol=0, atol=1e-5)
    torch.testing.assert_close(point.kl, torch.zeros(1), rtol=0, atol=1e-6)
    torch.testing.assert_close(point.win, torch.full((1,), 0.5), rtol=0, atol=1e-5)
    assert point.accuracy.item() == 0.5
    weights = tree.sft_logps.exp()
    torch.testing.assert_close((weights * tree.reward**2).sum(), torch.tensor(1.0))
    assert (tree.pairs[:, 0] != tree.pairs[:, 1]).all()
    assert tree.seen.sum() == len(tree.pairs.unique())


def test_measures_agree_with_sampling(tree):
    policy = tree.policy.repeated(1)
    with torch.no_grad():
        policy.out.add_(0.3 * torch.randn(policy.out.shape, generator=torch.Generator().manual_seed(1)))
        logps = policy(tree.sequences)[0]
    point = measure(tree, policy)
    generator = torch.Generator().manual_seed(0)
    ours = torch.multinomial(logps.exp(), 40_000, replacement=True, generator=generator)
    theirs = torch.multinomial(tree.sft_logps.exp(), 40_000, replacement=True, generator=generator)
    win = (tree.reward[ours] > tree.reward[theirs]).float().mean() + 0.5 * (ours == theirs).float().mean()
    assert point.gold.item() == pytest.approx(tree.reward[ours].mean().item(), abs=0.03)
    assert point.win.item() == pytest.approx(win.item(), abs=0.015)
    assert point.kl.item() == pytest.approx((logps - tree.sft_logps)[ours].mean().item(), abs=0.03)
    assert point.outside.item() == pytest.approx((~tree.seen[ours]).float().mean().item(), abs=0.015)


def test_copies_do_not_see_each_other(tree):
    together = run(tree, betas=(0.1, 0.5))
    alone = [run(tree, betas=(beta,)) for beta in (0.1, 0.5)]
    for point, first, second in zip(together, *alone, strict=True):
        torch.testing.assert_close(point.kl, torch.cat([first.kl, second.kl]), rtol=1e-4, atol=1e-6)


def test_an_update_that_never_comes_is_a_fixed_reference(tree):
    fixed, never = run(tree), run(tree, mode="soft", every=100)
    assert torch.equal(fixed[-1].kl, never[-1].kl)
    assert not torch.equal(fixed[-1].kl, run(tree, mode="hard")[-1].kl)


def test_a_moving_reference_ends_further_away(tree):
    """The mechanism (claim C4): the margin is reset, so its pull does not fade."""
    settings = {"betas": (0.5,), "steps": 120, "every": 15}
    fixed, soft, hard = (run(tree, mode=mode, alpha=0.6, **settings)[-1].kl.item() for mode in ("fixed", "soft", "hard"))
    assert fixed < soft
    assert fixed < hard


def test_simpo_needs_no_reference():
    pol, ref, lengths = torch.randn(4, 5), torch.randn(2, 5), torch.full((5,), 3)
    torch.testing.assert_close(
        simpo_loss(*pol[:2], *ref, 0.1, lengths, lengths), simpo_loss(*pol[:2], *-ref, 0.1, lengths, lengths)
    )


def test_ipo_is_divided_by_length():
    pol, ref, lengths = torch.randn(2, 5), torch.randn(2, 5), torch.full((5,), 4)
    margin = ((pol[0] - ref[0]) - (pol[1] - ref[1])) / 4
    torch.testing.assert_close(ipo_loss(*pol, *ref, 0.25, lengths, lengths), (margin - 2) ** 2)


def test_a_loss_that_blows_up_is_a_failed_run(tree):
    with pytest.raises(FloatingPointError, match="at step 1"):
        run(tree, loss=lambda *args: args[0] * float("inf"))


def test_frontier_reads_the_best_in_shared_bins():
    ours = (np.array([0.1, 0.4, 0.6, 2.1]), np.array([1.0, 3.0, 2.0, 9.0]))
    theirs = (np.array([0.2, 0.9, 1.4]), np.array([2.0, 2.5, 7.0]))
    assert frontier(*ours) == {0: 3.0, 1: 2.0, 4: 9.0}
    assert shared_bins(ours[0], theirs[0]) == [0, 1]
    assert gain_at_equal_kl(ours, theirs) == pytest.approx((1.0 - 0.5) / 2)
    assert gain_at_equal_kl(ours, (np.array([9.0]), np.array([1.0]))) is None


def replicate(name="tree/0", **arms):
    return Replicate(name, 0, study.scale("desk"), {arm.replace("_", "-"): Outcome(metrics) for arm, metrics in arms.items()})


def test_claims_read_what_they_say():
    falls = {f"tree_drop@{beta:g}": 0.0 for beta in study.scale("desk").betas} | {"tree_drop@0.01": 0.5, "tree_drop@0.03": 0.2}
    r = replicate(dpo=falls, tr_dpo_soft={**falls, "tree_drop@0.01": 0.1})
    assert smaller_fall("tr-dpo-soft", "dpo")(r) == pytest.approx(0.4)
    flat = dict.fromkeys(falls, 0.01)
    assert smaller_fall("tr-dpo-soft", "dpo")(replicate(dpo=flat, tr_dpo_soft=flat)) is None
    small = {**flat, f"tree_drop@{EQUAL_BETA:g}": OVER}
    assert smaller_fall("tr-dpo-soft", "dpo")(replicate(dpo=small, tr_dpo_soft=flat)) == pytest.approx(OVER - 0.01)
    assert on("tree", lambda r: 1.0)(replicate("reviews/0")) is None
    assert on("tree", lambda r: 1.0)(replicate("tree/0")) == 1.0
    peaks = {"tree_peak@0.01": 0.9, "tree_peak@0.03": 1.1, "tree_peak@0.1": 5.0}
    assert lower_beta_gain(replicate(dpo=peaks, tr_dpo_soft={"tree_peak@0.1": 1.0})) == pytest.approx(0.1)
    distances = {"tree": "tree_kl@0.1", "harmless": "harmless_kl", "reviews": "kl"}
    for case, metric in distances.items():
        r = replicate(f"{case}/0", dpo={metric: 1.0}, tr_dpo_soft={metric: 3.5})
        assert further(case, "tr-dpo-soft", "dpo")(r) == 2.5
    assert further("reviews", "tr-dpo-hard", "dpo")(replicate("reviews/0", dpo={"kl": 1.0}, tr_dpo_hard={})) is None
    assert learns("reviews")(replicate("reviews/0", dpo={"proxy_win": 0.6})) == 0.6


def test_the_envelope_takes_the_best_beta_in_every_bin():
    def outcome(*runs):
        curves = {}
        for end, kl, gold in runs:
            curves |= {f"tree_kl{end}": ([1, 2], kl), f"tree_gold{end}": ([1, 2], gold)}
        return Outcome({}, curves)

    ours = outcome(("", [0.1, 0.6], [1.0, 1.0]), ("@0.3", [0.2, 0.7], [0.5, 3.0]))
    theirs = outcome(("", [0.3, 0.9], [0.75, 1.5]), ("@0.3", [0.4, 9.0], [0.0, 9.0]))
    r = Replicate("tree/0", 0, study.scale("desk"), {"tr-dpo-soft": ours, "dpo": theirs})
    assert envelope_gain("tr-dpo-soft", "dpo")(r) == pytest.approx((0.25 + 1.5) / 2)
    assert frontier_gain("tr-dpo-soft", "dpo")(r) == pytest.approx((0.25 - 0.5) / 2)


def test_a_case_that_did_not_learn_closes_its_own_claims_alone():
    def at(name, **metrics):
        return Replicate(name, 0, study.scale("desk"), {arm: Outcome(metrics) for arm in study.arms})

    tree = at("tree/0", tree_peak=1.0, **{"tree_kl@0.1": 1.0})
    harmless = at("harmless/0", harmless_accuracy=0.4, harmless_kl=1.0)
    reviews = at("reviews/0", proxy_win=0.7, kl=1.0, parity=0.0)
    found = {claim.text: judge(claim, [tree, harmless, reviews]) for claim in study.claims}
    of = {case: [f for text, f in found.items() if text.startswith(f"{case}: C4")] for case in ("Tree", "Harmless", "Reviews")}
    assert [finding.verdict for finding in of["Tree"]] == [Verdict.FAILS] * 2  # equal distances: judged
    assert [finding.verdict for finding in of["Harmless"]] == [Verdict.INCONCLUSIVE] * 2
    assert all("gate not met: Harmless" in finding.reason for finding in of["Harmless"])
    assert [finding.verdict for finding in of["Reviews"]] == [Verdict.FAILS]
    assert next(finding for text, finding in found.items() if text.startswith("C1")).verdict is Verdict.HOLDS


def test_arms_are_what_they_are_called():
    assert fixed_dpo(None).reference == "fixed"
    assert soft_dpo(None).loss is dpo_loss
    assert study.arms["tr-dpo-hard"](None).reference == "hard"


def test_beta_is_tuned_by_the_mean_over_several_languages():
    config = study.scale("smoke").model_copy(update={"tuning_trees": 2})
    log = SimpleNamespace(replicate="tree/1000", seed=3, arm="dpo", metric=lambda *_: None, track=lambda steps, _="": steps)
    trees = study.prepare(config, log)
    assert len(trees) == 2
    assert not torch.equal(trees[0].reward, trees[1].reward)
    tuned = study.trial(study.arms["dpo"], trees, config, log)
    log.replicate = "tree/0"
    single = [study.trial(study.arms["dpo"], tree, config, log)["tree_gold"] for tree in trees]
    assert tuned == {"tree_gold": pytest.approx(sum(single) / 2)}
