"""A small Llama of one's own: its tokenizer, its pre-training, batched sampling with a cache, and log-probabilities.

0.8 million weights at the default sizes, yet a Hugging Face model like any other, so that trainers take it unchanged.
"""

import inspect
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .language import quiet, transformers

PAD, BOS, EOS = "<pad>", "<s>", "</s>"


def train_tokenizer(texts: Iterable[str], vocabulary: int = 1500) -> Any:
    """A byte-level BPE tokenizer of the texts; it puts ``<s>`` first, pads on the left, and any text round-trips."""
    import tokenizers

    hf = transformers()
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def small_llama(
    tokenizer: Any, *, hidden: int = 128, ffn: int = 344, layers: int = 3, heads: int = 4, positions: int = 256, seed: int = 0
) -> Any:
    """A Llama with tied embeddings and random weights, the same ones for the same seed; in evaluation mode."""
    hf = transformers()
    config = hf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return hf.LlamaForCausalLM(config).eval()


def pretrain(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    steps: int,
    seed: int,
    batch: int = 32,
    lr: float = 3e-3,
    max_length: int = 64,
    track: Callable[[range], Iterable[int]] = iter,
) -> list[float]:
    """AdamW on ``<s> text </s>``, a tenth of the steps warm-up, then a cosine to a tenth; the loss of each step in nats.

    Raises:
        FloatingPointError: the loss is no longer finite.
    """
    device = next(model.parameters()).device
    rows = [ids[:max_length] for ids in _encoded(tokenizer, texts, end=True)]
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.01)
    warm = max(1, steps // 10)

    def rate(step: int) -> float:
        return (step + 1) / warm if step < warm else 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses: list[float] = []
    model.train()
    batches = _batches_of_like_length(rows, batch, generator)
    for step in track(range(steps)):
        ids, mask = _padded(next(batches), tokenizer.pad_token_id, side="right", device=device)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        loss = F.cross_entropy(logits[mask[:, 1:].bool()], ids[:, 1:][mask[:, 1:].bool()])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"the language model's loss became {losses[-1]} at step {step}")
    model.eval()
    return losses


def _batches_of_like_length(rows: list[list[int]], batch: int, generator: torch.Generator) -> Iterator[list[list[int]]]:
    """Endless; every pass over the rows in another order. Eight batches at a time are sorted by length: half the padding."""
    order: list[int] = []
    while True:
        while len(order) < 8 * batch:
            order += torch.randperm(len(rows), generator=generator).tolist()
        group, order = sorted(order[: 8 * batch], key=lambda i: len(rows[i])), order[8 * batch :]
        for k in torch.randperm(8, generator=generator).tolist():
            yield [rows[i] for i in group[k * batch : (k + 1) * batch]]


class Samples(NamedTuple):
    """Completions of prompts, grouped by prompt: row ``p · per_prompt + j`` is prompt p's j-th.

    Shapes: ids and mask ``(n, new tokens)``, mask 1 up to and with the end token; logps ``(n,)`` the sum over those tokens
    at temperature 1; prompt_ids and prompt_mask ``(n, prompt tokens)``, padded on the left.
    """

    texts: list[str]
    ids: Tensor
    mask: Tensor
    logps: Tensor
    prompt_ids: Tensor
    prompt_mask: Tensor

    @property
    def lengths(self) -> Tensor:
        """Tokens of each completion, the end token among them: ``(n,)``."""
        return self.mask.sum(1)


@torch.no_grad()
def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    seed: int,
    per_prompt: int = 1,
    max_new_tokens: int = 20,
    temperature: float = 1.0,
    batch: int = 600,
) -> Samples:
    """Completions drawn from the model itself, nothing cut off.

    A prompt is read once for all its completions, the key-value cache is kept, and completions that have ended leave it.

    Args:
        batch: Completions at a time, about. Prompts are padded on the left to the longest of all.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    prompt_ids, prompt_mask = _padded(_encoded(tokenizer, prompts), tokenizer.pad_token_id, side="left", device=device)
    model.eval()
    drawn = prompt_ids.new_full((len(prompts) * per_prompt, max_new_tokens), tokenizer.pad_token_id)
    logps = torch.zeros(len(drawn), device=device)
    prompts_at_once = max(1, batch // per_prompt)
    for start in range(0, len(prompts), prompts_at_once):
        mask = prompt_mask[start : start + prompts_at_once]
        out = _step(model, prompt_ids[start : start + prompts_at_once], mask, None)
        mask, logits = (t.repeat_interleave(per_prompt, 0) for t in (mask, out.logits))
        cache = getattr(out, _cache_name(model))
        cache.batch_repeat_interleave(per_prompt)
        rows = torch.arange(len(mask), device=device) + start * per_prompt  # those in the cache
        for t in range(max_new_tokens):
            logits = logits[:, -1].float()
            cdf = (logits / temperature).softmax(-1).cumsum(-1)
            u = torch.rand(len(rows), 1, device=device, generator=generator) * cdf[:, -1:]
            token = torch.searchsorted(cdf, u, right=True).clamp_max(cdf.shape[-1] - 1)  # a third of multinomial's time
            alive = ~(drawn[rows, :t] == tokenizer.eos_token_id).any(1)
            logps[rows] += alive * logits.log_softmax(-1).gather(1, token)[:, 0]
            drawn[rows, t] = torch.where(alive, token[:, 0], tokenizer.pad_token_id)
            alive = alive & (token[:, 0] != tokenizer.eos_token_id)
            if t + 1 == max_new_tokens or not alive.any():
                break
            if alive.double().mean() < 0.8:
                keep = alive.nonzero()[:, 0]
                cache.batch_select_indices(keep)
                rows, mask, token = rows[keep], mask[keep], token[keep]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            logits = _step(model, token, mask, cache).logits
    mask = _until_end(drawn, tokenizer.eos_token_id)
    texts = tokenizer.batch_decode(
        [row[m].tolist() for row, m in zip(drawn, mask.bool(), strict=True)], skip_special_tokens=True
    )
    repeated = (t.repeat_interleave(per_prompt, 0) for t in (prompt_ids, prompt_mask))
    return Samples(texts, drawn, mask, logps, *repeated)


def _step(model: Any, ids: Tensor, mask: Tensor, cache: Any) -> Any:
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, _cache_name(model): cache}
    return model(**inputs, use_cache=True, logits_to_keep=1)


def _cache_name(model: Any) -> str:
    """transformers 5.24 renamed the argument, and warns of the old name."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def _until_end(ids: Tensor, eos: int) -> Tensor:
    """1 for the tokens up to and with the first end token, ``(n, tokens)``."""
    ended = (ids == eos).long().cumsum(1) - (ids == eos).long()
    return (ended == 0).long()


