"""Texts in datasets of Hugging Face: read by index, or in sequence."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from common.base.errors import UserError
from examples.text.data import BAD, WORDS, review

COMPLAINTS = {"but", "not", *BAD}
SHARDS = 8  # of the reviews, as if they were as many files


class Texts:
    """Texts by index.

    Args:
        data_dir: folder of `files` and `tokenizer`.
        mode: train or val.
        reviews: how many reviews to make; without `files`.
        praise: only those without any complaint.
        files: pattern of JSON lines, each with a `text`, instead of reviews.
        tokenizer: folder that `save_pretrained` has written; null: a number for each word of the reviews.
    """

    random = False  # nothing is drawn, so the loader need not seed

    def __init__(
        self,
        data_dir: Path,
        mode: str,
        reviews: int = 0,
        praise: bool = False,
        files: str | None = None,
        tokenizer: str | None = None,
    ) -> None:
        self.data = _from_files(data_dir, mode, files, False) if files else made_up(mode, reviews, praise)
        self.collate = Collate(AutoTokenizer.from_pretrained(data_dir / tokenizer) if tokenizer else word_numbers())

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, str]:
        """`text`."""
        return {"text": self.data[index]["text"]}


class TextStream:
    """The same texts as a stream: nothing is held but the shard that is read, and for files not even that.

    Args:
        data_dir, mode, reviews, files, tokenizer: as for `Texts`.
        buffer: shuffle among so many texts; 0: only the order of shards changes from epoch to epoch.
    """

    def __init__(
        self,
        data_dir: Path,
        mode: str,
        reviews: int = 0,
        files: str | None = None,
        tokenizer: str | None = None,
        buffer: int = 0,
    ) -> None:
        self.data: Any = (
            _from_files(data_dir, mode, files, True)
            if files
            else made_up(mode, reviews).to_iterable_dataset(num_shards=min(SHARDS, reviews))
        )
        self.collate = Collate(AutoTokenizer.from_pretrained(data_dir / tokenizer) if tokenizer else word_numbers())
        if buffer:
            self.data = self.data.shuffle(seed=0, buffer_size=buffer)
        else:  # with a buffer, a stream's state leaves out what is in it: a resume would lose those texts
            self.state_dict, self.load_state_dict = self.data.state_dict, self.data.load_state_dict

    def set_epoch(self, epoch: int) -> None:
        self.data.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, str]]:
        """Texts, as of `Texts`."""
        return ({"text": row["text"]} for row in self.data)


class Collate:
    """Makes a batch of texts: `input_ids` and `attention_mask` (B, longest text), int64, padded at the end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def __call__(self, items: list[dict[str, str]]) -> dict[str, Any]:
        texts = [item["text"] for item in items]
        return dict(self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt"))


def made_up(mode: str, reviews: int, praise: bool = False) -> datasets.Dataset:
    """Return a dataset of reviews; review i is a function of `mode` and i."""
    texts: list[str] = []
    number = 0
    while len(texts) < reviews:
        words, _ = review(random.Random(f"{mode} {number}"))
        number += 1
        if not praise or COMPLAINTS.isdisjoint(words):
            texts.append(" ".join(words))
    return datasets.Dataset.from_dict({"text": texts})


def word_numbers() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a number for each word of the reviews, as `train_from_iterator` would find them."""
    words = {word: number for number, word in enumerate(("<pad>", *WORDS))}
    numbers = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    numbers.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=numbers, pad_token="<pad>")


def _from_files(data_dir: Path, mode: str, files: str, streaming: bool) -> Any:
    paths = sorted(map(str, data_dir.glob(files)))
    if not paths:
        raise UserError(f"dataset.{mode}.files: {data_dir / files} matches no file")
    return datasets.load_dataset("json", data_files=paths, split="train", streaming=streaming)
