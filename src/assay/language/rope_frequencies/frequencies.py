"""Which pairs of a head turn how fast: p-RoPE's frequencies, its rivals', and how they get into a model or a config."""

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

Target = TypeVar("Target", PreTrainedModel, PreTrainedConfig)
Schedule = Callable[[int, float], Tensor]
"""``(head_dim, base) -> (head_dim // 2,)``: the frequency of every pair, in radians a token."""
STATIC = ("default", "linear", "proportional")
"""Kinds of rotary encoding whose frequencies are a constant that p-RoPE can replace."""


def p_rope_inv_freq(head_dim: int, base: float, p: float, reverse: bool = False) -> Tensor:
    r"""Frequencies of p-RoPE: the highest fraction `p` of RoPE's, and zeros for the pairs that do not turn.

    Barbero et al., *Round and Round We Go! What makes Rotary Positional Encodings useful?*, ICLR 2025.

    .. math:: g_k = \theta^{-2(k-1)/d} \text{ for } k \le n, \quad g_k = 0 \text{ for } n < k \le d/2, \qquad
        n = \lfloor p\,d / 2 \rfloor

    The exponent runs over the whole `d`: the pairs that turn keep the frequency they had. A partial rotary factor (NeoX,
    Phi) instead spreads the whole range of frequencies over fewer pairs; that is `partial_inv_freq`.

    Args:
        head_dim: `d`, even, > 0.
        base: :math:`\theta` > 0.
        p: In [0, 1]. 1 is RoPE, 0 is no positional encoding.
        reverse: Keep the lowest fraction instead: the paper's ablation.

    Shapes:
        - output: ``(head_dim // 2,)``, float32, equal to the last bit to transformers' ``rope_type="proportional"``.

    Raises:
        ValueError: an odd head_dim, a base that is not positive, p outside [0, 1].

    Example:
        >>> p_rope_inv_freq(8, 10_000.0, 0.5)
        tensor([1.0000, 0.1000, 0.0000, 0.0000])
    """
    _check(head_dim, base, p)
    turning, pairs = int(p * head_dim // 2), head_dim // 2
    start = 2 * (pairs - turning) if reverse else 0
    # Only the entries that turn are computed: a power over the whole range rounds some of them differently.
    exponent = torch.arange(start, start + 2 * turning, 2, dtype=torch.int64).float() / head_dim
    kept, still = 1.0 / (base**exponent), torch.zeros(pairs - turning)
    return torch.cat([still, kept] if reverse else [kept, still])


def partial_inv_freq(head_dim: int, base: float, p: float) -> Tensor:
    r"""Frequencies under a partial rotary factor `p`: :math:`\theta^{-2(k-1)/r}` over the first `r = int(p d)` dimensions.

    NeoX pairs dimension `k` with `k + r/2`, these frequencies as used here pair it with `k + d/2`; the two differ by a fixed
    order of the dimensions of queries and keys, which training does not see.

    Args:
        head_dim, base, p: As for `p_rope_inv_freq`; ``int(p * head_dim)`` even.

    Raises:
        ValueError: as `p_rope_inv_freq`; an odd number of dimensions that turn.

    Example:
        >>> partial_inv_freq(8, 10_000.0, 0.5)
        tensor([1.0000, 0.0100, 0.0000, 0.0000])
    """
    _check(head_dim, base, p)
    turning = int(p * head_dim)
    if turning % 2:
        raise ValueError(f"p={p} lets {turning} of {head_dim} dimensions turn; they must be even in number")
    kept = 1.0 / (base ** (torch.arange(0, turning, 2).float() / max(turning, 1)))
    return torch.cat([kept, torch.zeros((head_dim - turning) // 2)])


def _check(head_dim: int, base: float, p: float) -> None:
    if not isinstance(head_dim, int) or head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even and positive, got {head_dim!r}")
    if not 0 < base < float("inf"):
        raise ValueError(f"base must be positive and finite, got {base!r}")
    if not 0 <= p <= 1:
        raise ValueError(f"p must be in [0, 1], got {p!r}")


def apply_p_rope(model_or_config: Target, p: float, *, reverse: bool = False, layers: Collection[int] | None = None) -> Target:
    """Turns a model or a config, in place, into one that rotates only the highest fraction `p` of its frequencies.

    A config gets ``rope_type="proportional"`` and ``partial_rotary_factor=p``: build from it, train, save and load as ever.
    A model gets its frequency buffers replaced and, where that says the same, its config changed alike, because the buffers
    are not saved. The model's weights do not change; a trained model may want a short fine-tuning.

    Args:
        model_or_config: A Hugging Face decoder with rotary encoding, or its config. Frequencies scaled linearly keep their
            factor.
        p: In [0, 1]; 1 is RoPE, 0 none.
        reverse: Keep the lowest instead of the highest. Models only: no config says that.
        layers: Indices of the layers to change, default all. Models only. Layers that share their frequencies with
            others (as all of a Llama do) are changed by a hook on their attention, which can only stop more pairs than
            the shared frequencies do.

    Returns:
        What was given.

    Raises:
        TypeError: neither a model nor a config.
        ValueError: p outside [0, 1]; no rotary encoding; frequencies that are recomputed while it runs or scaled unevenly
            (dynamic, YaRN, longrope, llama3); heads of which only a part is rotated; layers that are not there; `reverse`
            or `layers` with a config.

    Example:
        >>> from transformers import LlamaConfig
        >>> apply_p_rope(LlamaConfig(), 0.75).rope_parameters["rope_type"]
        'proportional'
    """
    if isinstance(model_or_config, PreTrainedConfig):
        if reverse or layers is not None:
            raise ValueError("a config cannot say reverse or layers: build the model and give that")
        _configure(model_or_config.get_text_config(), p)
        return model_or_config
    if not isinstance(model_or_config, PreTrainedModel):
        kind = type(model_or_config).__name__
        raise TypeError(f"model_or_config must be a PreTrainedModel or a PreTrainedConfig, got {kind}")
    _check(2, 1.0, p)
    tables = frequency_tables(model_or_config)
    if layers is not None:
        from .layerwise import hold_layers

        hold_layers(model_or_config, p, reverse=reverse, layers=layers)
    else:
        for table in tables:
            table.write(p_rope_inv_freq(table.head_dim, table.base, p, reverse))
    if reverse or layers is not None:
        warnings.warn("save_pretrained does not keep this p-RoPE: no config says reverse or layers", stacklevel=2)
    else:
        _configure(model_or_config.config.get_text_config(), p)
    return model_or_config


def _configure(config: Any, p: float) -> None:
    _check(2, 1.0, p)
    for parameters in _rope_parameters(config).values():
        if parameters["rope_type"] != "proportional":  # of a proportional one the factor is its p, to be replaced
            _whole_heads(parameters, type(config).__name__)
        parameters |= {"rope_type": "proportional", "partial_rotary_factor": p}


def _rope_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """The rotary parameters by kind of layer; the key is empty where there is one kind."""
    found = getattr(config, "rope_parameters", None)
    if not found:
        raise ValueError(f"{type(config).__name__} has no rotary position encoding of a known kind (rope_parameters)")
    config.standardize_rope_params()
    found = config.rope_parameters
    by_kind = {"": found} if "rope_theta" in found else {kind: each for kind, each in found.items() if each}
    for parameters in by_kind.values():
        if parameters["rope_type"] not in STATIC:
            raise ValueError(
                f"rope_type must be one of {', '.join(STATIC)}, got {parameters['rope_type']!r}, whose frequencies are "
                "recomputed while the model runs or scaled unevenly; set another rope_type in the config and build from that"
            )
    return by_kind


def _whole_heads(parameters: dict[str, Any], name: str) -> None:
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"{name} rotates the first {parameters['partial_rotary_factor']:g} of each head (partial_rotary_factor); "
            "p-RoPE is about heads that are rotated whole"
        )


class Table(NamedTuple):
    """One buffer of frequencies and what it was made from."""

    rotary: nn.Module
    buffer: str
    head_dim: int
    base: float
    factor: float

    @property
    def twin(self) -> str:
        """The copy that transformers keeps of the frequencies as they were at first."""
        return self.buffer.removesuffix("inv_freq") + "original_inv_freq"

    def read(self) -> Tensor:
        return self.rotary.get_buffer(self.buffer)

    @torch.no_grad()
    def write(self, inv_freq: Tensor) -> None:
        """Puts frequencies before linear scaling into the buffer and its twin."""
        held = self.read()
        if inv_freq.shape != held.shape or not torch.isfinite(inv_freq).all():
            raise ValueError(f"frequencies must be finite and of shape {tuple(held.shape)}, got {tuple(inv_freq.shape)}")
        held.copy_(inv_freq / self.factor)
        twin = getattr(self.rotary, self.twin, None)
        if isinstance(twin, Tensor):
            twin.copy_(held)


def frequency_tables(model: PreTrainedModel) -> list[Table]:
    """The buffers of frequencies of a model that rotates whole heads at constant frequencies.

    Raises:
        ValueError: as `apply_p_rope`.
    """
    config: Any = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = _rope_parameters(config)
    tables = []
    for rotary, buffer in frequency_buffers(model):
        kind = buffer.removesuffix("inv_freq").removesuffix("_")
        given = parameters.get(kind) or parameters.get("")
        if given is None:
            raise ValueError(f"the config has no rope_parameters for {buffer}; it has {', '.join(parameters)}")
        if 2 * rotary.get_buffer(buffer).numel() != head_dim:
            raise ValueError(f"p-RoPE is about heads that are rotated whole; {buffer} does not fit head_dim {head_dim}")
        tables.append(Table(rotary, buffer, head_dim, given["rope_theta"], given.get("factor", 1.0)))
    return tables


def frequency_buffers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every buffer of rotary frequencies: ``inv_freq``, or one for each kind of layer (``full_attention_inv_freq`` …).

    Raises:
        ValueError: there is none.
    """
    found = [
        (module, name)
        for module in model.modules()
        for name, _ in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    ]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no rotary position encoding of a known kind: no module with a buffer inv_freq "
            "(learned positions and ALiBi have no frequencies; GPT-J keeps tables of sines)"
        )
    return found


@contextmanager
def rotary_frequencies(model: PreTrainedModel, schedule: Schedule) -> Iterator[None]:
    """A model that turns at other frequencies, for as long as the block lasts.

    Args:
        model: As for `apply_p_rope`.
        schedule: ``(head_dim, base) -> (head_dim // 2,)``; asked once for every buffer of frequencies.

    Raises:
        ValueError: as `apply_p_rope`; frequencies that are not finite or of another shape.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=8, intermediate_size=8)
        >>> model = LlamaForCausalLM(config)
        >>> with rotary_frequencies(model, lambda head_dim, base: p_rope_inv_freq(head_dim, base, 0.5)):
        ...     model.model.rotary_emb.inv_freq
        tensor([1.0000, 0.1000, 0.0000, 0.0000])
    """
    tables = frequency_tables(model)
    held = [(table.rotary, name, table.rotary.get_buffer(name).clone()) for table in tables
            for name in (table.buffer, table.twin) if hasattr(table.rotary, name)]  # fmt: skip
    try:
        for table in tables:
            table.write(schedule(table.head_dim, table.base).to(table.read().device))
        yield
    finally:
        with torch.no_grad():
            for rotary, name, before in held:
                rotary.get_buffer(name).copy_(before)
