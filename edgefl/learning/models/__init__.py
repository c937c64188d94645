"""The models that an experiment can name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from edgefl.data import Dataset
from edgefl.errors import ConfigError, nearest
from edgefl.learning.model import Model
from edgefl.learning.models.base import Options, Problem
from edgefl.learning.models.conv import CNNOptions, ResNetOptions, VGGOptions
from edgefl.learning.models.dense import LinearOptions, MLPOptions
from edgefl.learning.models.text import LSTMOptions, TransformerOptions

__all__ = ["MODELS", "ModelConfig", "Options", "Problem", "build_model"]

MODELS: dict[str, type[Options]] = {
    "linear": LinearOptions,
    "mlp": MLPOptions,
    "cnn": CNNOptions,
    "resnet": ResNetOptions,
    "vgg": VGGOptions,
    "char-lstm": LSTMOptions,
    "transformer": TransformerOptions,
}


class ModelConfig(BaseModel):
    """The [model] table: the model's name, and that model's own keys.

    Raises ConfigError when made, for an unknown name or key or a value out of range.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = "mlp"
    """linear, mlp, cnn, resnet, vgg, char-lstm or transformer."""
    load: str | None = None
    """Start from the weights in this safetensors file."""

    # Checked here and not in a validator: pydantic would wrap the error in several lines of its own.
    def __init__(self, **values: Any) -> None:
        shared = {key: values.pop(key) for key in ("name", "load") if key in values}
        options = _options(shared.get("name", "mlp"), values)
        super().__init__(**shared, **options.model_dump())


def _options(name: object, own: Mapping[str, Any]) -> Options:
    """The named model's own keys, checked, with their defaults."""
    if not isinstance(name, str) or name not in MODELS:
        raise ConfigError("model.name", name, nearest(str(name), MODELS))
    kind = MODELS[name]
    for key, value in own.items():
        if key not in kind.model_fields:
            known = [*ModelConfig.model_fields, *kind.model_fields]
            raise ConfigError(f"model.{key}", value, f"{name} has no such key; {nearest(key, known)}")
    try:
        return kind(**own)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(["model", *map(str, first["loc"])])
        raise ConfigError(key, first["input"], first["msg"]) from error


def build_model(config: ModelConfig, problem: Problem | Dataset, seed: int) -> Model:
    """The model that a [model] table asks for, fitted to the data. seed: of its initial parameters.

    Raises ConfigError where the model does not fit the data, or the file of `load` not the model.
    """
    if isinstance(problem, Dataset):
        problem = Problem.of(problem)
    blocks = _options(config.name, config.model_extra or {}).blocks(problem)
    model = Model(config.name, problem.task, problem.input_shape, problem.num_outputs, seed, blocks)
    return model.load(config.load) if config.load is not None else model
