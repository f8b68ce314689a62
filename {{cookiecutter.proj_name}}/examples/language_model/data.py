"""A text as blocks of characters. Without a file of your own: the reference of the Python language, part of Python."""

from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor

from common.base.errors import UserError

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
PADDING = -1  # as a target: nothing is to be predicted


def encode(text: str) -> Tensor:
    """Return the numbers of the characters, int64; all that are not in `CHARACTERS` are left out."""
    codes = np.frombuffer(text.encode("ascii", "ignore"), dtype=np.uint8).astype(np.int64)
    codes = codes[(codes == 10) | (codes >= 32) & (codes < 127)]
    return torch.from_numpy(np.where(codes == 10, 0, codes - 31))


def decode(numbers: list[int]) -> str:
    """Return the text of these numbers of characters."""
    return "".join(CHARACTERS[number] for number in numbers)


class Text:
    """Blocks of a text: the first 90 % for training, the rest for validation.

    Training blocks begin at random places; an epoch has as many as the text is long. In validation every character is
    predicted exactly once.

    Args:
        data_dir: folder of `file`.
        mode: train or val.
        context: characters of a block.
        file: a text; null: the topics of Python's `help()`.
        length: use this many characters; null: all. Each version of Python has slightly different topics: a number
            fixes the steps of an epoch.
    """

    def __init__(
        self, data_dir: Path, mode: str, context: int, file: str | None = None, length: int | None = None
    ) -> None:
        if file and not (data_dir / file).is_file():
            raise UserError(f"dataset.{mode}.file: there is no {data_dir / file}")
        whole = (data_dir / file).read_text("utf-8") if file else "\n".join(topics[name] for name in sorted(topics))
        text = encode(whole)[:length]
        cut = len(text) * 9 // 10
        self.text, self.context = text[:cut] if mode == "train" else text[cut:], context
        if len(self.text) <= context + 1:
            raise UserError(f"dataset.{mode}: {len(text)} characters are too few for blocks of {context}")
        self.random = mode == "train"

    def __len__(self) -> int:
        return -(-(len(self.text) - 1) // self.context)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`input` and `target`, the characters after those of `input`, (context,) each, int64; see `PADDING`."""
        last_start = len(self.text) - 1 - self.context
        start = int(torch.randint(last_start + 1, ())) if self.random else index * self.context
        block = self.text[start : start + self.context + 1]
        missing = self.context + 1 - len(block)  # the last block of the validation
        block = torch.nn.functional.pad(block, (0, missing), value=PADDING)
        return {"input": block[:-1].clamp(min=0), "target": block[1:]}
