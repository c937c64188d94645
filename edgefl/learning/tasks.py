"""What each task minimises and reports.

classification: output (B, C) logits, targets (B,) int64; cross-entropy; accuracy.
regression: output (B, K), targets (B, K) or, for K = 1, (B,); mean squared error; rmse.
language: output (B, T, C) logits, targets (B, T) int64; cross-entropy per token; perplexity, accuracy.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional

from edgefl.data import Task


def mean_loss(task: Task, output: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
    """The loss to minimise, a 0-d tensor: mean over the batch (and over its tokens or values).

    weight: (B,) of each example in the mean, not all 0; all alike where None.
    """
    if weight is not None:
        return _losses(task, output, targets) @ weight / weight.sum()
    if task == "regression":
        return functional.mse_loss(output, targets.view_as(output))
    return functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def _losses(task: Task, output: Tensor, targets: Tensor) -> Tensor:
    """(B,) the loss of each example."""
    if task == "regression":
        losses = functional.mse_loss(output, targets.view_as(output), reduction="none")
    else:
        losses = functional.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(len(output), -1).mean(1)


def teaching_loss(output: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(output / T)), 0-d: mean over the batch (and its tokens).

    output, teacher: logits (B, C) or (B, T, C). The factor T^2 keeps the gradient's size at any temperature.
    Source: Hinton, Vinyals, Dean 2015, section 2 (https://arxiv.org/abs/1503.02531).
    """
    own, other = (
        functional.log_softmax(logits.flatten(0, -2) / temperature, dim=1) for logits in (output, teacher)
    )
    return functional.kl_div(own, other, reduction="batchmean", log_target=True) * temperature**2


def num_correct(task: Task, output: Tensor, targets: Tensor) -> int:
    """How many labels or tokens the largest logit names; 0 for regression."""
    return 0 if task == "regression" else int((output.argmax(-1) == targets).sum())


def metrics(task: Task, loss: float, correct: int, num_targets: int) -> dict[str, float]:
    """The task's metrics, its own first. num_targets: labels or tokens that `correct` counts among."""
    if task == "regression":
        return {"rmse": math.sqrt(loss)}
    accuracy = correct / num_targets
    if task == "classification":
        return {"accuracy": accuracy}
    return {"perplexity": math.exp(min(loss, 700.0)), "accuracy": accuracy}
