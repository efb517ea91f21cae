"""What the study puts before its arms: prompts, the classes they come from, and the model that is trained on one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .classes import CUBIC, LINEAR, LINQUAD, QUADRATIC, SQRT, FunctionClass, ReLUNet, SigmoidNet, sample_prompts
from .descent import GDReference
from .linear_attention import LinearAttentionICL
from .mixtures import MODES, unseen_prompts
from .references import LeastSquares
from .retrieval import LinearRetrieval
from .transformer import ICLTransformer

Prompts = tuple[Tensor, Tensor]
_DRAWS = 20
CLASSES = {c.name: c for c in (LINEAR, QUADRATIC, CUBIC, SQRT, LINQUAD, ReLUNet(), SigmoidNet())}


@dataclass(frozen=True)
class Case:
    d: int
    """Dimensions of x."""
    ks: tuple[int, ...]
    """Lengths of context that are looked at, the last two of `judged` among them."""
    prompts: Mapping[str, Prompts]
    """Test prompts by name: ``A`` of the class trained on, ``B`` of the unseen one, others as they come."""
    classes: Mapping[str, FunctionClass] = field(default_factory=dict)
    """The classes of ``A`` and ``B``."""
    model: Callable[[], nn.Module] | None = None
    """Makes the model that is trained, freshly initialised; without it nothing is."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """What `train_icl` is told."""
    judged: tuple[int, int] = (0, 0)
    """The k that claims read, 3d and 4d; the two largest of `ks` unless given."""
    fits: Mapping[str, Tensor] = field(default_factory=dict)
    """Predictions of the references on ``B``, ``(B, len(ks))``; computed where absent."""

    def __post_init__(self) -> None:
        if self.judged == (0, 0):
            object.__setattr__(self, "judged", tuple(sorted(self.ks)[-2:]))
        if not self.fits and {"A", "B"} <= set(self.classes):
            object.__setattr__(
                self, "fits", {name: r.predict(*self.prompts["B"], self.ks) for name, r in references(self).items()}
            )


def references(case: Case) -> dict[str, Any]:
    """``ols_A, ols_B`` where a class is linear in features, ``gd_A, gd_B``."""
    found: dict[str, Any] = {}
    for letter in ("A", "B"):
        if letter in case.classes:
            function_class: Any = case.classes[letter]
            if hasattr(function_class, "features"):
                found[f"ols_{letter}"] = LeastSquares(function_class.features, name=f"ols_{letter}")
            if hasattr(function_class, "features") or isinstance(function_class, (ReLUNet, SigmoidNet)):
                found[f"gd_{letter}"] = GDReference(function_class, name=f"gd_{letter}")
    return found


def regression_case(config: Any, seed: int) -> Case:
    """A transformer on small prompts, and rows of real data for it."""
    gen = torch.Generator().manual_seed(seed)
    d, n = config.d, config.examples
    classes = {"A": CLASSES[config.trained_on], "B": CLASSES[config.tested_on]}
    prompts = {name: sample_prompts(c, config.prompts, n, d, gen) for name, c in classes.items()}
    prompts["diabetes"] = diabetes_prompts(config.prompts, n, d, gen)
    judged = min(3 * d, n - 2), min(4 * d, n - 1)
    return Case(
        d,
        tuple(sorted({k for k in (1, d, d + 1, 2 * d, *judged, n - 1) if 1 <= k < n})),
        prompts,
        classes,
        lambda: ICLTransformer(d, n, config.width, config.layers, config.heads),
        {
            "steps": config.steps, "batch": config.batch, "lr": config.lr, "curriculum": config.curriculum(),
            "warmup": min(100, config.steps // 4), "cosine": config.cosine, "clip": config.clip,
        },
        judged,
    )  # fmt: skip


def attention_case(config: Any, seed: int) -> Case:
    """Linear attention, in more dimensions than a small transformer gets off its plateau in.

    Its layers are cubic in a token, so that a few prompts of large labels would be all that a mean shows: those of B are
    as large as all but the largest 1 % of A's.
    """
    gen = torch.Generator().manual_seed(seed)
    d = config.attention_d
    n, shortest = 4 * d + 1, 3 * d
    classes = {"A": CLASSES[config.trained_on], "B": CLASSES[config.tested_on]}
    xs, ys = sample_prompts(classes["A"], config.prompts, n, d, gen)
    largest = ys[:, :-1].square().mean(1).quantile(config.attention_match)
    return Case(
        d,
        tuple(range(shortest, n)),
        {"A": (xs, ys), "B": _no_larger(classes["B"], config.prompts, n, d, gen, largest)},
        classes,
        lambda: LinearAttentionICL(d, min_context=shortest),
        {
            "steps": config.attention_steps, "batch": 256, "lr": 3e-3, "curriculum": None, "n": n,
            "warmup": min(50, config.attention_steps // 4), "cosine": True, "clip": 1.0,
        },
        (3 * d, 4 * d),
    )  # fmt: skip


def _no_larger(function_class: FunctionClass, prompts: int, n: int, d: int, gen: torch.Generator, largest: Tensor) -> Prompts:
    """The first prompts whose context's labels have a mean square of at most `largest`."""
    kept: list[Prompts] = []
    for _ in range(_DRAWS):
        xs, ys = sample_prompts(function_class, prompts, n, d, gen)
        small = ys[:, :-1].square().mean(1) <= largest
        kept.append((xs[small], ys[small]))
        if sum(len(x) for x, _ in kept) >= prompts:
            return torch.cat([x for x, _ in kept])[:prompts], torch.cat([y for _, y in kept])[:prompts]
    raise ValueError(f"{function_class.name}: fewer than one in {_DRAWS} prompts is as small as those trained on")


