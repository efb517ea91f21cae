"""POWER as a TRL trainer: its numbers, its data, adapters, accumulation, resume, two processes, and what it refuses."""

import gc
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import HfArgumentParser, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer

from alignment import power_toys as toys
from assay.alignment import POWERConfig, POWERTrainer, power_loss
from assay.alignment.power.pairs import why_unusable
from assay.alignment.power.trainer import LABELS_FILE

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def batch_of(made, rows):
    made._set_signature_columns_if_needed()
    examples = [{k: v for k, v in made.train_dataset[i].items() if k in made._signature_columns} for i in rows]
    return made.data_collator(examples)


def answer_logp(model, tokenizer, prompt, answer):
    """Summed over the answer and its end token, without TRL."""
    head, whole = (tokenizer(text)["input_ids"] for text in (prompt, prompt + answer + "</s>"))
    logits = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(logits[t - 1, whole[t]] for t in range(len(head), len(whole))), len(whole) - len(head)


def expected_loss(model, rows, beta, eta, labels=None, weight=lambda length: 1 / length):
    tok, up, down, w_up, w_down = toys.tokenizer(), [], [], [], []
    for row in rows:
        for logps, ws, answer in ((up, w_up, row["chosen"]), (down, w_down, row["rejected"])):
            logp, length = answer_logp(model, tok, row["prompt"], answer)
            logps.append(logp)
            ws.append(weight(length))
    stacked = (torch.stack(up), torch.stack(down), torch.tensor(w_up), torch.tensor(w_down))
    return power_loss(*stacked, beta, eta, labels).mean()


@pytest.mark.parametrize("weighting", ["inverse_length", "uniform"])
def test_the_loss_is_the_pure_one_with_lengths_that_count_the_end_token(tmp_path, weighting):
    data = toys.pairs()
    made = toys.trainer(tmp_path, data, gamma=0.0, eta=0.3, weighting=weighting)
    made.model.train()
    loss = made.compute_loss(made.model, batch_of(made, range(5)))
    weight = {"uniform": lambda length: 1.0, "inverse_length": lambda length: 1 / length}[weighting]
    torch.testing.assert_close(loss, expected_loss(made.model, data.select(range(5)), 2.0, 0.3, weight=weight))


def test_labels_move_before_the_loss_once_a_visit_and_never_in_evaluation(tmp_path):
    data = toys.pairs()
    made = toys.trainer(tmp_path, data, gamma=0.5, eta=0.0)
    made.model.eval()
    hard = made.compute_loss(made.model, batch_of(made, [3, 7]))
    assert made.dynamic_labels.visits.sum() == 0
    torch.testing.assert_close(hard, expected_loss(made.model, data.select([3, 7]), 2.0, 0.0))
    made.model.train()
    soft = made.compute_loss(made.model, batch_of(made, [3, 7]))
    assert made.dynamic_labels.visits.nonzero().flatten().tolist() == [3, 7]
    labels = made.dynamic_labels.of([3, 7])
    assert (labels < 1).all()
    torch.testing.assert_close(soft, expected_loss(made.model, data.select([3, 7]), 2.0, 0.0, labels))
    late = toys.trainer(tmp_path, data, gamma=0.5, eta=0.0, update="after")
    late.model.train()
    torch.testing.assert_close(late.compute_loss(late.model, batch_of(late, [3, 7])), hard)
    torch.testing.assert_close(late.dynamic_labels.labels, made.dynamic_labels.labels)


def test_one_model_is_held(tmp_path):
    def models():
        gc.collect()
        return sum(type(o) is LlamaForCausalLM for o in gc.get_objects())

    toys.model().save_pretrained(tmp_path / "sft")
    before = models()
    made = POWERTrainer(
        model=str(tmp_path / "sft"), args=toys.settings(tmp_path), processing_class=toys.tokenizer(), train_dataset=toys.pairs()
    )
    assert models() == before + 1
    assert made.ref_model is None
    del made
    args = DPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to="none")
    two = DPOTrainer(model=str(tmp_path / "sft"), args=args, processing_class=toys.tokenizer(), train_dataset=toys.pairs())
    assert models() == before + 2
    assert two.ref_model is not None


