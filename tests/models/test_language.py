import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from assay.data import DataUnavailable
from assay.models import ARCHITECTURES, load_language_model
from assay.models.tiny import byte_tokenizer

pytest.importorskip("transformers")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tiny_model_runs_learns_and_is_the_same_every_time(architecture):
    torch.manual_seed(1)
    model, tokenizer = load_language_model(f"tiny-{architecture}")
    drawn = torch.rand(1)
    again, _ = load_language_model(f"tiny-{architecture}")
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), drawn)  # the global generator was left alone
    assert not model.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    batch = tokenizer(["to be", "or not to be"], return_tensors="pt", padding=True)
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
    assert sum(p.numel() for p in model.parameters()) < 200_000
    text = model.generate(**tokenizer("a", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert text.shape[0] == 1


def test_a_batch_that_is_padded_gives_what_single_texts_give():
    model, tokenizer = load_language_model("tiny-llama")
    tokenizer.padding_side = "left"
    batch = tokenizer(["to be", "or not to be"], return_tensors="pt", padding=True)
    single = tokenizer("to be", return_tensors="pt")
    with torch.no_grad():
        assert torch.allclose(model(**batch).logits[0, -5:], model(**single).logits[0], atol=1e-5)


@pytest.mark.parametrize("text", ["", "plain", "Grüße, 世界 🤗", "a  b\n\tc ", "<bos> in the text", "\x00\x7f"])
def test_bytes_round_trip(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    if "<" not in text:
        assert len(ids) == len(text.encode())


def test_the_byte_tokenizer_has_a_chat_template():
    text = byte_tokenizer().apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text == "<bos>user\nhi<eos>\n<bos>assistant\n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtype(dtype):
    model, _ = load_language_model("tiny-qwen2", dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_a_folder_round_trips(tmp_path):
    model, tokenizer = load_language_model("tiny-gpt2")
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    again, same = load_language_model(tmp_path / "m")
    ids = same("some text", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert load_language_model(str(tmp_path / "m"), dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="no tiny architecture 'lama'; there are gemma"):
        load_language_model("tiny-lama")
    with pytest.raises(ValueError, match=r"floating torch.dtype, got torch.int64"):
        load_language_model("tiny-llama", dtype=torch.int64)
    with pytest.raises(ValueError, match="holds no model that transformers can load"):
        load_language_model(tmp_path)
    with pytest.raises(DataUnavailable, match="'smollm2-135m', 'gemma3-270m'"):
        load_language_model("no-such-model")


@pytest.mark.slow  # a process of its own, since transformers reads HF_HUB_OFFLINE when it is imported
def test_a_hub_model_that_cannot_be_reached(tmp_path):
    script = (
        "from assay.data import DataUnavailable\nfrom assay.models import load_language_model\n"
        "try: load_language_model('assay-no-such/model')\nexcept DataUnavailable as missing: print(missing)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert "'assay-no-such/model' is not available" in done.stdout
    assert "https://huggingface.co/assay-no-such/model" in done.stdout
    assert "ASSAY_MODELS" in done.stdout


def test_without_transformers_the_error_names_the_command(monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "transformers" else there(name, *rest))
    with pytest.raises(ImportError, match=r"pip install 'assay\[compression\]'"):
        load_language_model("tiny-llama")
