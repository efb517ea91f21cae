"""SelKD beside labels alone and ordinary distillation: when a student needs some of the teacher's classes, do plans help?

Published: on CIFAR-100 with 20 of 100 classes selected, students distilled by matching transport plans are ahead of ordinary
distillation made to fit the subset, closed (the student knows the selected classes alone) and open (it also answers "not
selected"). Desk: UCI letters with an MLP of 256 hidden units as the teacher of 26 classes and one of 32 as the student of
six, ``easy`` to tell apart or ``hard`` (D, I, J, O, Q, U); and five of scikit-learn's ten digits with small convolutional
networks. A student sees ``shots`` labelled samples of each selected class and, open, a few of every other. Desk cannot show
CIFAR-100, deep networks, or the schedule of 240 epochs; that SelKD is ahead of ordinary distillation is not expected of it,
that it is not behind is.

An arm is a callable ``(selected, config) -> loss``: `selected` the class ids kept, `loss` a callable ``(student_logits,
teacher_logits, labels) -> scalar`` with the teacher's class ids as labels. An attribute ``outputs`` says what the student is:
``"closed"`` (the default: K columns, trained on rows of selected classes), ``"open"`` (K + 1 columns, all rows) or
``"all"`` (the teacher's C columns, rows of selected classes).

``prepare`` returns a ``Case``: training rows ``x (n, ...)``, their labels ``y`` and the teacher's logits of them, the class ids
``selected``, ``student(outputs)`` which makes a network, and rows with labels to choose settings on and to test on. For a case
of your own add ``--set cases=own``.
"""

from collections.abc import Callable
from functools import partial

import torch
from pydantic import Field
from torch import Tensor

from assay.bench import Claim, Config, Replicate, Study, Tune, at_least, at_most
from assay.data import load_images, load_letters

from . import plan_divergence, remap_labels, transport_plan
from .arms import Outputs, Released, Rival, Selective, label_loss, term_gradient
from .figures import figure
from .rivals import dkd, kd, kd_full, kd_merged
from .training import (
    Case,
    abilities,
    answers,
    batches,
    best_threshold,
    chosen_rows,
    convolutions,
    fit,
    fit_teacher,
    mlp,
)

LETTERS = {"easy": "ALMTWX", "hard": "DIJOQU"}
HELD_OUT = 2000


class SelKDConfig(Config):
    cases: tuple[str, ...] = ("hard", "easy", "images")
    """What is run: letters `hard` or `easy` to tell apart, `images`; `own` with a case of yours. Tuned on the first."""
    letters: str = "letters"
    """A name or path that `assay.data.load_letters` takes."""
    images: str = "digits"
    """Images: a name that `assay.data.load_images` knows, or a folder."""
    image_classes: int = Field(5, ge=2)
    """How many of the images' classes are selected, the first ones."""
    image_width: int = Field(4, ge=1)
    """Channels of the student's first convolution; the teacher has six times as many."""
    shots: tuple[int, ...] = (5, 20, 80)
    """Labelled samples of each selected class; 0: all."""
    others: int = Field(5, ge=0)
    """Samples of each other class that an open student sees; 0: all."""
    draws: int = Field(2, ge=1)
    """Draws of the labelled samples, and students, that a replicate's numbers are the mean of."""
    teacher_steps: int = Field(1000, ge=1)
    """Steps that the teacher is trained for, with 128 rows each."""
    steps: int = Field(500, ge=1)
    """Steps that a student is trained for."""
    batch: int = Field(64, ge=2)
    """Rows a step; all rows where there are fewer."""
    lr: float = Field(1e-2, gt=0)
    """Learning rate of Adam, falling to zero along a cosine; tuned, every arm over the same grid."""
    eps: float = Field(4.0, gt=0)
    """Temperature of every distillation."""
    alpha: float = Field(1.0, ge=0)
    """Weight of every distillation term beside the labels' 1."""


# -- cases --------------------------------------------------------------------------------------------------------------


def prepare(config, log) -> Case:
    name = log.replicate.partition("/")[0]
    if name.isdecimal():  # the replicate that settings are tuned on
        name = config.cases[0]
    if name in LETTERS:
        return letters_case(config, log, [ord(letter) - ord("A") for letter in LETTERS[name]])
    if name == "images":
        return images_case(config, log)
    raise ValueError(f"cases must be among {', '.join(LETTERS)}, images, or own with --case, got {name!r}")


