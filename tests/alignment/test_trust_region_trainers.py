"""TRL's trainers with a moving reference: parity with TRL, PEFT, accumulation, resuming, caching, bad input."""

import copy
import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

trl = pytest.importorskip("trl")

from datasets import Dataset, IterableDataset  # noqa: E402

from assay.alignment import TRDPOConfig, TRKTOConfig, TrustRegionCallback, tr_dpo_loss, tr_ipo_loss, tr_kto_loss  # noqa: E402
from assay.alignment.trust_region.lora import adapter_tensors, add_reference_adapter  # noqa: E402
from assay.alignment.trust_region.reference import answer_logps  # noqa: E402
from assay.alignment.trust_region.trainer import TrustRegion  # noqa: E402

_spec = importlib.util.spec_from_file_location("trust_region_toys", Path(__file__).with_name("trust_region_toys.py"))
toys = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toys)

EXACT = {"rtol": 0, "atol": 1e-6}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TQDM_DISABLE", "1")


def same(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], **(tolerance or EXACT), msg=lambda text, name=name: f"{name}: {text}")


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# ---- parity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_equals_trls_sync_ref_model(kind, tmp_path):
    """Three updates of the same α and τ, reference loaded by TRL from a path: weights and losses to 1e-6."""
    tokenizer = toys.toy_tokenizer()
    toys.toy_model(tokenizer).save_pretrained(tmp_path / "sft")
    ours = toys.toy_trainer(kind, tmp_path, model=str(tmp_path / "sft"), tr_alpha=0.6, beta=0.1)
    ours.train()
    settings = {k: v for k, v in toys.toy_settings(tmp_path).items() if not k.startswith("tr_")}
    settings |= {"sync_ref_model": True, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 2, "beta": 0.1}
    trainer, config = (trl.DPOTrainer, trl.DPOConfig) if kind == "dpo" else (trl.KTOTrainer, trl.KTOConfig)
    data = toys.toy_pairs() if kind == "dpo" else toys.toy_answers()
    theirs = trainer(
        model=str(tmp_path / "sft"), args=config(**settings), train_dataset=data, processing_class=toys.toy_tokenizer()
    )
    theirs.train()
    assert ours.moving.updater.syncs == 3
    assert losses(ours) == pytest.approx(losses(theirs), abs=1e-6)
    same(dict(ours.model.named_parameters()), dict(theirs.model.named_parameters()))
    same(dict(ours.ref_model.named_parameters()), dict(theirs.ref_model.named_parameters()))


@pytest.mark.parametrize(
    "settings",
    [{}, {"label_smoothing": 0.2}, {"loss_type": "ipo"}, {"loss_type": "ipo", "ipo_length_normalized": False}],
    ids=["dpo", "smoothed", "ipo", "ipo of sums"],
)
def test_trainer_loss_is_the_pure_loss(settings, tmp_path):
    trainer = toys.toy_trainer("dpo", tmp_path, beta=0.3, tr_sft_probe=0, **settings)
    with torch.no_grad():
        for p in trainer.ref_model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    policy = trainer.compute_ref_log_probs(trainer.model, dict(batch))
    reference = trainer.compute_ref_log_probs(trainer.ref_model, dict(batch))
    quadruple = (policy[0], policy[1], reference[0], reference[1])
    lengths = batch["completion_mask"].sum(1).chunk(2)
    if "loss_type" not in settings:
        expected = tr_dpo_loss(*quadruple, 0.3, settings.get("label_smoothing", 0.0))
    else:
        expected = tr_ipo_loss(*quadruple, 0.3, *(() if "ipo_length_normalized" in settings else lengths))
    torch.testing.assert_close(trainer.compute_loss(trainer.model, batch).detach(), expected.mean())


def test_kto_trainer_loss_is_the_pure_loss(tmp_path):
    trainer = toys.toy_trainer("kto", tmp_path, beta=0.3, tr_sft_probe=0, desirable_weight=2.0)
    with torch.no_grad():
        for p in trainer.ref_model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    policy, policy_kl = trainer.compute_ref_log_probs(trainer.model, dict(batch))
    reference, reference_kl = trainer.compute_ref_log_probs(trainer.ref_model, dict(batch))
    kl = (policy_kl - reference_kl).mean()
    expected = tr_kto_loss(policy, reference, batch["label"], kl, 0.3, desirable_weight=2.0).mean()
    torch.testing.assert_close(trainer.compute_loss(trainer.model, batch).detach(), expected)


