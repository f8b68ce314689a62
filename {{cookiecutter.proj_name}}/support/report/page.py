"""HTML: elements that escape their text, tables, and the frame of a page that needs no other file."""

import math
from collections.abc import Iterable, Sequence
from html import escape

from support.report.style import STYLE

_EMPTY = ("img", "meta", "line", "circle", "path", "polyline", "rect")  # elements without content


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *content: str | None, **attributes: str | int | float | None) -> Html:
    """An element; text in it is escaped unless it is `Html`. `class_` means class, and None leaves an attribute out."""
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            words.append(f'{key.rstrip("_").replace("_", "-")}="{escape(str(value))}"')
    if name in _EMPTY:
        return Html(f"<{' '.join(words)}/>")
    return Html(f"<{' '.join(words)}>{joined(content)}</{name}>")


def joined(content: Iterable[str | None]) -> Html:
    """Elements and escaped texts, one after another."""
    return Html("".join(each if isinstance(each, Html) else escape(each) for each in content if each is not None))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], class_: str | None = None) -> Html:
    """A table that scrolls sideways where it is too wide. The first cell of a row is its heading."""
    top = tag("tr", *(tag("th", cell, scope="col") for cell in head))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return tag("div", tag("table", tag("thead", top), tag("tbody", *body), class_=class_), class_="scroll")


def details(summary: str, *content: str) -> Html:
    return tag("details", tag("summary", summary), *content)


def round_number(value: float) -> str:
    """A number in about four digits, without those at its end that say nothing: as on an axis."""
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "−∞"}.get(value, "NaN")
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        text = f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    else:
        text = f"{value:.3g}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("-", "−")


def page(title: str, *content: str) -> str:
    """A whole page that needs nothing else: no script, no font and no file from anywhere."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(STYLE)),
    )
    body = tag("body", tag("main", *content))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"
