"""The study's methods: each answers a task, by full enumeration or by training a language model, at several settings.

An arm takes a `Task` and yields ``(setting, policy)``, mildest setting first. In the enumerated case a policy is its
log-probabilities ``(S,)``; in the other a trained model, or, for best-of-N itself, the texts it would answer with.
"""

import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .cdf import RewardCDF
from .exact import Strings, bon_logp, optimise
from .reward import Bound
from .trainer import VBoNConfig, VBoNTrainer

Points = Iterator[tuple[float, Any]]


@dataclass(frozen=True)
class Task:
    """What an arm works on: the enumerated ``strings``, or a language model in the folder ``path``.

    ``settings`` are keyword arguments for TRL's configurations; ``texts`` are the reference's answers by prompt and
    ``rewards (prompts, M)`` the proxy's scores of them; ``reward`` is a TRL reward function; ``quiet()`` silences TRL.
    """

    ns: tuple[int, ...]
    betas: tuple[float, ...]
    sft_n: int
    steps: int
    strings: Strings | None = None
    path: str = ""
    prompts: tuple[str, ...] = ()
    texts: Sequence[Sequence[str]] = ()
    rewards: np.ndarray | None = None
    reward: Callable[..., list[float | None]] | None = None
    settings: Mapping[str, Any] | None = None
    seed: int = 0
    quiet: Callable[[], AbstractContextManager[None]] | None = None


def vbon(task: Task, bound: Bound = "l1") -> Points:
    """The method, for each N."""
    for n in task.ns:
        if task.strings is not None:
            yield n, optimise(task.strings, bound, n, steps=task.steps, lr=0.1)[0]
        else:
            yield n, trained(task, lambda settings, n=n: VBoNConfig(n=n, bound=bound, **settings))  # type: ignore[misc]


def kl_rl(task: Task) -> Points:
    """KL-regularised RL with the reward as it is, for each β."""
    import trl

    for beta in task.betas:
        if task.strings is not None:
            yield beta, optimise(task.strings, "kl-rl", beta=beta, steps=task.steps, lr=0.1)[0]
        else:
            yield beta, trained(task, lambda settings, beta=beta: trl.RLOOConfig(beta=beta, **settings))  # type: ignore[misc]


def bon(task: Task) -> Points:
    """Best-of-N sampling itself, at N times the price: the teacher."""
    for n in task.ns:
        if task.strings is not None:
            yield n, bon_logp(task.strings, n)
        else:
            yield n, winners(task, n)


def bon_sft(task: Task) -> Points:
    """Supervised fine-tuning on winners; with all strings listed, the same on unlimited winners."""
    n = task.sft_n
    if task.strings is not None:
        target, logp = bon_logp(task.strings, n).exp(), task.strings.ref_logp
        for _ in range(task.steps):  # the natural gradient of the forward KL mixes in the teacher
            logp = (0.9 * logp.exp() + 0.1 * target).log()
        yield n, logp
        return
    import trl
    from datasets import Dataset

    rows = [(p, text) for p, texts in zip(task.prompts, winners(task, n), strict=True) for text in texts if text]
    data = Dataset.from_dict({"prompt": [p for p, _ in rows], "completion": [text for _, text in rows]})
    with _workspace(task) as folder:
        settings = {k: v for k, v in (task.settings or {}).items() if k not in ("num_generations", "max_completion_length")}
        trainer = trl.SFTTrainer(task.path, args=trl.SFTConfig(output_dir=folder, **settings), train_dataset=data)
        trainer.train()
        yield n, trainer.model


def trained(task: Task, config: Callable[[dict[str, Any]], Any]) -> Any:
    """The policy after RLOO on the task's prompts, with the raw reward or with vBoN's."""
    import trl
    from datasets import Dataset

    assert task.reward is not None
    assert task.rewards is not None
    with _workspace(task) as folder:
        data = Dataset.from_dict({"prompt": list(task.prompts)})
        args = config({**(task.settings or {}), "output_dir": folder})
        if isinstance(args, VBoNConfig):
            trainer: Any = VBoNTrainer(task.path, task.reward, args, data, cdf=table(task))
        else:
            trainer = trl.RLOOTrainer(task.path, task.reward, args, data)
        trainer.train()
        return trainer.model


def table(task: Task) -> RewardCDF:
    """The reference's rewards, which the task brings with it: nothing is sampled again."""
    cdf = RewardCDF()
    assert task.rewards is not None
    for prompt, row in zip(task.prompts, task.rewards.tolist(), strict=True):
        cdf.add(prompt, row)
    return cdf


def winners(task: Task, n: int) -> list[list[str]]:
    """The best of every n answers of the reference, by prompt: ``M // n`` each, from groups that do not overlap."""
    assert task.rewards is not None
    groups = task.rewards.shape[1] // n
    if groups < 1:
        raise ValueError(f"the table has {task.rewards.shape[1]} answers a prompt, too few for the best of {n}")
    best = task.rewards[:, : groups * n].reshape(len(task.prompts), groups, n).argmax(-1)
    return [[texts[g * n + int(k)] for g, k in enumerate(row)] for texts, row in zip(task.texts, best, strict=True)]


@contextmanager
def _workspace(task: Task) -> Iterator[str]:
    """A folder for a trainer's output, and silence, for as long as it trains."""
    silence = task.quiet() if task.quiet else nullcontext()
    with tempfile.TemporaryDirectory(prefix="vbon-") as folder, silence, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of TRL's and transformers' own making
        yield folder


def order_twin(task: Task) -> Task:
    """The same task with ``exp(reward)`` in place of the reward: the same order, another scale."""
    assert task.strings is not None
    return Task(**{**task.__dict__, "strings": Strings(task.strings.ref_logp, task.strings.rewards.exp())})


def simulated(strings: Strings, n: int, draws: int, seed: int) -> float:
    """How far the closed form is from best-of-n done by drawing, ties broken by a coin: χ² in its standard deviations."""
    generator = torch.Generator().manual_seed(seed)
    p = strings.ref_logp.exp()
    counts = torch.zeros(len(p), dtype=torch.double)
    for _ in range(10):
        drawn = torch.multinomial(p, draws // 10 * n, replacement=True, generator=generator).reshape(-1, n)
        coin = torch.rand(drawn.shape, dtype=torch.double, generator=generator)
        reward = strings.rewards[drawn]
        top = reward == reward.max(1, keepdim=True).values
        best = torch.where(top, coin, -1.0).argmax(1, keepdim=True)
        counts += torch.bincount(drawn.gather(1, best)[:, 0], minlength=len(p))
    expected = bon_logp(strings, n).exp() * counts.sum()
    often = expected >= 5  # χ² needs some counts in every class; the rare strings are one class together
    seen = torch.cat([counts[often], counts[~often].sum()[None]])
    wanted = torch.cat([expected[often], expected[~often].sum()[None]])
    chi2 = ((seen - wanted).square() / wanted.clamp_min(1e-9)).sum().item()
    freedom = len(seen) - 1
    return (chi2 - freedom) / math.sqrt(2 * freedom)
