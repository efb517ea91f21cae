"""What users do with a model around quantising it: masks, checkpointing, saving, calibration data, mistakes."""

import copy
import logging
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, BatchEncoding, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from assay.compression.rotated_runtime_smooth import (
    RotatedLinear,
    RRSConfig,
    RRSLinear,
    configure_activations,
    quantize_rrs,
    rotate_model,
)
from assay.compression.rotated_runtime_smooth.calibrate import calibration_batches
from assay.compression.rotated_runtime_smooth.masks import TokenMask, counted_tokens
from assay.compression.rotated_runtime_smooth.quiet import quiet_torchao
from assay.compression.rotated_runtime_smooth.smoothquant import quantize_smoothquant

SIZES = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 160, "num_hidden_layers": 2, "num_key_value_heads": 2}
IDS = torch.randint(3, 96, (2, 14), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[0, :5] = 0
RIGHT = PADDED.flip(1)
SMOOTH = RRSConfig(group="auto", smooth_targets="all")
GPTQ = RRSConfig(group="auto", weight_method="gptq")


def build(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}, num_attention_heads=4)).eval()


def logits(model, ids=IDS, **kwargs):
    with torch.no_grad():
        return model(input_ids=ids, **kwargs).logits


def causal(mask):
    """Boolean (batch, 1, tokens, keys): causal, padding hidden."""
    size = mask.shape[1]
    return mask.bool()[:, None, None, :] & torch.ones(size, size, dtype=torch.bool).tril()


def additive(mask):
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("padding", [PADDED, RIGHT])
@pytest.mark.parametrize("form", [causal, lambda mask: additive(causal(mask))], ids=["boolean", "added"])
def test_a_four_dimensional_mask_leaves_padding_out(padding, form):
    model = quantize_rrs(build(), SMOOTH)
    positions = (padding.cumsum(-1) - 1).clamp_min(0)
    expected = logits(model, attention_mask=padding, position_ids=positions)
    found = logits(model, attention_mask=form(padding), position_ids=positions)
    real = padding.bool()
    assert torch.allclose(found[real], expected[real], atol=1e-5)
    everything = logits(model, attention_mask=form(torch.ones_like(padding)), position_ids=positions)
    assert not torch.allclose(everything[real], expected[real], atol=1e-3)


def test_a_mapping_of_masks_leaves_padding_out():
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES, num_attention_heads=4, layer_types=["full_attention", "full_attention"])
    model = quantize_rrs(Qwen2ForCausalLM(config).eval(), SMOOTH)
    expected = logits(model, attention_mask=PADDED)
    found = logits(model, attention_mask={"full_attention": causal(PADDED)})
    assert torch.allclose(found[PADDED.bool()], expected[PADDED.bool()], atol=1e-5)
    assert torch.equal(logits(model, attention_mask={"full_attention": None}), logits(model))


def test_the_tokens_of_a_call_are_found_behind_a_cache():
    full = causal(PADDED)
    assert torch.equal(counted_tokens(full, 2, 14), PADDED.bool())
    assert torch.equal(counted_tokens(full[:, :, 3:], 2, 11, past=3), PADDED[:, 3:].bool())
    room = torch.nn.functional.pad(full, (0, 6))  # a static cache: keys not yet written
    assert torch.equal(counted_tokens(room, 2, 14), PADDED.bool())
    assert torch.equal(counted_tokens(room[:, :, 3:], 2, 11, past=3), PADDED[:, 3:].bool())
    assert torch.equal(counted_tokens(full[:, :, 4:, 2:], 2, 10, past=4), PADDED[:, 4:].bool())  # a sliding one: last 12 keys
    assert torch.equal(counted_tokens(PADDED.bool()[:, None, None], 2, 14), PADDED.bool())  # keys only
    assert counted_tokens(full[:, :, -1:], 2, 1, past=13) is None
    assert counted_tokens(causal(torch.ones_like(IDS))[:1], 2, 14) is None


