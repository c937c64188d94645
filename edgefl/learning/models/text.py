"""Models that predict the next character or token: (B, T) int64 to (B, T, vocabulary) logits."""

from __future__ import annotations

import math
from functools import partial

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from edgefl.errors import ConfigError
from edgefl.learning.models.base import Blocks, Options, Problem


class LSTM(nn.LSTM):
    """One LSTM layer as a block: (B, T, in) to (B, T, hidden); each sequence starts from zeros."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        output: Tensor = super().forward(x)[0]
        return output


class LSTMOptions(Options):
    """Characters, LSTM layers, logits: the Shakespeare model of McMahan et al. 2017."""

    embedding: int = Field(default=8, gt=0)
    """Size of a character's embedding."""
    hidden: int = Field(default=128, gt=0)
    """Units of each LSTM layer."""
    layers: int = Field(default=2, gt=0)
    """LSTM layers, one block each."""

    def blocks(self, problem: Problem) -> Blocks:
        _check_text("char-lstm", problem)
        sizes = (self.embedding, *[self.hidden] * self.layers)
        layers = tuple((f"lstm{i + 1}", partial(LSTM, sizes[i], sizes[i + 1])) for i in range(self.layers))
        return (
            ("embedding", partial(nn.Embedding, problem.num_outputs, self.embedding)),
            *layers,
            ("output", partial(nn.Linear, self.hidden, problem.num_outputs)),
        )


class Embedded(nn.Module):
    """Token and position embeddings added up: (B, T) to (B, T, width)."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)

    def forward(self, x: Tensor) -> Tensor:
        token: Tensor = self.token(x)
        return token + self.position.weight[: x.shape[1]]


class TransformerBlock(nn.Module):
    """Causal self-attention and a feed-forward part, each behind a LayerNorm: (B, T, D) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixed(self._attend(self.qkv(self.norm1(x))))
        y: Tensor = x + self.narrow(functional.gelu(self.widen(self.norm2(x))))
        return y

    def _attend(self, qkv_BTE: Tensor) -> Tensor:
        """Each position looks at itself and earlier ones. Legend: E = 3 D, H heads of K = D / H."""
        B, T, E = qkv_BTE.shape
        q_BHTK, k_BHTK, v_BHTK = qkv_BTE.view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores_BHTT = q_BHTK @ k_BHTK.transpose(-1, -2) / math.sqrt(q_BHTK.shape[-1])
        later = torch.ones(T, T, dtype=torch.bool, device=qkv_BTE.device).triu(1)
        shares_BHTT = scores_BHTT.masked_fill(later, -math.inf).softmax(-1)
        attended: Tensor = shares_BHTT @ v_BHTK
        return attended.transpose(1, 2).reshape(B, T, E // 3)


class Logits(nn.Module):
    """A last LayerNorm and the map to logits: (B, T, D) to (B, T, vocabulary)."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x))
        return y


class TransformerOptions(Options):
    """A small decoder without dropout (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762)."""

    width: int = Field(default=64, gt=0)
    """Size of a token's representation."""
    heads: int = Field(default=4, gt=0)
    """Attention heads; divides width."""
    layers: int = Field(default=2, gt=0)
    """Transformer blocks."""

    @model_validator(mode="after")
    def _divides(self) -> TransformerOptions:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self

    def blocks(self, problem: Problem) -> Blocks:
        _check_text("transformer", problem)
        layers = tuple(
            (f"layer{i + 1}", partial(TransformerBlock, self.width, self.heads)) for i in range(self.layers)
        )
        return (
            ("embedding", partial(Embedded, problem.num_outputs, problem.input_shape[0], self.width)),
            *layers,
            ("output", partial(Logits, self.width, problem.num_outputs)),
        )


def _check_text(model: str, problem: Problem) -> None:
    if problem.task != "language":
        raise ConfigError("model.name", model, f"it takes text, the data is {problem.task}")
