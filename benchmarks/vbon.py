"""Quantiles beside a loop over samples, the closed form beside the binomial sum, and a training step beside plain RLOO."""

import math
import tempfile

import torch

from assay.alignment import RewardCDF, VBoNConfig, VBoNTrainer, bon_log_prob
from assay.bench.speed import Contest

torch.manual_seed(0)
P, M, N = 1024, 300, 512
tables = torch.randn(P, M, dtype=torch.double)
prompts, rewards = [f"prompt {i}" for i in range(P)], torch.randn(P, dtype=torch.double)
cdf = RewardCDF()
lists = {}
for prompt, row in zip(prompts, tables.tolist(), strict=True):
    cdf.add(prompt, row)
    lists[prompt] = sorted(row)


def loop():
    """A comparison with every reward of the prompt, sample by sample."""
    return [math.log((sum(x < r for x in lists[p]) + 1) / (M + 1)) for p, r in zip(prompts, rewards.tolist(), strict=True)]


torch.testing.assert_close(cdf.log_cdf(prompts, rewards), torch.tensor(loop(), dtype=torch.double))

log_cdf = -torch.rand(256, dtype=torch.double)
ref_logp = -5 - 20 * torch.rand(256, dtype=torch.double)


def binomial_sum():
    terms = [
        math.lgamma(N + 1) - math.lgamma(i + 1) - math.lgamma(N - i + 1) + (N - i) * log_cdf + i * ref_logp
        for i in range(1, N + 1)
    ]
    return torch.stack(terms).logsumexp(0)


torch.testing.assert_close(bon_log_prob(ref_logp, log_cdf, N), binomial_sum(), rtol=1e-6, atol=1e-6)


def trainer_of(kind):
    """Both trainers on the same small model, prompts and reward."""
    import trl
    from datasets import Dataset
    from transformers import PrinterCallback

    from assay.models.small_lm import Checkpoint, small_llama, train_tokenizer

    words = [f"sentence {i} of words" for i in range(64)]
    tokenizer = train_tokenizer(words, 300)
    data = Dataset.from_dict({"prompt": words[:16]})
    folder = tempfile.mkdtemp(prefix="vbon-speed-")
    settings = {
        "output_dir": folder, "max_steps": 2, "per_device_train_batch_size": 32, "num_generations": 8, "seed": 0,
        "max_completion_length": 20, "report_to": "none", "save_strategy": "no", "bf16": False, "disable_tqdm": True,
        "gradient_checkpointing": False, "use_cpu": True, "dataloader_pin_memory": False, "logging_strategy": "no",
    }  # fmt: skip
    known = RewardCDF()
    for word in words[:16]:
        known.add(word, torch.randn(M).tolist())

    def reward(prompts, completions, **_):
        return [float(len(c)) for c in completions]

    with Checkpoint.of(small_llama(tokenizer), tokenizer).on_disk() as path:
        if kind == "vbon":
            trainer = VBoNTrainer(path, reward, VBoNConfig(n=16, **settings), data, cdf=known)
        else:
            trainer = trl.RLOOTrainer(path, reward, trl.RLOOConfig(beta=1 / 15, **settings), data)
    trainer.remove_callback(PrinterCallback)
    return trainer


trainers = {kind: trainer_of(kind) for kind in ("vbon", "rloo")}


def train(kind):
    return lambda: trainers[kind].train()


contests = [
    Contest(
        "log F̂ of 1,024 rewards, 300 a table", ours=lambda: cdf.log_cdf(prompts, rewards), peer=loop, peer_name="a loop",
        target=1 / 50,
    ),
    Contest(
        "log π_bon of 256 strings, N = 512", ours=lambda: bon_log_prob(ref_logp, log_cdf, N), peer=binomial_sum,
        peer_name="the binomial sum", target=1 / 100,
    ),
    Contest("two training steps", ours=train("vbon"), peer=train("rloo"), peer_name="trl.RLOOTrainer", target=1.1),
]  # fmt: skip
