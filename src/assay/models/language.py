"""Causal language models by name."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from assay.data.hub import first_line, is_hub_id
from assay.data.places import DataUnavailable

from . import pretrained, tiny

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EXTRA = "compression"


def load_language_model(
    name: str | Path, *, dtype: torch.dtype = torch.float32
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """A causal language model in evaluation mode, on the CPU, and its tokenizer.

    Args:
        name: ``"smollm2-135m"``, ``"gemma3-270m"`` (fetched and converted at the first call: a minute or two);
            ``"tiny-<architecture>"``, for instance ``"tiny-llama"``: two layers of random weights, the same ones every
            time, and a tokenizer of bytes; a folder that transformers can load; or an id of the Hugging Face hub.
            Code that comes with a model is never run (``trust_remote_code`` stays off).
        dtype: What the weights are cast to, a floating type.

    Raises:
        ValueError: an unknown architecture, a dtype that is not floating, a folder that holds no such model.
        DataUnavailable: no model of that name here, and none could be fetched.
        ImportError: transformers is not installed; the message has the command that mends it.

    Example:
        >>> model, tokenizer = load_language_model("tiny-llama")
        >>> batch = tokenizer(["some text"], return_tensors="pt")
        >>> model(**batch).logits.shape
        torch.Size([1, 9, 259])
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating torch.dtype, got {dtype!r}")
    hf = transformers()
    text = str(name)
    if text.startswith("tiny-"):
        return tiny.tiny_language_model(text.removeprefix("tiny-"), dtype=dtype)
    path = Path(name).expanduser()
    if pretrained.named(text) is not None:
        return _from_pretrained(hf, pretrained.pull(text), dtype)
    if path.is_dir():
        try:
            return _from_pretrained(hf, path, dtype)
        except (OSError, ValueError) as failure:
            raise ValueError(f"{path} holds no model that transformers can load: {first_line(failure)}") from failure
    names = ", ".join(repr(model.name) for model in pretrained.available())
    home = f"a folder, a hub id 'owner/name', 'tiny-<architecture>', or one of {names}"
    if not is_hub_id(text):
        raise DataUnavailable(text, [path.absolute()], home, setting="ASSAY_MODELS")
    try:
        return _from_pretrained(hf, text, dtype)
    except OSError as failure:
        url = f"https://huggingface.co/{text}"
        raise DataUnavailable(text, [path.absolute(), url], url, first_line(failure), "ASSAY_MODELS") from failure


def transformers(*also: str) -> Any:
    """The package transformers, or an error with the command that installs it and what else is needed."""
    for package in ("transformers", *also):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"language models need the package {package!r}: pip install 'assay[{EXTRA}]'", name=package)
    import transformers as hf

    return hf


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars, which would tear a live table; as it was, afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _from_pretrained(hf: Any, source: str | Path, dtype: torch.dtype) -> tuple[Any, Any]:
    with quiet():
        model = hf.AutoModelForCausalLM.from_pretrained(source, dtype=dtype, trust_remote_code=False)
        tokenizer = hf.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # GPT-2 and others have none, and batches need one
    return model.eval(), tokenizer
