"""The loss: zero where it must be, its parts by hand, the gradient it promises, every bad input; and its trainer."""

import copy
import io
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from assay.compression import SelKDLoss, plan_divergence, transport_plan
from assay.compression.selkd.plans import column_potential

SELECTED, C, K, B, EPS = [9, 2, 5, 7, 0, 4], 12, 6, 32, 4.0


def batch(outside=0, seed=0, dtype=torch.float64):
    """Student logits, a teacher that knows the labels, labels: the first `outside` are not selected."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor(SELECTED)[torch.randint(K, (B,), generator=generator)]
    others = torch.tensor(sorted(set(range(C)) - set(SELECTED)))
    labels[:outside] = others[torch.randint(len(others), (outside,), generator=generator)]
    teacher = 2 * torch.randn(B, C, generator=generator, dtype=dtype) + 8 * F.one_hot(labels, C)
    student = 2 * torch.randn(B, K + (outside > 0), generator=generator, dtype=dtype)
    return student.requires_grad_(), teacher, labels


def merged(teacher):
    """The logits of an open-set student whose tempered probabilities are the teacher's, unselected ones merged."""
    log_p = (teacher / EPS).log_softmax(1)
    others = sorted(set(range(C)) - set(SELECTED))
    return EPS * torch.cat([log_p[:, SELECTED], log_p[:, others].logsumexp(1, keepdim=True)], 1)


def terms(criterion, *given):
    criterion(*given)
    return criterion.last_terms


# -- where it is zero ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outside", [1, 20, 31])
def test_the_perfect_open_student_has_no_loss(outside):
    _, teacher, labels = batch(outside)
    seen = terms(SelKDLoss(SELECTED, mode="open"), merged(teacher), teacher, labels)
    assert seen["plan"] == pytest.approx(0, abs=1e-12)
    assert seen["slack"] == pytest.approx(0, abs=1e-12)


def test_odds_in_place_of_probabilities_would_not_do():
    """Rows that are scaled by each model's own reject logit do not compare: the perfect student has a loss."""
    _, teacher, _ = batch(20)
    z, m = merged(teacher), 12
    log_teacher = transport_plan(EPS * (teacher / EPS).log_softmax(1)[:, SELECTED], rows="le", total=m)
    log_student = transport_plan(z[:, :K] - z[:, K:], rows="le", total=m)
    assert plan_divergence(log_teacher, log_student, EPS).abs() > 0.05


def test_the_perfect_closed_student_has_no_loss_and_no_gradient():
    _, teacher, labels = batch()
    student = (teacher[:, SELECTED] + 3).requires_grad_()
    criterion = SelKDLoss(SELECTED, gamma=0, student_iters=20)
    loss = criterion(student, teacher, labels)
    assert loss.item() == pytest.approx(0, abs=1e-12)
    assert torch.autograd.grad(loss, student)[0].abs().max() < 1e-9


def test_the_loss_is_a_divergence():
    for seed in range(20):
        student, teacher, labels = batch(12, seed)
        seen = terms(SelKDLoss(SELECTED, mode="open"), student, teacher, labels)
        assert seen["plan"] + seen["slack"] > 0
        student, teacher, labels = batch(0, seed)
        assert terms(SelKDLoss(SELECTED), student, teacher, labels)["plan"] > 0


# -- its parts ----------------------------------------------------------------------------------------------------------


def test_closed_by_hand():
    student, teacher, labels = batch()
    criterion = SelKDLoss(SELECTED, alpha=0.7, gamma=0.3)
    b = torch.tensor([(labels == c).sum() for c in SELECTED])
    plan = plan_divergence(
        transport_plan(teacher[:, SELECTED], col_mass=b, n_iter=20), transport_plan(student, col_mass=b, n_iter=5), EPS
    )
    ce = F.cross_entropy(student, torch.tensor([SELECTED.index(y) for y in labels.tolist()]))
    torch.testing.assert_close(criterion(student, teacher, labels), 0.3 * ce + 0.7 * plan)
    seen = criterion.last_terms
    assert (seen["ce"], seen["plan"], seen["slack"]) == (pytest.approx(ce.item()), pytest.approx(plan.item()), 0)