def test_any_other_trl_loss_takes_the_moving_reference(tmp_path):
    trainer = toys.toy_trainer("dpo", tmp_path, loss_type=["hinge", "sigmoid"], loss_weights=[0.5, 0.5], label_smoothing=0.1)
    trainer.train()
    assert trainer.moving.updater.syncs == 3
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    policy, reference = (trainer.compute_ref_log_probs(m, dict(batch)) for m in (trainer.model, trainer.ref_model))
    delta = 0.05 * ((policy[0] - reference[0]) - (policy[1] - reference[1]))
    expected = 0.5 * torch.relu(1 - delta).mean() + 0.5 * tr_dpo_loss(*policy, *reference, 0.05, 0.1).mean()
    torch.testing.assert_close(trainer.compute_loss(trainer.model, batch).detach(), expected)


# ---- where the reference comes from ----------------------------------------------------------------------------------


def test_a_model_object_gets_a_frozen_copy_of_its_weights(tmp_path):
    """Without a path TRL fails to load a reference; and one changed after loading would get the wrong one."""
    model = toys.toy_model(toys.toy_tokenizer(), seed=3).train()
    start = copy.deepcopy(model.state_dict())
    trainer = toys.toy_trainer("dpo", tmp_path, model=model, tr_sync_steps=100)
    trainer.train()
    same(dict(trainer.ref_model.state_dict()), dict(start), rtol=0, atol=0)
    assert not trainer.ref_model.training
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())
    assert not torch.equal(model.state_dict()["lm_head.weight"], start["lm_head.weight"])


def test_a_model_that_was_trained_before_gets_a_copy_that_runs_its_own_weights(tmp_path):
    """TRL patches ``forward`` on the object: a plain deep copy's unfused forward would still be the policy's."""
    model = toys.toy_model(toys.toy_tokenizer())
    toys.toy_trainer("dpo", tmp_path, model=model, max_steps=1).train()
    again = toys.toy_trainer("dpo", tmp_path, model=model, tr_sync_steps=100)
    ids = torch.arange(5, 12)[None]
    before = again.ref_model(input_ids=ids).logits
    again.train()
    torch.testing.assert_close(again.ref_model(input_ids=ids).logits, before, rtol=0, atol=0)
    assert not torch.allclose(again.model(input_ids=ids).logits, before, atol=1e-4)


def test_another_reference_may_be_given_and_is_put_into_evaluation_mode(tmp_path):
    tokenizer = toys.toy_tokenizer()
    other = toys.toy_model(tokenizer, seed=5).train()
    trainer = toys.TRDPOTrainer(
        model=toys.toy_model(tokenizer), ref_model=other, args=TRDPOConfig(**toys.toy_settings(tmp_path)),
        train_dataset=toys.toy_pairs(), processing_class=tokenizer,
    )  # fmt: skip
    assert not trainer.ref_model.training
    trainer.train()
    assert trainer.moving.updater.syncs == 3


