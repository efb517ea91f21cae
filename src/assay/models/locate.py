"""Where the parts of a causal language model are: one map for every Hugging Face family."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

ATTENTION = ("self_attn", "attn", "attention", "self_attention")
MLP = ("mlp", "block_sparse_moe", "feed_forward")
QUERY_KEY_VALUE = (("q_proj", "k_proj", "v_proj"), ("c_attn",), ("query_key_value",), ("qkv_proj",))
ATTENTION_OUT = ("o_proj", "c_proj", "dense", "out_proj")
MLP_IN = (("gate_proj", "up_proj"), ("gate_up_proj",), ("c_fc",), ("dense_h_to_4h",), ("fc1",))
MLP_OUT = ("down_proj", "c_proj", "dense_4h_to_h", "fc2")
ROUTER = ("gate", "router")
FINAL_NORM = ("norm", "ln_f", "final_layer_norm", "final_layernorm")


class UnknownArchitecture(ValueError):
    """A model whose parts have names that `locate` does not know; the message lists those it looked for."""


class Part(NamedTuple):
    """A module and its full name, so that ``model.get_submodule(part.name) is part.module``."""

    name: str
    module: nn.Module


@dataclass(frozen=True)
class Layer:
    """The parts of one transformer layer. ``None`` or an empty tuple: the family has no such part."""

    name: str
    module: nn.Module
    attention: Part
    qkv: tuple[Part, ...]
    """Query, key and value projection; a single one where the family fuses them."""
    attention_out: Part
    query_norm: Part | None
    key_norm: Part | None
    mlp: Part
    mlp_in: tuple[Part, ...]
    """Gate and up projection; a single one where there is no gate or where they are fused; none in a mixture of experts."""
    mlp_out: Part | None
    router: Part | None
    experts: Part | None
    attention_norm: Part | None
    """The norm whose output attention reads."""
    mlp_norm: Part | None
    """The norm whose output the MLP reads (Llama calls it ``post_attention_layernorm``)."""
    post_attention_norm: Part | None
    """The norm on attention's output before it is added to the stream (Gemma 2 and 3, OLMo 2)."""
    post_mlp_norm: Part | None

    @property
    def projections(self) -> tuple[Part, ...]:
        """All weight matrices that are modules of their own, in the order of the forward pass.

        GPT-2's are ``Conv1D``, whose weight is ``(in, out)``, not ``(out, in)``.
        """
        out = (self.mlp_out,) if self.mlp_out else ()
        return (*self.qkv, self.attention_out, *self.mlp_in, *out)

    @property
    def norms(self) -> tuple[Part, ...]:
        """The norms of the layer's stream in the order of the forward pass, without those of queries and keys."""
        order = (self.attention_norm, self.post_attention_norm, self.mlp_norm, self.post_mlp_norm)
        return tuple(part for part in order if part)


@dataclass(frozen=True)
class Located:
    """The parts of a causal language model."""

    embedding: Part
    layers: tuple[Layer, ...]
    final_norm: Part
    lm_head: Part | None
    """None for a model without a head."""
    rotary: Part | None
    """The module that makes the rotary angles of all layers."""
    tied: bool
    """Whether head and embedding are the same parameter: changing one changes the other."""


def locate(model: nn.Module) -> Located:
    """Find embedding, attention, MLP, norms, router and head of a Hugging Face causal language model.

    Modules are found by the names that the families give them (Llama, Mistral, Qwen, Gemma, GPT-2, NeoX, Mixtral, Phi-3,
    OLMo 2 …), wherever the stack of layers sits, so a model wrapped by PEFT or inside a multimodal one is found as well.

    Args:
        model: A model with one stack of layers.

    Raises:
        UnknownArchitecture: a part is missing under every known name; the message lists the names tried and those there.

    Example:
        >>> from assay.models import load_language_model
        >>> parts = locate(load_language_model("tiny-gpt2")[0])
        >>> parts.layers[1].mlp_in[0].name, parts.layers[1].mlp_norm.name, parts.tied
        ('transformer.h.1.mlp.c_fc', 'transformer.h.1.ln_2', True)
    """
    stack = _stack(model)
    parent_name = stack.name.rpartition(".")[0]
    parent = Part(parent_name, model.get_submodule(parent_name))
    embedding, head = _embedding(model, "get_input_embeddings"), _embedding(model, "get_output_embeddings")
    if embedding is None:
        raise UnknownArchitecture(f"{type(model).__name__} names no input embedding (get_input_embeddings)")
    return Located(
        embedding=embedding,
        layers=tuple(_layer(Part(f"{stack.name}.{i}", layer)) for i, layer in stack.module.named_children()),
        final_norm=_need(parent, FINAL_NORM),
        lm_head=head,
        rotary=_child(parent, ("rotary_emb",)),
        tied=head is not None and getattr(head.module, "weight", 0) is getattr(embedding.module, "weight", 1),
    )


