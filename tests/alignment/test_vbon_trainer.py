"""VBoNTrainer in TRL: its expected gradient, scale, PEFT, what it refuses, and two processes beside one."""

import math
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("peft")

import trl
from datasets import Dataset

from assay.alignment.vbon.cdf import RewardCDF
from assay.alignment.vbon.sampling import best_of_n
from assay.alignment.vbon.trainer import VBoNConfig, VBoNTrainer

PROMPTS = ["a", "b", "a b", "c c"]
QUIET = {
    "max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 4, "seed": 0,
    "learning_rate": 1e-2, "report_to": "none", "save_strategy": "no", "bf16": False, "disable_tqdm": True, "use_cpu": True,
    "gradient_checkpointing": False, "dataloader_pin_memory": False, "logging_strategy": "no", "lr_scheduler_type": "constant",
}  # fmt: skip


def save_tiny(folder):
    """A Llama of width 16 that knows six tokens."""
    import tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "a", "b", "c"])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=6, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def tiny(tmp_path):
    return save_tiny(tmp_path / "tiny")


def reward(prompts, completions, completion_ids=None, **_):
    """Different for nearly every answer: more 'a', then longer."""
    return [2.0 * c.count("a") + 0.3 * c.count("b") + 0.01 * len(c) for c in completions]


def build(tiny, tmp_path, reward=reward, cdf=None, more=None, **settings):
    args = VBoNConfig(output_dir=str(tmp_path / "out"), **{**QUIET, **settings})
    return VBoNTrainer(tiny, reward, args, Dataset.from_dict({"prompt": PROMPTS}), cdf=cdf, **(more or {}))


def known(values=(0.0, 0.3, 0.5, 2.0, 2.2, 4.0, 6.0, 8.0)):
    cdf = RewardCDF()
    for prompt in PROMPTS:
        cdf.add(prompt, list(values))
    return cdf


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("bound", ["l1", "exact", "jensen"])
def test_the_expected_gradient_is_that_of_the_objective(tiny, tmp_path, bound):
    """All 36 pairs of one-token answers of a six-armed policy, weighted by their probability."""
    cdf = known()
    trainer = build(
        tiny, tmp_path, cdf=cdf, n=3, bound=bound, num_generations=2, per_device_train_batch_size=2, max_completion_length=1
    )  # fmt: skip
    policy, reference = trainer.model.double(), trainer.ref_model.double()
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.1 * torch.randn_like(p))  # away from the reference
    prompt = torch.tensor([trainer.processing_class("a")["input_ids"]])

    def logp_of(model):
        return model(input_ids=prompt).logits[0, -1].log_softmax(-1)

    arms = range(6)
    texts = trainer.processing_class.batch_decode([[y] for y in arms], skip_special_tokens=True)
    r = torch.tensor(trainer.reward_funcs[0](["a"] * 6, texts, completion_ids=[[y] for y in arms]), dtype=torch.double)
    logp, ref_logp = logp_of(policy), logp_of(reference).detach()
    objective = (logp.exp() * (r - trainer.beta * (logp - ref_logp))).sum()
    wanted = torch.autograd.grad(objective, list(policy.parameters()))

    found = [torch.zeros_like(p) for p in policy.parameters()]
    policy.train()
    pi = logp.exp().detach()
    for y1 in arms:
        for y2 in arms:
            trainer._generate_single_turn = lambda *_, pair=((y1,), (y2,)): [list(y) for y in pair]
            batch = trainer._generate_and_score_completions([{"prompt": "a"}, {"prompt": "a"}])
            gradient = torch.autograd.grad(trainer._compute_loss(policy, batch), list(policy.parameters()))
            for total, g in zip(found, gradient, strict=True):
                total -= pi[y1] * pi[y2] * g
    assert max(g.abs().max() for g in wanted) > 1e-3
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_scale_of_the_reward_leaves_every_weight_as_it_is(tiny, tmp_path):
    twins = []
    for scale in (lambda x: x, lambda x: torch.tensor(x).double().exp().item()):

        def scaled(prompts, completions, scale=scale, **_):
            return [scale(x) for x in reward(prompts, completions)]

        trainer = build(tiny, tmp_path, reward=scaled, n=3, cdf_samples=16)
        before = weights(trainer)
        trainer.train()
        assert any(not torch.equal(before[k], v) for k, v in weights(trainer).items())
        twins.append(weights(trainer))
    assert all(torch.equal(twins[0][name], twins[1][name]) for name in twins[0])


