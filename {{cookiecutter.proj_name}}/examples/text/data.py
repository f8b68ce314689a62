"""Short reviews, written by formula, and how sentences of different lengths become a batch."""

import random
import re
from collections import UserDict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common.base.errors import UserError

THINGS = ("acting", "book", "dinner", "ending", "film", "hotel", "music", "plot", "room", "service", "story", "view")
GOOD = ("brilliant", "charming", "clever", "good", "great", "lovely", "perfect", "superb")
BAD = ("awful", "bad", "boring", "dull", "horrible", "poor", "terrible", "weak")
OTHERS = ("<start>", "and", "but", "i", "is", "not", "quite", "really", "the", "think", "very", "was")
WORDS = tuple(sorted((*OTHERS, *THINGS, *GOOD, *BAD)))
NUMBERS = {word: number for number, word in enumerate(WORDS)}

Sentences = UserDict[str, Tensor]
"""A batch: `words` (B, T), int64, `mask` (B, T), bool, false on padding, and `label` (B,), int64.

It is a mapping but not a dict, like the batches of Hugging Face's tokenizers.
"""


class Reviews:
    """Reviews of one or two clauses, positive (1) or negative (0). After "but", only the second clause counts.

    Review i of a split is a function of i.

    Args:
        reviews: how many.
    """

    classes = ("negative", "positive")
    lines = True  # predict.py reads files of one review per line
    suffixes = frozenset({".txt"})
    random = False  # each review draws from a generator of its own, so the loader need not seed

    def __init__(self, data_dir: Path, mode: str, reviews: int) -> None:
        self.mode, self.reviews = mode, reviews

    def __len__(self) -> int:
        return self.reviews

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`words` (T,), int64, with T from 5 to 18, and `label`, int64 scalar."""
        words, label = review(random.Random(f"{self.mode} {index}"))
        return {"words": torch.tensor([NUMBERS[word] for word in words]), "label": torch.tensor(label)}

    @classmethod
    def from_files(cls, files: Sequence[str], **_: object) -> "Lines":
        """Return a dataset of these reviews, without labels."""
        return Lines(files)

    @staticmethod
    def collate(items: list[dict[str, Tensor]]) -> Sentences:
        """Pad every sentence to the length of the longest."""
        lengths = torch.tensor([len(item["words"]) for item in items])
        words = pad_sequence([item["words"] for item in items], batch_first=True)
        mask = torch.arange(words.shape[1]) < lengths[:, None]
        labels = {"label": torch.stack([item["label"] for item in items])} if "label" in items[0] else {}
        return UserDict(words=words, mask=mask, **labels)


class Lines:
    """Reviews that a person wrote, in the words of this example."""

    random = False
    collate = staticmethod(Reviews.collate)

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`words` (T,), int64. Raises `UserError` for a word that no review has."""
        words = ["<start>", *re.findall(r"[^\W_]+", self.texts[index].lower())]
        if unknown := [word for word in words if word not in NUMBERS]:
            raise UserError(f"unknown words: {', '.join(unknown)}; there are {', '.join(WORDS[1:])}")
        return {"words": torch.tensor([NUMBERS[word] for word in words])}


def review(draw: random.Random) -> tuple[list[str], int]:
    """Return the words of a random review, and whether it is positive."""
    label = draw.randrange(2)
    words = ["<start>"] + ["i", "think"] * draw.randrange(2)
    joined = draw.choice(("", "", "and", "but"))
    if joined:
        words += [*clause(draw, label if joined == "and" else 1 - label), joined]
    return words + clause(draw, label), label


def clause(draw: random.Random, positive: int) -> list[str]:
    """As in "the film was not very good". Either the adjective is negative or there is a "not", or both or none."""
    negated = draw.randrange(2)
    words = ["the", draw.choice(THINGS), draw.choice(("is", "was"))] + ["not"] * negated
    words += draw.sample(("quite", "really", "very"), draw.randrange(3))
    return [*words, draw.choice(GOOD if positive != negated else BAD)]
