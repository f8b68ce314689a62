"""A network from a string: `c16 n r p2 2(c16 n r c16 n) r a2 f l10`.

    c16      convolution, 16 channels, 3 x 3; c16k5s2: 5 x 5, stride 2. Without stride the image keeps its size
    n  r  g  batch norm, ReLU, GELU
    p2  a2   maximum of each 2 x 2 pixels; mean of the image's parts, 2 x 2 of them
    d10      dropout of 10 % of the features
    f  l10   one vector per image; linear layer, 10 features
    (...)    the layers in brackets, and their input is added to their output; 3(...): three such blocks

To add a layer of your own, add its letter to `LAYERS`.
"""

import copy
import inspect
import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from common.base.errors import UserError

Shape = tuple[int, ...]
"""Of one sample: (channels, height, width), or (features,)."""


def convolution(shape: Shape, channels: int, k: int = 3, s: int = 1) -> nn.Module:
    return nn.Conv2d(shape[0], channels, k, stride=s, padding=k // 2)


def linear(shape: Shape, features: int) -> nn.Module:
    if len(shape) > 1:
        raise ValueError(f"needs a vector, not the shape {shape}: put f before it")
    return nn.Linear(shape[0], features)


# By letter: a function of the input's shape, the number after the letter, if it has one, and options by their letter.
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "c": convolution,
    "n": lambda shape: nn.BatchNorm2d(shape[0]) if len(shape) == 3 else nn.BatchNorm1d(shape[0]),
    "r": lambda shape: nn.ReLU(),
    "g": lambda shape: nn.GELU(),
    "p": lambda shape, size: nn.MaxPool2d(size),
    "a": lambda shape, size: nn.AdaptiveAvgPool2d(size),
    "d": lambda shape, percent: nn.Dropout(percent / 100),
    "f": lambda shape: nn.Flatten(),
    "l": linear,
}


class StringModel(nn.Module):
    """The network that `layers` describes, see the top of this file.

    Args:
        layers: words, one for each layer.
        shape: of a sample, [channels, height, width].
    """

    def __init__(self, layers: str, shape: list[int]) -> None:
        super().__init__()
        self.layers = Builder(layers).build(tuple(shape))

    def forward(self, image: Tensor) -> Tensor:
        """Map images (B, *shape) to the output of the last layer."""
        return self.layers(image)


class Residual(nn.Module):
    """Adds the input of some layers to their output."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Builder:
    """Reads a description from left to right and keeps track of the shape, so that no layer needs its input size.

    All methods raise `UserError` with the place of a mistake.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.words = list(re.finditer(r"\d*\(|\)|[^\s()]+", text))
        self.at = 0  # the next word

    def build(self, shape: Shape) -> nn.Sequential:
        """Build the whole network for samples of this shape."""
        if not self.words:
            raise UserError("model.layers: there is no layer")
        return self._sequence(shape, opened=None)[0]

    def _sequence(self, shape: Shape, opened: re.Match[str] | None) -> tuple[nn.Sequential, Shape]:
        """Return the layers up to the bracket that closes `opened`, or to the end; and the shape after them."""
        layers = nn.Sequential()
        while self.at < len(self.words):
            word = self.words[self.at]
            self.at += 1
            if word[0] == ")":
                if opened is None:
                    raise self._mistake(word, "no bracket was opened")
                return layers, shape
            if word[0].endswith("("):
                layers.extend(self._residuals(shape, word))
                continue
            layer = self._layer(word, shape)
            layers.append(layer)
            shape = self._shape_after(layer, shape, word)
        if opened is not None:
            raise self._mistake(opened, "this bracket is not closed")
        return layers, shape

    def _residuals(self, shape: Shape, opened: re.Match[str]) -> list[nn.Module]:
        """As many blocks as the number before the bracket says, by default one."""
        first, blocks = self.at, list[nn.Module]()
        for _ in range(int(opened[0][:-1] or 1)):
            self.at = first
            layers, after = self._sequence(shape, opened)
            if after != shape:
                raise self._mistake(opened, f"the output {after} cannot be added to the input {shape}")
            blocks.append(Residual(layers))
        return blocks

    def _layer(self, word: re.Match[str], shape: Shape) -> nn.Module:
        parts = re.fullmatch(r"([a-z])([1-9]\d*)?((?:[a-z][1-9]\d*)*)", word[0])
        if parts is None or parts[1] not in LAYERS:
            known = " ".join(LAYERS)
            raise self._mistake(word, f"a layer is one of {known}, then a number, then options such as k3")
        make, numbers = LAYERS[parts[1]], [int(parts[2])] if parts[2] else []
        options = {name: int(number) for name, number in re.findall(r"([a-z])(\d+)", parts[3])}
        try:
            return make(shape, *numbers, **options)
        except TypeError as error:
            takes = ", ".join(list(inspect.signature(make).parameters)[1:]) or "no number"
            raise self._mistake(word, f"{parts[1]} takes {takes}") from error
        except ValueError as error:
            raise self._mistake(word, str(error)) from error

    def _shape_after(self, layer: nn.Module, shape: Shape, word: re.Match[str]) -> Shape:
        try:  # on the device "meta" there are shapes only: nothing is computed
            output: Tensor = copy.deepcopy(layer).to("meta")(torch.empty(2, *shape, device="meta"))
        except (RuntimeError, ValueError) as error:
            raise self._mistake(word, f"does not fit the shape {shape}: {error}") from error
        return tuple(output.shape[1:])

    def _mistake(self, word: re.Match[str], what: str) -> UserError:
        return UserError(f"model.layers: {word[0]}: {what}\n  {self.text}\n  {' ' * word.start()}^")