@pytest.mark.slow
def test_lora_and_the_exact_bound(tiny, tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = build(tiny, tmp_path, n=3, bound="exact", cdf_samples=16, more={"peft_config": lora})
    assert trainer.cdf.samples == 16
    before = weights(trainer)
    trainer.train()
    moved = {name for name, p in weights(trainer).items() if not torch.equal(before[name], p)}
    assert moved
    assert all("lora" in name for name in moved)
    ids = [[3, 4], [5, 2]]
    with trainer.model.disable_adapter():
        full = torch.tensor([[3, 3, 4], [4, 5, 2]])
        logps = trainer.model(input_ids=full).logits[:, :-1].log_softmax(-1).gather(2, full[:, 1:, None])[..., 0].sum(1)
    torch.testing.assert_close(trainer._reference_logps(["a", "b"], ids), logps)


def test_the_coefficient_follows_from_n(tmp_path):
    assert VBoNConfig(output_dir=str(tmp_path), n=16, **QUIET).beta == 1 / 15
    assert VBoNConfig(output_dir=str(tmp_path), n=16, bound="exact", **QUIET).beta == 1 / 16
    for settings, message in (
        ({"beta": 0.05}, "beta follows from n"),
        ({"n": 1}, "at least 2"),
        ({"bound": "l2"}, "bound must be one of"),
        ({"cdf_samples": 1}, "cdf_samples must be at least 2"),
        ({"normalize_advantages": True}, "normalize_advantages must stay off"),
        ({"reward_clip_range": (-1, 1)}, "reward_clip_range must stay off"),
    ):
        with pytest.raises(ValueError, match=message):
            VBoNConfig(output_dir=str(tmp_path), **QUIET, **settings)


def test_what_the_trainer_refuses(tiny, tmp_path):
    with pytest.raises(ValueError, match="must be a VBoNConfig, got RLOOConfig"):
        VBoNTrainer(tiny, reward, trl.RLOOConfig(output_dir=str(tmp_path), **QUIET), Dataset.from_dict({"prompt": PROMPTS}))

    async def later(prompts, completions, **_):
        return reward(prompts, completions)

    for unfit in ([reward, reward], later, torch.nn.Linear(1, 1), "reward-model"):
        with pytest.raises(ValueError, match="must be one plain function"):
            build(tiny, tmp_path, reward=unfit)
    part = RewardCDF()
    part.add("a", [1.0, 2.0])
    with pytest.raises(ValueError, match="no rewards for 3 prompts of train_dataset or eval_dataset, first 'b'"):
        build(tiny, tmp_path, cdf=part, n=2)
    with pytest.raises(ValueError, match="no rewards for 1 prompts of train_dataset or eval_dataset, first 'c'"):
        build(tiny, tmp_path, cdf=known(), n=2, more={"eval_dataset": Dataset.from_dict({"prompt": ["a", "c"]})})
    with pytest.raises(ValueError, match="eval_dataset must be a map-style data set with a column 'prompt'"):
        build(tiny, tmp_path, cdf=known(), n=2, more={"eval_dataset": Dataset.from_dict({"text": ["a", "c"]})})
    other = known()
    other.sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "max_new_tokens": 4}
    with pytest.raises(ValueError, match=r"temperature: table 0\.7, roll-outs 1\.0"):
        build(tiny, tmp_path, cdf=other, n=2)


@pytest.mark.filterwarnings("ignore:8 rewards a prompt")
def test_a_loss_that_is_not_finite_ends_the_run(tiny, tmp_path):
    trainer = build(tiny, tmp_path, cdf=known(), n=4)
    whole = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: whole(model, inputs) * float("nan")
    with pytest.raises(FloatingPointError, match="the loss became nan at step 0"):
        trainer.train()


