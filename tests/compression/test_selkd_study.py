"""The study's own pieces: rivals against their definitions, rows dealt alike, a user's case and arm, claims that read right."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from assay.bench import Log, Outcome, Replicate
from assay.bench.claims import judge
from assay.compression.selkd.arms import Released, Rival, Selective, label_loss, term_gradient
from assay.compression.selkd.figures import figure
from assay.compression.selkd.rivals import dkd, kd, kd_full, kd_merged
from assay.compression.selkd.study import SelKDConfig, learnt, prepare, room_left, study
from assay.compression.selkd.training import Answers, Case, abilities, answers, batches, best_threshold, chosen_rows, mlp
from assay.data import needs

SELECTED, C, K, B = (4, 1, 6), 8, 3, 16
FEW = SelKDConfig(cases=("own",), seeds=1, shots=(4, 8), others=2, draws=1, steps=100, batch=8)


def drawn(outputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor(SELECTED)[torch.randint(K, (B,), generator=generator)]
    width = {"closed": K, "open": K + 1, "all": C}[outputs]
    if outputs == "open":
        labels[:5] = 0
    return torch.randn(B, width, generator=generator), 3 * torch.randn(B, C, generator=generator), labels


def own_case():
    """Eight clouds of points in a plane, and the teacher that drew them."""
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.stack([torch.arange(C).cos(), torch.arange(C).sin()], 1)

    def draw(rows):
        y = torch.arange(C).repeat(rows)
        return centres[y] + 0.5 * torch.randn(len(y), 2, generator=generator), y

    def teacher(x):
        return -2 * torch.cdist(x, centres).square()

    (x, y), held_out, test = draw(20), draw(20), draw(40)
    return Case(x, y, teacher(x), SELECTED, partial(mlp, [2, 16]), *held_out, *test, teacher(test[0]))


def run(arm, case, name="mine", config=FEW):
    return study.trial(arm, case, config, Log(seed=0, replicate="own/0", scale="desk", device="cpu", arm=name))


# -- rivals -------------------------------------------------------------------------------------------------------------


def test_all_selected_in_order_makes_the_two_distillations_one():
    student, teacher, labels = drawn("all")
    every = tuple(range(C))
    torch.testing.assert_close(kd(student, teacher, labels, every, 4.0), kd_full(student, teacher, labels, every, 4.0))


def test_merged_distillation_is_of_the_teachers_own_probabilities():
    _, teacher, targets = drawn("open")
    p = (teacher / 4).softmax(1)
    others = [c for c in range(C) if c not in SELECTED]
    perfect = 4 * torch.cat([p[:, list(SELECTED)], p[:, others].sum(1, keepdim=True)], 1).log()
    assert kd_merged(perfect, teacher, targets, SELECTED, 4.0).abs() < 1e-6
    assert kd_merged(perfect.flip(1), teacher, targets, SELECTED, 4.0) > 0.1


def test_decoupled_distillation_weighted_by_the_teacher_is_distillation():
    """KL = KL(target or not) + p(not) KL(within the rest): its authors' identity, one sample at a time."""
    student, teacher, labels = drawn("closed")
    targets = torch.tensor([SELECTED.index(y) for y in labels.tolist()])
    for i in range(B):
        one = student[i : i + 1], teacher[i : i + 1], targets[i : i + 1], SELECTED, 4.0
        both = [dkd(*one), dkd(one[0] + 5 * F.one_hot(one[2], K), *one[1:])]  # the second moves the first part alone
        whole = [kd(*one), kd(one[0] + 5 * F.one_hot(one[2], K), *one[1:])]
        torch.testing.assert_close(both[0] - both[1], whole[0] - whole[1], rtol=1e-3, atol=1e-4)


def test_a_gradient_without_the_labels():
    student, teacher, labels = drawn("closed")
    assert term_gradient(Rival()(SELECTED, FEW), student, teacher, labels, SELECTED, "closed") == 0
    z = student.clone().requires_grad_()
    by_hand = torch.autograd.grad(kd(z, teacher, labels, SELECTED, 4.0), z)[0].norm()
    seen = term_gradient(Rival(kd)(SELECTED, FEW), student, teacher, labels, SELECTED, "closed")
    assert seen == pytest.approx(by_hand.item(), rel=1e-4)


def test_selective_arms_hold_the_same_labels_loss_as_their_rivals():
    without = SimpleNamespace(eps=4.0, alpha=0.0)
    for outputs in ("closed", "open"):
        student, teacher, labels = drawn(outputs)
        expected = label_loss(student, labels, SELECTED, outputs)
        for arm in (Rival(outputs=outputs), Selective(outputs), Released(outputs)):
            torch.testing.assert_close(arm(SELECTED, without)(student, teacher, labels), expected)


def test_the_released_term_starts_almost_without_a_gradient():
    student, teacher, labels = drawn("closed")
    ours, theirs = (
        term_gradient(arm(SELECTED, FEW), student, teacher, labels, SELECTED, "closed") for arm in (Selective(), Released())
    )
    assert ours > 100 * theirs > 0