def selection_case(config: Any, seed: int) -> Case:
    """Prompts from outside the mixture that an exact Bayesian learner expects."""
    gen = torch.Generator().manual_seed(seed)
    last = config.selection_k
    prompts: dict[str, Prompts] = {mode: unseen_prompts(mode, config.selection_prompts, last + 1, gen) for mode in MODES}
    return Case(3, (1, last), prompts, {"A": LINEAR})  # what every component is a mixture of


def labels_case(config: Any, seed: int) -> Case:
    """Abstract labels: a regression looked up in a vocabulary, with shifts and with a regression that were not trained on."""
    gen = torch.Generator().manual_seed(seed)
    d, n = 7, config.examples
    low, high = config.shift
    classes: dict[str, FunctionClass] = {
        "A": LinearRetrieval((low, high)),
        "unseen shifts": LinearRetrieval((high + 100, high + 200)),
        "B": LinearRetrieval((low, high), power=2),
    }
    prompts = {name: sample_prompts(c, config.prompts, n, d, gen) for name, c in classes.items()}
    curriculum = config.curriculum()
    training = {"steps": config.steps, "batch": config.batch, "lr": config.lr, "curriculum": curriculum, "clip": config.clip}
    return Case(
        d, (n - 2, n - 1), prompts, classes, lambda: ICLTransformer(d, n, config.width, config.layers, config.heads), training
    )


CASES: dict[str, Callable[[Any, int], Case]] = {
    "regression": regression_case,
    "attention": attention_case,
    "selection": selection_case,
    "labels": labels_case,
}


def diabetes_prompts(prompts: int, n: int, d: int, gen: torch.Generator) -> Prompts:
    """Rows of scikit-learn's diabetes data: each prompt d of its 10 columns and n of its 442 rows, without repetition.

    Columns have mean 0 and variance 1; labels variance d, as a model knows them that was trained on linear functions: an
    error over d is the share of variance that is left.
    """
    from sklearn.datasets import load_diabetes

    x, y = (torch.from_numpy(t).float() for t in load_diabetes(return_X_y=True))
    x, y = ((t - t.mean(0)) / t.std(0) for t in (x, y))
    if d > x.shape[1] or n > len(x):
        raise ValueError(f"diabetes has {x.shape[1]} columns and {len(x)} rows, a prompt wants {d} and {n}")
    rows = torch.rand(prompts, len(x), generator=gen).argsort(1)[:, :n]
    columns = torch.rand(prompts, x.shape[1], generator=gen).argsort(1)[:, :d]
    return x[rows[:, :, None], columns[:, None, :]], d**0.5 * y[rows]