def test_training_learns_logs_and_evaluates(tmp_path):
    made = toys.train(toys.trainer(tmp_path, eval_dataset=toys.pairs(8), eval_strategy="steps", eval_steps=4))
    logs = [line for line in made.state.log_history if "loss" in line]
    assert logs[-1]["rewards/margins"] > logs[0]["rewards/margins"]
    assert {"labels/mean", "labels/frac_below_half", "rewards/accuracies", "logps/chosen", "num_tokens"} <= logs[-1].keys()
    evaluated = [line for line in made.state.log_history if "eval_loss" in line]
    assert len(evaluated) == 2
    assert "eval_labels/mean" not in evaluated[0]
    made.evaluate(made.train_dataset)  # it has the pairs' positions, and still no visit counts
    assert made.dynamic_labels.visits.tolist() == [2] * 16
    fresh = made.evaluate(toys.pairs(4))
    assert fresh["eval_loss"] > 0


def test_accumulated_steps_are_whole_steps(tmp_path):
    whole = toys.train(toys.trainer(tmp_path, per_device_train_batch_size=8, max_steps=4))
    parts = toys.train(toys.trainer(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4))
    torch.testing.assert_close(toys.weights(parts), toys.weights(whole), rtol=0, atol=2e-5)
    torch.testing.assert_close(parts.dynamic_labels.labels, whole.dynamic_labels.labels, rtol=0, atol=1e-5)
    assert parts.dynamic_labels.visits.tolist() == [2] * 16


