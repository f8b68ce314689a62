"""Fonts for the texts in pictures. Pillow's own has plain letters only, so others come from the system."""

import os
from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
FOLDERS = (
    "~/.fonts", "~/.local/share/fonts", "/usr/local/share/fonts", "/usr/share/fonts",
    "/Library/Fonts", "/System/Library/Fonts", "C:/Windows/Fonts",
)  # fmt: skip
_STYLES = ("Bold", "Italic", "Oblique", "Mono", "Serif", "Condensed", "Light")  # tried last
_MISSING = "\U0010ffff"  # no font has it: drawn as a box


def font_for(text: str, size: int) -> Font:
    """Return a font of `size` pixels with every character of the text, or Pillow's own if there is none."""
    file = _file_with(frozenset(text))
    return ImageFont.truetype(file, size) if file else ImageFont.load_default(size)


def legible(text: str, number: int | str = "") -> str:
    """Return the text if there is a font with all its characters, otherwise `number`, such as that of a class."""
    return str(number) if _file_with(frozenset(text)) is None else text


@lru_cache(maxsize=1024)
def _file_with(characters: frozenset[str]) -> str | None:
    """Return the first file of a font with these characters, "" for Pillow's own; None if there is none."""
    for file in ("", *_files()):
        try:
            font = ImageFont.truetype(file, 16) if file else ImageFont.load_default(16)
        except OSError:  # of a kind that Pillow cannot read
            continue
        box = bytes(font.getmask(_MISSING))
        if all(character.isspace() or bytes(font.getmask(character)) != box for character in characters):
            return file
    return None


@lru_cache(maxsize=1)
def _files() -> tuple[str, ...]:
    """Return the files of the system's fonts, plain styles first."""
    files = sorted(file for folder in FOLDERS for file in Path(os.path.expanduser(folder)).rglob("*.[ot]t[fc]"))
    files.sort(key=lambda file: (any(style in file.stem for style in _STYLES), "Sans" not in file.stem))
    return tuple(str(file) for file in files if "LastResort" not in file.stem)  # which draws a box for every character