def test_a_reward_of_nan_is_not_taken_for_a_missing_one(tiny, tmp_path):
    trainer = build(tiny, tmp_path, reward=lambda prompts, completions, **_: [float("nan")] * len(prompts), cdf=known(), n=2)
    with pytest.raises(ValueError, match="NaN for 8 of 8"):
        trainer.train()


class Everything(RewardCDF):
    """Holds no prompt, knows them all: a table that is filled as it is asked."""

    def __contains__(self, prompt):
        return True


@pytest.mark.filterwarnings("ignore:0 rewards a prompt")
def test_a_table_that_is_still_empty_is_the_one_that_the_reward_asks(tiny, tmp_path):
    cdf = Everything()
    assert build(tiny, tmp_path, cdf=cdf, n=2).reward_funcs[0].cdf is cdf


@pytest.mark.filterwarnings("ignore:8 rewards a prompt")
def test_evaluation_has_its_prompts_in_the_table(tiny, tmp_path):
    held_out = {"eval_dataset": {"one": Dataset.from_dict({"prompt": ["c"]}), "two": Dataset.from_dict({"prompt": ["b c"]})}}
    trainer = build(tiny, tmp_path, n=4, cdf_samples=8, more=held_out, num_generations_eval=4, per_device_eval_batch_size=4)
    assert "c" in trainer.cdf
    assert "b c" in trainer.cdf
    trainer.evaluate()
    rewards = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(rewards) == 2
    assert all(-math.log(9) <= r <= 0 for r in rewards)


@pytest.mark.filterwarnings("ignore:8 rewards a prompt")
def test_the_table_is_drawn_as_the_roll_outs_are(tiny, tmp_path):
    penalty = {"repetition_penalty": 1.5, "generation_kwargs": {"min_p": 0.1}, "n": 4}
    trainer = build(tiny, tmp_path, cdf_samples=8, **penalty)
    assert trainer.cdf.sampling["repetition_penalty"] == 1.5
    assert trainer.cdf.sampling["min_p"] == 0.1
    plain = build(tiny, tmp_path, n=4, cdf_samples=8).cdf
    assert plain._rewards != trainer.cdf._rewards
    with pytest.raises(ValueError, match=r"repetition_penalty: table 1\.0, roll-outs 1\.5"):
        build(tiny, tmp_path, cdf=plain, **penalty)


