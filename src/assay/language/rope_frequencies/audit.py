"""What the study reads off a model: shares of usage with their controls, and what its positional heads live on."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .ablate import scores_without
from .analyse import analyse_rope, shuffled
from .reading import fresh
from .report import RopeReport, positional_heads


def audit(model: Any, text: Tensor, log: Any) -> dict[str, float]:
    """Shares of usage, with their controls; heads that look at the token before, without each quarter of their pairs."""
    ids = text.to(log.device)
    report = analyse_rope(model, ids, contrib=True, seed=log.seed)
    untrained = analyse_rope(fresh(model.config, log.seed).to(log.device).eval(), ids, attention=False)
    mixed = analyse_rope(model, shuffled(ids, log.seed), attention=False)
    share = report.shares(4).mean((0, 1))
    for pair, value in enumerate(report.shares(report.usage.shape[-1]).mean((0, 1)).tolist()):
        log.metric("usage", value, pair)
    for pair, value in enumerate(untrained.shares(report.usage.shape[-1]).mean((0, 1)).tolist()):
        log.metric("usage_untrained", value, pair)
    low = partial(low_half, report)
    assert report.contrib is not None
    assert report.contrib_attended is not None
    found = {
        "low": low(report.usage),
        "low_without_first": low(report.usage_without_first),
        "low_untrained": low(untrained.usage),
        "low_shuffled": low(mixed.usage),
        "low_contrib": low(report.contrib),
        "low_attended": low(report.contrib_attended),
        "high_quarter": share[0].item(),
        "angle_low": float(report.inv_freq[:, -report.usage.shape[-1] // 4].max()) * (ids.shape[1] - 1),
    }
    kinds = getattr(model.config, "layer_types", None) or []
    for kind in set(kinds) if len(set(kinds)) > 1 else ():
        of_kind = torch.tensor([each == kind for each in kinds])
        found[f"low_{kind}"] = report.shares(2)[of_kind, :, 1].mean().item()
    return found | quarters_of_previous(model, ids, report, log)


def low_half(report: RopeReport, usage: Tensor) -> float:
    return report.shares(2, of=usage)[..., 1].mean().item()


def quarters_of_previous(model: Any, ids: Tensor, report: RopeReport, log: Any) -> dict[str, float]:
    """What is left of the previous-token heads without the highest, second, third and lowest quarter of their pairs."""
    assert report.scores is not None
    heads = positional_heads(report)
    prev, high = report.scores["prev"], report.shares(4)[..., 0]
    found = {
        "prev_heads": float(len(heads)),
        "self_heads": float(len(positional_heads(report, "self"))),
        "prev_high_correlation": torch.corrcoef(torch.stack([prev.flatten(), high.flatten()]))[0, 1].item(),
    }
    if heads:
        quarter = torch.arange(report.usage.shape[-1]) * 4 // report.usage.shape[-1]
        left = scores_without(model, ids, {str(i): quarter != i for i in range(4)})
        cuts = torch.tensor([[1 - float(left[str(i)]["prev"][at] / prev[at]) for i in range(4)] for at in heads])
        found |= {"prev_best": float(prev[heads[0]]), "prev_high_share": float(torch.stack([high[at] for at in heads]).mean())}
        found |= {"cut_high": cuts[0, 0].item(), "cut_low": cuts[0, 3].item()}
        found |= {"cut_high_least": cuts[:, 0].min().item(), "cut_low_most": cuts[:, 3].max().item()}
        for i, cut in enumerate(cuts[0].tolist()):
            log.metric("prev_left", 1 - cut, i)
    return found
