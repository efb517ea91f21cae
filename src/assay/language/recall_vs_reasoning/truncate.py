"""Weights of a model cut to low rank, or dropped, in place: for good, until restored, or for a `with` block."""

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from .spectrum import Spectrum, Which, check_matrix, check_which, kept_rank

Target = str | tuple[str, str]


class Truncation:
    """What a truncation changed, so that it can be undone.

    Attributes:
        changed: Names of the changed parameters.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[nn.Parameter, Tensor]] = {}

    @property
    def changed(self) -> tuple[str, ...]:
        return tuple(self._before)

    def replace(self, name: str, parameter: nn.Parameter, value: Tensor) -> None:
        """Writes `value` into the parameter and remembers what was there the first time."""
        if name not in self._before:
            self._before[name] = (parameter, parameter.detach().clone())
        with torch.no_grad():
            parameter.copy_(value)

    def restore(self) -> None:
        """Puts every weight back, to the last bit. A second call changes nothing."""
        with torch.no_grad():
            for parameter, before in self._before.values():
                parameter.copy_(before)
        self._before.clear()


@torch.no_grad()
def truncate_(target: nn.Module | nn.Parameter, rank_fraction: float, which: Which = "top") -> Truncation:
    r"""Keep only the largest singular values of a weight, or of every weight matrix in a module, in place.

    Chen, Bruna, Bietti: Distributional Associations vs In-Context Reasoning, ICLR 2025 (arXiv 2406.03068); the operation
    is LASER's (Sharma, Ash, Misra, ICLR 2024).

    .. math:: W = U \Sigma V^\top \to \sum_{i \le k} \sigma_i u_i v_i^\top, \qquad k = \lfloor \rho \min(m, n) \rfloor

    Biases and norms stay, except with ``which="drop"``, which zeroes all that the module adds. In a feed-forward that ends
    in a matrix, zeroing that matrix alone does the same; zeroing the others does so only where there are no biases.

    Args:
        target: A parameter ``(m, n)`` or ``(E, m, n)``, or a module: all such parameters in it.
        rank_fraction: ρ in [0, 1]. 1 changes nothing.
        which: ``"top"`` keeps the k largest singular values, ``"bottom"`` the k smallest, ``"drop"`` (ρ = 0) nothing.

    Returns:
        A `Truncation`; its ``restore()`` undoes it.

    Raises:
        ValueError: ρ or `which` out of range; no matrix in the module; an embedding, or a matrix that is one too (a tied
            head); weights that are quantised, on the meta device or not finite. Nothing has been changed then.

    Example:
        >>> layer = nn.Linear(8, 8)
        >>> handle = truncate_(layer, 0.25)
        >>> int(torch.linalg.matrix_rank(layer.weight))
        2
        >>> handle.restore()
    """
    check_which(which, rank_fraction)
    if isinstance(target, nn.Parameter):
        named = {"weight": target}
        check_matrix(target, "target")
    elif isinstance(target, nn.Module):
        _refuse_quantised(target, "")
        embeddings = embedding_ids(target)
        named = {name: p for name, p in target.named_parameters() if which == "drop" or p.ndim in (2, 3)}
        if not any(p.ndim in (2, 3) for p in named.values()):
            raise ValueError(f"target has no weight matrix: {type(target).__name__}")
        for name, parameter in named.items():
            refuse_embedding(name, parameter, embeddings)
            if parameter.ndim in (2, 3):
                check_matrix(parameter, name)
    else:
        raise TypeError(f"target must be a module or a parameter, got {type(target).__name__}")
    handle = Truncation()
    for name, parameter in named.items():
        _cut(handle, name, parameter, rank_fraction, which)
    return handle


@contextmanager
def truncated(model: nn.Module, fractions: Mapping[Target, float], which: Which = "top") -> Iterator[Truncation]:
    """Weights of a model cut to low rank within a ``with`` block; afterwards they are what they were.

    Args:
        model: Any module.
        fractions: What to cut, and ρ in [0, 1]. A key is the name of a parameter or of a module (all matrices in it), or a
            pattern with ``*``: ``"model.layers.28.mlp"``, ``"model.layers.*.mlp.down_proj"``. A pair of names
            ``(out, value)`` cuts the product ``out @ value`` and leaves `out` as it is.
        which: As for `truncate_`.

    Raises:
        ValueError: a key that matches no weight matrix, with the nearest names; two keys that match the same one; what
            `truncate_` refuses. Nothing has been changed then.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> with truncated(model, {"2": 0.0}):
        ...     torch.equal(model(torch.ones(4)), model[2].bias)
        True
    """
    handle = Truncation()
    try:
        _truncate_named(handle, model, fractions, which)
        yield handle
    finally:
        handle.restore()


@torch.no_grad()
def _truncate_named(handle: Truncation, model: nn.Module, fractions: Mapping[Target, float], which: Which) -> None:
    embeddings = embedding_ids(model)
    claimed: dict[int, Target] = {}
    plan: list[tuple[dict[str, nn.Parameter], Target, float]] = []
    for key, fraction in fractions.items():
        check_which(which, fraction)
        if isinstance(key, str):
            found = matching(model, key, also_vectors=which == "drop")
        else:
            found = {name: p for part in key for name, p in matching(model, part).items()}
            if len(key) != 2 or len(found) != 2:
                raise ValueError(f"a product must be two names of one matrix each, got {key!r}: {', '.join(found)}")
        for name, parameter in found.items():
            if id(parameter) in claimed:
                raise ValueError(f"{name} is matched by {claimed[id(parameter)]!r} and by {key!r}")
            claimed[id(parameter)] = key
            refuse_embedding(name, parameter, embeddings)
            if parameter.ndim > 1:
                check_matrix(parameter, name)
        plan.append((found, key, fraction))
    for found, key, fraction in plan:
        if isinstance(key, str):
            for name, parameter in found.items():
                _cut(handle, name, parameter, fraction, which)
        else:
            (_, out), (name, value) = found.items()
            handle.replace(name, value, cut_product(out, value, fraction, which))


def matching(model: nn.Module, pattern: str, *, also_vectors: bool = False) -> dict[str, nn.Parameter]:
    """The weight matrices that a name or pattern means, each once; on request with the biases and gains among them.

    Raises:
        ValueError: no matrix, with the nearest names; a quantised module among those meant.

    Example:
        >>> list(matching(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "*"))
        ['0.weight', '1.weight']
    """
    for name, module in model.named_modules():
        if fnmatchcase(name, pattern) or name.startswith(f"{pattern}."):
            _refuse_quantised(module, name)
    every = dict(model.named_parameters(remove_duplicate=False))  # a tied head has a name of its own
    meant = {name: p for name, p in every.items() if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
    if not any(p.ndim in (2, 3) for p in meant.values()):
        modules = [name for name, _ in model.named_modules() if name]
        matrices = [name for name, p in every.items() if p.ndim in (2, 3)]
        near = difflib.get_close_matches(pattern, [*matrices, *modules], n=3, cutoff=0.3)
        raise ValueError(f"{pattern!r} matches no weight matrix; the nearest names are {', '.join(near) or 'none'}")
    once = {id(p): name for name, p in reversed(meant.items())}
    return {
        name: p for name, p in meant.items() if once[id(p)] == name and (p.ndim in (2, 3) or (also_vectors and p.ndim < 2))
    }  # fmt: skip


def cut_product(out: Tensor, value: Tensor, rank_fraction: float, which: Which = "top") -> Tensor:
    r"""The `value` with which ``out @ value`` is its own truncation: W_V V_k V_kᵀ, V from the product's decomposition.

    ⌊ρ · min(shape of the product)⌋ singular values stay.

    Raises:
        ValueError: shapes that do not multiply, ρ out of range.
    """
    check_which(which, rank_fraction)
    if out.ndim != 2 or value.ndim != 2 or out.shape[1] != value.shape[0]:
        raise ValueError(f"out and value must multiply, got {tuple(out.shape)} and {tuple(value.shape)}")
    product = out.detach().double() @ value.detach().double()
    size = min(product.shape)
    k = 0 if which == "drop" else kept_rank(rank_fraction, size)
    if k == size:
        return value.detach().clone()
    rows = torch.linalg.svd(product, full_matrices=False).Vh
    rows = rows[size - k :] if which == "bottom" else rows[:k]
    return ((value.detach().double() @ rows.mT) @ rows).to(value.dtype)


@torch.no_grad()
def project_out(weight: nn.Parameter, direction: Tensor) -> Truncation:
    r"""Remove one output direction from a matrix ``(out, in)``, in place: ``W ← (I − u uᵀ) W``.

    ``u`` is the direction at length 1. The rank-one rival of a truncation: what a layer writes along the distractor's row of
    the output matrix is removed, and nothing else.

    Raises:
        ValueError: a direction that is not ``(out,)``, not finite, or zero.
    """
    check_matrix(weight, "weight")
    if weight.ndim != 2 or direction.shape != weight.shape[:1]:
        raise ValueError(f"direction must be ({weight.shape[0]},) for this weight, got {tuple(direction.shape)}")
    norm = direction.double().norm()
    if not norm.isfinite() or norm == 0:
        raise ValueError("direction must be finite and not zero")
    u = direction.double() / norm
    handle = Truncation()
    exact = weight.double()
    handle.replace("weight", weight, exact - torch.outer(u, u @ exact))
    return handle


def _cut(handle: Truncation, name: str, parameter: nn.Parameter, rank_fraction: float, which: Which) -> None:
    if rank_fraction == 0:  # nothing to decompose
        handle.replace(name, parameter, torch.zeros_like(parameter))
    elif rank_fraction < 1:
        handle.replace(name, parameter, Spectrum(parameter, name).truncate(rank_fraction, which))


def embedding_ids(module: nn.Module) -> set[int]:
    """Which parameters are embeddings, by identity: a tied head is the same one."""
    return {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}


def refuse_embedding(name: str, parameter: nn.Parameter, embeddings: set[int]) -> None:
    """Raises ValueError where the parameter is one of them."""
    if id(parameter) in embeddings:
        raise ValueError(f"{name} is an embedding, or a head tied to one: its rows are tokens, and truncating mixes them")


def _refuse_quantised(module: nn.Module, name: str) -> None:
    """A quantised linear keeps its weight in buffers or packed parameters, which a truncation would silently pass over."""
    for part, inner in module.named_modules():
        full = ".".join(p for p in (name, part) if p) or type(inner).__name__
        if type(inner) is not nn.Linear and any(hasattr(inner, mark) for mark in ("qweight", "quant_state", "_packed_params")):
            raise ValueError(f"{full} is quantised ({type(inner).__name__}): dequantize the model first")
