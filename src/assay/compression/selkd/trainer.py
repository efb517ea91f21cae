"""A Hugging Face trainer that distils selected classes. Imported by its own name: the loss needs torch alone.

``from assay.compression.selkd.trainer import SelKDTrainer``
"""

from typing import Any

import torch
from torch import Tensor, nn

from .loss import SelKDLoss

try:
    from transformers import Trainer
except ImportError as missing:
    raise ImportError("SelKDTrainer needs the package 'transformers': pip install 'assay[compression]'") from missing


class SelKDTrainer(Trainer):
    """`transformers.Trainer` for a classifier whose loss is `SelKDLoss` against a teacher.

    Shi, Shi and Yan, "SelKD: Selective Knowledge Distillation via Optimal Transport Perspective", ICLR 2025.

    Both models see the same inputs. The data's ``labels`` are the teacher's class ids; student and teacher return an output
    with ``logits``. Metrics are computed on the student's logits beside those labels: `remap_labels` and `predict_open`
    translate. An evaluation loss sees the labels through the plans; choose models by a metric.

    Args:
        teacher: The large model; moved to the student's device, put in evaluation mode, not trained and not saved.
        criterion: The loss. The student must have K logits (closed) or K + 1 (open).
        args, kwargs: As `transformers.Trainer` takes them.

    Raises:
        ValueError: a loss function of another kind beside `criterion`, or what `SelKDLoss` raises for a batch.

    Example:
        >>> trainer = SelKDTrainer(
        ...     model=student, teacher=teacher, criterion=SelKDLoss([3, 8, 14], mode="open"), args=args, train_dataset=rows
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(self, *args: Any, teacher: nn.Module, criterion: SelKDLoss, **kwargs: Any):
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError("compute_loss_func must be left out: criterion is the loss")
        super().__init__(*args, **kwargs)
        self.teacher = teacher.to(self.args.device).eval()
        self.criterion = criterion.to(self.args.device)
        self.model_accepts_loss_kwargs = False  # the loss is a mean of its batch: the trainer divides by accumulation steps

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor | tuple[Tensor, Any]:
        features = {name: value for name, value in inputs.items() if name != "labels"}
        outputs = model(**features)
        self.teacher.eval()  # whoever shares it may have left it in training mode
        with torch.no_grad():
            teacher_logits = self.teacher(**features).logits
        loss = self.criterion(outputs.logits, teacher_logits, inputs.get("labels"))
        return (loss, outputs) if return_outputs else loss
