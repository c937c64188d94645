"""A model as one flat vector with a layout, and what papers do to such vectors."""

from edgefl.parameters.layout import BufferSpec, Entry, Layout
from edgefl.parameters.vector import Vector, WeightedMean, mix

__all__ = ["BufferSpec", "Entry", "Layout", "Vector", "WeightedMean", "mix"]
