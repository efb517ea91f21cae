"""Function classes of in-context regression: what a prompt's labels are made by."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]
"""One function a prompt: ``(B, n, d)`` to ``(B, n)``, or to ``(B, n, d)`` where labels are vectors."""


@runtime_checkable
class FunctionClass(Protocol):
    """What `train_icl` and `ood_report` ask of a class: a name, and one function a prompt.

    A class whose inputs are not standard normal also has ``inputs(batch, n, d, gen) -> (batch, n, d)``.
    """

    @property
    def name(self) -> str: ...

    def sample(self, batch: int, d: int, gen: torch.Generator) -> Function:
        """Draws ``batch`` functions of R^d from the class, on the generator's device."""
        ...


@dataclass(frozen=True)
class Power:
    r"""Sums of element-wise powers with random weights.

    "Can In-context Learning Really Generalize to Out-of-distribution Tasks?", ICLR 2025, https://arxiv.org/abs/2410.09695.

    .. math:: y = c \sum_p w_p^\top x^p, \qquad w_p \sim \mathcal N(0, I_d)

    Powers that are no whole numbers are taken of :math:`|x|`.

    Args:
        name: How reports call it.
        powers: The exponents p, > 0.
        scale: c > 0. The published :math:`1/\sqrt 3` puts quadratic targets on the scale of linear ones
            (:math:`E x^4 = 3`). The cubic keeps it although :math:`E x^6 = 15`; `normalized` mends that.

    Shapes:
        - sampled function: ``(B, n, d)`` to ``(B, n)``.

    Raises:
        ValueError: no powers, a power or a scale that is not positive.

    Example:
        >>> f = QUADRATIC.sample(4, 3, torch.Generator().manual_seed(0))
        >>> f(torch.ones(4, 10, 3)).shape
        torch.Size([4, 10])
    """

    name: str
    powers: tuple[float, ...]
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.powers or not all(p > 0 and math.isfinite(p) for p in self.powers):
            raise ValueError(f"powers must be one or more positive numbers, got {self.powers}")
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise ValueError(f"scale must be positive, got {self.scale}")

    def features(self, x: Tensor) -> Tensor:
        """What a function of the class is linear in: ``(..., d)`` to ``(..., d · number of powers)``."""
        return torch.cat([x**p if float(p).is_integer() else x.abs() ** p for p in self.powers], -1)

    def sample(self, batch: int, d: int, gen: torch.Generator) -> Function:
        w = torch.randn(batch, d * len(self.powers), 1, generator=gen, device=gen.device)
        return lambda x: self.scale * (self.features(x) @ w.to(x.dtype)).squeeze(-1)

    def normalized(self) -> "Power":
        """The same class with targets of variance d on standard normal inputs, as linear ones have."""
        # E|x|^{2p} = 2^p Γ(p + 1/2) / √π
        second = sum(2**p * math.gamma(p + 0.5) / math.sqrt(math.pi) for p in self.powers)
        return replace(self, scale=1 / math.sqrt(second))


LINEAR = Power("linear", (1,))
QUADRATIC = Power("quadratic", (2,), 3**-0.5)
CUBIC = Power("cubic", (3,), 3**-0.5)
SQRT = Power("sqrt", (0.5,), 3**-0.5)
LINQUAD = Power("linear+quadratic", (1, 2), 0.5)  # w₁ᵀx + w₂ᵀx² has variance 4d; the released code leaves it there


@dataclass(frozen=True)
class _TwoLayerNet:
    hidden: int = 100
    name: ClassVar[str] = ""
    activation: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if self.hidden < 1:
            raise ValueError(f"hidden must be at least 1, got {self.hidden}")

    def sample(self, batch: int, d: int, gen: torch.Generator) -> Function:
        v = torch.randn(batch, d, self.hidden, generator=gen, device=gen.device)
        a = torch.randn(batch, self.hidden, 1, generator=gen, device=gen.device)
        activation = getattr(torch, self.activation)
        scale = math.sqrt(2 / self.hidden)
        return lambda x: scale * (activation(x @ v.to(x.dtype)) @ a.to(x.dtype)).squeeze(-1)


class ReLUNet(_TwoLayerNet):
    r"""Two-layer ReLU nets without biases: :math:`y = \sqrt{2/r} \sum_j a_j \max(v_j^\top x, 0)`, all weights N(0, 1).

    Args:
        hidden: r ≥ 1.

    Example:
        >>> ReLUNet(8).sample(2, 3, torch.Generator())(torch.zeros(2, 5, 3)).abs().max().item()
        0.0
    """

    name: ClassVar[str] = "relu"
    activation: ClassVar[str] = "relu"


class SigmoidNet(_TwoLayerNet):
    r"""The same with the logistic function in place of the ReLU.

    Args:
        hidden: r ≥ 1.
    """

    name: ClassVar[str] = "sigmoid"
    activation: ClassVar[str] = "sigmoid"


def sample_prompts(
    function_class: FunctionClass, batch: int, n: int, d: int, gen: torch.Generator, *, xs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Inputs and labels of fresh prompts, each with a function of its own.

    Args:
        function_class: The class.
        batch: Prompts, B.
        n: Examples a prompt, the last of which is only ever a query.
        d: Dimensions of x.
        gen: Where the randomness comes from; its device is where the prompts lie.
        xs: Inputs to use in place of fresh ones; a class with ``inputs`` of its own draws those all the same.

    Shapes:
        - output: ``(B, n, d)`` and ``(B, n)``, or ``(B, n, d)`` twice.

    Raises:
        ValueError: labels of another shape, or not finite.

    Example:
        >>> xs, ys = sample_prompts(LINEAR, 4, 10, 3, torch.Generator())
        >>> xs.shape, ys.shape
        (torch.Size([4, 10, 3]), torch.Size([4, 10]))
    """
    if hasattr(function_class, "inputs"):
        xs = function_class.inputs(batch, n, d, gen)
    elif xs is None:
        xs = torch.randn(batch, n, d, generator=gen, device=gen.device)
    ys = function_class.sample(batch, d, gen)(xs)
    if ys.shape not in ((batch, n), (batch, n, d)):
        raise ValueError(f"{function_class.name}: labels must be {(batch, n)} or {(batch, n, d)}, got {tuple(ys.shape)}")
    if not torch.isfinite(ys).all():
        raise ValueError(f"{function_class.name}: {int((~torch.isfinite(ys)).sum())} of {ys.numel()} labels are not finite")
    return xs, ys
