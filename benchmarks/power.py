"""One training step of POWER beside DPO with mean log-probabilities and SimPO, and bandits in a batch beside run by run.

Forward, loss and backward of pairs of some 64 tokens, a small Llama in float32; data preparation and the optimizer left out.
"""

import tempfile
import warnings
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer

from assay.alignment import POWERBandit, POWERConfig, POWERTrainer
from assay.alignment.preference_training import silence, trainer_settings
from assay.bench.speed import Contest
from assay.models.small_lm import Checkpoint, small_llama, train_tokenizer

WORDS = 30
SIZES = {
    "d=128, 3 layers, 16 pairs": (16, {}),
    "d=256, 6 layers, 6 pairs": (6, {"hidden": 256, "ffn": 688, "layers": 6}),
}


def step_of(kind: str, count: int, sizes: dict[str, int]) -> Callable[[], None]:
    """A call that does one training step without the optimizer; everything is made at its first use."""

    def prepared() -> Iterator[tuple[Any, Any]]:
        words = [f"w{i}" for i in range(500)]
        generator = torch.Generator().manual_seed(0)

        def texts() -> list[str]:
            return [" " + " ".join(words[i] for i in torch.randint(500, (WORDS,), generator=generator)) for _ in range(count)]

        tokenizer = train_tokenizer(words * 20)
        checkpoint = Checkpoint.of(small_llama(tokenizer, **sizes), tokenizer)
        pairs = Dataset.from_dict({"prompt": texts(), "chosen": texts(), "rejected": texts()})
        settings = trainer_settings(tempfile.mkdtemp(), steps=100, batch=count, lr=0.0, seed=0)
        made: Any
        with checkpoint.on_disk() as path, silence(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            common = {"model": path, "processing_class": tokenizer, "train_dataset": pairs}
            if kind == "power":
                made = POWERTrainer(**common, args=POWERConfig(**settings))
            elif kind == "dpo":
                made = DPOTrainer(**common, args=DPOConfig(loss_type=["sigmoid_norm"], **settings))
            else:
                made = CPOTrainer(**common, args=CPOConfig(loss_type="simpo", simpo_gamma=0.0, cpo_alpha=0.0, **settings))
            made.create_optimizer()
            made.current_gradient_accumulation_steps = 1
            batch = next(iter(made.get_train_dataloader()))
        yield from repeat((made, batch))

    ready = prepared()

    def call() -> None:
        made, batch = next(ready)
        made.training_step(made.model, batch)
        made.model.zero_grad(set_to_none=True)

    return call


PROBLEM, RUNS = [(0, 1, 60), (1, 0, 40), (2, 0, 1)], 50


def batched() -> None:
    POWERBandit(steps=200).fit(PROBLEM, torch.zeros(RUNS, 3), eta=0.1, gamma=0.02)


def run_by_run() -> None:
    for _ in range(RUNS):
        POWERBandit(steps=200).fit(PROBLEM, torch.zeros(1, 3), eta=0.1, gamma=0.02)


contests = [
    contest
    for name, (count, sizes) in SIZES.items()
    for ours in [step_of("power", count, sizes)]
    for contest in (
        Contest(f"step, {name}", ours, step_of("dpo", count, sizes), "trl.DPOTrainer sigmoid_norm", 0.85, rounds=11),
        Contest(f"step, {name}", ours, step_of("simpo", count, sizes), "trl CPOTrainer simpo", 1.05, rounds=11),
    )
] + [Contest(f"bandit, {RUNS} runs of 200 steps", batched, run_by_run, "run by run", None, rounds=3)]
