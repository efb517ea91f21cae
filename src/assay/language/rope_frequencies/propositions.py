"""The paper's propositions, computed once for a seed."""

import torch

from . import theory
from .frequencies import p_rope_inv_freq

HEAD_DIM, BASE = 256, 10_000.0  # the published models': Gemma
DISTANCES = (0, 1, 2, 5, 10, 100, 1000, 4000)
FLIPS = ((64, 1e4), (64, 1e5), (256, 1e4), (256, 1e6))


def propositions(seed: int, draws: int) -> dict[str, float]:
    """P1 to P5 as numbers that the propositions bound."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(102, HEAD_DIM, generator=generator, dtype=torch.float64)
    distances = torch.randint(4096, (100,), generator=generator).tolist()
    missed = sum(theory.maximal_distance(q, r, BASE, horizon=4096) != r for q, r in zip(normal[:100], distances, strict=True))
    random = theory.gaussian_expectation(DISTANCES, HEAD_DIM, BASE, draws=draws, generator=generator)
    ones = torch.ones(HEAD_DIM)
    near, *far = theory.logits_by_distance(ones, ones, torch.tensor([0, *range(2048, 4096)]), BASE).tolist()

    tokens = 256
    uniform = (1 / torch.arange(1, tokens + 1, dtype=torch.float64))[:, None].expand(tokens, tokens).tril()
    nope = theory.causal_attention(normal[100].expand(tokens, -1), normal[101].expand(tokens, -1), None)
    weight = min(
        theory.target_weight(band, N, BASE, HEAD_DIM, back=back, epsilon=epsilon) / (1 - epsilon)
        for back in (0, 1) for band in (1, 8, HEAD_DIM // 2) for N in (40, 512) for epsilon in (0.5, 0.01)
    )  # fmt: skip
    far_away = torch.tensor([0, 1, 10, 1000, 100_000], dtype=torch.float64)
    low = slice(3 * HEAD_DIM // 8, None)  # the quarter of the pairs that 0.75-RoPE stops
    product = (theory.as_pairs(normal[100]).conj() * theory.as_pairs(normal[101]))[low]
    moved = [
        (torch.polar(torch.ones(5, len(product)).double(), -far_away[:, None] * g) @ product).real
        for g in (p_rope_inv_freq(HEAD_DIM, BASE, 0.75)[low].double(), theory.frequencies(HEAD_DIM, BASE)[low])
    ]
    still, turning = ((logits - logits[0]).abs().max().item() for logits in moved)
    return {
        "theory_p1_missed": float(missed),
        "theory_p2_errors": float((random.mean.abs() / random.standard_error).max()),
        "theory_p2_ones_far": sum(far) / len(far) / near,
        "theory_p3_gap": float((nope - uniform).abs().max()),
        "theory_p4_weight": weight,
        "theory_p4_gap_one": theory.diagonal_gap(1, 512, BASE, HEAD_DIM),
        "theory_p4_gap_8": theory.diagonal_gap(8, 512, BASE, HEAD_DIM),
        "theory_p4_gap_all": theory.diagonal_gap(HEAD_DIM // 2, 512, BASE, HEAD_DIM),
        "theory_p5_missed": float(sum(unflipped(head_dim, base) for head_dim, base in FLIPS)),
        "theory_p5_still": still,
        "theory_p5_turning": turning,
    }


def unflipped(head_dim: int, base: float) -> int:
    """Pairs whose logit with their own content is not positive up to its horizon and negative one token later."""
    missed = 0
    for pair in range(head_dim // 2):
        q = torch.zeros(head_dim)
        q[pair] = 1.0
        horizon = int(theory.semantic_horizon(base, head_dim, pair))
        before, after = theory.logits_by_distance(q, q, torch.tensor([horizon, horizon + 1]), base).tolist()
        missed += not before >= 0 > after
    return missed
