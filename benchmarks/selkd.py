"""SelKD's loss forward and backward beside ordinary distillation, and its plan beside the B × B form of the released code.

Distillation is its usual three lines with `F.kl_div`, with cross-entropy as ours has it. Student logits of 20 classes (open:
21), teacher logits of 100.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from assay.bench.speed import Contest
from assay.compression import SelKDLoss, transport_plan
from assay.compression.selkd.rivals import kd_merged

torch.manual_seed(0)
B, K, C, EPS = 256, 20, 100, 4.0
labels = torch.randint(K, (B,))
any_labels = torch.randint(C, (B,))
teacher = 3 * torch.randn(B, C) + 10 * F.one_hot(labels, C)
closed_student, open_student = torch.randn(B, K, requires_grad=True), torch.randn(B, K + 1, requires_grad=True)
closed, unrolled, open_ = SelKDLoss(range(K)), SelKDLoss(range(K), unroll=True), SelKDLoss(range(K), mode="open")


def kd() -> Tensor:
    term = EPS**2 * F.kl_div(F.log_softmax(closed_student / EPS, 1), F.softmax(teacher[:, :K] / EPS, 1), reduction="batchmean")
    return term + F.cross_entropy(closed_student, labels)


def merged() -> Tensor:
    term = kd_merged(open_student, teacher, any_labels, tuple(range(K)), EPS)
    return term + F.cross_entropy(open_student, any_labels.clamp(max=K))


def step(loss, student):
    return lambda: torch.autograd.grad(loss(), student)


LARGE = 1024
large, large_labels = torch.randn(LARGE, K), torch.randint(K, (LARGE,))
counts = torch.bincount(large_labels, minlength=K)


def diagonal() -> Tensor:
    """The released shape, with our sign: columns are samples, the plan a product with two diagonal matrices."""
    kernel = torch.exp(large @ F.one_hot(large_labels, K).float().T / EPS)
    ones = torch.ones(LARGE)
    v = ones
    for _ in range(5):
        u = ones / (kernel @ v + 1e-6)
        v = ones / (kernel.T @ u + 1e-6)
    return torch.diag(u) @ kernel @ torch.diag(v)


ours_closed = step(lambda: closed(closed_student, teacher, labels), closed_student)
contests = [
    Contest(
        "closed loss, B = 256, K = 20",
        ours_closed,
        step(kd, closed_student),
        "labels and F.kl_div",
        1.3,
        note="the iterations alone, 5 for the student and up to 20 for the teacher, take as long as a step of distillation",
    ),
    Contest(
        "closed loss, differentiated through its iterations",
        step(lambda: unrolled(closed_student, teacher, labels), closed_student),
        step(kd, closed_student),
        "labels and F.kl_div",
    ),
    Contest(
        "open loss, B = 256, K = 20",
        step(lambda: open_(open_student, teacher, any_labels), open_student),
        step(merged, open_student),
        "labels and F.kl_div, one merged column",
    ),
    Contest(
        "plan, 5 iterations, B = 1024",
        lambda: transport_plan(large, col_mass=counts, n_iter=5),
        diagonal,
        "B × B with diagonal matrices",
        0.1,
        memory=True,
    ),
]