# -- rows and answers ---------------------------------------------------------------------------------------------------


def test_rows_are_dealt_by_class():
    labels = torch.arange(C).repeat(10)
    rows = chosen_rows(labels, SELECTED, 4, None)
    assert sorted(labels[rows].tolist()) == sorted(4 * SELECTED)
    second = chosen_rows(labels, SELECTED, 4, None, draw=1)
    assert not set(rows.tolist()) & set(second.tolist())
    rows = chosen_rows(labels, SELECTED, 0, 2)
    assert torch.bincount(labels[rows]).tolist() == [2, 10, 2, 2, 10, 2, 10, 2]
    assert len(chosen_rows(labels, SELECTED, 0, 0)) == 80


def test_batches_show_every_row_equally_often():
    order = batches(24, 8, 9, seed=0)
    assert order.shape == (9, 8)
    assert torch.bincount(order.flatten()).tolist() == [3] * 24
    assert torch.equal(order, batches(24, 8, 9, seed=0))
    assert batches(5, 8, 3, seed=0).tolist() == [[0, 1, 2, 3, 4]] * 3


def test_answers_and_abilities():
    logits = torch.tensor([[3.0, 0, 0, 1], [0, 0, 2, 4], [0, 2, 0, -9]])
    said = answers(logits, SELECTED, "open")
    assert said.best.tolist() == [0, 2, 1]
    assert said.answer.tolist() == [0, 3, 1]
    p = logits.softmax(1)[:, 3]
    torch.testing.assert_close(said.score.sigmoid(), 1 - p)
    closed = answers(logits[:, :3], SELECTED, "closed")
    torch.testing.assert_close(closed.score.sigmoid(), logits[:, :3].softmax(1).max(1).values)
    wide = torch.randn(5, C)
    top = answers(wide, SELECTED, "all")
    p = wide.softmax(1)[:, list(SELECTED)]
    assert torch.equal(top.best, p.argmax(1))
    torch.testing.assert_close(top.score.sigmoid(), p.max(1).values)


def test_threshold_by_brute_force():
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(K + 1, (60,), generator=generator)
    best = torch.where(torch.rand(60, generator=generator) < 0.7, targets.clamp(max=K - 1), 0)
    score = torch.randn(60, generator=generator) + 1.5 * (targets < K)
    said = Answers(best, score, None)
    reached = abilities(said, targets, best_threshold(said, targets))["open_accuracy"]
    tried = [abilities(said, targets, bar)["open_accuracy"] for bar in score.tolist()]
    assert reached == pytest.approx(max(tried))
    seen = abilities(said, targets, 0.0)
    inside = targets < K
    pairs = (score[inside][:, None] > score[~inside]).float().mean().item()
    assert seen["auroc"] == pytest.approx(pairs)
    assert seen["accuracy"] == pytest.approx((best == targets)[inside].float().mean().item())


# -- whole trials -------------------------------------------------------------------------------------------------------


def test_every_arm_learns_a_case_of_ones_own():
    case = own_case()
    for name, arm in study.arms.items():
        metrics = run(arm, case, name)
        assert all(np.isfinite(list(metrics.values())))
        if "released" not in name:
            assert metrics["accuracy_8"] > 0.8, name
        assert ("teacher_accuracy" in metrics) == (name == "ce")
        assert metrics.get("chance", 1 / K) == pytest.approx(1 / K)  # the case is balanced
        assert ("identity_gap" in metrics) == (name == "kd")
    assert run(study.arms["kd"], case, "kd")["identity_gap"] < 1e-9


def test_arms_start_alike_and_repeat():
    case = own_case()
    again = [run(study.arms["selkd"], case, "selkd") for _ in range(2)]
    assert again[0] == again[1]
    frozen = FEW.model_copy(update={"lr": 1e-12})
    starts = [run(study.arms[name], case, name, frozen)["accuracy_4"] for name in ("ce", "kd", "selkd")]
    assert starts[0] == starts[1] == starts[2]


def test_an_arm_of_ones_own():
    def mine(selected, config):
        wanted = torch.tensor(selected)
        return lambda student, teacher, labels: F.cross_entropy(student, (labels[:, None] == wanted).float())

    assert run(mine, own_case())["accuracy_8"] > 0.8


def test_letters_are_dealt_without_overlap():
    needs("letters")
    config = SelKDConfig(shots=(3,), others=2, draws=2, teacher_steps=60)
    case = prepare(config, Log(seed=0, replicate="hard/0", scale="smoke", device="cpu"))
    assert "".join(chr(65 + c) for c in case.selected) == "DIJOQU"
    assert torch.bincount(case.y, minlength=26).tolist() == [6 if c in case.selected else 4 for c in range(26)]
    assert len(case.held_out_y) == 2000
    assert len(case.test_y) == 4000
    assert case.teacher_logits.shape == (len(case.y), 26)
    own, others = ({tuple(row) for row in x.tolist()} for x in (case.x, case.held_out_x))
    assert len(own & others) < 0.1 * len(own)  # the data hold some rows twice