def test_the_callback_works_on_trls_own_trainer(tmp_path):
    settings = {k: v for k, v in toys.toy_settings(tmp_path).items() if not k.startswith("tr_")}
    tokenizer = toys.toy_tokenizer()
    model = toys.toy_model(tokenizer)
    trainer = trl.DPOTrainer(
        model=model, ref_model=copy.deepcopy(model), args=trl.DPOConfig(**settings), train_dataset=toys.toy_pairs(),
        processing_class=tokenizer,
    )  # fmt: skip
    callback = TrustRegionCallback(trainer.ref_model, mode="hard", every="auto")
    trainer.add_callback(callback)
    trainer.train()
    assert callback.updater.every == 1  # an eighth of six steps, rounded, at least one
    same(dict(trainer.model.named_parameters()), dict(trainer.ref_model.named_parameters()))


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_optimiser_steps_are_counted_not_batches(tmp_path):
    """Two batches of 2 accumulated are one step of 4: the same weights, the same updates."""
    whole = toys.toy_trainer("dpo", tmp_path)
    whole.train()
    halves = toys.toy_trainer("dpo", tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    halves.train()
    assert halves.moving.updater.steps == 6
    assert halves.moving.updater.syncs == 3
    same(toys.weights(whole), toys.weights(halves), rtol=1e-4, atol=1e-5)


def test_steps_that_the_scaler_skipped_do_not_count(tmp_path):
    trainer = toys.toy_trainer("dpo", tmp_path, max_steps=1, tr_sync_steps=1)
    trainer.train()
    updater = trainer.moving.updater
    trainer.moving.on_step_end(trainer.args, trainer.state, trainer.control, optimizer=SimpleNamespace(step_was_skipped=True))
    assert (updater.steps, updater.syncs) == (1, 1)


def test_auto_is_an_eighth_of_the_run(tmp_path):
    trainer = toys.toy_trainer("dpo", tmp_path, tr_sync_steps="auto", max_steps=-1, num_train_epochs=4)
    trainer.train()
    assert trainer.state.max_steps == 24
    assert (trainer.moving.updater.every, trainer.moving.updater.syncs) == (3, 8)


def test_a_budget_spares_updates(tmp_path):
    free = toys.toy_trainer("dpo", tmp_path, tr_kl_budget=1e-9, tr_sync_steps=1)
    free.train()
    tight = toys.toy_trainer("dpo", tmp_path, tr_kl_budget=1e3, tr_sync_steps=1)
    tight.train()
    assert free.moving.updater.syncs >= 5
    assert tight.moving.updater.syncs == 0


# ---- what is logged --------------------------------------------------------------------------------------------------


def test_rewards_against_the_initial_model_do_not_reset(tmp_path):
    trainer = toys.toy_trainer("dpo", tmp_path, max_steps=12, tr_mode="hard", tr_sync_steps=4, beta=0.5, tr_sft_probe=24)
    initial = copy.deepcopy(trainer.model)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "rewards_sft/margins" in entry]
    assert len(entries) == 12
    assert abs(entries[4]["rewards/margins"]) < 0.5 * abs(entries[3]["rewards/margins"])  # just after an update
    assert entries[4]["rewards_sft/margins"] > entries[3]["rewards_sft/margins"] > 0
    batch = trainer._prepare_inputs(trainer.data_collator([trainer.train_dataset[i] for i in range(24)]))
    now, start = (trainer.compute_ref_log_probs(m, batch) for m in (trainer.model, initial))
    margin = 0.5 * ((now[0] - start[0]) - (now[1] - start[1]))
    assert entries[-1]["rewards_sft/margins"] == pytest.approx(margin.mean().item(), abs=1e-5)
    assert entries[-1]["rewards_sft/accuracies"] == pytest.approx((margin > 0).float().mean().item())
    assert [entry["tr/syncs"] for entry in entries] == [0] * 4 + [1] * 4 + [2] * 4


