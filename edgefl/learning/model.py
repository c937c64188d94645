"""A model as a sequence of named blocks, which can be cut between any two of them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from edgefl.data import Task
from edgefl.errors import ConfigError
from edgefl.learning.counting import BlockCount, count_blocks
from edgefl.learning.initial import initialise
from edgefl.learning.narrowing import Narrowing, SubModel, checked, index_of, narrow_factories, narrowing_of
from edgefl.learning.operators import Loss, Passes, StepTimes, trace_blocks
from edgefl.parameters import Layout, Vector

Factory = Callable[[], nn.Module]


@dataclass(frozen=True, eq=False)
class Model:
    """What a model is, without any parameters: these are values of their own.

    input_shape: of one example. num_outputs: classes, targets, or the vocabulary's size.
    factories: block name and constructor, in order; a block takes one tensor and returns one.
    seed: of the initial parameters. given: tensors to start from by name, instead of drawn ones.
    whole, first: for a stage, the model that it is a part of and its first block there.
    narrower: those that `narrowed` has made so far, by size.
    """

    name: str
    task: Task
    input_shape: tuple[int, ...]
    num_outputs: int
    seed: int
    factories: tuple[tuple[str, Factory], ...]
    given: Mapping[str, Tensor] | None = None
    whole: Model | None = None
    first: int = 0
    _stages: dict[tuple[int, int], Model] = field(default_factory=dict, init=False, repr=False)
    narrower: dict[tuple[int, ...], Model] = field(default_factory=dict, init=False, repr=False)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks, in order; parameters are named `block.rest`."""
        return tuple(name for name, _ in self.factories)

    @cached_property
    def label(self) -> str:
        """Name and number of parameters, such as "mlp/4810": what measured step times go by."""
        return f"{self.name}/{self.layout.size}"

    def build(self) -> nn.Sequential:
        """A new module; what its parameters hold means nothing until a Vector is loaded into them.

        Leaves torch's global random state as it found it.
        """
        with torch.random.fork_rng(devices=[]):
            return nn.Sequential(OrderedDict((name, make()) for name, make in self.factories))

    @cached_property
    def layout(self) -> Layout:
        """Places of the parameters in the vector, and the buffers that go with it."""
        return Layout.of_module(self.build())

    def init(self) -> Vector:
        """The initial parameters: a function of the seed, the same on every node."""
        return self._initial

    @cached_property
    def _initial(self) -> Vector:
        if self.whole is not None:
            return self.whole.cut(self.whole.init(), self.first, self.first + len(self.factories))
        module = self.build()
        initialise(module, self.seed)
        tensors = dict(module.named_parameters()) | dict(module.named_buffers()) | dict(self.given or {})
        return self._vector(tensors)

    def _vector(self, tensors: Mapping[str, Tensor]) -> Vector:
        parts = [tensors[e.name].detach().reshape(-1) for e in self.layout.entries]
        values = torch.cat(parts) if parts else torch.empty(0, dtype=self.layout.dtype)
        return Vector(self.layout, values, tuple(tensors[b.name].clone() for b in self.layout.buffers))

    def load(self, path: str | Path) -> Model:
        """This model, starting from the weights in a safetensors file.

        Raises ConfigError when the file cannot be read or holds other names, shapes or dtypes.
        """
        try:
            tensors = load_file(path)
        except (OSError, safetensors.SafetensorError) as error:
            raise ConfigError("model.load", str(path), f"a safetensors file is needed ({error})") from error
        dtype = self.layout.dtype
        needed = {e.name: (e.shape, dtype) for e in self.layout.entries}
        needed |= {b.name: (b.shape, b.dtype) for b in self.layout.buffers}
        found = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        for name in sorted(needed.keys() | found.keys()):
            if needed.get(name) != found.get(name):
                here, there = _said(needed.get(name)), _said(found.get(name))
                accepted = f"{self.name} needs {name} {here}, the file has {there}"
                raise ConfigError("model.load", str(path), accepted)
        return replace(self, given=tensors)

    def stage(self, first: int, last: int) -> Model:
        """Blocks first, ..., last - 1 as a model of its own; the same stage is always the same object."""
        self._check(first, last)
        if self.whole is not None:
            return self.whole.stage(self.first + first, self.first + last)
        if (first, last) == (0, len(self.factories)):
            return self
        stage = self._stages.get((first, last))
        if stage is None:
            stage = self._stages[first, last] = replace(
                self,
                name=f"{self.name}[{first}:{last}]",
                input_shape=self.block_counts[first - 1].output_shape if first else self.input_shape,
                factories=self.factories[first:last],
                given=None,
                whole=self,
                first=first,
            )
        return stage

    @cached_property
    def narrowing(self) -> Narrowing:
        """The sets of units that a narrower model may keep fewer of, and what hangs on them.

        Raises ConfigError for a model that cannot be narrowed, naming the block; ValueError for a stage.
        """
        if self.whole is not None:
            raise ValueError(f"{self.name} is a stage; narrow the whole model and cut that")
        return narrowing_of(self, self.build())

    def narrow(self, keep: Mapping[str, Sequence[int]]) -> SubModel:
        """A smaller model that keeps these units of these sets, and all of the others.

        Its model is the same object for as many units of each set, and this one where all are kept; init()
        of a narrower one is not a part of the whole one's: extract that. Raises as `narrowing` does, and
        ValueError for units that do not exist.
        """
        narrowing = self.narrowing
        kept = checked(self, narrowing, keep)
        model = self.narrowed(tuple(map(len, kept.values())))
        return SubModel(model, kept, index_of(self.layout, narrowing, kept))

    def narrowed(self, sizes: tuple[int, ...]) -> Model:
        """The model with so many units in each set, in the order of `narrowing`; always the same object."""
        counts = self.narrowing.counts
        if sizes == tuple(counts.values()):
            return self
        model = self.narrower.get(sizes)
        if model is None:
            makers = narrow_factories(self.narrowing, self.build(), dict(zip(counts, sizes, strict=True)))
            model = replace(self, factories=tuple(zip(self.blocks, makers, strict=True)), given=None)
            self.narrower[sizes] = model
        return model

    def block_slice(self, first: int, last: int) -> slice:
        """Where the parameters of blocks first, ..., last - 1 lie in the vector."""
        self._check(first, last)
        return slice(self._parameter_offsets[first], self._parameter_offsets[last])

    def buffer_slice(self, first: int, last: int) -> slice:
        """Where the buffers of blocks first, ..., last - 1 lie among the vector's buffers."""
        self._check(first, last)
        return slice(self._buffer_offsets[first], self._buffer_offsets[last])

    def cut(self, vector: Vector, first: int, last: int) -> Vector:
        """The part of a vector of this model that belongs to stage(first, last)."""
        where, buffers = self.block_slice(first, last), self.buffer_slice(first, last)
        # A copy: a view would keep the whole vector alive for as long as the part.
        values = vector.values[where].clone()
        return Vector(self.stage(first, last).layout, values, vector.buffers[buffers])

    def join(self, *vectors: Vector) -> Vector:
        """The vector of this model from those of consecutive stages that cover it."""
        values = torch.cat([v.values for v in vectors])
        return Vector(self.layout, values, tuple(b for v in vectors for b in v.buffers))

    def example(self, num_examples: int) -> Tensor:
        """An input of zeros: (num_examples, *input_shape), tokens (int64) or float32."""
        tokens = self.task == "language" and self.first == 0
        return torch.zeros(num_examples, *self.input_shape, dtype=torch.int64 if tokens else torch.float32)

    @cached_property
    def block_counts(self) -> tuple[BlockCount, ...]:
        """Operations, bytes and output shape of each block, per example."""
        if self.whole is not None:
            return self.whole.block_counts[self.first : self.first + len(self.factories)]
        return count_blocks(self.build(), self.example(1))

    @cached_property
    def counts(self) -> ModelCount:
        """The blocks together, per example; the gradient at the input is left out of backward_flops."""
        blocks = self.block_counts
        backward = sum(b.backward_flops for b in blocks)
        return ModelCount(
            forward_flops=sum(b.forward_flops for b in blocks),
            backward_flops=backward - blocks[0].backward_flops + blocks[0].first_backward_flops,
            input_gradient_flops=blocks[0].backward_flops - blocks[0].first_backward_flops,
            saved_bytes=sum(b.saved_bytes for b in blocks),
            parameter_bytes=self.layout.size * self.layout.dtype.itemsize,
        )

    @cached_property
    def block_passes(self) -> tuple[Passes, ...]:
        """The operators of each block; of a whole model, those of its loss at the end."""
        if self.whole is not None:
            whole = self.whole.block_passes
            end = self.first + len(self.factories)
            # The loss belongs to the stage that ends where the model ends.
            return whole[self.first : end + (end == len(self.whole.factories))]
        return trace_blocks((*self.build(), Loss(self.task)), self.example(1))

    @cached_property
    def step_times(self) -> StepTimes:
        """What its passes take where a device's kernels are measured."""
        passes, blocks = self.block_passes, len(self.factories)
        loss = passes[blocks] if len(passes) > blocks else None
        return StepTimes(passes[:blocks], loss, self.layout.size, math.prod(self.input_shape))

    @cached_property
    def _parameter_offsets(self) -> tuple[int, ...]:
        return _running(self.blocks, {e.name: e.numel for e in self.layout.entries})

    @cached_property
    def _buffer_offsets(self) -> tuple[int, ...]:
        return _running(self.blocks, {b.name: 1 for b in self.layout.buffers})

    def _check(self, first: int, last: int) -> None:
        if not 0 <= first < last <= len(self.factories):
            raise ValueError(f"blocks {first}:{last} of {self.name}, which has {len(self.factories)}")


@dataclass(frozen=True)
class ModelCount:
    """A model or stage, per example: operations, bytes saved for the backward pass; bytes of parameters."""

    forward_flops: float
    backward_flops: float
    input_gradient_flops: float
    saved_bytes: int
    parameter_bytes: int


def _running(blocks: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Where each block begins, and the end, when names like `block.rest` take so many places each."""
    totals = dict.fromkeys(blocks, 0)
    for name, size in sizes.items():
        totals[name.split(".", 1)[0]] += size
    offsets = [0]
    for block in blocks:
        offsets.append(offsets[-1] + totals[block])
    return tuple(offsets)


def _said(tensor: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    if tensor is None:
        return "no such tensor"
    shape, dtype = tensor
    return f"{shape} {str(dtype).removeprefix('torch.')}, {math.prod(shape)} values"
