"""Truncation, the association probe and the scan, on small models of the families that transformers has."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from assay.language import AssociationProbe, Spectrum, laser_scan, project_out, scan_cuts, truncate_, truncated
from assay.language.recall_vs_reasoning.scan import layer_stack
from assay.language.recall_vs_reasoning.truncate import cut_product
from assay.models import load_language_model

PROMPTS = [("The answer to it is", " yes", "the"), ("Who gave it? It was", "Bob", "!"), ("It is the answer to", "Zoe", "the")]


def by_svd(weight, k, bottom=False):
    U, S, V = torch.linalg.svd(weight.double(), full_matrices=False)
    kept = slice(len(S) - k, len(S)) if bottom else slice(0, k)
    return (U[:, kept] * S[kept]) @ V[kept]


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model, before):
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# -- one matrix ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (9, 9)])
@pytest.mark.parametrize("which", ["top", "bottom"])
def test_a_cut_is_that_of_the_decomposition(shape, which):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    spectrum = Spectrum(weight)
    assert torch.allclose(spectrum.singular_values, torch.linalg.svdvals(weight.double()), atol=1e-10)
    for fraction in (0.0, 0.2, 0.5, 0.9):
        k = int(fraction * min(shape) + 1e-9)
        cut = spectrum.truncate(fraction, which)
        assert torch.allclose(cut.double(), by_svd(weight, k, which == "bottom"), atol=1e-6)
        assert cut.dtype == weight.dtype
        assert torch.allclose(Spectrum(weight.T).truncate(fraction, which).T, cut, atol=1e-6)
    assert torch.equal(spectrum.truncate(1.0, which), weight)
    halves = spectrum.truncate(3 / min(shape)) + spectrum.truncate(1 - 3 / min(shape), "bottom")
    assert torch.allclose(halves, weight, atol=1e-5)


def test_a_cut_is_the_nearest_matrix_of_its_rank_and_cutting_twice_is_cutting_once():
    torch.manual_seed(0)
    weight = torch.randn(20, 10, dtype=torch.double)
    cut = Spectrum(weight).truncate(0.3)
    assert torch.linalg.matrix_rank(cut) == 3
    assert (weight - cut).norm() == pytest.approx(float(Spectrum(weight).singular_values[3:].norm()))
    again = Spectrum(cut).truncate(0.3)
    assert torch.allclose(again, cut)


def test_a_stack_is_cut_matrix_by_matrix_and_half_precision_stays():
    torch.manual_seed(0)
    stack = torch.randn(3, 6, 8)
    cut = Spectrum(stack).truncate(0.5)
    assert all(torch.allclose(cut[i].double(), by_svd(stack[i], 3), atol=1e-5) for i in range(3))
    assert Spectrum(stack.bfloat16()).truncate(0.5).dtype == torch.bfloat16


@pytest.mark.parametrize("which", ["top", "bottom", "drop"])
def test_the_product_is_cut_and_its_left_factor_kept(which):
    torch.manual_seed(0)
    out, value = torch.randn(8, 5), torch.randn(5, 9)
    fraction = 0.0 if which == "drop" else 0.4
    cut = out @ cut_product(out, value, fraction, which)
    assert torch.allclose(cut.double(), by_svd(out @ value, 0 if which == "drop" else 3, which == "bottom"), atol=1e-5)
    assert torch.equal(cut_product(out, value, 1.0), value)
    with pytest.raises(ValueError, match="multiply"):
        cut_product(value, out[:7], 0.5)


def test_dropping_and_zeroing_a_module():
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    x, before = torch.randn(3, 4), weights(mlp)
    whole = mlp(x)
    handle = truncate_(mlp, 0.0)
    assert torch.equal(mlp(x), mlp[2].bias.expand(3, 4))
    handle.restore()
    assert torch.equal(mlp(x), whole)
    handle = truncate_(mlp, 0.0, "drop")
    assert not mlp(x).any()
    assert len(handle.changed) == 4
    handle.restore()
    assert same(mlp, before)
    handle.restore()
    assert same(mlp, before)
    first = truncate_(mlp[0].weight, 0.5)
    assert first.changed == ("weight",)
    assert torch.linalg.matrix_rank(mlp[0].weight) == 2


def test_one_direction_is_taken_out_of_the_output():
    torch.manual_seed(0)
    layer, direction = nn.Linear(6, 5, bias=False), torch.randn(5)
    before, x = layer.weight.clone(), torch.randn(4, 6)
    orthogonal = torch.linalg.qr(torch.cat([direction[:, None], torch.randn(5, 4)], 1)).Q[:, 1:]
    expected = layer(x) @ orthogonal
    handle = project_out(layer.weight, direction)
    assert torch.allclose(layer(x) @ direction, torch.zeros(4), atol=1e-5)
    assert torch.allclose(layer(x) @ orthogonal, expected, atol=1e-5)
    handle.restore()
    assert torch.equal(layer.weight, before)
    for wrong in (torch.zeros(5), torch.ones(6), torch.full((5,), float("nan"))):
        with pytest.raises(ValueError, match="direction"):
            project_out(layer.weight, wrong)


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("qweight", torch.zeros(4, 2, dtype=torch.int8))
        self.scale = nn.Parameter(torch.ones(4, 1))


def spoilt(value):
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight[0, 0] = value
    return layer


def tied():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5)})
    model["head"].weight = model["embed"].weight
    return model


REFUSED = {
    "rank_fraction": (lambda: nn.Linear(3, 3), 1.5),
    "rank_fraction must be in": (lambda: nn.Linear(3, 3), float("nan")),
    "embedding": (lambda: nn.Embedding(4, 3), 0.5),
    "embedding, or a head tied": (tied, 0.5),
    "no weight matrix": (lambda: nn.LayerNorm(4), 0.5),
    "NaN": (lambda: spoilt(float("nan")), 0.5),
    "dequantize": (lambda: nn.Sequential(nn.Linear(2, 2), Quantised()), 0.5),
    "meta device": (lambda: nn.Linear(3, 3, device="meta"), 0.5),
    "plain floating": (lambda: nn.Parameter(torch.ones(3, 3, dtype=torch.int8), requires_grad=False), 0.5),
    "a matrix or a stack": (lambda: nn.Parameter(torch.ones(3)), 0.5),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_meaningful_cut_is_refused_and_left_alone(message):
    make, fraction = REFUSED[message]
    target = make()
    before = copy.deepcopy(target)
    with pytest.raises(ValueError, match=message):
        truncate_(target, fraction)
    if isinstance(target, nn.Module) and not any(p.is_meta for p in target.parameters()):
        assert all(torch.equal(a, b) or b.isnan().any() for a, b in zip(target.parameters(), before.parameters(), strict=True))


def test_wrong_targets_and_kinds():
    with pytest.raises(TypeError, match="module or a parameter"):
        truncate_(torch.ones(2, 2), 0.5)
    with pytest.raises(ValueError, match="which"):
        truncate_(nn.Linear(2, 2), 0.5, "middle")
    with pytest.raises(ValueError, match="keeps nothing"):
        truncate_(nn.Linear(2, 2), 0.5, "drop")


# -- a whole model ------------------------------------------------------------------------------------------------------


def test_names_and_patterns_in_a_model():
    model = load_language_model("tiny-llama")[0]
    before = weights(model)
    with truncated(model, {"model.layers.*.mlp.down_proj": 0.0, "model.layers.0.self_attn": 0.25}) as handle:
        assert len(handle.changed) == 2 + 4
        assert not model.model.layers[1].mlp.down_proj.weight.any()
        assert model.model.layers[1].mlp.up_proj.weight.any()
        assert torch.linalg.matrix_rank(model.model.layers[0].self_attn.q_proj.weight) == 8
    assert same(model, before)
    with pytest.raises(RuntimeError), truncated(model, {"model.layers.0": 0.0}):  # norms are no matrices
        raise RuntimeError
    assert same(model, before)


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ({"model.layers.5.mlp": 0.1}, r"matches no weight matrix.*model\.layers"),
        ({"model.layers.0.mlp": 0.1, "model.layers.*.mlp.up_proj": 0.2}, "is matched by"),
        ({"model.embed_tokens": 0.1}, "embedding"),
        ({"*": 0.1}, "embedding"),
        ({"model.layers.0.mlp": 0.0, "model.layers.1.mlp": -0.1}, "rank_fraction"),
        ({("model.layers.0.mlp", "model.layers.1.mlp"): 0.1}, "a product must be two names"),
    ],
)
def test_a_wrong_key_changes_nothing(fractions, message):
    model = load_language_model("tiny-llama")[0]
    before = weights(model)
    with pytest.raises(ValueError, match=message), truncated(model, fractions):
        pass
    assert same(model, before)


def test_a_tied_head_is_refused_by_its_own_name_and_shared_matrices_are_cut_once():
    model = load_language_model("tiny-gpt2")[0]
    with (
        pytest.raises(ValueError, match=r"lm_head\.weight is an embedding, or a head tied"),
        truncated(model, {"lm_head": 0.5}),
    ):
        pass
    twins = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    twins[1].weight = twins[0].weight
    before = twins[0].weight.detach().clone()
    with truncated(twins, {"*": 0.5}, "bottom"):
        assert torch.allclose(twins[0].weight.double(), by_svd(before, 2, bottom=True), atol=1e-6)
    assert torch.equal(twins[1].weight, before)
    with pytest.raises(ValueError, match="is matched by"), truncated(twins, {"0": 0.5, "1": 0.5}):
        pass


def test_dropping_by_name_takes_biases_too():
    model = load_language_model("tiny-gpt2")[0]
    mlp, x = model.transformer.h[0].mlp.eval(), torch.randn(3, 32)
    with torch.no_grad():
        mlp.c_proj.bias.fill_(0.5)
        before = mlp(x)
        with truncated(model, {"transformer.h.0.mlp": 0.0}):
            assert torch.equal(mlp(x), torch.full_like(before, 0.5))
        with truncated(model, {"transformer.h.0.mlp": 0.0}, "drop"):
            assert not mlp(x).any()
        assert torch.equal(mlp(x), before)


def test_dropping_an_mlp_leaves_the_residual_and_its_last_matrix_alone_does_it():
    model, tok = load_language_model("tiny-llama")
    ids = tok(["some text"], return_tensors="pt")["input_ids"]
    outputs = []
    with torch.no_grad():
        for cut in ({"model.layers.1.mlp": 0.0}, {"model.layers.1.mlp.down_proj": 0.0}, {"model.layers.1.mlp.gate_proj": 0.0}):
            with truncated(model, cut):
                outputs.append(model(ids).logits)
        hook = model.model.layers[1].mlp.register_forward_hook(lambda _m, _i, output: torch.zeros_like(output))
        expected = model(ids).logits
        hook.remove()
    assert all(torch.equal(output, expected) for output in outputs)  # silu(0) = 0: without biases the gate does it too


# -- the probe ----------------------------------------------------------------------------------------------------------


def test_the_probe_reads_what_the_model_says():
    model, tok = load_language_model("tiny-llama")
    probe = AssociationProbe(PROMPTS)
    with pytest.warns(UserWarning, match="more than one token"):
        scores = probe.scores(model, tok)
    for i, (prompt, answer, distractor) in enumerate(PROMPTS):
        ids = tok(prompt, return_tensors="pt")["input_ids"]
        p = model(ids).logits[0, -1].detach().softmax(-1)
        first, second = (tok(prompt + text)["input_ids"][ids.shape[1]] for text in (answer, distractor))
        assert scores.p_answer[i] == pytest.approx(float(p[first]), rel=1e-4)
        assert scores.p_distractor[i] == pytest.approx(float(p[second]), rel=1e-4)
        assert bool(scores.correct[i]) == (int(p.argmax()) == first)
    with pytest.warns(UserWarning, match="'Bob'"):
        found = probe.evaluate(model, tok)
    assert found["p_answer"] == pytest.approx(float(scores.p_answer.mean()))
    assert found["win_rate"] == pytest.approx(float((scores.p_answer > scores.p_distractor).float().mean()))
    assert scores.summary(torch.tensor([1]))["p_answer"] == pytest.approx(float(scores.p_answer[1]))


def test_the_probe_leaves_the_mode_of_the_model():
    model, tok = load_language_model("tiny-gpt2")
    model.train()
    layer_stack(model)[1][0].eval()  # as a user freezes a part
    modes = [module.training for module in model.modules()]
    probe = AssociationProbe([("The answer is", "y", "n")])
    first = probe.evaluate(model, tok)
    assert [module.training for module in model.modules()] == modes
    assert len(set(modes)) == 2
    assert probe.evaluate(model, tok) == first  # no dropout


def test_prompts_from_a_table(tmp_path):
    path = tmp_path / "prompts.csv"
    path.write_text('prompt,answer,distractor\n"Madrid is located in"," Spain"," the"\n', encoding="utf-8")
    assert AssociationProbe.from_csv(path).items == [("Madrid is located in", " Spain", " the")]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns prompt, answer, distractor"):
        AssociationProbe.from_csv(path)
    path.write_text("prompt,answer,distractor\nonly\n")
    with pytest.raises(ValueError, match=r"prompts\[0\]"):
        AssociationProbe.from_csv(path)
    path.write_text("prompt,answer,distractor\na,b,c\n", encoding="utf-8-sig")  # as Excel writes it
    assert AssociationProbe.from_csv(path).items == [("a", "b", "c")]
    path.write_bytes(b"\xff\xfe\x00bad")
    with pytest.raises(ValueError, match="UTF-8"):
        AssociationProbe.from_csv(path)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=80), st.booleans())
def test_any_file_is_a_table_or_an_error(tmp_path, content, headed):
    path = tmp_path / "any.csv"
    path.write_bytes((b"prompt,answer,distractor\n" if headed else b"") + content)
    try:
        items = AssociationProbe.from_csv(path).items
    except ValueError:
        return
    assert all(part for item in items for part in item)


def merging(text):
    """A tokenizer for which "an" is one token: it merges the end of a prompt with the beginning of an answer."""
    return {"input_ids": [ord(c) for c in text.replace("an", "\x01")]}


def test_wrong_prompts_are_refused():
    for prompts, message in (([], "at least one"), ([("a", "b")], r"prompts\[0\]"), ([("a", "", "c")], "non-empty")):
        with pytest.raises(ValueError, match=message):
            AssociationProbe(prompts)
    tok = load_language_model("tiny-llama")[1]
    with pytest.raises(ValueError, match="same token"):
        AssociationProbe([("a", "xy", "xz")]).encode(tok)
    with pytest.raises(ValueError, match="move the blank"):
        AssociationProbe([("a", "n", "c")]).encode(merging)
    with pytest.raises(ValueError, match="no token"):
        AssociationProbe([("a", "b", "c")]).encode(lambda text: {"input_ids": []})


def test_a_broken_model_is_reported():
    model, tok = load_language_model("tiny-llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        AssociationProbe([("a", "b", "c")]).evaluate(model, tok)


# -- the scan -----------------------------------------------------------------------------------------------------------

CUT = {
    "gpt2": ("mlp", "attn.c_proj"),
    "mixtral": ("self_attn.o_proj",),
    "gpt_neox": ("mlp", "attention.dense"),
    "olmo2": ("mlp",),
    "qwen3_moe": ("mlp.experts",),
}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", *CUT])
def test_the_scan_is_a_full_pass_for_every_cut(family):
    model, tok = load_language_model(f"tiny-{family}")
    matrices = CUT.get(family, ("mlp", "self_attn.o_proj"))
    before, text = weights(model), torch.tensor(tok("held-out text, some words of it")["input_ids"])
    probe = AssociationProbe([(prompt, answer[:1], distractor[:1]) for prompt, answer, distractor in PROMPTS])
    cuts = list(scan_cuts(model, tok, probe, [0, -1], [0.3, 0.0, 1.0], matrices, text=text))
    assert same(model, before)
    assert len(cuts) == 1 + 2 * 3 * len(matrices)
    stack = layer_stack(model)[0]
    for cut in cuts:
        key = {} if cut.layer < 0 else {f"{stack}.{cut.layer}.{cut.matrices}": cut.fraction}
        with truncated(model, key), torch.no_grad():
            expected = probe.scores(model, tok)
            nll = float(nn.functional.cross_entropy(model(text[None]).logits[0, :-1], text[1:]))
        assert torch.allclose(cut.scores.p_answer, expected.p_answer, atol=1e-6)
        assert torch.allclose(cut.scores.p_distractor, expected.p_distractor, atol=1e-6)
        assert cut.nll == pytest.approx(nll, abs=1e-5)
    assert not any("forward" in layer.__dict__ for layer in model.get_submodule(stack))


def test_the_scan_as_a_table():
    model, tok = load_language_model("tiny-llama")
    prompts = [("The answer is", "y", "n"), ("It is", "a", "t")]
    table = laser_scan(model, tok, prompts, layers=range(2), fractions=[0.5, 0.0])
    assert list(table.columns) == ["layer", "matrices", "fraction", "p_answer", "p_distractor", "win_rate", "accuracy"]
    assert table.layer.tolist() == [-1, 0, 0, 1, 1]
    assert table.p_answer.nunique() == 5
    base = AssociationProbe(prompts).evaluate(model, tok)
    assert table.iloc[0][["p_answer", "win_rate"]].tolist() == pytest.approx([base["p_answer"], base["win_rate"]])


def test_a_scan_that_is_broken_off_leaves_the_model_whole():
    model, tok = load_language_model("tiny-llama")
    before = weights(model)
    for _ in zip(range(3), scan_cuts(model, tok, [("a", "b", "c")], [1], [0.5, 0.0]), strict=False):
        assert same(model, before)  # restored before a result is handed out
    model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(scan_cuts(model, tok, [("a", "b", "c")], [1], [0.5]))
    assert same(model, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": [2]}, r"layers must be numbers in \[-2, 2\)"),
        ({"layers": []}, "at least one"),
        ({"fractions": [0.5, 1.1]}, "rank_fraction"),
        ({"matrices": ["feed"]}, "matches no weight matrix"),
        ({"text": torch.ones(1, 3)}, "text must be"),
        ({"stack": "model.blocks"}, "no module"),
    ],
)
def test_a_wrong_scan_is_refused(arguments, message):
    model, tok = load_language_model("tiny-llama")
    with pytest.raises(ValueError, match=message):
        laser_scan(model, tok, [("a", "b", "c")], **{"layers": [0], "fractions": [0.5], **arguments})


def test_a_model_with_no_single_stack_is_refused():
    model = load_language_model("tiny-llama")[0]
    model.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="pass stack="):
        layer_stack(model)
    assert layer_stack(model, "model.layers")[0] == "model.layers"