def _stack(model: nn.Module) -> Part:
    """The one list of layers with attention in it; of several (an image tower beside the text) the one for text."""
    lists = [Part(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    stacks = [part for part in lists if _child(Part("", next(part.module.children())), ATTENTION)]
    if len(stacks) > 1:
        stacks = [part for part in stacks if "language_model" in part.name or "text_model" in part.name] or stacks
    if len(stacks) != 1:
        found = ", ".join(part.name for part in stacks or lists) or "none"
        raise UnknownArchitecture(
            f"{type(model).__name__}: expected one list of layers whose members have one of {', '.join(ATTENTION)}; "
            f"{'several' if stacks else 'lists without'}: {found}"
        )
    return stacks[0]


def _layer(layer: Part) -> Layer:
    attention, mlp = _need(layer, ATTENTION), _need(layer, MLP)
    experts = _child(mlp, ("experts",))
    before_attention, before_mlp, after_attention, after_mlp = _norms(layer)
    return Layer(
        name=layer.name,
        module=layer.module,
        attention=attention,
        qkv=_need_all(attention, QUERY_KEY_VALUE),
        attention_out=_need(attention, ATTENTION_OUT),
        query_norm=_child(attention, ("q_norm",)),
        key_norm=_child(attention, ("k_norm",)),
        mlp=mlp,
        mlp_in=() if experts else _need_all(mlp, MLP_IN),
        mlp_out=None if experts else _need(mlp, MLP_OUT),
        router=_need(mlp, ROUTER) if experts else None,
        experts=experts,
        attention_norm=before_attention,
        mlp_norm=before_mlp,
        post_attention_norm=after_attention,
        post_mlp_norm=after_mlp,
    )


def _norms(layer: Part) -> tuple[Part | None, Part | None, Part | None, Part | None]:
    """Norms before attention, before the MLP, after attention, after the MLP: the same name means two things."""
    before_attention = _child(layer, ("input_layernorm", "ln_1"))
    after = _child(layer, ("post_attention_layernorm",))
    after_mlp = _child(layer, ("post_feedforward_layernorm",))
    before_mlp = _child(layer, ("pre_feedforward_layernorm", "ln_2"))
    if before_mlp is None and after_mlp is None:  # Llama and most others: "after attention" is where the MLP begins
        before_mlp, after = after, None
    if not any((before_attention, before_mlp, after, after_mlp)):
        wanted = "input_layernorm, ln_1, post_attention_layernorm, pre_feedforward_layernorm, post_feedforward_layernorm, ln_2"
        raise UnknownArchitecture(f"{layer.name}: no norm called {wanted}; it has {_names(layer)}")
    return before_attention, before_mlp, after, after_mlp


def _embedding(model: nn.Module, getter: str) -> Part | None:
    module = getattr(model, getter, lambda: None)()
    return next((Part(name, m) for name, m in model.named_modules() if m is module), None) if module is not None else None


def _child(parent: Part, names: Sequence[str]) -> Part | None:
    prefix = f"{parent.name}." if parent.name else ""
    children = dict(parent.module.named_children())
    return next((Part(prefix + name, children[name]) for name in names if name in children), None)


def _need(parent: Part, names: Sequence[str]) -> Part:
    found = _child(parent, names)
    if found is None:
        where = parent.name or "the model"
        raise UnknownArchitecture(f"{where}: no module called {' or '.join(names)}; it has {_names(parent)}")
    return found


def _need_all(parent: Part, groups: Sequence[Sequence[str]]) -> tuple[Part, ...]:
    for group in groups:
        found = [_child(parent, (name,)) for name in group]
        if all(found):
            return tuple(part for part in found if part)
    wanted = " or ".join(" + ".join(group) for group in groups)
    raise UnknownArchitecture(f"{parent.name}: no modules {wanted}; it has {_names(parent)}")


def _names(parent: Part) -> str:
    return ", ".join(_iter_names(parent)) or "no modules"


def _iter_names(parent: Part) -> Iterator[str]:
    return (name for name, _ in parent.module.named_children())