class CompletionLogps(NamedTuple):
    """Log-probability of each completion given its prompt, summed over its tokens, and how many those are: ``(n,)``."""

    sums: Tensor
    lengths: Tensor


def completion_logps(
    model: Any, tokenizer: Any, prompts: Sequence[str], completions: Sequence[str], *, end: bool = True, batch: int = 128
) -> CompletionLogps:
    """``log π(completion | prompt)``; with ``end`` the end token counts as its last. Differentiable in the weights."""
    device = next(model.parameters()).device
    heads = _encoded(tokenizer, prompts)
    tails = _encoded(tokenizer, completions, end=end, begin=False)
    sums, lengths = [], []
    for start in range(0, len(heads), batch):
        head, tail = heads[start : start + batch], tails[start : start + batch]
        ids, mask = _padded(
            [h + t for h, t in zip(head, tail, strict=True)], tokenizer.pad_token_id, side="right", device=device
        )
        first = torch.tensor([len(h) for h in head], device=device)[:, None]
        position = torch.arange(1, ids.shape[1], device=device)
        counted = (position >= first) & mask[:, 1:].bool()
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
        token_logps = logits.gather(2, ids[:, 1:, None])[..., 0] - logits.logsumexp(-1)
        sums.append((token_logps * counted).sum(1))
        lengths.append(counted.sum(1))
    return CompletionLogps(torch.cat(sums), torch.cat(lengths))


class TokenKL(NamedTuple):
    """Three estimates of ``KL(policy ‖ reference)`` for each drawn completion, ``(n,)`` nats; each has it as its mean.

    ``exact`` sums the KL between the next-token distributions over the tokens drawn, ``k1`` is the log-ratio of what was
    drawn, ``k3`` the sum over tokens of ``ratio − 1 − log ratio`` with ``ratio = reference / policy``.
    """

    exact: Tensor
    k1: Tensor
    k3: Tensor


@torch.no_grad()
def token_kl(policy: Any, reference: Any, samples: Samples, *, batch: int = 250) -> TokenKL:
    """How far the policy has moved, on completions drawn from it."""
    parts = []
    for start in range(0, len(samples.ids), batch):
        rows = slice(start, start + batch)
        ids = torch.cat([samples.prompt_ids[rows], samples.ids[rows]], 1)
        mask = torch.cat([samples.prompt_mask[rows], samples.mask[rows]], 1)
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        width = samples.ids.shape[1]
        ours, theirs = (
            model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=width + 1)
            .logits[:, :-1].float().log_softmax(-1)
            for model in (policy, reference)
        )  # fmt: skip
        drawn, counted = samples.ids[rows, :, None], samples.mask[rows]
        log_ratio = (ours - theirs).gather(2, drawn)[..., 0]  # (rows, new tokens)
        exact = (ours.exp() * (ours - theirs)).sum(-1)
        k3 = (-log_ratio).exp() - 1 + log_ratio
        parts.append(torch.stack([(each * counted).sum(1) for each in (exact, log_ratio, k3)]))
    return TokenKL(*torch.cat(parts, 1))


@dataclass(frozen=True)
class Checkpoint:
    """A model and its tokenizer that can be pickled, and laid out in a folder for those who want a path.

    Either ``files`` (name to content, as ``save_pretrained`` writes them) or the ``path`` of a folder or hub id.
    """

    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    path: str = ""

    @classmethod
    def of(cls, model: Any, tokenizer: Any) -> "Checkpoint":
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            return cls({path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())})

    @contextmanager
    def on_disk(self) -> Iterator[str]:
        """The path of a folder that holds it, for as long as the block lasts."""
        if self.path:
            yield self.path
            return
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
            for name, content in self.files.items():
                (Path(folder) / name).write_bytes(content)
            yield folder

    def load(self) -> tuple[Any, Any]:
        """A fresh copy of the model in float32 and evaluation mode, and the tokenizer, padding on the left."""
        hf = transformers()
        with self.on_disk() as folder, quiet():
            model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
            tokenizer = hf.AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return model.eval(), tokenizer


def _encoded(tokenizer: Any, texts: Sequence[str], *, end: bool = False, begin: bool = True) -> list[list[int]]:
    rows = tokenizer(list(texts), add_special_tokens=begin)["input_ids"] if texts else []
    return [[*row, tokenizer.eos_token_id] for row in rows] if end else rows


def _padded(rows: Sequence[list[int]], pad: int, *, side: str, device: Any) -> tuple[Tensor, Tensor]:
    """Ids and mask, ``(n, longest)``."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(r, dtype=torch.long) for r in rows], True, pad, side)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(r), dtype=torch.long) for r in rows], True, 0, side)
    return ids.to(device), mask.to(device)
