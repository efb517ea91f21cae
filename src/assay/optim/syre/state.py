"""Anchors to and from a state dict."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .pull import Anchor


def saved_anchors(
    params: Sequence[Tensor], keys: Mapping[Tensor, str], anchors: Mapping[Tensor, Anchor]
) -> list[dict[str, Any]]:
    """One entry a parameter: what its anchor is made from, and θ₀ and D themselves where they are kept."""
    entries = []
    for p in params:
        entry: dict[str, Any] = {"key": keys[p], "shape": tuple(p.shape)}
        if anchor := anchors.get(p):
            entry |= {"seed": anchor.seed, "std": anchor.std, "spread": anchor.spread}
            entry |= {"theta0": anchor.theta0, "D": anchor.D}
        entries.append(entry)
    return entries


def load_anchors(
    entries: Sequence[Mapping[str, Any]],
    params: Sequence[Tensor],
    keys: Mapping[Tensor, str],
    keep: bool,
    dtype: torch.dtype | None,
) -> tuple[dict[Tensor, str], dict[Tensor, Anchor]]:
    """Keys and anchors from entries, matched by key where both sides hold the same ones, else by order.

    Raises:
        ValueError: the number of parameters or a shape differs.
    """
    if len(entries) != len(params):
        raise ValueError(f"the state has {len(entries)} parameters, the optimizer {len(params)}")
    by_key = {entry["key"]: entry for entry in entries}
    if by_key.keys() == {keys[p] for p in params}:
        entries = [by_key[keys[p]] for p in params]
    loaded: dict[Tensor, Anchor] = {}
    for p, entry in zip(params, entries, strict=True):
        if tuple(entry["shape"]) != tuple(p.shape):
            raise ValueError(f"{entry['key']!r} has shape {tuple(entry['shape'])} in the state, {tuple(p.shape)} here")
        if "std" not in entry:
            continue
        anchor = loaded[p] = Anchor(entry["key"], entry["seed"], entry["std"], entry["spread"], dtype)
        if keep:
            anchor.keep(p.detach())
            for held, saved in ((anchor.theta0, entry["theta0"]), (anchor.D, entry["D"])):
                if held is not None and saved is not None:
                    held.copy_(saved)  # the draw of the machine that saved it: another's may differ in the last bit
    return {p: entry["key"] for p, entry in zip(params, entries, strict=True)}, loaded