def test_a_resumed_training_is_the_uninterrupted_one(tmp_path):
    data = toys.pairs(pair_id=[f"p{i}" for i in range(16)])
    made = toys.train(toys.trainer(tmp_path / "a", data, save_strategy="steps", save_steps=4))
    again = toys.trainer(tmp_path / "a", data, save_strategy="no")
    toys.train(again, resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    torch.testing.assert_close(toys.weights(again), toys.weights(made), rtol=0, atol=1e-6)
    assert torch.equal(again.dynamic_labels.labels, made.dynamic_labels.labels)
    assert again.dynamic_labels.visits.tolist() == [2] * 16

    with pytest.raises(ValueError, match="other pairs"):
        toys.train(toys.trainer(tmp_path / "b", toys.pairs()), resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    (tmp_path / "a" / "checkpoint-4" / LABELS_FILE).unlink()
    with pytest.raises(ValueError, match="was not written by a POWERTrainer"):
        toys.train(toys.trainer(tmp_path / "b", data), resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))


@pytest.mark.parametrize("more", [{"bf16": True}, {"gradient_checkpointing": True}, {"policy": toys.model().bfloat16()}])
def test_half_precision_and_checkpointing_visit_a_pair_once_a_pass(tmp_path, more):
    made, plain = toys.train(toys.trainer(tmp_path, **more)), toys.train(toys.trainer(tmp_path))
    assert made.dynamic_labels.visits.tolist() == [2] * 16
    torch.testing.assert_close(made.dynamic_labels.labels, plain.dynamic_labels.labels, rtol=0, atol=5e-3)


def test_adapters_have_no_twin(tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    made = toys.trainer(tmp_path, peft_config=lora)
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    toys.train(made)
    moved = {name for name, p in made.model.named_parameters() if not torch.equal(p.detach(), before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    wrapped = toys.trainer(tmp_path, policy=peft.get_peft_model(toys.model(), lora))
    assert list(wrapped.model.peft_config) == ["default"]  # DPO's trainer would add a copy of the adapter
    toys.train(wrapped)
    assert wrapped.dynamic_labels.visits.sum() == 32


def test_suspicious_pairs_come_by_their_own_ids(tmp_path):
    data = toys.pairs(pair_id=[f"p{i}" for i in range(16)])
    swapped = [i in (2, 9) for i in range(16)]
    up, down = (
        [r[b if s else a] for r, s in zip(data, swapped, strict=True)]
        for a, b in (("chosen", "rejected"), ("rejected", "chosen"))
    )
    mixed = Dataset.from_dict({"prompt": data["prompt"], "chosen": up, "rejected": down, "pair_id": data["pair_id"]})
    made = toys.train(toys.trainer(tmp_path, mixed, max_steps=60, gamma=0.3, eta=0.0, learning_rate=3e-3))
    assert set(made.dynamic_labels.below(0.5)[:2]) == {"p2", "p9"}


# ---- options -------------------------------------------------------------------------------------------------------------


def test_a_baseline_column(tmp_path):
    data = toys.pairs()
    own = toys.trainer(tmp_path, data.add_column("best", data["chosen"]), gamma=0.0, eta=0.5, baseline="best")
    plain = toys.trainer(tmp_path, data, gamma=0.0, eta=0.5)
    other = toys.trainer(tmp_path, data.add_column("best", [" not at all"] * 16), gamma=0.0, eta=0.5, baseline="best")
    losses = []
    for made in (own, plain, other):
        made.model.train()
        losses.append(made.compute_loss(made.model, batch_of(made, range(6))))
    torch.testing.assert_close(losses[0], losses[1])
    chosen, best = (
        [answer_logp(plain.model, toys.tokenizer(), p, a) for p, a in zip(data["prompt"][:6], answers, strict=True)]
        for answers in (data["chosen"][:6], [" not at all"] * 6)
    )
    shift = sum((c[0] / c[1] - b[0] / b[1]) for c, b in zip(chosen, best, strict=True)) / 6
    torch.testing.assert_close(losses[2] - losses[1], 0.5 * 2.0 * shift, rtol=1e-4, atol=1e-5)


def test_the_initial_policy_as_baseline(tmp_path):
    made = toys.trainer(tmp_path, baseline="initial", baseline_tokens=5, eval_dataset=toys.pairs(4))
    answers = made.train_dataset["baseline_ids"]
    assert all(1 <= len(ids) <= 5 for ids in answers)
    assert answers[0] == answers[4]  # one prompt, one answer
    again = toys.trainer(tmp_path, baseline="initial", baseline_tokens=5)
    assert again.train_dataset["baseline_ids"][:] == answers[:]
    toys.train(made)
    assert made.evaluate()["eval_loss"] > -10
    with pytest.raises(ValueError, match="must be given when the trainer is made"):
        made.evaluate(toys.pairs(4))


def test_one_label_for_a_prompt_or_a_key(tmp_path):
    by_prompt = toys.trainer(tmp_path, label_sharing=lambda row: row["prompt"])
    assert len(by_prompt.dynamic_labels) == 4
    named = toys.train(toys.trainer(tmp_path, toys.pairs(annotator=["x", "y"] * 8), label_sharing=lambda row: row["annotator"]))
    assert list(named.dynamic_labels.ids) == [0, 1]
    assert named.dynamic_labels.visits.tolist() == [16, 16]
    setting = POWERTrainer(
        model=toys.model(),
        args=toys.settings(tmp_path, label_sharing="prompt"),
        processing_class=toys.tokenizer(),
        train_dataset=toys.pairs(),
    )
    assert len(setting.dynamic_labels) == 4


def test_weights_by_column_and_function(tmp_path):
    data = toys.pairs(chosen_weight=[0.5] * 16, rejected_weight=[0.25] * 16)
    column = toys.trainer(tmp_path, data, weighting=None, gamma=0.0)
    by_column = POWERTrainer(
        model=toys.model(),
        args=toys.settings(tmp_path, weighting="column", gamma=0.0),
        processing_class=toys.tokenizer(),
        train_dataset=data,
    )
    by_function = toys.trainer(
        tmp_path, data, weighting=lambda batch: torch.cat([torch.full((3,), 0.5), torch.full((3,), 0.25)]), gamma=0.0
    )
    losses = []
    for made in (by_column, by_function, column):
        made.model.train()
        losses.append(made.compute_loss(made.model, batch_of(made, range(3))).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] != pytest.approx(losses[2], rel=1e-3)
    for bad, message in ((lambda b: torch.zeros(6), "positive and finite"), (lambda b: torch.ones(4), "one weight a row")):
        made = toys.trainer(tmp_path, data, weighting=bad, gamma=0.0)
        with pytest.raises(ValueError, match=message):
            made.compute_loss(made.model, batch_of(made, range(3)))
    with pytest.raises(ValueError, match="needs the columns chosen_weight and rejected_weight"):
        POWERTrainer(
            model=toys.model(),
            args=toys.settings(tmp_path, weighting="column"),
            processing_class=toys.tokenizer(),
            train_dataset=toys.pairs(),
        )


def test_labels_can_start_elsewhere(tmp_path):
    made = toys.trainer(tmp_path, toys.pairs(trust=[i / 15 for i in range(16)]), label_column="trust")
    torch.testing.assert_close(made.dynamic_labels.labels, torch.arange(16) / 15)
    with pytest.raises(ValueError, match="label_column='faith' is not in the data"):
        toys.trainer(tmp_path, label_column="faith")


# ---- what it refuses, and what it reports ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"beta": 0.0}, "beta must be positive"),
        ({"eta": -1.0}, "eta must be at least 0"),
        ({"gamma": 1.0}, r"gamma must be in \[0, 1\)"),
        ({"weighting": "length"}, "weighting must be one of"),
        ({"weighting": len}, "give a function to POWERTrainer"),
        ({"label_sharing": "all"}, "label_sharing must be one of"),
        ({"loss_type": "ipo"}, "means nothing to POWER: the loss is POWER's"),
        ({"sync_ref_model": True}, "there is no reference model"),
        ({"label_smoothing": 0.1}, "labels are gamma's work"),
        ({"baseline_tokens": 0}, "baseline_tokens must be at least 1"),
        ({"gamma": 0.0, "gate_sft": True}, "gate_sft would do nothing: gamma=0"),
        ({"gamma": 0.0, "label_column": "trust", "label_sharing": "prompt"}, "label_column and label_sharing would do nothing"),
    ],
)
def test_settings_out_of_range(tmp_path, more, message):
    with pytest.raises(ValueError, match=message):
        toys.settings(tmp_path, **more)


def test_the_config_comes_from_the_command_line_and_goes_to_json(tmp_path):
    (config,) = HfArgumentParser(POWERConfig).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--eta", "0.05", "--gamma", "0.2", "--bf16", "False"]
    )
    assert (config.eta, config.resolved_eta, config.gamma, config.beta) == (0.05, 0.05, 0.2, 2.0)
    assert json.loads(config.to_json_string())["gamma"] == 0.2
    assert (toys.settings(tmp_path).resolved_eta, toys.settings(tmp_path, gamma=0.0).resolved_eta) == (1e-3, 0.1)


def test_a_reference_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="uses no reference model"):
        POWERTrainer(model=toys.model(), ref_model=toys.model(), args=toys.settings(tmp_path), train_dataset=toys.pairs())
    with pytest.raises(TypeError, match="args must be a POWERConfig, got DPOConfig"):
        POWERTrainer(model=toys.model(), args=DPOConfig(output_dir=str(tmp_path), bf16=False), train_dataset=toys.pairs())


