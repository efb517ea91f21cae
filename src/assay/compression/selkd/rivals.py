"""What the study sets beside SelKD: distillation made to fit a subset of classes in the ways a practitioner would try first.

A term is a function ``(student_logits, teacher_logits, targets, selected, eps) -> scalar``; targets count into `selected`,
K for any other class.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Term = Callable[[Tensor, Tensor, Tensor, tuple[int, ...], float], Tensor]
DKD_TARGET, DKD_OTHERS = 1.0, 8.0  # α and β of its authors' CIFAR-100 runs


def tempered_kl(log_student: Tensor, log_teacher: Tensor, eps: float) -> Tensor:
    return eps**2 * F.kl_div(log_student, log_teacher.detach(), reduction="batchmean", log_target=True)


def kd(student: Tensor, teacher: Tensor, targets: Tensor, selected: tuple[int, ...], eps: float) -> Tensor:
    """Distillation (Hinton et al., 2015) on the selected columns: the plan whose rows alone are constrained."""
    return tempered_kl((student / eps).log_softmax(1), (teacher[:, list(selected)] / eps).log_softmax(1), eps)


def kd_full(student: Tensor, teacher: Tensor, targets: Tensor, selected: tuple[int, ...], eps: float) -> Tensor:
    """Distillation of all classes into a student with a column for each."""
    return tempered_kl((student / eps).log_softmax(1), (teacher / eps).log_softmax(1), eps)


def kd_merged(student: Tensor, teacher: Tensor, targets: Tensor, selected: tuple[int, ...], eps: float) -> Tensor:
    """Distillation with the teacher's mass on all other classes added up to one column, "not selected"."""
    log_p = (teacher / eps).log_softmax(1)
    others = torch.ones(teacher.shape[1], dtype=torch.bool, device=teacher.device)
    others[list(selected)] = False
    merged = torch.cat([log_p[:, list(selected)], log_p[:, others].logsumexp(1, keepdim=True)], 1)
    return tempered_kl((student / eps).log_softmax(1), merged, eps)


def dkd(student: Tensor, teacher: Tensor, targets: Tensor, selected: tuple[int, ...], eps: float) -> Tensor:
    """Decoupled distillation (Zhao et al., CVPR 2022) on the selected columns: target against the rest, and within the rest."""
    target = F.one_hot(targets, len(selected)).bool()
    whole, within = [], []
    for z in (student, teacher[:, list(selected)]):
        log_p = (z / eps).log_softmax(1)
        rest = log_p.masked_fill(target, -torch.inf).logsumexp(1)
        whole.append(torch.stack([log_p[target], rest], 1))
        within.append(log_p[~target].view(len(z), -1).log_softmax(1))
    return DKD_TARGET * tempered_kl(whole[0], whole[1], eps) + DKD_OTHERS * tempered_kl(within[0], within[1], eps)