def test_open_is_a_bernoulli_divergence_of_row_masses_and_a_weighted_one_within_rows():
    student, teacher, labels = batch(20)
    seen = terms(SelKDLoss(SELECTED, mode="open"), student, teacher, labels)
    p_t, p_s = (teacher / EPS).log_softmax(1)[:, SELECTED], (student / EPS).log_softmax(1)[:, :K]
    r_t, r_s = (transport_plan(EPS * p, rows="le", total=12).exp().sum(1) for p in (p_t, p_s))
    rows = (r_t[:, None] * p_t.softmax(1) * (p_t.log_softmax(1) - p_s.log_softmax(1))).sum()
    bernoulli = r_t.xlogy(r_t / r_s).sum() + (1 - r_t).xlogy(((1 - r_t) / (1 - r_s)).clamp_min(1e-300)).sum()
    assert r_s.max() < 1  # no student row is full: the floor does not enter
    assert seen["plan"] + seen["slack"] == pytest.approx(EPS**2 / B * (rows + bernoulli).item())
    targets = torch.tensor([SELECTED.index(y) if y in SELECTED else K for y in labels.tolist()])
    assert seen["ce"] == pytest.approx(F.cross_entropy(student, targets).item())


def test_a_full_student_row_is_charged_and_stays_finite():
    _, teacher, labels = batch(20)
    student = torch.zeros(B, K + 1, dtype=torch.float64)
    student[:20, K] = 40.0
    student[0, K] = -400.0  # one that is not selected gives itself away whole
    student.requires_grad_()
    criterion = SelKDLoss(SELECTED, mode="open", gamma=0)
    loss = criterion(student, teacher, labels)
    assert criterion.last_terms["slack"] > 1
    gradient = torch.autograd.grad(loss, student)[0]
    assert gradient.isfinite().all()
    assert gradient[0, K].abs() < 1e-12  # documented: it is pushed back through λ alone
    assert gradient[1:].abs().max() > 1e-3


def test_without_a_selected_sample_labels_and_slack_remain():
    student, teacher, labels = batch(B)
    criterion = SelKDLoss(SELECTED, mode="open")
    loss = criterion(student, teacher, labels)
    assert criterion.last_terms["plan"] == criterion.last_terms["slack"] == 0
    expected = torch.autograd.grad(F.cross_entropy(student, torch.full((B,), K)), student)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, student)[0], expected)


def test_classes_absent_from_the_batch():
    student, teacher, labels = batch()
    rows = torch.tensor([y in (9, 5, 0) for y in labels.tolist()])
    student, teacher, labels = student[rows], teacher[rows], labels[rows]
    loss = SelKDLoss(SELECTED, gamma=0)(student, teacher, labels)
    present = [0, 2, 4]
    alone = SelKDLoss([9, 5, 0], gamma=0)(student[:, present], teacher, labels)
    torch.testing.assert_close(loss, alone)
    one = SelKDLoss(SELECTED, gamma=0)(student[:1], teacher[:1], labels[:1])  # a single sample has a single plan
    assert one.item() == pytest.approx(0, abs=1e-12)


def test_marginals():
    student, teacher, labels = batch()
    uniform = terms(SelKDLoss(SELECTED, marginal="uniform"), student, teacher, labels)["plan"]
    b = torch.full((K,), B / K)
    by_hand = [transport_plan(z, col_mass=b, n_iter=n) for z, n in ((teacher[:, SELECTED], 20), (student, 5))]
    assert uniform == pytest.approx(plan_divergence(*by_hand, EPS).item())
    unlabelled = SelKDLoss(SELECTED, marginal="teacher")
    value = unlabelled(student, teacher)
    assert unlabelled.last_terms["ce"] == 0
    b = teacher[:, SELECTED].softmax(1).sum(0)
    by_hand = [transport_plan(z, col_mass=b, n_iter=n) for z, n in ((teacher[:, SELECTED], 20), (student, 5))]
    torch.testing.assert_close(value, plan_divergence(*by_hand, EPS))
    student, teacher, labels = batch(20)
    unlabelled = SelKDLoss(SELECTED, mode="open", marginal="teacher")
    unlabelled(student, teacher)
    m = teacher.softmax(1)[:, SELECTED].sum()
    by_hand = [
        transport_plan(EPS * z, rows="le", total=m)
        for z in ((teacher / EPS).log_softmax(1)[:, SELECTED], (student / EPS).log_softmax(1)[:, :K])
    ]
    assert unlabelled.last_terms["plan"] == pytest.approx(plan_divergence(*by_hand, EPS).item())


def test_a_raw_teacher_moves_with_each_samples_scale_and_a_normalised_one_does_not():
    student, teacher, labels = batch(20)
    shifted = teacher + torch.linspace(0, 9, B)[:, None].double()
    change = {}
    for normalised in (True, False):
        criterion = SelKDLoss(SELECTED, mode="open", normalise_teacher=normalised)
        change[normalised] = abs(criterion(student, teacher, labels) - criterion(student, shifted, labels))
    assert change[True] < 1e-9
    assert change[False] > 0.1


