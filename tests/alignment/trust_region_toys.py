"""A tiny Llama, made-up preference rows and settings for the trainers' tests; also the script that torchrun starts."""

import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset

from assay.alignment import TRDPOConfig, TRDPOTrainer, TRKTOConfig, TRKTOTrainer
from assay.models.small_lm import small_llama, train_tokenizer

WORDS = ["good", "bad", "nice", "warm", "awful", "long", "food", "movie", "late"]


def toy_tokenizer():
    return train_tokenizer([" ".join(WORDS)] * 4, vocabulary=300)


def toy_model(tokenizer, seed=0):
    return small_llama(tokenizer, hidden=16, ffn=32, layers=1, heads=2, seed=seed)


def toy_pairs(rows=24):
    generator = torch.Generator().manual_seed(0)

    def say(words):
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (words,), generator=generator).tolist())

    chosen, rejected = ([f" {say(3)}" for _ in range(rows)], [f" {say(4)}" for _ in range(rows)])
    return Dataset.from_dict({"prompt": [say(3) for _ in range(rows)], "chosen": chosen, "rejected": rejected})


def toy_answers(rows=24):
    pairs = toy_pairs(rows)
    answers = [row["chosen" if i % 2 else "rejected"] for i, row in enumerate(pairs)]
    return Dataset.from_dict({"prompt": pairs["prompt"], "completion": answers, "label": [i % 2 == 1 for i in range(rows)]})


def toy_settings(folder, **more):
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_steps": 6,
        "report_to": "none",
        "save_strategy": "no",
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "tr_sync_steps": 2,
        "seed": 0,
        **more,
    }


def toy_trainer(kind, folder, model=None, data=None, peft=False, **settings):
    tokenizer = toy_tokenizer()
    trainer, config = (TRDPOTrainer, TRDPOConfig) if kind == "dpo" else (TRKTOTrainer, TRKTOConfig)
    extra = {}
    if peft:
        from peft import LoraConfig

        extra["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return trainer(
        model=toy_model(tokenizer) if model is None else model,
        args=config(**toy_settings(folder, **settings)),
        train_dataset=(toy_pairs() if kind == "dpo" else toy_answers()) if data is None else data,
        processing_class=tokenizer,
        **extra,
    )


def weights(trainer):
    """Policy and reference by name, wherever they are."""
    updater = trainer.moving.updater
    tensors = {f"policy/{name}": t for name, t in updater._policy.items()}
    return {
        name: t.detach().clone() for name, t in (tensors | {f"reference/{n}": t for n, t in updater._reference.items()}).items()
    }


if __name__ == "__main__":  # under torchrun: what each process ends with
    from torch import distributed

    folder = Path(sys.argv[1])
    ends = {}
    for name, kind, settings in json.loads(sys.argv[2]):
        trainer = toy_trainer(kind, folder / name, **settings)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        ends[name] = {"weights": weights(trainer), "losses": losses, "hits": trainer._cache.hits if trainer._cache else 0}
    torch.save(ends, folder / f"ends-{distributed.get_rank()}.pt")
    distributed.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the group, and abort a process that ends as usual