def letters_case(config, log, selected: list[int]) -> Case:
    data = load_letters(config.letters)
    x, y = torch.from_numpy(data.features).float(), torch.from_numpy(data.labels)
    held_out = torch.from_numpy(data.is_test)
    x = (x - x[~held_out].mean(0)) / x[~held_out].std(0)
    teacher = mlp([16, 256, 256], 26)
    return case_of(config, log, teacher, partial(mlp, [16, 32, 32]), (x, y, held_out), selected)


def images_case(config, log) -> Case:
    data = load_images(config.images)
    x = torch.from_numpy(data.images).permute(0, 3, 1, 2).float() / 255
    y = torch.from_numpy(data.labels)
    network = partial(convolutions, x.shape[1])
    teacher = network(6 * config.image_width, len(data.classes))
    selected = list(range(config.image_classes))
    return case_of(config, log, teacher, partial(network, config.image_width), (x, y, torch.from_numpy(data.is_test)), selected)


def case_of(config, log, teacher, student, data: tuple[Tensor, Tensor, Tensor], selected: list[int]) -> Case:
    """Trains the teacher on all training rows, deals out the student's in a random order, and keeps some to choose on."""
    x, y, is_test = data
    test_x, test_y = x[is_test], y[is_test]
    x, y = x[~is_test], y[~is_test]
    fit_teacher(teacher, x, y, config.teacher_steps, log)
    held_out, rest = torch.randperm(len(x)).split((some := min(HELD_OUT, len(x) // 4), len(x) - some))
    most, others = (0 if 0 in n else config.draws * max(n) for n in (config.shots, (config.others,)))
    pool = rest[chosen_rows(y[rest], selected, most, others)]
    with torch.no_grad():
        logits, test_logits = teacher(x[pool]), teacher(test_x)
    return Case(x[pool], y[pool], logits, selected, student, x[held_out], y[held_out], test_x, test_y, test_logits)


# -- one arm on one case ------------------------------------------------------------------------------------------------


def trial(arm, case: Case, config, log) -> dict[str, float]:
    outputs: Outputs = getattr(arm, "outputs", "closed")
    selected = tuple(case.selected)
    targets, held_out = (remap_labels(y, selected, open_set=True) for y in (case.test_y, case.held_out_y))
    metrics = first_step(arm, case, config, log, outputs)
    chosen_on = []
    for shots in log.track(config.shots, "shots"):
        seen = []
        for draw in range(config.draws):
            student = trained(arm, case, config, log, outputs, shots, draw)
            with torch.no_grad():
                said, said_before = (
                    answers(student(x.to(log.device)).cpu(), selected, outputs) for x in (case.test_x, case.held_out_x)
                )
            bar = best_threshold(said_before, held_out)
            seen.append(abilities(said, targets, bar))
            before = abilities(said_before, held_out, bar)
            chosen_on.append(before["open_accuracy" if outputs == "open" else "accuracy"])
        for what in seen[0]:
            value = sum(one[what] for one in seen) / len(seen)
            metrics[f"{what}_{shots}"] = value
            log.metric(what, value, shots)
    metrics["chosen_on"] = sum(chosen_on) / len(chosen_on)
    if log.arm == "ce" and case.test_teacher is not None:  # the same for all arms: written down once
        teacher = abilities(answers(case.test_teacher, selected, "all"), targets, 0.0)
        chance = float(torch.bincount(targets)[: len(selected)].max()) / int((targets < len(selected)).sum())
        metrics |= {"teacher_accuracy": teacher["accuracy"], "teacher_auroc": teacher["auroc"], "chance": chance}
    return metrics


def start(arm, case: Case, config, log, outputs: Outputs, shots: int, draw: int):
    """A student, the same for all arms but for its last layer's width; the loss; its rows; and their order."""
    selected = tuple(case.selected)
    torch.manual_seed(log.seed + draw)
    K, C = len(selected), case.teacher_logits.shape[1]
    student = case.student({"closed": K, "open": K + 1, "all": C}[outputs]).to(log.device)
    rows = chosen_rows(case.y, selected, shots, config.others if outputs == "open" else None, draw)
    order = batches(len(rows), config.batch, config.steps, log.seed + draw).to(log.device)
    return student, arm(selected, config), [t[rows].to(log.device) for t in (case.x, case.teacher_logits, case.y)], order


def trained(arm, case: Case, config, log, outputs: Outputs, shots: int, draw: int):
    student, loss, (x, z_t, y), order = start(arm, case, config, log, outputs, shots, draw)
    fit(student, order, config.lr, lambda r: loss(student(x[r]), z_t[r], y[r]), log, f"{shots}-{draw}")
    return student.eval()


def first_step(arm, case: Case, config, log, outputs: Outputs) -> dict[str, float]:
    """Before any step: the gradient of all that is not labels, and whether ordinary distillation is a plan's loss."""
    student, loss, (x, z_t, y), order = start(arm, case, config, log, outputs, config.shots[0], 0)
    rows, selected = order[0], tuple(case.selected)
    with torch.no_grad():
        z_s, z_t, y = student(x[rows]), z_t[rows], y[rows]
    metrics = {"term_gradient": term_gradient(loss, z_s, z_t, y, selected, outputs)}
    if log.arm == "kd":
        z_s, z_t = z_s.double(), z_t.double()
        teacher, own = (transport_plan(z, eps=config.eps) for z in (z_t[:, list(selected)], z_s))
        term = loss(z_s, z_t, y) - label_loss(z_s, y, selected, outputs)
        metrics["identity_gap"] = float((term - config.alpha * plan_divergence(teacher, own, config.eps)).abs())
    return metrics


# -- what is read off ---------------------------------------------------------------------------------------------------


def case_name(r: Replicate) -> str:
    return r.name.partition("/")[0]


def in_case(case: str, read: Callable[[Replicate], float | None]) -> Callable[[Replicate], float | None]:
    """A statistic of one case's replicates; every case that is not the study's is the user's own."""
    return lambda r: read(r) if (case_name(r) if case_name(r) in CASES else "own") == case else None


def gain(case: str, metric: str, arm: str, other: str, shots: int | None = None):
    """The difference of two arms in one case: at one number of shots, or the mean over all."""

    def difference(r: Replicate) -> float | None:
        counts = [n for n in r.config.shots if shots in (n, None)]
        gaps = [r[arm].metrics[f"{metric}_{n}"] - r[other].metrics[f"{metric}_{n}"] for n in counts]
        return sum(gaps) / len(gaps) if gaps else None

    return in_case(case, difference)


def weakest_gradient(r: Replicate) -> float:
    return r["selkd"].term_gradient / r["released-closed"].term_gradient


def learnt(r: Replicate) -> float:
    """How far labels alone come with the most samples: 0 at chance, 1 at the teacher's accuracy."""
    ce = r["ce"]
    return (ce.metrics[f"accuracy_{r.config.shots[-1]}"] - ce.chance) / (ce.teacher_accuracy - ce.chance)


def room_left(shots: int | None, r: Replicate) -> float | None:
    """Teacher's accuracy above that of labels alone, with these many samples or with the fewest."""
    shots = r.config.shots[0] if shots is None else shots
    return r["ce"].teacher_accuracy - r["ce"].metrics[f"accuracy_{shots}"] if shots in r.config.shots else None


CASES = {"hard": "hard letters", "easy": "easy letters", "images": "images"}
RIVALS = {
    "dkd": "decoupled distillation",
    "kd-full": "distillation of all classes",
    "selkd-uniform": "itself with equal column sums",
}
OPEN_RIVALS = {
    "open-merged": "distillation with one merged column",
    "kd": "distillation and a bar on its odds",
    "open-alternate-raw": "itself by alternating projections, teacher's raw logits",
}


def judged(case: str, name: str) -> list[Claim]:
    """The claims on one case, which count only where it could show them; another case's gates are not theirs."""
    taught = (
        Claim(
            f"{name}: the teacher knows the selected classes (accuracy)",
            in_case(case, lambda r: r["ce"].teacher_accuracy),
            at_least(0.9),
        ),
        Claim(
            f"{name}: labels alone with the most samples go half of the way from chance to the teacher (share)",
            in_case(case, learnt),
            at_least(0.5),
        ),
    )

    def gates(shots: int | None, least: float) -> tuple[Claim, ...]:
        words = "the fewest samples" if shots is None else f"{shots} shots"
        room = Claim(
            f"{name}: room between labels alone, {words}, and the teacher (accuracy)",
            in_case(case, partial(room_left, shots)),
            at_least(least),
        )
        return *taught, room

    return [
        Claim(f"{name}: accuracy of SelKD above labels alone, 5 shots", gain(case, "accuracy", "selkd", "ce", 5), at_least(0.03), "ahead", gates(5, 0.06)),
        Claim(f"{name}: accuracy of SelKD above labels alone, 20 shots", gain(case, "accuracy", "selkd", "ce", 20), at_least(0.01), "ahead", gates(20, 0.02)),
        Claim(f"{name}: accuracy of SelKD above ordinary distillation", gain(case, "accuracy", "selkd", "kd"), at_least(-0.01), "ahead", gates(None, 0.02)),
        Claim(f"{name}: AUROC of open SelKD above labels alone", gain(case, "auroc", "open-selkd", "open-ce"), at_least(0.0), "ahead", taught),
    ]  # fmt: skip


def reported(case: str, name: str) -> list[Claim]:
    return [
        *(Claim(f"{name}: accuracy of SelKD above {words}", gain(case, "accuracy", "selkd", arm)) for arm, words in RIVALS.items()),
        *(Claim(f"{name}: AUROC of open SelKD above {words}", gain(case, "auroc", "open-selkd", arm)) for arm, words in OPEN_RIVALS.items()),
    ]  # fmt: skip


study = Study(
    prepare=prepare,
    trial=trial,
    arms={
        "ce": Rival(),
        "kd": Rival(kd),
        "kd-full": Rival(kd_full, "all"),
        "dkd": Rival(dkd),
        "selkd": Selective(),
        "selkd-uniform": Selective(options={"marginal": "uniform"}),
        "selkd-unrolled": Selective(options={"unroll": True}),
        "released-closed": Released(),
        "open-ce": Rival(outputs="open"),
        "open-merged": Rival(kd_merged, "open"),
        "open-selkd": Selective("open"),
        "open-alternate": Selective("open", {"solver": "alternate"}),
        "open-alternate-raw": Selective("open", {"solver": "alternate", "normalise_teacher": False}),
        "open-released": Released("open"),
    },
    tune=Tune("lr", (3.16e-3, 1e-2, 3.16e-2, 1e-1), select="chosen_on", mode="max"),
    replicates=lambda config: [f"{case}/{seed}" for case in config.cases for seed in range(config.seeds)],
    scales={
        "smoke": SelKDConfig(cases=("hard",), seeds=1, shots=(20,), draws=1, steps=100, teacher_steps=300),
        "desk": SelKDConfig(),
        "paper": SelKDConfig(
            cases=("images",), images="cifar100", image_classes=20, image_width=32, shots=(0,), others=0, draws=1, steps=187_500, num_gpus=1,
            teacher_steps=96_000,
        ),
    },
    paper=(
        "CIFAR-100, classes 0 to 19 selected of 100; teachers and students in pairs (ResNet-56 and ResNet-20, ResNet-32x4 and "
        "ResNet-8x4, WRN-40-2 and WRN-40-1, ResNet-50 and MobileNetV2 …); 240 epochs, batch 64, SGD with lr 0.05 (0.01 for MobileNet and "
        "ShuffleNet), momentum 0.9, weight decay 5e-4, divided by 10 after epochs 150, 180 and 210; temperature 4; random crops and "
        "flips; accuracy of the last epoch. About 2 GPU hours a pair and arm. This configuration trains as many steps of small "
        "convolutional networks with Adam: give the published ones by --case."
    ),
    compare=("accuracy_5", "accuracy_20", "accuracy_80", "auroc_5", "auroc_20", "auroc_80"),
    claims=[
        *(claim for case, name in CASES.items() for claim in judged(case, name)),
        Claim("the plan loss with rows alone constrained is ordinary distillation (difference)", lambda r: r["kd"].identity_gap, at_most(1e-6), "equal"),
        Claim("gradient of the plan term at the start: SelKD / released formulas", weakest_gradient, at_least(5.0)),
        *(claim for case, name in CASES.items() for claim in reported(case, name)),
        *(Claim(f"your own case: accuracy of SelKD above {words}", gain("own", "accuracy", "selkd", arm)) for arm, words in (("ce", "labels alone"), ("kd", "ordinary distillation"))),
        *(Claim(f"your own case: AUROC of open SelKD above {words}", gain("own", "auroc", "open-selkd", arm)) for arm, words in (("open-ce", "labels alone"), ("open-merged", OPEN_RIVALS["open-merged"]))),
    ],
    figure=figure,
)  # fmt: skip
