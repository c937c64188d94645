"""A small language that speakers use differently, generated from a grammar: next-character prediction."""

from __future__ import annotations

import numpy as np
import torch

from edgefl.data.config import DataConfig
from edgefl.data.dataset import Dataset
from edgefl.keyed import generator

ALPHABET = "\n ,.abcdefghijklmnopqrstuvwxyz"
"""Character i has token i."""
WORDS: dict[str, tuple[str, ...]] = {
    "N": (
        "board",
        "river",
        "lamp",
        "garden",
        "signal",
        "stone",
        "engine",
        "window",
        "cloud",
        "bridge",
        "horse",
    ),
    "V": ("carries", "follows", "warms", "hides", "answers", "moves", "counts", "watches", "leaves", "mends"),
    "A": ("quiet", "small", "bright", "heavy", "old", "green", "quick", "lonely", "warm", "broken"),
    "D": ("the", "a", "every", "this", "my", "no"),
    "P": ("under", "behind", "near", "over", "beside", "without"),
    "R": ("slowly", "again", "today", "often", "gladly", "never"),
    "C": ("and", "but", "while", "because", "so"),
}
"""Terminals by class: noun, verb, adjective, determiner, preposition, adverb, conjunction."""
RULES: dict[str, tuple[str, ...]] = {
    "sentence": ("clause .", "clause , C clause .", "R , clause ."),
    "clause": ("phrase V phrase", "phrase V R", "phrase V phrase place"),
    "phrase": ("D N", "D A N", "D A A N"),
    "place": ("P phrase",),
}
"""Each symbol's expansions; a speaker has its own probabilities for them, and for the words of each class."""
CONCENTRATION = 0.4
"""Of the Dirichlet that speakers' probabilities are drawn from: some ways of speaking dominate."""
EXAMPLES = (40, 160)
"""Least and most examples of a speaker where [data] does not fix them."""
TEST_SHARE = 0.1


def load_text(config: DataConfig) -> Dataset:
    """x: (n, length) int64 tokens; y: the same, one character later; owners: the speakers.

    Every speaker's last tenth is for the test. num_classes is the size of the alphabet.
    """
    speakers = [_speaker(config, k) for k in range(config.num_owners)]
    cuts = [len(rows) - max(1, round(TEST_SHARE * len(rows))) for rows in speakers]
    train = torch.from_numpy(np.concatenate([rows[:cut] for rows, cut in zip(speakers, cuts, strict=True)]))
    test = torch.from_numpy(np.concatenate([rows[cut:] for rows, cut in zip(speakers, cuts, strict=True)]))
    return Dataset(
        "text",
        "language",
        *(train[:, :-1].contiguous(), train[:, 1:].contiguous()),
        *(test[:, :-1].contiguous(), test[:, 1:].contiguous()),
        num_classes=len(ALPHABET),
        owners=np.repeat(np.arange(config.num_owners), cuts),
    )


def decode(tokens: np.ndarray) -> str:
    """The characters of (length,) tokens."""
    return "".join(ALPHABET[int(token)] for token in tokens)


def _speaker(config: DataConfig, k: int) -> np.ndarray:
    """(examples, length + 1) tokens: one speaker's text, cut into pieces that overlap by one character."""
    rng = generator(config.data_seed, "text", k)
    num_examples = config.examples_per_owner or int(rng.integers(EXAMPLES[0], EXAMPLES[1] + 1))
    habits = {
        symbol: rng.dirichlet(np.full(len(choices), CONCENTRATION)).cumsum()
        for symbol, choices in (RULES | WORDS).items()
    }
    needed = num_examples * config.length + 1
    text = ""
    while len(text) < needed:
        text += "\n".join(_sentence(habits, rng) for _ in range(32)) + "\n"
    tokens = np.array([ALPHABET.index(character) for character in text[:needed]], dtype=np.int64)
    starts = np.arange(num_examples)[:, None] * config.length
    return np.asarray(tokens[starts + np.arange(config.length + 1)])


def _sentence(habits: dict[str, np.ndarray], rng: np.random.Generator) -> str:
    """Expand the grammar from the left with one speaker's cumulative probabilities."""
    pending, words = ["sentence"], []
    while pending:
        symbol = pending.pop()
        if symbol not in habits:
            words.append(symbol)
            continue
        choices = RULES.get(symbol) or WORDS[symbol]
        place = int(np.searchsorted(habits[symbol], rng.random()))
        chosen = choices[min(place, len(choices) - 1)]  # rounding may leave the last sum below 1
        pending += reversed(chosen.split()) if symbol in RULES else []
        words += [] if symbol in RULES else [chosen]
    return " ".join(words).replace(" ,", ",").replace(" .", ".")