def test_a_models_own_generation_settings_do_not_reach_the_table(tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    tables = [RewardCDF.sample(model, tokenizer, PROMPTS, reward, m=8, max_new_tokens=4)]
    for name, value in {"repetition_penalty": 3.0, "min_p": 0.9, "temperature": 0.1, "top_k": 1}.items():
        setattr(model.generation_config, name, value)
    tables.append(RewardCDF.sample(model, tokenizer, PROMPTS, reward, m=8, max_new_tokens=4))
    assert tables[0]._rewards == tables[1]._rewards


def save_gpt2(folder):
    """In place of the Llama, a GPT-2 with its usual dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 6, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "initializer_range": 0.3}
    GPT2LMHeadModel(GPT2Config(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)).save_pretrained(folder)
    return folder


def test_the_update_is_of_the_policy_that_rolled_out(tiny, tmp_path):
    """Dropout between the two would move the ratio off one, as far as the clip."""
    trainer = build(save_gpt2(tiny), tmp_path, cdf=known(), n=2, logging_strategy="steps", logging_steps=1)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "kl" in entry]
    assert entries[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert [entry["clip_ratio/region_mean"] for entry in entries] == [0, 0]


@pytest.mark.filterwarnings("ignore:8 rewards a prompt")
def test_the_reference_inside_an_adapted_model_has_no_dropout(tiny, tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    settings = {"n": 3, "bound": "exact", "disable_dropout": False}
    trainer = build(save_gpt2(tiny), tmp_path, cdf=known(), more={"peft_config": lora}, **settings)
    trainer.model.train()
    frozen = next(module for module in trainer.model.modules() if isinstance(module, torch.nn.LayerNorm))
    frozen.eval()
    twice = [trainer._reference_logps(["a b"] * 8, [[3, 4, 5, 2]] * 8) for _ in range(2)]
    assert torch.equal(*twice)
    assert trainer.model.training
    assert not frozen.training


def test_best_of_n_and_tables_do_not_depend_on_how_the_work_is_shared(tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    model.train().get_input_embeddings().eval()  # as a user freezes a part
    modes = [module.training for module in model.modules()]
    best = best_of_n(model, tokenizer, PROMPTS, reward, n=8, max_new_tokens=4, batch_size=16)
    assert [module.training for module in model.modules()] == modes
    one = best_of_n(model, tokenizer, PROMPTS, reward, n=1, max_new_tokens=4)
    assert sum(reward(PROMPTS, best)) > sum(reward(PROMPTS, one))
    settings = {"m": 8, "batch_size": 8, "max_new_tokens": 4}
    whole = RewardCDF.sample(model, tokenizer, PROMPTS, reward, **settings)
    parts = [RewardCDF.sample(model, tokenizer, PROMPTS, reward, share=(k, 2), **settings) for k in range(2)]
    assert RewardCDF().merge(parts)._rewards == whole._rewards
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_new_tokens": 4}
    assert whole.sampling == plain
    with pytest.raises(ValueError, match=r"rewards of shape \(32, 1\): one number a completion"):
        RewardCDF.sample(model, tokenizer, PROMPTS, lambda prompts, completions: torch.zeros(len(prompts), 1), m=8)
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a padding nor an end token"):
        RewardCDF.sample(model, tokenizer, PROMPTS, reward, m=2)
    with pytest.raises(ValueError, match="at least one text"):
        best_of_n(model, tokenizer, [], reward, n=2)


# ---- two processes -----------------------------------------------------------------------------------------------------


class Scripted(VBoNTrainer):
    """Rolls out fixed answers, the k-th of a group its k-th: draws differ between processes, gradients must not."""

    def _generate_single_turn(self, prompt_ids, *_):
        answers = [[3], [4, 2], [5, 5, 2], [3, 3, 3, 2]]
        return [answers[(k + sum(ids)) % 4] for k, ids in enumerate(prompt_ids)]


def train_scripted(tiny, folder, processes):
    settings = {**QUIET, "per_device_train_batch_size": 8 // processes, "use_cpu": True}
    args = VBoNConfig(output_dir=str(folder), n=4, bound="exact", cdf_samples=200, **settings)
    trainer = Scripted(tiny, reward, args, Dataset.from_dict({"prompt": PROMPTS}))
    trainer.train()
    return {name.removeprefix("module."): p for name, p in weights(trainer).items()}, trainer.cdf._rewards


def worker(tiny, folder):
    """What torchrun runs."""
    found, table = train_scripted(tiny, folder, processes=2)
    if torch.distributed.get_world_size() != 2:
        raise RuntimeError("not two processes")
    if torch.distributed.get_rank() == 0:
        torch.save({"weights": found, "table": table}, f"{folder}/found.pt")
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the group, and abort a process that ends as usual


@pytest.mark.slow
def test_two_processes_train_as_one(tiny, tmp_path):
    script = tmp_path / "worker.py"
    lines = ["import sys", f"sys.path.insert(0, {__file__.rpartition('/')[0]!r})", "import test_vbon_trainer as t"]
    script.write_text("\n".join([*lines, f"t.worker({tiny!r}, {str(tmp_path)!r})", ""]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    both = torch.load(tmp_path / "found.pt", weights_only=True)
    alone, table = train_scripted(tiny, tmp_path / "alone", processes=1)
    assert both["table"] == {prompt: table[prompt] for prompt in both["table"]}
    assert set(both["table"]) == set(PROMPTS)
    for name, p in alone.items():
        torch.testing.assert_close(both["weights"][name], p, rtol=1e-5, atol=1e-6)
