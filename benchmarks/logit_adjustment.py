"""Adjusting 2,048 × 1,000 logits beside one multiplication of them, and the chunked 1-vs-1 rule beside the whole (B, K, K)."""

import torch

from assay.bench.speed import Contest
from assay.perception import MultiplicativeLogitAdjustment, OneVsOneAdjuster

torch.manual_seed(0)
counts = 100.0 ** (1 - torch.arange(1000) / 999)
logits = 4 * torch.randn(2048, 1000)
factor = (counts.max() / counts) ** 0.5
checked, unchecked = MultiplicativeLogitAdjustment(counts), MultiplicativeLogitAdjustment(counts, check=False)

few_logits = logits[:32]
one_vs_one = OneVsOneAdjuster(counts, 0.5, break_ties=False)
kappa = one_vs_one.kappa


def multiply():
    return logits * factor


def whole_cube():
    """All comparisons at once, as the released adjuster makes them."""
    return (few_logits[:, :, None] * kappa > few_logits[:, None, :] * kappa.T).sum(-1) / 1000


# The same up to a comparison here and there that rounding decides: κ carries a factor sin ρ that ours divides out.
torch.testing.assert_close(one_vs_one(few_logits), whole_cube(), rtol=0, atol=1.1e-3)

contests = [
    Contest("MLA without the check", ours=lambda: unchecked(logits), peer=multiply, peer_name="one multiplication", target=1.2),
    Contest("MLA with the check", ours=lambda: checked(logits), peer=multiply, peer_name="one multiplication", target=1.6),
    Contest(
        "1-vs-1, 32 × 1000", ours=lambda: one_vs_one(few_logits), peer=whole_cube, peer_name="(B, K, K) at once",
        target=1.0, memory=True, memory_target=1 / 3,
    ),
]  # fmt: skip
