"""The GPT-2-shaped model that learns function classes in context."""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model


class ICLTransformer(nn.Module):
    r"""A GPT-2 that reads x₁, y₁, x₂, y₂, … and predicts each y from all that stands before it.

    "Can In-context Learning Really Generalize to Out-of-distribution Tasks?", ICLR 2025, https://arxiv.org/abs/2410.09695;
    the architecture is that of Garg et al., 2022, https://arxiv.org/abs/2208.01066.

    .. math:: \hat y_i = \mathrm{out}\big(\mathrm{GPT2}(\mathrm{in}(x_1), \mathrm{in}(y_1, 0, …), …, \mathrm{in}(x_i))\big)

    Read out where an x stands: a read-out at y would give the label away.

    Args:
        d: Dimensions of x, ≥ 1.
        n_positions: The longest prompt in examples, the query among them, ≥ 1.
        n_embd: Width, a multiple of `n_head`.
        n_layer: Layers, ≥ 1.
        n_head: Heads, ≥ 1.

    Shapes:
        - xs: ``(B, n, d)``, n ≤ `n_positions`.
        - ys: ``(B, n)``, or ``(B, n, d)`` where labels are vectors. The last one is never looked at.
        - output: as ys.

    Raises:
        ValueError: sizes that do not fit; a prompt longer than `n_positions`; another d; shapes that do not match.

    Example:
        >>> model = ICLTransformer(d=2, n_positions=10, n_embd=16, n_layer=1, n_head=2)
        >>> model(torch.randn(4, 10, 2), torch.randn(4, 10)).shape
        torch.Size([4, 10])
    """

    def __init__(self, d: int, n_positions: int = 101, n_embd: int = 256, n_layer: int = 12, n_head: int = 8):
        super().__init__()
        sizes = {"d": d, "n_positions": n_positions, "n_embd": n_embd, "n_layer": n_layer, "n_head": n_head}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if n_embd % n_head:
            raise ValueError(f"n_embd must be a multiple of n_head, got {n_embd} and {n_head}")
        self.d, self.n_positions = d, n_positions
        self.read_in = nn.Linear(d, n_embd)
        self.backbone = GPT2Model(
            GPT2Config(
                vocab_size=1,  # tokens come as embeddings; the table would be most of a small model
                n_positions=2 * n_positions,
                n_embd=n_embd,
                n_layer=n_layer,
                n_head=n_head,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                activation_function="gelu_pytorch_tanh",  # gelu_new in one kernel
                use_cache=False,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
        self.read_out = nn.Linear(n_embd, 1)
        self.read_out_vector = nn.Linear(n_embd, d)

    def forward(self, xs: Tensor, ys: Tensor) -> Tensor:
        check_model_input(self, xs, ys)
        labels = ys if ys.ndim == 3 else nn.functional.pad(ys[..., None], (0, self.d - 1))
        tokens = torch.stack((xs, labels.to(xs.dtype)), 2).flatten(1, 2)[:, :-1]  # (B, 2n − 1, d): x₁ y₁ … xₙ
        states = self.backbone(inputs_embeds=self.read_in(tokens)).last_hidden_state[:, ::2]
        return self.read_out_vector(states) if ys.ndim == 3 else self.read_out(states)[..., 0]


def check_model_input(model: nn.Module, xs: Tensor, ys: Tensor) -> None:
    """Raises ValueError for prompts that do not fit the model's ``d`` and ``n_positions``, where it has them."""
    d, n_positions = getattr(model, "d", None), getattr(model, "n_positions", None)
    if xs.ndim != 3 or (d is not None and xs.shape[2] != d):
        raise ValueError(f"xs must be (B, n, {d or 'd'}), got {tuple(xs.shape)}")
    if n_positions is not None and xs.shape[1] > n_positions:
        raise ValueError(f"xs: {xs.shape[1]} examples, more than n_positions={n_positions}")
    if ys.shape not in (xs.shape[:2], xs.shape):
        raise ValueError(f"ys must be {tuple(xs.shape[:2])} or {tuple(xs.shape)}, got {tuple(ys.shape)}")