def test_static_caches_hand_over_such_masks_while_generating():
    model = quantize_rrs(build(), SMOOTH)
    arguments = {"attention_mask": PADDED, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    found = model.generate(IDS, cache_implementation="static", disable_compile=True, **arguments)
    assert torch.equal(found, model.generate(IDS, **arguments))


@pytest.mark.parametrize(
    "mask",
    [torch.ones(2, 14, 14), "causal", torch.ones(2, 5), torch.ones(3, 14), torch.ones(2, 1, 9, 14), object()],
)
def test_masks_that_say_nothing_are_refused_by_name(mask):
    model = quantize_rrs(build(), SMOOTH)
    with pytest.raises(ValueError, match="attention_mask"):
        logits(model, attention_mask=mask)


@pytest.mark.parametrize("padding", [None, PADDED, RIGHT])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(padding, reentrant):
    def gradient(checkpointing):
        model = quantize_rrs(build(), SMOOTH).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        # Two batches before one backward pass: the recomputation must know whose padding is whose.
        outs = [model(input_ids=IDS, attention_mask=mask, use_cache=False).logits for mask in (padding, None)]
        sum(out.square().sum() for out in outs).backward()
        return model.get_input_embeddings().weight.grad

    plain, again = gradient(False), gradient(True)
    assert plain.abs().sum() > 0
    assert torch.allclose(again, plain, rtol=1e-4, atol=1e-5)


def test_checkpointing_survives_the_search_for_a_sink():
    with torch.no_grad():
        model = build()
        model.model.embed_tokens.weight[:, 7] = 0
        model.model.embed_tokens.weight[IDS[0, 0], 7] = 50
        model.model.layers[0].mlp.up_proj.weight[:, 7] *= 1000
    model = quantize_rrs(model, RRSConfig(group="auto", smooth_targets="all", rotate="online")).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.warns(UserWarning, match="sink=1"):
        model(input_ids=IDS, use_cache=False).logits.sum().backward()
    gradient = model.get_input_embeddings().weight.grad
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0


def test_a_rotated_model_refuses_to_be_saved(tmp_path):
    model = rotate_model(build())
    for refusing in (model, copy.deepcopy(model), model.model):
        with pytest.raises(ValueError, match=r"save_pretrained.*RRSConfig\(w_bits=16, a_bits=16\)"):
            refusing.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    # the way that the message offers
    twin = quantize_rrs(build(), RRSConfig(w_bits=16, a_bits=16))
    twin.save_pretrained(tmp_path)
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model), atol=1e-4)


@pytest.mark.parametrize("kv_bits", [4, 16])
def test_a_dequantised_model_is_plain_again(tmp_path, kv_bits):
    config = {"a_bits": 16, "kv_bits": kv_bits}
    rotated = quantize_rrs(build(), RRSConfig(**config)).dequantize()
    with pytest.raises(ValueError, match="before dequantize"):
        rotated.save_pretrained(tmp_path)

    model = quantize_rrs(build(), RRSConfig(**config, rotate="none"))
    expected = build()
    with torch.no_grad():
        for name, linear in expected.named_modules():
            if isinstance(linear, torch.nn.Linear) and name != "lm_head":
                linear.weight.copy_(model.get_submodule(name).dequantize())
    model.dequantize()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(model), logits(expected))
    assert not any(isinstance(getattr(h, "__self__", None), TokenMask) for m in model.modules() for h in hooks(m))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(loaded, "hf_quantizer")
    assert torch.equal(logits(loaded), logits(model))


def hooks(module):
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def test_the_rival_refuses_to_be_saved(tmp_path):
    with pytest.raises(ValueError, match="save_pretrained: the static scales"):
        quantize_smoothquant(build(), IDS[0]).save_pretrained(tmp_path)


def spoilt(part):
    model = build()
    with torch.no_grad():
        model.get_submodule(part).weight[0] = float("nan")
    return model


ARRAY = [IDS[0].numpy(), IDS[1].numpy()]
MISTAKES = {
    "NaN in a linear": (lambda: spoilt("model.layers.1.mlp.up_proj"), SMOOTH, None, r"layers\.1\.up_proj\.weight"),
    "NaN in a norm": (lambda: spoilt("model.norm"), SMOOTH, None, r"norm\.weight"),
    "NaN in the embedding": (lambda: spoilt("model.embed_tokens"), SMOOTH, None, r"embedding\.weight"),
    "odd inputs": (lambda: build(intermediate_size=165), SMOOTH, None, "even to pack.*down_proj has 165"),
    "a group that does not divide": (build, RRSConfig(group=32), None, "does not divide the 48"),
    "keys": (lambda: build(head_dim=6), RRSConfig(group="auto", kv_bits=4), None, "head_dim"),
    "no data": (build, GPTQ, None, "needs calib"),
    "empty data": (build, GPTQ, [], "calib is empty"),
    "an empty sequence": (build, GPTQ, [[]], r"calib\[0\]"),
    "text": (build, GPTQ, "some text", "calib must hold token ids"),
    "texts": (build, GPTQ, ["some text"], r"calib\[0\].*tokenise"),
    "a number": (build, GPTQ, 5, "calib must"),
    "probabilities": (build, GPTQ, [torch.rand(4)], r"calib\[0\] must hold integer"),
    "ids out of range": (build, GPTQ, IDS + 90, r"calib\[0\] has ids"),
    "negative ids": (build, GPTQ, [[-1, 3]], r"calib\[0\] has ids"),
    "three dimensions": (build, GPTQ, IDS[None], "calib must be"),
    "no ids": (build, GPTQ, {"labels": IDS}, "calib has no 'input_ids'"),
    "a mask of another shape": (build, GPTQ, {"input_ids": IDS, "attention_mask": PADDED[:, 1:]}, "attention_mask of calib"),
    "a mask without a token": (build, GPTQ, {"input_ids": IDS, "attention_mask": 0 * PADDED}, "attention_mask of calib"),
    "pairs": (build, GPTQ, [(IDS, PADDED[:1])], r"calib\[0\]"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_leaves_the_model_as_it_was(mistake, tmp_path):
    make, config, calib, message = MISTAKES[mistake]
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        quantize_rrs(model, config, calib)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(
        torch.equal(
            before[key],
            after[key],
        )
        or after[key].isnan().any()
        for key in after
    )
    assert not any(isinstance(module, (RotatedLinear, RRSLinear)) for module in model.modules())
    assert not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path)


def test_rotation_alone_checks_first_too():
    model = spoilt("model.layers.0.self_attn.q_proj")
    before = model.model.layers[1].mlp.up_proj.weight.clone()
    with pytest.raises(ValueError, match=r"layers\.0\.q_proj"):
        rotate_model(model)
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, before)
    model = build()
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(160, 48, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="int8"):
        rotate_model(model)
    with pytest.raises(ValueError, match="meta device"):
        rotate_model(build().to("meta"))