# -- gradients ----------------------------------------------------------------------------------------------------------


def test_the_formula_is_the_derivative_of_the_value_with_potentials_held():
    """Absent classes, whose potential is −∞, too; and it can itself be differentiated."""
    student, teacher, labels = batch()
    labels[labels == SELECTED[1]] = SELECTED[0]
    criterion = SelKDLoss(SELECTED, gamma=0, alpha=0.7)
    b = torch.tensor([(labels == c).sum() for c in SELECTED]).double()
    assert b[1] == 0
    log_teacher = transport_plan(teacher[:, SELECTED], col_mass=b)
    with torch.no_grad():
        g = column_potential(student / EPS, b, 5)
    seen, weight = [], torch.linspace(-1, 1, student.numel()).double().view_as(student)
    for loss in (
        criterion(student, teacher, labels),
        0.7 * plan_divergence(log_teacher, (student / EPS + g).log_softmax(1), EPS),
    ):
        gradient = torch.autograd.grad(loss, student, create_graph=True)[0]
        seen.append((loss, gradient, torch.autograd.grad((weight * gradient).sum(), student)[0]))
    for ours, held in zip(*seen, strict=True):
        torch.testing.assert_close(ours, held)
    assert seen[0][2].abs().max() > 1e-5
    by_function = torch.func.grad(lambda z: criterion(z, teacher, labels))(student.detach())
    torch.testing.assert_close(by_function, seen[0][1].detach())


@pytest.mark.parametrize("outside", [0, 20])
def test_gradients(outside):
    student, teacher, labels = batch(outside)
    rows = slice(18, 26)
    options = {"mode": "open"} if outside else {"unroll": True, "student_iters": 3}
    criterion = SelKDLoss(SELECTED, **options)
    small = student[rows].detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: criterion(z, teacher[rows], labels[rows]), (small,))


def test_constant_potentials_give_the_gradient_of_the_converged_problem():
    """(P_s − P_t) ε / B, which differentiating through the iterations comes to as well."""
    student, teacher, labels = batch()
    gradients = {
        unroll: torch.autograd.grad(
            SelKDLoss(SELECTED, gamma=0, student_iters=100, teacher_iters=200, unroll=unroll)(student, teacher, labels), student
        )[0]
        for unroll in (False, True)
    }
    b = torch.tensor([(labels == c).sum() for c in SELECTED])
    p_t, p_s = (transport_plan(z, col_mass=b, n_iter=200).exp() for z in (teacher[:, SELECTED], student))
    for gradient in gradients.values():
        torch.testing.assert_close(gradient, (p_s - p_t) * EPS / B, rtol=0, atol=1e-9)


def test_nothing_flows_into_the_teacher():
    student, teacher, labels = batch(20)
    teacher.requires_grad_()
    SelKDLoss(SELECTED, mode="open")(student, teacher, labels).backward()
    assert student.grad is not None
    assert teacher.grad is None


def test_minimising_it_recovers_the_teacher():
    _, teacher, labels = batch(20)
    student = torch.zeros(B, K + 1, dtype=torch.float64, requires_grad=True)
    criterion = SelKDLoss(SELECTED, mode="open", gamma=0)
    optimizer = torch.optim.Adam([student], lr=0.2)
    for _ in range(400):
        optimizer.zero_grad()
        criterion(student, teacher, labels).backward()
        optimizer.step()
    plans = [
        transport_plan(EPS * (z / EPS).log_softmax(1)[:, columns], rows="le", total=12).exp()
        for z, columns in ((teacher, SELECTED), (student, list(range(K))))
    ]
    torch.testing.assert_close(*plans, rtol=0, atol=0.02)


# -- as a module --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    student, teacher, labels = batch(20, dtype=torch.float32)
    half = student.detach().to(dtype).requires_grad_()
    criterion = SelKDLoss(SELECTED, mode="open")
    loss = criterion(half, teacher.to(dtype), labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, criterion(half.float(), teacher.to(dtype).float(), labels))
    loss.backward()
    assert half.grad.dtype == dtype
    assert half.grad.isfinite().all()


@pytest.mark.parametrize("outside", [0, 20])
@pytest.mark.parametrize(
    "kinds", [(torch.float32, torch.float64), (torch.bfloat16, torch.float64), (torch.float64, torch.float32)]
)
def test_a_teacher_of_another_precision(kinds, outside):
    """Logits that were stored by NumPy are double."""
    student, teacher, labels = batch(outside)
    student, teacher = student.detach().to(kinds[0]).requires_grad_(), teacher.to(kinds[1])
    criterion = SelKDLoss(SELECTED, mode="open" if outside else "closed")
    loss = criterion(student, teacher, labels)
    torch.testing.assert_close(loss, criterion(student.double(), teacher.double(), labels))
    loss.backward()
    assert student.grad.dtype == kinds[0]


