"""Sequences in lock-step beside a token loop, one decomposition beside one for each fraction, a scan beside whole passes."""

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from assay.bench.speed import Contest
from assay.data import load_text
from assay.language import AssociationProbe, NoisyRecall, Spectrum, laser_scan, truncated

torch.manual_seed(0)
task = NoisyRecall.from_text(load_text("pydoc"), seq_len=96)
BATCH = 512  # the published batch
unigram, bigram, tokens = task.unigram.numpy(), task.bigram.numpy(), np.arange(task.vocab)
trigger = int(task.triggers[0])


def token_by_token():
    """The form of the published generator: one draw from a row of the bigrams for every token."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(BATCH):
        answer = rng.integers(task.vocab)
        row = [rng.choice(tokens, p=unigram)]
        while len(row) <= task.seq_len:
            if row[-1] == trigger:
                row.append(answer if rng.random() >= task.alpha else task.noise_token)
            else:
                row.append(rng.choice(tokens, p=bigram[row[-1]]))
        rows.append(row)
    return np.array(rows)


FRACTIONS = (0.5, 0.1, 0.05, 0.01)
weight = torch.randn(1536, 576)


def decomposed_once():
    spectrum = Spectrum(weight)
    return [spectrum.truncate(fraction) for fraction in FRACTIONS]


def decomposed_every_time():
    cuts = []
    for fraction in FRACTIONS:
        U, S, Vh = torch.linalg.svd(weight, full_matrices=False)
        k = int(fraction * 576)
        cuts.append(U[:, :k] * S[:k] @ Vh[:k])
    return cuts


for a, b in zip(decomposed_once(), decomposed_every_time(), strict=True):
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)

config = LlamaConfig(
    vocab_size=512, hidden_size=192, intermediate_size=512, num_hidden_layers=18, num_attention_heads=6, num_key_value_heads=6
)
model = LlamaForCausalLM(config).eval()
LAYERS = range(12, 18)
probe = AssociationProbe([(f"{i:032d}", "a", "b") for i in range(24)])


def tok(text):
    return {"input_ids": list(text.encode())}


def whole_passes():
    found = [probe.evaluate(model, tok)["p_answer"]]
    for layer in LAYERS:
        with truncated(model, {f"model.layers.{layer}.mlp": 0.0}):
            found.append(probe.evaluate(model, tok)["p_answer"])
    return found


def scan():
    return laser_scan(model, tok, probe, LAYERS, [0.0])


np.testing.assert_allclose(scan().p_answer, whole_passes(), rtol=1e-4)

contests = [
    Contest(
        f"{BATCH} sequences of 96 tokens", ours=lambda: task.sample(BATCH), peer=token_by_token, peer_name="a loop over tokens",
        target=1 / 30,
    ),
    Contest(
        "1536 × 576 cut to four ranks", ours=decomposed_once, peer=decomposed_every_time, peer_name="torch.linalg.svd for each",
        target=0.4,
    ),
    Contest(
        "scan of the last third of 18 layers", ours=scan, peer=whole_passes, peer_name="a whole pass for each cut", target=0.55,
        memory=True,
    ),
]  # fmt: skip