@pytest.mark.parametrize(
    ("ids", "message"), [([0, 0, *range(2, 16)], "1 are repeated"), ([None, *range(1, 16)], "1 have none")]
)
def test_ids_doubled_or_missing(tmp_path, ids, message):
    with pytest.raises(ValueError, match=message):
        toys.trainer(tmp_path, toys.pairs(pair_id=ids))
    toys.trainer(tmp_path, toys.pairs(pair_id=ids), gamma=0.0)  # then they mean nothing


def test_unusable_pairs_are_counted_and_their_neighbours_keep_their_numbers(tmp_path):
    data = toys.pairs().to_dict()
    data["chosen"][1], data["rejected"][2], data["rejected"][5] = None, "  ", data["chosen"][5]
    data["prompt"][7] = None
    with pytest.warns(UserWarning, match=r"skipped 4 of the 16 pairs of the train data: .*'identical answers': 1"):
        made = toys.trainer(tmp_path, Dataset.from_dict(data))
    assert made.skipped["train"] == {"missing answer": 1, "empty answer": 1, "identical answers": 1, "missing prompt": 1}
    assert made.dynamic_labels.ids == [0, 3, 4, 6, *range(8, 16)]
    with pytest.raises(ValueError, match="no usable pair among 16"):
        toys.trainer(tmp_path, Dataset.from_dict(data | {"rejected": data["chosen"]}))


def test_conversations_are_judged_by_their_last_message():
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    yes, no, blank, gone = ({"role": "assistant", "content": text} for text in ("yes", "no", "  ", None))
    for chosen, rejected, reason in (
        ([call, yes], [call, no], ""), ([call], [no], ""), ([yes], [{**yes, "content": "yes "}], "identical answers"),
        ([blank], [no], "empty answer"), ([gone], [no], "missing answer"), ([], [no], "missing answer"),
    ):  # fmt: skip
        assert why_unusable({"chosen": chosen, "rejected": rejected}) == reason


