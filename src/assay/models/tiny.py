"""Small language models of random weights in the shapes of real ones, for tests: nothing is fetched."""

from typing import Any

import torch

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
ARCHITECTURES: dict[str, dict[str, int]] = {
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 16},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 16},
    "gpt2": {},
    "gpt_neox": {},
    "llama": {},
    "mistral": {"sliding_window": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
"""Architectures by their name in transformers, with what they need beside the common small shape."""

_PAD, _BOS, _EOS = "<pad>", "<bos>", "<eos>"
_CHAT = (
    "{% for message in messages %}<bos>{{ message['role'] }}\n{{ message['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


def tiny_language_model(architecture: str, *, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Two layers of width 32 with four heads and random weights, the same ones every time, and a tokenizer of bytes.

    Raises:
        ValueError: an architecture that is not in `ARCHITECTURES`.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"no tiny architecture {architecture!r}; there are {', '.join(ARCHITECTURES)}")
    from .language import transformers

    hf = transformers()
    tokenizer = byte_tokenizer()
    usual = hf.AutoConfig.for_model(architecture)
    config = hf.AutoConfig.for_model(
        architecture,
        **{key: value for key, value in _SHAPE.items() if hasattr(usual, key)},  # GPT-2 knows no key-value heads
        **ARCHITECTURES[architecture],
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval(), tokenizer


def byte_tokenizer() -> Any:
    """One token a byte of UTF-8, 256 of them after ``<pad>``, ``<bos>`` and ``<eos>``: any text round-trips."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([_PAD, _BOS, _EOS, *alphabet])}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=_PAD,
        bos_token=_BOS,
        eos_token=_EOS,
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT,
    )
