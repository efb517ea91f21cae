import pytest
import torch
from torch import nn

from assay.models import ARCHITECTURES, UnknownArchitecture, load_language_model, locate

pytest.importorskip("transformers")


@pytest.fixture(params=list(ARCHITECTURES))
def model(request):
    return load_language_model(f"tiny-{request.param}")[0]


def run(model, recorded):
    """A forward pass; the inputs and outputs of the modules in `recorded` by their key."""
    seen, handles = {}, []
    for key, module in recorded.items():

        def note(module, positional, named, output, key=key):
            given = positional[0] if positional else named["hidden_states"]
            seen[key] = (given, output[0] if isinstance(output, tuple) else output)

        handles.append(module.register_forward_hook(note, with_kwargs=True))
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 20)[None]).logits
    for handle in handles:
        handle.remove()
    return logits, seen


def test_names_lead_to_the_modules(model):
    found = locate(model)
    parts = [found.embedding, found.final_norm, found.lm_head]
    for layer in found.layers:
        parts += [layer.attention, layer.mlp, *layer.projections, *layer.norms]
        parts += [part for part in (layer.router, layer.experts, layer.query_norm, layer.key_norm) if part]
        assert model.get_submodule(layer.name) is layer.module
    for part in parts:
        assert model.get_submodule(part.name) is part.module
    assert len(found.layers) == model.config.num_hidden_layers
    assert found.tied == (found.lm_head.module.weight is found.embedding.module.weight) == model.config.tie_word_embeddings


def test_every_parameter_of_a_layer_is_in_exactly_one_part(model):
    for layer in locate(model).layers:
        parts = [
            *layer.projections,
            *layer.norms,
            *(p for p in (layer.router, layer.experts, layer.query_norm, layer.key_norm) if p),
        ]
        owned = [id(parameter) for part in parts for parameter in part.module.parameters()]
        assert len(owned) == len(set(owned))
        assert set(owned) == {id(parameter) for parameter in layer.module.parameters()}


def test_the_norms_are_where_they_are_said_to_be(model):
    """Not by name: by what flows. A norm before a block makes the block's input; a norm after it takes its output."""
    found = locate(model)
    layer = found.layers[1]
    roles = ("attention_norm", "mlp_norm", "post_attention_norm", "post_mlp_norm")
    modules = {role: getattr(layer, role).module for role in roles if getattr(layer, role)}
    modules |= {"attention": layer.attention.module, "mlp": layer.mlp.module}
    modules |= {"final": found.final_norm.module, "head": found.lm_head.module, "embedding": found.embedding.module}
    modules |= {"out": layer.attention_out.module, "first": layer.qkv[0].module}
    logits, seen = run(model, modules)
    into, out_of = {key: value[0] for key, value in seen.items()}, {key: value[1] for key, value in seen.items()}
    for norm, block in (("attention_norm", "attention"), ("mlp_norm", "mlp")):
        if norm in modules:
            assert torch.equal(out_of[norm], into[block])
    for block, norm in (("attention", "post_attention_norm"), ("mlp", "post_mlp_norm")):
        if norm in modules:
            assert torch.equal(out_of[block], into[norm])
    assert torch.equal(into["first"], into["attention"])
    assert torch.equal(out_of["out"].reshape(out_of["attention"].shape), out_of["attention"])
    assert torch.equal(out_of["final"], into["head"])
    if getattr(model.config, "final_logit_softcapping", None) is None:
        assert torch.equal(out_of["head"], logits)
    assert out_of["embedding"].shape == (1, 17, model.config.hidden_size)


def test_the_shapes_of_projections(model):
    config = model.config
    heads, kv = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    for layer in locate(model).layers:
        sizes = [min(w.shape) and w.numel() // config.hidden_size for w in (part.module.weight for part in layer.qkv)]
        assert sum(sizes) == (heads + 2 * kv) * width
        assert layer.attention_out.module.weight.numel() == heads * width * config.hidden_size
        if layer.experts is None:
            assert sum(p.module.weight.numel() for p in layer.mlp_in) % layer.mlp_out.module.weight.numel() == 0


def test_mixtures_of_experts_have_a_router_and_the_rest_have_none():
    for architecture in ARCHITECTURES:
        model = load_language_model(f"tiny-{architecture}")[0]
        expects = architecture in ("mixtral", "qwen3_moe")
        for layer in locate(model).layers:
            assert (layer.router is not None) == (layer.experts is not None) == (not layer.mlp_in) == expects
        if expects:
            _, seen = run(model, {"router": layer.router.module, "mlp": layer.mlp.module})
            assert torch.equal(seen["router"][0].flatten(), seen["mlp"][0].flatten())


def test_inside_another_module_and_with_wrapped_projections():
    inner = load_language_model("tiny-llama")[0]

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = inner
            self.get_input_embeddings, self.get_output_embeddings = inner.get_input_embeddings, inner.get_output_embeddings

    found = locate(Wrapped())
    assert found.layers[0].qkv[0].name == "base.model.layers.0.self_attn.q_proj"
    assert found.lm_head.name == "base.lm_head"


def test_a_model_without_a_head():
    model = load_language_model("tiny-llama")[0].model
    found = locate(model)
    assert found.lm_head is None
    assert not found.tied
    assert found.layers[0].name == "layers.0"
    assert found.final_norm.name == "norm"


def test_unknown_families_are_told_what_was_looked_for():
    with pytest.raises(UnknownArchitecture, match=r"self_attn, attn, attention.*lists without: none"):
        locate(nn.Linear(2, 2))
    model = load_language_model("tiny-llama")[0]
    layer = model.model.layers[0]
    layer.strange = layer.mlp
    del layer.mlp
    with pytest.raises(UnknownArchitecture, match=r"model\.layers\.0: no module called mlp or .*; it has self_attn, .*strange"):
        locate(model)
    model = load_language_model("tiny-llama")[0]
    del model.model.layers[0].self_attn.k_proj
    with pytest.raises(UnknownArchitecture, match=r"no modules q_proj \+ k_proj \+ v_proj or c_attn"):
        locate(model)
    model = load_language_model("tiny-llama")[0]
    del model.model.norm
    with pytest.raises(UnknownArchitecture, match=r"model: no module called norm or ln_f"):
        locate(model)
