"""Which models may be saved: a plain checkpoint cannot hold what happens to activations on their way."""

import functools
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

ONLINE_ROTATIONS = (
    "this model rotates the inputs of o_proj and down_proj as it runs, which a plain checkpoint cannot hold: the model that "
    "is loaded would compute something else. What saves and loads is a quantised model: quantise the model as it was "
    "before rotation (RRSConfig(w_bits=16, a_bits=16) rotates and rounds nothing), or save before dequantize()"
)


def refuse_saving(model: nn.Module, reason: str) -> None:
    """Makes ``save_pretrained`` of the model and of the models inside it raise ValueError, also in copies of them."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            vars(module)["save_pretrained"] = functools.partial(_refuse, reason)


def _refuse(reason: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(f"save_pretrained: {reason}")


def allow_saving(model: nn.Module) -> None:
    """Takes `refuse_saving` back."""
    for module in model.modules():
        vars(module).pop("save_pretrained", None)
