"""What `POWERTrainer` can be told, and what of DPO's settings means nothing to it."""

from dataclasses import dataclass, field

from trl import DPOConfig

from .loss import checked_beta, checked_eta, checked_gamma

NOT_OURS = {
    "loss_type": (["sigmoid"], "the loss is POWER's"),
    "loss_weights": (None, "the loss is POWER's"),
    "label_smoothing": (0.0, "labels are gamma's work"),
    "f_divergence_type": ("reverse_kl", "there is no reference to diverge from"),
    "use_weighting": (False, "set `weighting`"),
    "ld_alpha": (None, "set `weighting`"),
    "precompute_ref_log_probs": (False, "there is no reference model"),
    "sync_ref_model": (False, "there is no reference model"),
}
"""Settings of DPO that would change nothing here, with their defaults and why."""


@dataclass
class POWERConfig(DPOConfig):
    """`trl.DPOConfig` with POWER's settings; see `POWERTrainer` for the objective.

    Args:
        beta: Scale of margins, > 0; 2 to 10 are usual for length-normalised ones.
        eta: Weight of the likelihood term, ≥ 0, or ``"auto"``: 0.001 with dynamic labels, 0.1 without. It is not silenced
            by labels, so with ``gamma > 0`` keep it small or set ``gate_sft``.
        gamma: How fast labels follow the policy, in [0, 1); 0: labels stay 1, plain POWER.
        weighting: ``"inverse_length"`` (1 / tokens, the end token counted), ``"uniform"`` (1), or ``"column"``:
            the columns ``chosen_weight`` and ``rejected_weight`` (and ``baseline_weight``). A function goes to the trainer.
        baseline: Whose likelihood is raised: ``"chosen"``, ``"initial"`` (one answer a prompt, drawn from the model before
            training), or the name of a text column.
        baseline_tokens: Length limit of the answers drawn for ``baseline="initial"``.
        gate_sft: Multiply the likelihood term by the label.
        id_column: Ids of the pairs, all different; row numbers if the data has no such column.
        label_column: Where labels start, in [0, 1], for each pair; None: all at 1.
        label_sharing: ``"none"``, or ``"prompt"``: one label for all pairs of a prompt. A function goes to the trainer.
        update: ``"before"``: the loss uses the label that this visit has updated; ``"after"``: the one before it.

    Raises:
        ValueError: a value outside its range, or one of DPO's settings that has no meaning here.

    Example:
        >>> POWERConfig(output_dir="out", gamma=0.0, bf16=False).resolved_eta
        0.1
    """

    beta: float = field(default=2.0, metadata={"help": "Scale of margins, > 0."})
    eta: float | str = field(default="auto", metadata={"help": "Weight of the likelihood term, at least 0, or 'auto'."})
    gamma: float = field(default=0.1, metadata={"help": "How fast labels follow the policy, in [0, 1)."})
    weighting: str = field(default="inverse_length", metadata={"help": "'inverse_length', 'uniform' or 'column'."})
    baseline: str = field(default="chosen", metadata={"help": "'chosen', 'initial' or the name of a text column."})
    baseline_tokens: int = field(default=128, metadata={"help": "Length limit of the answers of baseline='initial'."})
    gate_sft: bool = field(default=False, metadata={"help": "Multiply the likelihood term by the label."})
    id_column: str = field(default="pair_id", metadata={"help": "Ids of the pairs; row numbers if it is not there."})
    label_column: str | None = field(default=None, metadata={"help": "Where each pair's label starts."})
    label_sharing: str = field(default="none", metadata={"help": "'none' or 'prompt'."})
    update: str = field(default="before", metadata={"help": "'before' or 'after' the loss of this visit."})

    def __post_init__(self) -> None:
        if isinstance(self.eta, str) and self.eta != "auto":  # the command line gives text
            self.eta = float(self.eta)
        checked_beta(self.beta)
        checked_gamma(self.gamma)
        checked_eta(self.resolved_eta)
        for name, allowed in (
            ("weighting", ("inverse_length", "uniform", "column")),
            ("label_sharing", ("none", "prompt")),
            ("update", ("before", "after")),
        ):
            if getattr(self, name) not in allowed:
                hint = "; give a function to POWERTrainer" if name != "update" and callable(getattr(self, name)) else ""
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}{hint}")
        if self.baseline_tokens < 1:
            raise ValueError(f"baseline_tokens must be at least 1, got {self.baseline_tokens}")
        if self.gamma == 0:
            idle = {"gate_sft": self.gate_sft, "label_column": self.label_column, "label_sharing": self.label_sharing != "none"}
            if used := [name for name, value in idle.items() if value]:
                raise ValueError(f"{' and '.join(used)} would do nothing: gamma=0 has no labels")
        super().__post_init__()
        for name, (default, why) in NOT_OURS.items():
            if getattr(self, name) != default:
                raise ValueError(f"{name}={getattr(self, name)!r} means nothing to POWER: {why}")

    @property
    def resolved_eta(self) -> float:
        """The number that ``eta`` stands for."""
        if isinstance(self.eta, str):
            return 1e-3 if self.gamma > 0 else 0.1
        return self.eta