def test_a_prompt_that_fills_the_length_is_counted(tmp_path):
    data = toys.pairs().to_dict()
    data["prompt"][4] = "the food was so very very very very very very bad"
    with pytest.warns(UserWarning, match="skipped 1 of the 16 pairs .* max_length=10"):
        made = toys.trainer(tmp_path, Dataset.from_dict(data), max_length=10)
    assert made.skipped["train"] == {"prompt as long as max_length": 1}


def test_streams_are_refused_or_watched(tmp_path):
    bad = toys.pairs().to_dict()
    bad["chosen"][0] = bad["rejected"][0]
    with pytest.raises(ValueError, match="can be counted"):
        toys.trainer(tmp_path, toys.pairs().to_iterable_dataset())
    toys.train(toys.trainer(tmp_path, toys.pairs().to_iterable_dataset(), gamma=0.0))
    with pytest.raises(ValueError, match="streamed train data has a pair that cannot be used: identical answers"):
        toys.train(toys.trainer(tmp_path, Dataset.from_dict(bad).to_iterable_dataset(), gamma=0.0))


def test_one_visit_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match=r"visited 1.0 times: with one visit, gamma=0.1 does no more than .* 0.9"):
        toys.trainer(tmp_path, max_steps=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        toys.trainer(tmp_path, max_steps=8)
        toys.trainer(tmp_path, max_steps=4, gamma=0.0)
    assert not [w for w in caught if "visited" in str(w.message)]


def test_padding_by_the_end_token_changes_no_number(tmp_path):
    losses = []
    for tok in (toys.tokenizer(), toys.tokenizer(pad_token=None)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = POWERTrainer(
                model=toys.model(), args=toys.settings(tmp_path), processing_class=tok, train_dataset=toys.pairs()
            )
        losses.append(made.compute_loss(made.model, batch_of(made, range(8))).item())
    assert any("no padding token" in str(w.message) for w in caught)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    with pytest.raises(ValueError, match="no end token"):
        POWERTrainer(
            model=toys.model(),
            args=toys.settings(tmp_path),
            processing_class=toys.tokenizer(eos_token=None),
            train_dataset=toys.pairs(),
        )


def test_a_nan_stops_before_the_labels(tmp_path):
    made = toys.trainer(tmp_path)
    with torch.no_grad():
        made.model.lm_head.weight[3] = float("nan")
    with pytest.raises(FloatingPointError, match="step 0 an answer's log-probability is NaN"):
        toys.train(made)
    assert made.dynamic_labels.labels.tolist() == [1.0] * 16


def test_an_answer_without_tokens(tmp_path):
    made = toys.trainer(tmp_path)
    made.model.train()
    batch = batch_of(made, range(2))
    batch["completion_mask"][3] = 0
    with pytest.raises(ValueError, match="1 answers of a batch have no token"):
        made.compute_loss(made.model, batch)


# ---- two processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(tmp_path):
    settings = {"max_steps": 6, "gamma": 0.3, "per_device_train_batch_size": 4}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(Path(toys.__file__))]
    two = json.dumps({**settings, "per_device_train_batch_size": 2, "ddp_backend": "gloo"})
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run([*command, str(tmp_path), two], env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"rank{r}.pt", weights_only=True) for r in range(2)]
    alone = toys.train(toys.trainer(tmp_path, **settings))
    for result in ranks:
        torch.testing.assert_close(result["weights"], toys.weights(alone), rtol=0, atol=1e-5)
        torch.testing.assert_close(result["labels"], alone.dynamic_labels.labels, rtol=0, atol=1e-5)
        assert torch.equal(result["visits"], alone.dynamic_labels.visits)
    logged = [line["labels/mean"] for line in alone.state.log_history if "labels/mean" in line]
    assert ranks[0]["log"] == pytest.approx(logged, abs=1e-5)
    assert max(logged) < 1


def test_drawing_a_baseline_leaves_each_modules_mode():
    from assay.alignment.power.baseline import _drawn

    tokenizer = toys.tokenizer()
    model = toys.model().train()
    model.get_input_embeddings().eval()  # as a user freezes a part
    modes = [module.training for module in model.modules()]
    answers = _drawn(model, tokenizer, [(3, 4), (5,)], 3, 0, 2)
    assert len(answers) == 2
    assert [module.training for module in model.modules()] == modes
