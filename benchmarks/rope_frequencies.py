"""The audit of a model of SmolLM2-135M's shape on 512 tokens, beside one forward pass that returns its attention weights.

Random weights: what is timed does not depend on them. Neither side computes the language model's head.
"""

import copy

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from assay.bench.speed import Contest
from assay.language import analyse_rope, apply_p_rope, rope_ablate

torch.manual_seed(0)
torch.set_grad_enabled(False)
config = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config).eval()
eager = copy.deepcopy(model)
eager.set_attn_implementation("eager")
turned = apply_p_rope(copy.deepcopy(model), 0.75)
ids = torch.randint(49152, (1, 512))
highest = torch.arange(32) >= 8


def forward(network, **kwargs):
    return lambda: network.base_model(ids, use_cache=False, **kwargs)


def ablated():
    with rope_ablate(model, highest):
        return model.base_model(ids, use_cache=False)


def audit(**kwargs):
    return lambda: analyse_rope(model, ids, shuffle_control=False, **kwargs)


attentions = forward(eager, output_attentions=True)
name = "forward with output_attentions"
contests = [
    Contest("lengths and head scores", ours=audit(), peer=attentions, peer_name=name, target=1.5, memory=True),
    Contest("with contributions", ours=audit(contrib=True), peer=attentions, peer_name=name, target=3.5, memory=True),
    Contest("the highest quarter un-rotated", ours=ablated, peer=attentions, peer_name=name),
    Contest("0.75-RoPE", ours=forward(turned), peer=forward(model), peer_name="RoPE", target=1.05),
]
