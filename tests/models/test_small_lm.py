import pickle

import pytest
import torch

pytest.importorskip("transformers")

from assay.models.small_lm import Checkpoint, completion_logps, pretrain, sample, small_llama, token_kl, train_tokenizer

TEXTS = ["the film was good", "the food was bad indeed", "a phone", "so very good, the phone was"] * 3


@pytest.fixture(scope="module")
def made():
    tokenizer = train_tokenizer(TEXTS, 300)
    model = small_llama(tokenizer, hidden=16, ffn=24, layers=2, heads=2)
    losses = pretrain(model, tokenizer, TEXTS, steps=30, seed=0, batch=4)
    return model, tokenizer, losses


def test_the_tokenizer_round_trips_any_text(made):
    _, tokenizer, _ = made
    for text in ("the film", " Grüße, 世界\n", ""):
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_training_lowers_the_loss_and_repeats(made):
    model, tokenizer, losses = made
    assert losses[-1] < losses[0] - 0.5
    again = small_llama(tokenizer, hidden=16, ffn=24, layers=2, heads=2)
    assert pretrain(again, tokenizer, TEXTS, steps=30, seed=0, batch=4) == losses
    assert not model.training


def test_a_loss_that_is_not_finite_is_an_error(made):
    tokenizer = made[1]
    model = small_llama(tokenizer, hidden=16, ffn=24, layers=1, heads=2)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="became nan at step 0"):
        pretrain(model, tokenizer, TEXTS, steps=1, seed=0, batch=2)


def test_sampled_log_probabilities_are_those_of_a_forward_pass(made):
    model, tokenizer, _ = made
    drawn = sample(model, tokenizer, ["the", "a phone so very"], per_prompt=40, max_new_tokens=6, seed=1, batch=24)
    ids, mask = (torch.cat(pair, 1) for pair in ((drawn.prompt_ids, drawn.ids), (drawn.prompt_mask, drawn.mask)))
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)).logits
    logps = logits[:, -7:-1].log_softmax(-1).gather(2, drawn.ids[..., None])[..., 0]
    torch.testing.assert_close((logps * drawn.mask).sum(1), drawn.logps, rtol=1e-4, atol=1e-4)
    ended = (drawn.ids == tokenizer.eos_token_id).any(1)
    assert torch.equal(drawn.lengths[~ended], torch.full_like(drawn.lengths[~ended], 6))
    again = sample(model, tokenizer, ["the", "a phone so very"], per_prompt=40, max_new_tokens=6, seed=1, batch=24)
    assert torch.equal(again.ids, drawn.ids)


def test_samples_follow_the_models_distribution(made):
    model, tokenizer, _ = made
    drawn = sample(model, tokenizer, ["the"], per_prompt=4000, max_new_tokens=1, seed=0, batch=1000)
    with torch.no_grad():
        p = model(input_ids=torch.tensor([tokenizer("the")["input_ids"]])).logits[0, -1].softmax(-1)
    seen = torch.bincount(drawn.ids[:, 0], minlength=len(p)) / 4000
    assert (seen - p).abs().max() < 5 * (0.25 / 4000) ** 0.5


def test_completion_log_probabilities_by_hand_and_padding_changes_nothing(made):
    model, tokenizer, _ = made
    both = completion_logps(model, tokenizer, ["the film", "a"], [" was", " phone so very good"])
    for i, (prompt, text) in enumerate((("the film", " was"), ("a", " phone so very good"))):
        head, tail = tokenizer(prompt)["input_ids"], tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*head, *tail, tokenizer.eos_token_id]])
        logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[len(head) - 1 :]
        torch.testing.assert_close(both.sums[i], logps.sum(), rtol=1e-4, atol=1e-4)
        assert both.lengths[i] == len(tail) + 1


def test_kl_estimates_agree_and_vanish_for_the_same_model(made):
    model, tokenizer, _ = made
    other = small_llama(tokenizer, hidden=16, ffn=24, layers=2, heads=2, seed=1)
    drawn = sample(model, tokenizer, ["the", "a"], per_prompt=1000, max_new_tokens=4, seed=0)
    found = token_kl(model, other, drawn)
    exact = found.exact.mean().item()
    for estimate in (found.k1, found.k3):
        assert estimate.mean().item() == pytest.approx(exact, abs=5 * (estimate - found.exact).std().item() / 2000**0.5)
    assert exact > 0.1
    assert token_kl(model, model, drawn).exact.abs().max() == 0


def test_a_checkpoint_pickles_and_lies_in_a_folder(made):
    model, tokenizer, _ = made
    kept = pickle.loads(pickle.dumps(Checkpoint.of(model, tokenizer)))
    copy, its_tokenizer = kept.load()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copy.parameters(), strict=True))
    assert its_tokenizer("the film")["input_ids"] == tokenizer("the film")["input_ids"]
    assert its_tokenizer.padding_side == "left"
    with kept.on_disk() as folder:
        again, _ = Checkpoint(path=folder).load()
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