def test_what_breaks_off_midway_says_so(tmp_path, monkeypatch):
    from assay.compression.rotated_runtime_smooth import quantize

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(quantize, "gptq_layers", fail)
    model = build()
    with pytest.raises(MemoryError) as caught:
        quantize_rrs(model, GPTQ, IDS)
    assert "load it again" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="broke off"):
        model.save_pretrained(tmp_path)


def test_settings_that_do_not_fit_leave_all_layers_as_they_were():
    model = quantize_rrs(build(), SMOOTH)
    with pytest.raises(ValueError, match="does not divide"):
        configure_activations(model, RRSConfig(group=80, a_bits=8, smooth_targets=("down_proj", "up_proj")))
    assert {m.a_bits for m in model.modules() if isinstance(m, RRSLinear)} == {4}


ROWS = [{"input_ids": row} for row in IDS]
FORMS = {
    "a tensor": IDS,
    "an array": IDS.numpy(),
    "nested lists": IDS.tolist(),
    "tensors": list(IDS),
    "arrays": ARRAY,
    "a generator": (row for row in IDS),
    "mappings": [{"input_ids": row.tolist(), "attention_mask": [1] * 14} for row in IDS],
    "a tokenizer's tensors": BatchEncoding({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}),
    "a tokenizer's lists": BatchEncoding({"input_ids": IDS.tolist(), "attention_mask": torch.ones_like(IDS).tolist()}),
    "a data loader": torch.utils.data.DataLoader(ROWS, batch_size=2),
}


@pytest.mark.parametrize("form", FORMS)
def test_calibration_data_in_every_form(form):
    batches = calibration_batches(FORMS[form], 96)
    assert torch.equal(torch.cat([batch["input_ids"] for batch in batches]), IDS)
    assert all(batch["attention_mask"].all() for batch in batches if "attention_mask" in batch)


def test_one_sequence_and_ragged_ones():
    for one in (IDS[0], IDS[0].tolist(), IDS[0].numpy(), {"input_ids": IDS[0]}):
        (batch,) = calibration_batches(one, 96)
        assert torch.equal(batch["input_ids"], IDS[:1])
    ragged = calibration_batches({"input_ids": [[1, 2, 3], [4]], "attention_mask": [[0, 1, 1], [1]]}, 96)
    assert [batch["input_ids"].tolist() for batch in ragged] == [[[1, 2, 3]], [[4]]]
    assert ragged[0]["attention_mask"].tolist() == [[0, 1, 1]]
    a, b = (quantize_rrs(build(), GPTQ, calib) for calib in (IDS.tolist(), {"input_ids": IDS}))
    x, y = (m.model.layers[1].mlp.down_proj.qweight for m in (a, b))
    assert (x != y).float().mean() < 0.02  # the same sums in another order


def test_torchao_is_imported_without_its_warnings():
    # transformers imports it for a quantizer of its own, the study for an arm
    code = "import assay.compression.rotated_runtime_smooth"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    with quiet_torchao():
        assert not logging.getLogger("torchao").isEnabledFor(logging.WARNING)
        assert logging.getLogger("torchao").isEnabledFor(logging.ERROR)
    assert logging.getLogger("torchao").isEnabledFor(logging.WARNING)