# ---- PEFT ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_peft_moves_the_adapter_alone(kind, tmp_path):
    trainer = toys.toy_trainer(kind, tmp_path, peft=True, tr_alpha=0.5)
    model = trainer.model
    base = {n: p.detach().clone() for n, p in model.named_parameters() if ".default." not in n and ".ref." not in n}
    start = {n: t.detach().clone() for n, t in adapter_tensors(model, "default").items()}
    same(adapter_tensors(model, "ref"), start, rtol=0, atol=0)
    trainer.train()
    assert trainer.moving.updater.syncs == 3
    same(base, {n: p for n, p in model.named_parameters() if n in base}, rtol=0, atol=0)
    reference, policy = adapter_tensors(model, "ref"), adapter_tensors(model, "default")
    assert all(not t.requires_grad and t.grad is None for t in reference.values())
    moved = [name for name, t in reference.items() if not torch.equal(t, start[name])]
    assert moved
    assert any(not torch.equal(t, reference[name]) for name, t in policy.items())
    assert model.active_adapter == "default"
    dropouts = [module.lora_dropout for module in model.modules() if hasattr(module, "lora_dropout")]
    assert dropouts
    assert all(isinstance(both["ref"], torch.nn.Identity) for both in dropouts)
    assert all(isinstance(both["default"], torch.nn.Dropout) for both in dropouts)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_the_peft_reference_runs_without_dropout_of_the_layers_below(kind, tmp_path):
    trainer = toys.toy_trainer(kind, tmp_path, peft=True, disable_dropout=False)
    for module in trainer.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    trainer.model.train()
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    first, second = (trainer._run_reference(dict(batch)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    policy = [answer_logps(trainer.model, batch) for _ in range(2)]
    assert not torch.equal(*policy)  # it is in training mode again


def test_hard_peft_equals_the_policy_after_an_update(tmp_path):
    trainer = toys.toy_trainer("dpo", tmp_path, peft=True, tr_mode="hard")
    start = {name: tensor.detach().clone() for name, tensor in adapter_tensors(trainer.model, "default").items()}
    trainer.train()
    policy, reference = adapter_tensors(trainer.model, "default"), adapter_tensors(trainer.model, "ref")
    assert trainer.moving.updater.syncs == 3
    assert policy.keys() == reference.keys() == start.keys()
    assert all(torch.equal(policy[name], reference[name]) for name in policy)
    assert any(not torch.equal(reference[name], start[name]) for name in start)


def test_exact_lora_averages_products(tmp_path):
    trainer = toys.toy_trainer("dpo", tmp_path, peft=True, tr_alpha=0.5, exact_lora=True, max_steps=2, tr_sync_steps=2)
    trainer.train()
    policy, reference = adapter_tensors(trainer.model, "default"), adapter_tensors(trainer.model, "ref")
    factors = [(name, name.replace("lora_A", "lora_B")) for name in policy if "lora_A" in name]
    assert len(factors) == 2  # of q_proj and v_proj
    for a, b in factors:
        assert policy[b].any()
        assert torch.allclose(reference[b] @ reference[a], 0.5 * policy[b] @ policy[a], rtol=1e-4, atol=1e-7)


def test_the_reference_adapter_is_a_copy_of_embedding_factors_too():
    """Their names end in the adapter's, so TRL's own copy, by ``.default.``, leaves them at their initial values."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(toys.toy_model(toys.toy_tokenizer()), LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]))
    with torch.no_grad():
        for tensor in adapter_tensors(model, "default").values():
            tensor.normal_()
    add_reference_adapter(model)
    assert any("lora_embedding_A" in name for name in adapter_tensors(model, "ref"))
    same(adapter_tensors(model, "default"), adapter_tensors(model, "ref"), rtol=0, atol=0)


# ---- cache -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_cached_log_probabilities_change_nothing(kind, tmp_path):
    settings = {"max_steps": -1, "num_train_epochs": 3, "tr_sync_steps": 15}
    plain = toys.toy_trainer(kind, tmp_path, **settings)
    plain.train()
    cached = toys.toy_trainer(kind, tmp_path, cache_ref_logps=True, **settings)
    cached.train()
    same(toys.weights(plain), toys.weights(cached), rtol=1e-4, atol=1e-6)
    # 18 steps of 4, an update after 15: two passes of 24 and 12 rows before it, of which 24 + 12 are known
    assert cached._cache.hits == 36


# ---- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "peft"), [("dpo", False), ("dpo", True), ("kto", False)])
def test_a_resumed_run_ends_where_the_whole_run_ends(kind, peft, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "peft": peft, "tr_alpha": 0.5}
    whole = toys.toy_trainer(kind, tmp_path / "whole", **settings)
    whole.train()
    resumed = toys.toy_trainer(kind, tmp_path / "whole", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert (resumed.moving.updater.steps, resumed.moving.updater.syncs) == (6, 3)
    same(toys.weights(whole), toys.weights(resumed))
    logged = [[e["rewards_sft/chosen"] for e in t.state.log_history if "rewards_sft/chosen" in e][-1] for t in (whole, resumed)]
    assert logged[0] == pytest.approx(logged[1], abs=1e-6)
    stored = (tmp_path / "whole" / "checkpoint-3" / "trust_region.safetensors").stat().st_size
    if peft:
        assert stored < 10_000  # the adapter alone


def test_a_resumed_run_goes_on_with_the_running_mean_of_its_budget(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 3, "tr_kl_budget": 1e3, "tr_sft_probe": 0}
    whole = toys.toy_trainer("dpo", tmp_path, **settings)
    whole.train()
    resumed = toys.toy_trainer("dpo", tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    drifts = [[e["tr/drift"] for e in t.state.log_history if "tr/drift" in e] for t in (whole, resumed)]
    assert drifts[0][-1] != 0
    assert drifts[0] == pytest.approx(drifts[1], abs=1e-6)


def test_a_checkpoint_without_a_reference_is_refused(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    toys.toy_trainer("dpo", tmp_path, **settings).train()
    (tmp_path / "checkpoint-3" / "trust_region.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="without the reference of that step"):
        toys.toy_trainer("dpo", tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_unusable_pairs_are_counted_and_reported(tmp_path, caplog):
    rows = [
        ("food", " good", " good"), ("food", "", " bad"), ("food", None, " bad"), (None, " good", " bad"),
        ("food", " a b", " a c"),
        (" ".join(["long"] * 60), " good", " bad"),
        *((row["prompt"], row["chosen"], row["rejected"]) for row in toys.toy_pairs(8)),
    ]  # fmt: skip
    data = Dataset.from_dict(dict(zip(("prompt", "chosen", "rejected"), map(list, zip(*rows, strict=True)), strict=True)))
    with caplog.at_level(logging.WARNING, logger="assay"):
        trainer = toys.toy_trainer("dpo", tmp_path, data=data, max_length=40)
    assert trainer.skipped["train"] == {
        "empty answer": 1, "identical answers": 1, "missing answer": 1, "missing prompt": 1, "prompt fills max_length": 1,
    }  # fmt: skip
    assert len(trainer.train_dataset) == 9
    assert "4 of 14 rows of the train data set are skipped" in caplog.text
    assert "good" not in caplog.text  # reasons, not texts


def test_pairs_that_differ_only_behind_max_length_are_counted(tmp_path):
    long = " good" * 20
    data = Dataset.from_dict(
        {
            "prompt": ["food"] * 5,
            "chosen": [long + " nice", "a", "b", "c", "d"],
            "rejected": [long + " bad", "e", "f", "g", "h"],
        }
    )
    trainer = toys.toy_trainer("dpo", tmp_path, data=data, max_length=12)
    assert trainer.skipped["train"] == {"identical within max_length": 1}


def test_kto_counts_a_last_batch_of_one_and_rows_without_a_label(tmp_path):
    answers = toys.toy_answers(10)
    data = Dataset.from_dict({
        "prompt": answers["prompt"], "completion": [*answers["completion"][:9], ""], "label": [*answers["label"][:9], True],
    })  # fmt: skip
    trainer = toys.toy_trainer("kto", tmp_path, data=data)
    assert trainer.skipped["train"] == {"empty answer": 1, "last batch of one": 1}
    assert len(trainer.train_dataset) == 8


def faults(tmp_path):
    from peft import LoraConfig

    tokenizer = toys.toy_tokenizer()
    model = toys.toy_model(tokenizer)
    no_end = toys.toy_tokenizer()
    no_end.eos_token = None
    nothing = Dataset.from_dict({"prompt": ["a"], "chosen": [" b"], "rejected": [" b"]})
    numbers = Dataset.from_dict({"prompt": ["a"], "chosen": [1], "rejected": [2]})
    scores = Dataset.from_dict({"prompt": ["a"], "completion": [1], "label": [True]})
    stream = IterableDataset.from_generator(lambda: iter([{"prompt": "a", "chosen": " b", "rejected": " b"}]))
    fine = IterableDataset.from_generator(lambda: iter(list(toys.toy_pairs())))

    def build(model=model, data=None, tokenizer=tokenizer, **more):
        args = TRDPOConfig(**toys.toy_settings(tmp_path))
        return toys.TRDPOTrainer(
            model=model, args=args, train_dataset=toys.toy_pairs() if data is None else data, processing_class=tokenizer, **more
        )

    return {
        "the policy itself": lambda: build(ref_model=model),
        "no end token": lambda: build(tokenizer=no_end),
        "no usable row: 1 identical answers": lambda: build(data=nothing),
        "no usable row: 1 answer that is no text": lambda: build(data=numbers),
        "train data set has no usable row: 1 answer that": lambda: toys.toy_trainer("kto", tmp_path, data=scores),
        "leave ref_model out": lambda: build(ref_model=toys.toy_model(tokenizer), peft_config=LoraConfig(r=2)),
        "no usable row: it is empty": lambda: build(data=nothing.select([])),
        "row 0 of the train stream cannot be used: identical answers": lambda: build(data=stream),
        "needs a data set with a length": lambda: toys.toy_trainer("dpo", tmp_path, data=fine, cache_ref_logps=True),
        "has no adapter": lambda: toys.toy_trainer("dpo", tmp_path, exact_lora=True),
        "at least 2: a KTO batch of one": lambda: toys.toy_trainer("kto", tmp_path, per_device_train_batch_size=1),
    }


@pytest.mark.parametrize("message", list(faults(Path("."))))
def test_trainers_refuse(message, tmp_path):
    with pytest.raises(ValueError, match=message):
        faults(tmp_path)[message]()


@pytest.mark.parametrize(
    ("kind", "base", "name"), [("dpo", trl.DPOConfig, "TRDPOConfig"), ("kto", trl.KTOConfig, "TRKTOConfig")]
)
def test_trainers_need_their_own_configuration(kind, base, name, tmp_path):
    trainer = toys.TRDPOTrainer if kind == "dpo" else toys.TRKTOTrainer
    with pytest.raises(TypeError, match=f"args must be a {name}, got {base.__name__}"):
        trainer(model=toys.toy_model(toys.toy_tokenizer()), args=base(output_dir=str(tmp_path), bf16=False, use_cpu=True))


def test_a_trainer_of_ones_own_must_say_how_it_reads_its_rows():
    class Half(TrustRegion, trl.DPOTrainer):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Half(model="none")


def test_zero3_is_refused_before_training():
    args = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3))
    policy, reference = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="deepspeed: with ZeRO-3"):
        TrustRegionCallback(reference).on_train_begin(args, SimpleNamespace(max_steps=8, global_step=0), None, model=policy)


@pytest.mark.parametrize("config", [TRDPOConfig, TRKTOConfig])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, "beta must be"),
        ({"tr_alpha": 1.0}, "that is mode='hard'"),
        ({"tr_alpha": 0.0}, "alpha must be"),
        ({"tr_sync_steps": 0}, "at least 1"),
        ({"tr_sync_steps": "often"}, "'auto'"),
        ({"tr_sft_probe": -1}, "tr_sft_probe"),
        ({"precompute_ref_log_probs": True}, "cache_ref_logps"),
        ({"sync_ref_model": True}, "a second time"),
    ],
)
def test_configs_refuse(config, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config(output_dir=str(tmp_path), bf16=False, **settings)


def test_configs_are_read_from_a_command_line(tmp_path):
    from transformers import HfArgumentParser

    line = f"--output_dir {tmp_path} --bf16 False --tr_sync_steps 12 --tr_mode hard --ipo_length_normalized False"
    (args,) = HfArgumentParser(TRDPOConfig).parse_args_into_dataclasses(line.split())
    assert (args.tr_sync_steps, args.tr_mode, args.ipo_length_normalized, args.beta) == (12, "hard", False, 0.05)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_nan_loss_stops_training_with_a_reason(kind, tmp_path):
    """TRL itself goes on: KTO averages over what is not NaN, and the log shows 0."""
    trainer = toys.toy_trainer(kind, tmp_path, tr_sft_probe=0)
    with torch.no_grad():
        trainer.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"at optimiser step 1 .* for \d+ of \d+ answers under the policy and 0 of"):
        trainer.train()


def test_a_tokenizer_without_padding_pads_with_its_end_token(tmp_path, caplog):
    tokenizer = toys.toy_tokenizer()
    tokenizer.pad_token = None
    with caplog.at_level(logging.WARNING, logger="assay"):
        trainer = toys.TRDPOTrainer(
            model=toys.toy_model(toys.toy_tokenizer()), args=TRDPOConfig(**toys.toy_settings(tmp_path)),
            train_dataset=toys.toy_pairs(), processing_class=tokenizer,
        )  # fmt: skip
    assert "no padding token" in caplog.text
    trainer.train()
    assert tokenizer.pad_token == tokenizer.eos_token


# ---- several processes -----------------------------------------------------------------------------------------------

RUNS = [
    ["dpo", "dpo", {}],
    ["kto", "kto", {}],
    ["peft", "dpo", {"peft": True}],
    ["cached", "dpo", {"cache_ref_logps": True, "max_steps": 12, "tr_sync_steps": 9}],
]


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(tmp_path):
    """DDP over gloo, two batches of 2 a step, beside one process with batches of 4 (KTO: two accumulated of 2)."""
    runs = [[name, kind, {**settings, "per_device_train_batch_size": 2}] for name, kind, settings in RUNS]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1", "--master-port=0",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", toys.__file__, str(tmp_path), json.dumps(runs),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"ends-{rank}.pt", weights_only=True) for rank in (0, 1)]
    for name, kind, settings in RUNS:
        same(ranks[0][name]["weights"], ranks[1][name]["weights"], rtol=0, atol=0)
        alone = toys.toy_trainer(kind, tmp_path / "alone", **settings)
        alone.train()
        same(ranks[0][name]["weights"], toys.weights(alone), rtol=1e-3, atol=1e-4)
        assert ranks[0][name]["losses"] == pytest.approx(losses(alone), abs=1e-4)
    assert (
        sum(end["cached"]["hits"] for end in ranks) == 12
    )  # rows of the second pass, wherever they were computed in the first
