"""Language models by name, and where their parts are.

A name is a pretrained model of `available`, ``"tiny-<architecture>"`` (random weights, for tests), a local folder, or an
id of the Hugging Face hub.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "language": ["load_language_model"],
        "locate": ["Layer", "Located", "Part", "UnknownArchitecture", "locate"],
        "pretrained": ["Pretrained", "available", "pull"],
        "tiny": ["ARCHITECTURES", "tiny_language_model"],
    },
)
