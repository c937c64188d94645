"""Models and their cuts, work items, what they cost on a device, and who carries them out."""

from edgefl.learning.cost import Cost, duration_s
from edgefl.learning.executors import Batched, Executor, Inline, make_executor
from edgefl.learning.learner import Learner
from edgefl.learning.model import Model
from edgefl.learning.models import ModelConfig, Problem, build_model
from edgefl.learning.narrowing import SubModel
from edgefl.learning.optimizer import Optimizer
from edgefl.learning.work import (
    Call,
    Evaluate,
    Evaluation,
    Gradient,
    GradientResult,
    LocalSGD,
    StageBackward,
    StageForward,
    StageGradient,
    Trained,
    Work,
)
from edgefl.learning.workload import TrainConfig, Workload

__all__ = [
    "Batched",
    "Call",
    "Cost",
    "Evaluate",
    "Evaluation",
    "Executor",
    "Gradient",
    "GradientResult",
    "Inline",
    "Learner",
    "LocalSGD",
    "Model",
    "ModelConfig",
    "Optimizer",
    "Problem",
    "StageBackward",
    "StageForward",
    "StageGradient",
    "SubModel",
    "TrainConfig",
    "Trained",
    "Work",
    "Workload",
    "build_model",
    "duration_s",
    "make_executor",
]