def test_autocast_does_not_reach_the_plans():
    student, teacher, labels = batch(dtype=torch.float32)
    criterion = SelKDLoss(SELECTED)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = criterion(student, teacher, labels)
    torch.testing.assert_close(mixed, criterion(student, teacher, labels))


def test_it_copies_pickles_and_has_no_state():
    student, teacher, labels = batch(20)
    criterion = SelKDLoss(SELECTED, mode="open", eps=3)
    value = criterion(student, teacher, labels)
    buffer = io.BytesIO()
    torch.save(criterion, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(criterion), torch.load(buffer, weights_only=False)):
        assert other(student, teacher, labels) == value
    assert criterion.state_dict() == {}
    assert str(criterion) == "SelKDLoss(selected=[9, 2, 5, 7, 0, 4], mode='open', eps=3, alpha=1, gamma=1)"


@pytest.mark.parametrize("integers", [torch.int32, torch.uint8, torch.int16])
def test_labels_of_any_integer_type_are_left_as_they_were(integers):
    student, teacher, labels = batch(20)
    given = labels.to(integers)
    criterion = SelKDLoss(SELECTED, mode="open")
    assert criterion(student, teacher, given) == criterion(student, teacher, labels)
    assert torch.equal(given.long(), labels)


def test_it_trains_the_example_of_the_page():
    torch.manual_seed(0)
    teacher, student = nn.Linear(8, 20), nn.Linear(8, 4)
    x = torch.randn(400, 8)
    with torch.no_grad():
        y = (3 * teacher(x)).argmax(1)
    criterion, optimizer = SelKDLoss([3, 8, 14], mode="open"), torch.optim.Adam(student.parameters(), 0.03)
    losses = []
    for _ in range(150):
        with torch.no_grad():
            z_t = 3 * teacher(x)
        loss = criterion(student(x), z_t, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("outside", [0, 20])
def test_it_compiles(outside):
    student, teacher, labels = batch(outside, dtype=torch.float32)
    criterion = SelKDLoss(SELECTED, mode="open" if outside else "closed")
    compiled = torch.compile(criterion, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(student, teacher, labels), criterion(student, teacher, labels))


# -- bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"selected": [1, 1]}, "distinct"),
        ({"selected": []}, "at least one"),
        ({"selected": [-2]}, "≥ 0"),
        ({"mode": "half"}, "mode must be one of 'closed', 'open', got 'half'"),
        ({"solver": "sort"}, "solver must be one of"),
        ({"marginal": "none"}, "marginal must be one of"),
        ({"mode": "open", "marginal": "uniform"}, "for the closed mode"),
        ({"eps": 0}, "eps must be positive"),
        ({"eps": math.nan}, "eps must be positive"),
        ({"alpha": -1}, "alpha must be finite and at least 0"),
        ({"gamma": math.inf}, "gamma must be finite"),
        ({"student_iters": 0}, "student_iters must be at least 1"),
        ({"teacher_iters": 0}, "teacher_iters must be at least 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        SelKDLoss(**{"selected": SELECTED, **arguments})


@pytest.mark.parametrize("mode", ["closed", "open"])
def test_bad_batches(mode):
    width = K + (mode == "open")
    criterion = SelKDLoss(SELECTED, mode=mode)
    student, teacher, labels = torch.zeros(4, width), torch.zeros(4, C), torch.tensor([9, 2, 5, 7])

    def refused(message, **changed):
        given = {"student_logits": student, "teacher_logits": teacher, "labels": labels, **changed}
        with pytest.raises(ValueError, match=message):
            criterion(**given)

    refused(rf"student_logits must be \(B, {width}\)", student_logits=torch.zeros(4, width + 1))
    refused(r"teacher_logits must be \(4, C\) with C above .* 9", teacher_logits=torch.zeros(4, 9))
    refused(r"teacher_logits must be \(4, C\)", teacher_logits=torch.zeros(3, C))
    refused("student_logits must be .* not empty", student_logits=torch.zeros(0, width))
    refused("student_logits must be floating point", student_logits=torch.zeros(4, width, dtype=torch.long))
    refused(r"labels must be \(4,\)", labels=labels[:3])
    refused("labels must be integers", labels=labels.float())
    refused(r"labels must be teacher class ids in .* got 2\.\.12", labels=torch.tensor([9, 2, 5, 12]))
    refused("labels must be teacher class ids in .* got -100", labels=torch.tensor([9, 2, 5, -100]))
    refused("labels may be left out", labels=None)
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = student.clone()
        spoilt[1, 1] = bad
        refused("student_logits must be finite, 1 of", student_logits=spoilt)
        refused("teacher_logits must be finite, 4 of 48", teacher_logits=teacher.clone().index_fill_(1, torch.tensor(3), bad))
    if mode == "closed":
        refused("labels must be among selected in closed mode, 1 of 4 are not", labels=torch.tensor([9, 2, 5, 1]))
        refused(r"in \[0, 12\), got -1\.\.9", labels=torch.tensor([9, 2, 5, -1]))
    else:
        assert criterion(student, teacher, torch.tensor([9, 2, 1, -1])).isfinite()


# -- with Hugging Face's trainer ----------------------------------------------------------------------------------------


def test_the_loss_needs_no_transformers():
    script = "import sys; from assay.compression import SelKDLoss; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def classifier(labels, seed, width=16):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=8,
            patch_size=4,
            num_channels=1,
            hidden_size=width,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=2 * width,
            num_labels=labels,
            hidden_dropout_prob=0.1,
        )
    )


