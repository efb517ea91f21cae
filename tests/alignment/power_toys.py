"""A toy model, its tokenizer and pairs for POWER's trainer tests; as a script, one process of a distributed training."""

import contextlib
import io
import json
import os
import sys
import warnings
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from assay.alignment import POWERConfig, POWERTrainer

WORDS = ["<pad>", "<s>", "</s>", "the", "a", "food", "film", "was", "is", "good", "bad", "nice", "awful"]
WORDS += ["so", "very", "not", "at", "all"]


def tokenizer(**special):
    from tokenizers import Tokenizer, models, pre_tokenizers

    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"} | special
    core.add_special_tokens(["<pad>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, **{k: v for k, v in names.items() if v}, padding_side="left")


def model(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def pairs(n=16, **columns):
    good, bad = ["good", "nice", "very good", "so nice all"], ["bad", "awful", "not good at all", "so bad"]
    rows = {
        "prompt": [f"the {('food', 'film')[i % 2]} {('was', 'is')[i // 2 % 2]}" for i in range(n)],
        "chosen": [f" {good[i % 4]}" + " very" * (i // 4) for i in range(n)],
        "rejected": [f" {bad[i % 4]}" + " at" * (i // 8) for i in range(n)],
    }
    return Dataset.from_dict(rows | columns)


def settings(folder, **more):
    base = {
        "output_dir": str(folder),
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "seed": 0,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "activation_checkpointing": False,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return POWERConfig(**(base | more))


def trainer(folder, data=None, policy=None, weighting=None, label_sharing=None, peft_config=None, eval_dataset=None, **more):
    return POWERTrainer(
        model=policy or model(), args=settings(folder, **more), processing_class=tokenizer(), train_dataset=data or pairs(),
        weighting=weighting, label_sharing=label_sharing, peft_config=peft_config, eval_dataset=eval_dataset,
    )  # fmt: skip


def train(made, **options):
    """Trains without printing."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.train(**options)
    return made


def weights(made):
    return torch.cat([p.detach().flatten() for p in made.accelerator.unwrap_model(made.model).parameters()])


if __name__ == "__main__":  # torchrun power_toys.py FOLDER '{"setting": ...}'
    out, more = Path(sys.argv[1]), json.loads(sys.argv[2])
    made = train(trainer(out, **more))
    rank = made.accelerator.process_index
    labels = made.dynamic_labels
    result = {"weights": weights(made), "labels": labels.labels, "visits": labels.visits}
    result["log"] = [line["labels/mean"] for line in made.state.log_history if "labels/mean" in line]
    torch.save(result, out / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the group, and abort a process that ends as usual