def test_images_and_unknown_cases():
    config = SelKDConfig(cases=("images",), shots=(3,), draws=1, teacher_steps=20)
    case = prepare(config, Log(seed=0, replicate="1000", scale="smoke", device="cpu"))  # tuned on the first case
    assert list(case.selected) == [0, 1, 2, 3, 4]
    assert case.x.shape[1:] == (1, 8, 8)
    assert case.student(6)(case.test_x).shape == (359, 6)
    with pytest.raises(ValueError, match="cases must be among easy, hard, images, or own"):
        prepare(config, Log(seed=0, replicate="own/0", scale="smoke", device="cpu"))


# -- claims -------------------------------------------------------------------------------------------------------------


def replicate(name="hard/0", **arms):
    usual = {f"{m}_{n}": v for m, v in (("accuracy", 0.7), ("auroc", 0.8), ("recall95", 0.5)) for n in (5, 20, 80)}
    arms["ce"] = {"teacher_accuracy": 0.95, "chance": 0.2, **arms.get("ce", {})}
    outcomes = {arm: Outcome({**usual, **arms.get(arm, {})}, {"accuracy": ([5, 20, 80], [0.7] * 3), "auroc": ([5, 20, 80], [0.8] * 3)}) for arm in study.arms}  # fmt: skip  # noqa: E501
    return Replicate(name, 0, study.scale("desk"), outcomes)


def claim(text):
    return next(c for c in study.claims if text in c.text)


def test_claims_read_their_case_and_shots():
    better = replicate(selkd={"accuracy_5": 0.74, "accuracy_20": 0.705})
    five, twenty, both = (
        claim(f"hard letters: accuracy of SelKD above {t}") for t in ("labels alone, 5", "labels alone, 20", "ordinary")
    )
    assert five.statistic(better) == pytest.approx(0.04)
    assert twenty.statistic(better) == pytest.approx(0.005)
    assert both.statistic(better) == pytest.approx(0.015)
    assert [judge(c, [better]).verdict for c in (five, twenty, both)] == ["holds", "fails", "holds"]
    assert five.statistic(replicate("easy/0")) is None
    assert claim("your own case: accuracy").statistic(better) is None
    assert claim("your own case: accuracy").statistic(replicate("own/0", selkd={"accuracy_80": 0.8})) == pytest.approx(0.1 / 3)


def test_what_the_mathematics_claims_read():
    r = replicate(selkd={"term_gradient": 6.0}, kd={"identity_gap": 1e-8}, **{"released-closed": {"term_gradient": 1.0}})
    assert judge(claim("gradient of the plan term"), [r]).verdict == "holds"
    assert judge(claim("is ordinary distillation"), [r]).verdict == "holds"
    worse = replicate(kd={"identity_gap": 1e-3}, selkd={"term_gradient": 1.0}, **{"released-closed": {"term_gradient": 1.0}})
    assert judge(claim("gradient of the plan term"), [worse]).verdict == "fails"
    assert judge(claim("is ordinary distillation"), [worse]).verdict == "fails"


def test_a_gate_closes_the_claims_of_its_case_alone():
    teacher = {"teacher_accuracy": 0.95, "chance": 0.2, "accuracy_80": 0.9}
    ahead = {"accuracy_5": 0.75, "accuracy_20": 0.75}
    five, twenty = (claim(f"easy letters: accuracy of SelKD above labels alone, {n}") for n in (5, 20))
    auroc, mathematics = claim("easy letters: AUROC of open SelKD above labels"), claim("gradient of the plan term")
    good = [replicate(f"{case}/0", ce=teacher, selkd=ahead) for case in ("hard", "easy")]
    assert {judge(c, good).verdict for c in (five, twenty, auroc)} == {"holds"}
    for spoilt, closed in (
        ({"teacher_accuracy": 0.89}, (five, twenty, auroc)),
        ({"accuracy_80": 0.57}, (five, twenty, auroc)),  # less than half of the way from 0.2 to 0.95
        ({"accuracy_5": 0.9}, (five,)),  # 0.05 left for a gain of 0.03
        ({"accuracy_20": 0.94}, (twenty,)),
    ):
        one_spoilt = [good[0], replicate("easy/0", ce=teacher | spoilt, selkd=ahead)]
        assert {c for c in (five, twenty, auroc) if "gate not met: easy letters" in judge(c, one_spoilt).reason} == set(closed)
        assert judge(claim("hard letters: accuracy of SelKD above labels alone, 5"), one_spoilt).verdict == "holds"
    assert not mathematics.gates
    assert not study.gates


def test_how_far_labels_alone_came():
    r = replicate(ce={"teacher_accuracy": 0.95, "chance": 0.2, "accuracy_80": 0.575})
    assert learnt(r) == pytest.approx(0.5)
    assert room_left(None, r) == pytest.approx(0.25)
    assert room_left(7, r) is None


def test_the_figure_has_a_column_for_each_case():
    shown = figure([replicate("hard/0"), replicate("hard/1"), replicate("images/0")])
    assert [axes.get_title() for axes in shown.axes[:2]] == ["hard", "images"]
    assert len(shown.axes) == 4
    assert not figure([]).axes
