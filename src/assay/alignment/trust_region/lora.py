"""A reference that lives in the same PEFT model: a second adapter, its tensors by name, and averages of LoRA products."""

from typing import Any

import torch
from torch import Tensor, nn

POLICY, REFERENCE = "default", "ref"  # TRL's reference forward selects an adapter of this name


def average_product(A: Tensor, B: Tensor, A_ref: Tensor, B_ref: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Factors of the best rank-r fit to ``α B A + (1−α) B_ref A_ref``.

    That average has rank up to 2r, so this is the nearest of rank r (in Frobenius norm), not the average itself. Averaging
    the factors one by one gives another matrix: its error is ``−α(1−α)(B−B_ref)(A−A_ref)``.

    Args:
        A: ``(r, in)``, or with further axes, which count as ``in``.
        B: ``(out, r)``, or with further axes of length 1.
        A_ref: As A.
        B_ref: As B.
        alpha: Share of ``B A``, in (0, 1].

    Returns:
        New ``A`` and ``B`` in the shapes and types of the reference's, with the singular values shared equally.

    Raises:
        ValueError: factors that do not fit each other.

    Example:
        >>> A, B = torch.eye(1, 3), torch.ones(2, 1)
        >>> a, b = average_product(A, B, A, 3 * B, alpha=0.5)
        >>> torch.allclose(b @ a, 2 * B @ A)
        True
    """
    rank = A.shape[0]
    if B.reshape(B.shape[0], -1).shape[1] != rank or A.shape != A_ref.shape or B.shape != B_ref.shape:
        raise ValueError(
            f"factors do not fit: A {tuple(A.shape)}, {tuple(A_ref.shape)}; B {tuple(B.shape)}, {tuple(B_ref.shape)}"
        )
    wide = torch.promote_types(A_ref.dtype, torch.float32)
    rows = torch.cat([x.to(device=A_ref.device, dtype=wide).flatten(1) for x in (A, A_ref)])  # (2r, in)
    columns = torch.cat([c * x.to(device=A_ref.device, dtype=wide).flatten(1) for c, x in ((alpha, B), (1 - alpha, B_ref))], 1)
    Q_out, R_out = torch.linalg.qr(columns)  # (out, 2r): the SVD is then of a 2r × 2r matrix, however large the layer
    Q_in, R_in = torch.linalg.qr(rows.mT)
    U, S, Vt = torch.linalg.svd(R_out @ R_in.mT, full_matrices=False)
    root = S[:rank].sqrt()
    new_A, new_B = root[:, None] * (Vt[:rank] @ Q_in.mT), (Q_out @ U[:, :rank]) * root
    if len(root) < rank:  # a layer narrower than its rank
        new_A = nn.functional.pad(new_A, (0, 0, 0, rank - len(root)))
        new_B = nn.functional.pad(new_B, (0, rank - len(root)))
    return new_A.reshape(A_ref.shape).to(A_ref.dtype), new_B.reshape(B_ref.shape).to(B_ref.dtype)


def adapter_tensors(model: nn.Module, adapter: str) -> dict[str, Tensor]:
    """The parameters of one adapter, under names in which ``*`` stands for the adapter's.

    Embedding factors end in the adapter's name (``lora_embedding_A.default``), others have it in their midst.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in model.named_parameters(remove_duplicate=True):
        parts = name.split(".")
        if adapter in parts:
            last = len(parts) - 1 - parts[::-1].index(adapter)
            found[".".join([*parts[:last], "*", *parts[last + 1 :]])] = tensor
    if not found:
        raise ValueError(f"the model has no parameters of an adapter called {adapter!r}")
    return found


@torch.no_grad()
def add_reference_adapter(model: Any) -> None:
    """Adds the adapter ``ref`` to a PEFT model, or takes the one there: a copy of ``default``, frozen, without dropout.

    Raises:
        ValueError: there is no adapter ``default``.
    """
    if POLICY not in model.peft_config:
        raise ValueError(f"the adapter that is trained must be called {POLICY!r}, got {', '.join(model.peft_config)}")
    if REFERENCE not in model.peft_config:
        active = model.active_adapter
        model.add_adapter(REFERENCE, model.peft_config[POLICY])
        model.set_adapter(active)
    source, target = adapter_tensors(model, POLICY), adapter_tensors(model, REFERENCE)
    if source.keys() != target.keys():
        raise ValueError(f"the adapters {POLICY!r} and {REFERENCE!r} must have the same parameters")
    for name, tensor in target.items():
        tensor.data = source[name].detach().clone()  # the type too: PEFT may have made it float32
        tensor.requires_grad_(False)
    for module in model.modules():
        for child_name, child in module.named_children():
            if isinstance(child, nn.ModuleDict) and "dropout" in child_name and REFERENCE in child:
                child[REFERENCE] = nn.Identity()


def low_rank_pairs(model: Any) -> list[tuple[str, str]]:
    """Names ``(A, B)`` of the LoRA factors of the adapter, as `adapter_tensors` calls them.

    Raises:
        ValueError: an adapter other than plain LoRA: DoRA's magnitudes do not average with the product.
    """
    config = model.peft_config[POLICY]
    if getattr(config.peft_type, "value", config.peft_type) != "LORA" or getattr(config, "use_dora", False):
        raise ValueError("exact_lora averages products of LoRA factors; it knows no other adapter and no DoRA")
    names = adapter_tensors(model, POLICY)
    pairs = [(name, name.replace("lora_A.", "lora_B.")) for name in names if "lora_A." in name]
    pairs += [(name, name.replace("lora_embedding_A.", "lora_embedding_B.")) for name in names if "lora_embedding_A." in name]
    return pairs
