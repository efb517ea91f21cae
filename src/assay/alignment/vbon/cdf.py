"""How good a reward is for its prompt: the empirical distribution of rewards of the reference model, prompt by prompt."""

import json
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .bon import checked_n
from .sampling import RewardFunction, checked_rewards, plain_sampling, sampled

Smoothing = Literal["plus_one", "none"]


class RewardCDF:
    """For each prompt, the sorted rewards of M answers of the reference model; ``log_cdf`` looks up ``log F̂``.

    Variational Best-of-N Alignment, ICLR 2025 (arXiv 2407.06057). With ``k`` of the M rewards below R::

        F̂(R) = (k + 1) / (M + 1)      smoothing="plus_one": never 0, so that log F̂ ∈ [−log(M + 1), 0]
        F̂(R) = k / M                  smoothing="none"

    Rewards are compared in float64; only their order matters. Every prompt has its own table: pooled tables would give
    easy prompts high quantiles.

    Args:
        smoothing: See above.

    Attributes:
        sampling: The settings that `sample` generated with, or None; the trainer refuses to roll out with others.

    Example:
        >>> cdf = RewardCDF()
        >>> cdf.add("Once", [0.1, 0.5, 0.9])
        >>> cdf.log_cdf(["Once", "Once"], [0.5, 7.0]).exp()
        tensor([0.5000, 1.0000], dtype=torch.float64)
    """

    def __init__(self, smoothing: Smoothing = "plus_one"):
        if smoothing not in ("plus_one", "none"):
            raise ValueError(f"smoothing must be 'plus_one' or 'none', got {smoothing!r}")
        self.smoothing = smoothing
        self.sampling: dict[str, Any] | None = None
        self._rewards: dict[str, list[float]] = {}
        self._table: tuple[dict[str, int], Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self._rewards)

    def __contains__(self, prompt: Any) -> bool:
        return prompt_key(prompt) in self._rewards

    def add(self, prompt: Any, rewards: Sequence[float]) -> None:
        """Rewards of further answers to a prompt: the exact string of the data set, or its list of messages.

        Raises:
            ValueError: no rewards, or NaN among them.
        """
        values = checked_rewards(rewards, len(rewards)).tolist()
        if not values:
            raise ValueError(f"no rewards were given for the prompt {shown(prompt)}")
        self._rewards.setdefault(prompt_key(prompt), []).extend(values)
        self._table = None

    @classmethod
    def sample(
        cls,
        model: Any,
        tokenizer: Any,
        prompts: Sequence[str],
        reward_fn: RewardFunction,
        m: int = 300,
        batch_size: int = 64,
        *,
        seed: int = 0,
        smoothing: Smoothing = "plus_one",
        share: tuple[int, int] = (0, 1),
        **gen: Any,
    ) -> "RewardCDF":
        """Draws m answers of each prompt from the reference model and keeps their rewards. Once, before training.

        Args:
            model: The reference: what training starts from.
            tokenizer: Its tokenizer.
            prompts: Texts; equal ones are sampled once.
            reward_fn: ``(prompts=[...], completions=[...]) -> rewards``.
            m: Answers a prompt, ≥ 2; the paper's results settle at about 300.
            batch_size: Answers generated at a time.
            seed: Of the draws.
            smoothing: As above.
            share: ``(k, of)``: only the k-th of ``of`` parts, for several processes; `merge` joins them.
            gen: What ``model.generate`` takes (``max_new_tokens=20`` unless given). Sample as you will roll out.
        """
        checked_n(m, 2)
        cdf = cls(smoothing)
        distinct = list(dict.fromkeys(prompts))
        for which, completions in sampled(model, tokenizer, distinct, m, batch_size=batch_size, seed=seed, share=share, **gen):
            asked = [distinct[i] for i in which for _ in range(m)]
            rewards = checked_rewards(reward_fn(prompts=asked, completions=completions), len(asked)).reshape(-1, m)
            for i, row in zip(which, rewards, strict=True):
                cdf.add(distinct[i], row.tolist())
        kept = plain_sampling() | gen
        cdf.sampling = {key: kept[key] for key in plain_sampling() if key != "do_sample"}
        return cdf

    def merge(self, others: Iterable["RewardCDF"]) -> "RewardCDF":
        """Adds the tables of others to this one, and returns it."""
        for other in others:
            for prompt, rewards in other._rewards.items():
                self._rewards.setdefault(prompt, []).extend(rewards)
            self.sampling = self.sampling or other.sampling
        self._table = None
        return self

    @property
    def samples(self) -> int:
        """Rewards of the prompt that has fewest."""
        return min(map(len, self._rewards.values()), default=0)

    def log_cdf(self, prompts: Sequence[Any], rewards: Sequence[float] | Tensor) -> Tensor:
        """``log F̂`` of each reward among the rewards of its prompt.

        Args:
            prompts: ``(n,)`` prompts that have a table.
            rewards: ``(n,)``.

        Returns:
            ``(n,)`` float64, on the CPU.

        Raises:
            ValueError: a prompt without a table or with fewer than two rewards, NaN, lengths that differ.
        """
        place, table, counts = self._tables()
        R = checked_rewards(rewards, len(prompts))
        texts = {*map(type, prompts)} <= {str}
        rows = list(map(place.get, prompts if texts else map(prompt_key, prompts)))
        if None in rows:
            raise ValueError(
                f"no rewards are known for the prompt {shown(prompts[rows.index(None)])}: use cdf.add(prompt, rewards) "
                "or build the table with RewardCDF.sample over all training prompts (keys are the exact strings)"
            )
        row = torch.from_numpy(np.fromiter(rows, np.int64, len(rows)))  # a quarter of torch.tensor's time
        M = counts[row]
        if (M < 2).any():
            raise ValueError(f"a quantile needs at least 2 rewards a prompt, {shown(prompts[int(M.argmin())])} has {M.min()}")
        below = torch.searchsorted(table.index_select(0, row), R[:, None])[:, 0]  # strictly below: side left
        if self.smoothing == "plus_one":
            return ((below + 1) / (M + 1).double()).log()
        return (below / M.double()).log()

    def warn_if_coarse(self, n: int) -> None:
        """Warns when M answers a prompt cannot tell the best of n: ``n − 1 > M/4``."""
        if n - 1 > self.samples / 4:
            warnings.warn(
                f"{self.samples} rewards a prompt hardly resolve the best of n={n}: take cdf_samples ≥ {4 * (n - 1)}",
                stacklevel=3,
            )

    def _tables(self) -> tuple[dict[str, int], Tensor, Tensor]:
        """Place of each prompt, sorted rewards ``(P, M)`` filled up with ∞ on the right, rewards of each ``(P,)``."""
        if self._table is None:
            counts = torch.tensor([len(r) for r in self._rewards.values()], dtype=torch.long)
            columns = [torch.tensor(r, dtype=torch.float64) for r in self._rewards.values()]
            table = (
                torch.nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_value=float("inf")).sort(1).values
                if columns
                else torch.empty(0, 0, dtype=torch.float64)
            )
            self._table = ({prompt: i for i, prompt in enumerate(self._rewards)}, table, counts)
        return self._table

    def save(self, path: str | Path) -> None:
        """Writes rows of ``prompt`` and ``rewards`` (and ``sampling``, where known), as ``.jsonl`` or ``.parquet``."""
        path = Path(path)
        rows: list[dict[str, Any]] = [{"prompt": prompt, "rewards": rewards} for prompt, rewards in self._rewards.items()]
        if self.sampling is not None:
            rows = [{**row, "sampling": self.sampling} for row in rows]
        if path.suffix == ".parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        elif path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        else:
            raise ValueError(f"path must end in .jsonl or .parquet, got {path.name!r}")

    @classmethod
    def load(cls, path: str | Path, smoothing: Smoothing = "plus_one") -> "RewardCDF":
        """Reads what `save` wrote, or any table with the columns ``prompt`` and ``rewards``."""
        path = Path(path)
        if path.suffix == ".parquet":
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(path).to_pylist()
        elif path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        else:
            raise ValueError(f"path must end in .jsonl or .parquet, got {path.name!r}")
        cdf = cls(smoothing)
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict) or not {"prompt", "rewards"} <= row.keys():
                raise ValueError(f"{path.name}, row {number}: 'prompt' and 'rewards' were expected")
            cdf.add(row["prompt"], row["rewards"])
            cdf.sampling = row.get("sampling") or cdf.sampling
        return cdf


def prompt_key(prompt: Any) -> str:
    """A text is its own key; a list of messages is known by its JSON."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)


def shown(prompt: Any) -> str:
    key = prompt_key(prompt)
    return repr(key if len(key) <= 60 else key[:57] + "...")
