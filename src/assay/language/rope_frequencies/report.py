"""What an analysis found: lengths by frequency, contributions, heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True, eq=False)
class RopeReport:
    """What `analyse_rope` found. Pairs run from the highest frequency to the lowest.

    Attributes:
        layer_names: Names of the attention modules.
        inv_freq: ``(layers, pairs)``, radians a token; zero where a pair does not turn.
        tokens: Length of the text.
        q_norm, k_norm: ``(layers, heads, pairs)``, typical lengths; a query head has its group's key head.
        q_norm_without_first, k_norm_without_first: The same without the first token, which often is an attention sink.
        contrib, contrib_attended: ``(layers, heads, pairs)``, mean contribution to the logits, and weighted by attention.
            None unless asked for.
        scores: ``self``, ``prev``, ``sink`` to ``(layers, heads)``; None unless asked for.
        shuffled_scores: The same with the tokens in another order.
    """

    layer_names: tuple[str, ...]
    inv_freq: Tensor
    tokens: int
    q_norm: Tensor
    k_norm: Tensor
    q_norm_without_first: Tensor
    k_norm_without_first: Tensor
    contrib: Tensor | None = None
    contrib_attended: Tensor | None = None
    scores: Mapping[str, Tensor] | None = None
    shuffled_scores: Mapping[str, Tensor] | None = None

    @property
    def usage(self) -> Tensor:
        """``(layers, heads, pairs)``: the most that each pair can add to a logit, on average."""
        return self.q_norm * self.k_norm

    @property
    def usage_without_first(self) -> Tensor:
        return self.q_norm_without_first * self.k_norm_without_first

    def shares(self, parts: int = 4, *, of: Tensor | None = None) -> Tensor:
        """Shares of bands of equally many pairs, highest frequencies first: ``(layers, heads, parts)``, adding up to 1.

        Args:
            parts: Bands; 1 to the number of pairs. Where they do not divide evenly, the first ones are larger.
            of: What is shared out, ``(layers, heads, pairs)``; by default `usage`.
        """
        usage = self.usage if of is None else of
        if not 1 <= parts <= usage.shape[-1]:
            raise ValueError(f"parts must be in [1, {usage.shape[-1]}], got {parts}")
        bands = torch.stack([band.sum(-1) for band in usage.tensor_split(parts, -1)], -1)
        return bands / bands.sum(-1, keepdim=True)

    @property
    def angles(self) -> Tensor:
        """``(layers, pairs)``: how far each pair turns from the first token of the text to its last, in radians."""
        return self.inv_freq * (self.tokens - 1)

    @property
    def head_scores(self) -> "DataFrame":
        """One row a head: its scores, the same on shuffled tokens, and the shares of its usage by quarter of the frequencies.

        Raises:
            ValueError: the heads were not scored.
            ImportError: pandas is not installed.
        """
        from pandas import DataFrame

        scores = self._scored()
        count, heads = next(iter(scores.values())).shape
        layer, head = (t.flatten().tolist() for t in torch.meshgrid(torch.arange(count), torch.arange(heads), indexing="ij"))
        columns: dict[str, Any] = {"layer": layer, "head": head}
        columns |= {name: score.flatten().tolist() for name, score in scores.items()}
        if self.shuffled_scores is not None:
            columns |= {f"{name}_shuffled": score.flatten().tolist() for name, score in self.shuffled_scores.items()}
        quarters = self.shares(min(4, self.usage.shape[-1])).flatten(0, 1)
        columns |= {f"usage_{i}": share.tolist() for i, share in enumerate(quarters.unbind(-1), 1)}
        return DataFrame(columns)

    def _scored(self) -> Mapping[str, Tensor]:
        if self.scores is None:
            raise ValueError("the heads were not scored: analyse_rope(..., attention=True)")
        return self.scores

    def plot(self, kind: Literal["usage", "heads"] = "usage") -> "Figure":
        """A figure. ``"usage"``: layer by frequency, lengths of queries, of keys and their product, each head's share
        averaged. ``"heads"``: every head's score against the share of its usage in the highest quarter.

        Raises:
            ValueError: another kind; heads that were not scored.
        """
        from matplotlib.figure import Figure

        if kind == "usage":
            figure = Figure(figsize=(12, 4), layout="constrained")
            maps = {"queries": self.q_norm, "keys": self.k_norm, "usage": self.usage}
            for axis, (name, values) in zip(figure.subplots(1, 3, sharey=True), maps.items(), strict=True):
                share = (values / values.sum(-1, keepdim=True)).mean(1)  # (layers, pairs)
                image = axis.imshow(share.numpy(), aspect="auto", cmap="magma", interpolation="nearest")
                axis.set(title=name, xlabel="pair, from the highest frequency to the lowest")
                figure.colorbar(image, ax=axis, label="share of the head")
            figure.axes[0].set_ylabel("layer")
            return figure
        if kind != "heads":
            raise ValueError(f"kind must be 'usage' or 'heads', got {kind!r}")
        figure = Figure(figsize=(8, 4), layout="constrained")
        high = self.shares(min(4, self.usage.shape[-1]))[..., 0].flatten().numpy()
        for axis, name in zip(figure.subplots(1, 2, sharey=True), ("prev", "self"), strict=True):
            axis.scatter(high, self._scored()[name].flatten().numpy(), s=9, alpha=0.6, lw=0)
            axis.set(xlabel="usage share of the highest quarter", title=f"attention to {_TO[name]}", ylim=(0, 1))
        return figure


_TO = {"prev": "the token before", "self": "the token itself"}


def positional_heads(
    report: RopeReport, kind: Literal["prev", "self"] = "prev", threshold: float = 0.5, *, stable: float = 0.8
) -> list[tuple[int, int]]:
    """Heads that look at a fixed position, whatever stands there: ``(layer, head)``, the most attentive first.

    A head is positional when its score exceeds `threshold` and stays above `stable` times itself once the tokens are
    shuffled; without that control a head counts by its score alone.

    Args:
        report: From `analyse_rope` with ``attention=True``.
        kind: ``"prev"`` or ``"self"``.
        threshold: In (0, 1).
        stable: In [0, 1]; 0 asks for no stability.

    Raises:
        ValueError: another kind, numbers out of range, heads that were not scored.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from assay.language import analyse_rope
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=32, intermediate_size=8)
        >>> positional_heads(analyse_rope(LlamaForCausalLM(config), torch.arange(32)[None]))  # untrained: none
        []
    """
    if kind not in _TO:
        raise ValueError(f"kind must be 'prev' or 'self', got {kind!r}")
    if not 0 < threshold < 1:
        raise ValueError(f"threshold must be in (0, 1), got {threshold!r}")
    if not 0 <= stable <= 1:
        raise ValueError(f"stable must be in [0, 1], got {stable!r}")
    score = report._scored()[kind]
    chosen = score > threshold
    if report.shuffled_scores is not None:
        chosen &= report.shuffled_scores[kind] > stable * score
    found = sorted(chosen.nonzero().tolist(), key=lambda at: -float(score[at[0], at[1]]))
    return [(layer, head) for layer, head in found]