def trainer_for(tmp_path, criterion, width, **changes):
    transformers = pytest.importorskip("transformers")
    from assay.compression.selkd.trainer import SelKDTrainer

    generator = torch.Generator().manual_seed(0)
    rows = [
        {"pixel_values": torch.randn(1, 8, 8, generator=generator), "labels": SELECTED[i % K] if i % 2 else 1}
        for i in range(1, 25, 2 if criterion.mode == "closed" else 1)
    ]
    settings = {"max_steps": 2, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True, **changes}
    args = transformers.TrainingArguments(str(tmp_path), **settings)
    student, teacher = classifier(width, 1), classifier(C, 2)
    teacher.train()  # as it may come
    return SelKDTrainer(
        model=student, teacher=teacher, criterion=criterion, args=args, train_dataset=rows, eval_dataset=rows[:5]
    ), rows


@pytest.mark.parametrize("mode", ["closed", "open"])
def test_the_trainer_trains_the_student_alone(tmp_path, mode):
    trainer, _ = trainer_for(tmp_path, SelKDLoss(SELECTED, mode=mode), K + (mode == "open"))
    before = [{n: p.clone() for n, p in m.state_dict().items()} for m in (trainer.model, trainer.teacher)]
    trainer.train()
    assert any(not torch.equal(before[0][n], p) for n, p in trainer.model.state_dict().items())
    assert all(torch.equal(before[1][n], p) for n, p in trainer.teacher.state_dict().items())
    assert not trainer.teacher.training
    predicted = trainer.predict(trainer.eval_dataset)
    assert predicted.predictions.shape == (5, K + (mode == "open"))
    assert math.isfinite(predicted.metrics["test_loss"])
    saved = tmp_path / "saved"
    trainer.save_model(str(saved))
    assert type(trainer.model).from_pretrained(saved).config.num_labels == K + (mode == "open")


def test_the_trainers_loss_is_the_criterions(tmp_path):
    criterion = SelKDLoss(SELECTED, mode="open")
    trainer, rows = trainer_for(tmp_path, criterion, K + 1)
    inputs = trainer.data_collator(rows[:6])
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, dict(inputs))
    x = inputs["pixel_values"]
    with torch.no_grad():
        expected = criterion(trainer.model(x).logits, trainer.teacher.eval()(x).logits, inputs["labels"])
    torch.testing.assert_close(loss, expected)


def test_accumulated_steps_weigh_as_one(tmp_path):
    """The loss is a mean over its batch: two batches of 4 give the mean of their gradients, not the sum."""
    norms = {}
    for steps in (1, 2):
        plain = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "max_steps": 1}
        criterion = SelKDLoss(SELECTED, mode="open")
        trainer, rows = trainer_for(tmp_path, criterion, K + 1, gradient_accumulation_steps=steps, **plain)
        trainer.train_dataset = [rows[3]] * 8
        for module in trainer.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train()
        moved = zip(trainer.model.parameters(), before, strict=True)
        norms[steps] = math.sqrt(sum(float((p.detach() - q).square().sum()) for p, q in moved))
    assert norms[1] == pytest.approx(norms[2], rel=1e-4)


def test_a_second_loss_is_refused(tmp_path):
    pytest.importorskip("transformers")
    from assay.compression.selkd.trainer import SelKDTrainer

    with pytest.raises(ValueError, match="compute_loss_func must be left out"):
        SelKDTrainer(
            model=classifier(K, 1), teacher=classifier(C, 2), criterion=SelKDLoss(SELECTED), compute_loss_func=lambda *a: a
        )
