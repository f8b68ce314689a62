"""The reader of configs against a second reader of YAML, ruamel.yaml, and the documented rules for words."""

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from common.config import ConfigError
from common.config.reading import Reader
from common.config.source import Node, read_file, read_text, scalar
from engine.properties.alike import same

NAMED: dict[str, Any] = {"true": True, "false": False, "null": None}
INFINITE = {"inf": math.inf, "Inf": math.inf, "INF": math.inf}
NOT_A_NUMBER = ("nan", "NaN", "NAN")


def origin(line: int) -> str:
    return f"line {line + 1}"


def documented(text: str) -> Any:
    """Return the value of an unquoted word by the documented rules, from JSON's numbers and a few words more."""
    for word in NAMED:
        if text in (word, word.capitalize(), word.upper()):
            return NAMED[word]
    if text in ("", "~", "None"):
        return None
    sign, digits = ("-", text[1:]) if text[:1] == "-" else ("", text.removeprefix("+"))
    if digits.removeprefix(".") in INFINITE:
        return -math.inf if sign else math.inf
    if text.removeprefix(".") in NOT_A_NUMBER:
        return math.nan
    mantissa, exponent, power = digits.partition("e" if "e" in digits else "E")
    whole, dot, fraction = mantissa.partition(".")
    if not dot and not exponent and whole.isascii() and whole.isdigit() and (whole == "0" or whole[0] != "0"):
        return int(sign + whole)
    if (whole or fraction) and (not whole or whole.isdigit()):  # JSON has neither "1." nor ".5"
        number = f"{sign}{whole or 0}.{fraction or 0}{exponent}{power}"
        try:
            return float(json.loads(number, parse_constant=lambda word: "x"))
        except ValueError:
            pass
    return text


def ours(text: str) -> Any:
    node = read_text(text, origin)
    return None if node is None else Reader(node).values


NUMBERISH = st.text("0123456789+-.eE_:xobinfaINF ", min_size=1, max_size=9).map(str.strip).filter(bool)
WORDS = st.sampled_from(
    [
        "1e-3",
        "1E5",
        "1e5",
        "-1.5e+3",
        ".5",
        "5.",
        "+.5",
        "1.",
        ".",
        "-",
        "+",
        "e5",
        "1e",
        "1e+",
        "007",
        "0",
        "-0",
        "00",
        "0x1F",
        "0o17",
        "1_000",
        "12:30:00",
        "1:2",
        "no",
        "off",
        "on",
        "yes",
        "Y",
        "n",
        "No",
        "ON",
        "true",
        "True",
        "TRUE",
        "tRUE",
        "false",
        "null",
        "Null",
        "~",
        "None",
        "none",
        "nil",
        "inf",
        "-inf",
        ".inf",
        "+.Inf",
        ".INF",
        "nan",
        ".nan",
        "-.nan",
        ".NaN",
        "NaN",
        "2024-01-01",
        "1.2.3",
        "1e5e5",
        "--1",
        "+-1",
        "-.5e-3",
        "0.1",
        "00.5",
        "1e400",
        "<<x",
        "=",
    ]
)


@given(WORDS | NUMBERISH)
@example("1e-3")
@example("no")
@example("007")
@example(".NaN")
@example("-.nan")
@example("+-1")
def test_a_word_is_read_as_documented(word: str) -> None:
    """An unquoted word is a number, true, false, null or text as docs/config.md says, alone and in a document."""
    assert same(scalar(word), documented(word))
    for quote in "'\"":
        assert same(ours(f"key: {quote}{word}{quote}\n"), {"key": word})
    assume(word[0] not in "-?:" or (len(word) > 1 and word[1] != " "))
    assume(": " not in word and not word.endswith(":"))
    assert same(ours(f"key: {word}\n"), {"key": documented(word)})


@given(WORDS | NUMBERISH)
def test_a_word_is_that_of_a_second_reader(word: str) -> None:
    """Beyond what YAML 1.2 leaves open (007, 0x1F, 1_000, bare inf and nan, None), ruamel.yaml reads the same."""
    assume(word[0] not in "-?:" or (len(word) > 1 and word[1] != " "))
    assume(": " not in word and not word.endswith(":") and "_" not in word)
    bare = word.lstrip("+-").lower()
    assume(not bare.startswith(("0x", "0o", "0b")) and bare not in ("inf", "nan", ".nan") and word != "None")
    assume(not (len(bare) > 1 and bare[0] == "0" and bare[1].isdigit()))
    try:
        theirs = YAML(typ="safe", pure=True).load(f"key: {word}\n")["key"]
    except YAMLError:
        assume(False)
    if type(theirs).__name__ in ("date", "datetime"):  # a tag beyond the core schema
        theirs = word
    assert same(ours(f"key: {word}\n"), {"key": theirs})


# What both readers take as the same value, in any form. PyYAML refuses `[a?]`, `[:b]`, which YAML 1.2 allows.
LETTERS = st.characters(max_codepoint=0xFFFF, exclude_categories=("C", "Zl", "Zp"), exclude_characters="$?:")
TEXT = st.text(LETTERS, max_size=12).filter(lambda text: documented(text) == text)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
KEYS = TEXT.filter(lambda key: key != "<<")
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
    ),
    max_size=5,
)


@st.composite
def documents(draw: Any) -> tuple[dict[str, Any], str]:
    """Return a tree, and a text of it in one of many forms, written by another package."""
    tree = draw(TREES)
    if draw(st.booleans()):
        return tree, json.dumps(tree, indent=draw(st.none() | st.integers(0, 5)), ensure_ascii=draw(st.booleans()))
    writer = YAML(typ=draw(st.sampled_from(("rt", "safe"))), pure=True)
    flow = draw(st.booleans())
    writer.default_flow_style = flow
    writer.indent = writer.map_indent = draw(st.integers(2, 7))
    # In flow form it folds keys, too, and cannot read them itself.
    writer.width = 10_000 if flow else draw(st.integers(20, 200))
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    buffer = io.StringIO()
    writer.dump(tree, buffer)
    return tree, buffer.getvalue()


@given(documents())
@example(({"a": {"b": [1, 0.001, "no", "1e-3", ""]}}, "{a: {b: [1, 1e-3, no, '1e-3', '']}}"))
def test_a_document_is_that_of_a_second_reader(document: tuple[dict[str, Any], str]) -> None:
    """In block and flow form, with any indent, quotes and folded lines, both readers see the tree that was written."""
    tree, text = document
    assert same(ours(text), tree)
    assert YAML(typ="safe", pure=True).load(text) == tree


@given(st.text("ab1:-?,[]{}'\"#&*! |>\n", max_size=24))
@example("a: [b, {a: 1}]\n")
@example("a: &b 1\nb: *b\n")
@example("a: |\n  b\n  1\n")
def test_any_text_is_read_alike_or_refused(text: str) -> None:
    """Text made of YAML's signs is never read as another tree than by a second reader, and never fails otherwise."""
    try:
        mine = ours(text)
    except ConfigError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "line " in refusal
        return
    try:
        theirs = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, TypeError, ValueError, AttributeError, NotImplementedError):  # stricter, or fails
        return
    if isinstance(mine, dict):  # all else is no config; the two differ about a comment below a lone `>`
        assert as_text(mine) == as_text(theirs)


def as_text(value: Any) -> Any:
    """Return a tree with the keys as text, as ours are."""
    if isinstance(value, dict):
        return {str(key) if key is not None else "": as_text(item) for key, item in value.items()}
    return [as_text(item) for item in value] if isinstance(value, list) else value


def mappings(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
    for inner in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from mappings(inner)


NAMES = st.text("abcxyz", min_size=1, max_size=4)
NESTED = st.recursive(st.integers(0, 9), lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3))


@given(st.dictionaries(NAMES, NESTED, min_size=1, max_size=3), st.data())
def test_a_key_that_is_given_twice_is_refused(tree: dict[str, Any], data: st.DataObject) -> None:
    """At any depth, a repeated key is a problem of that key that names both lines, and no other key has one."""
    chosen = data.draw(st.sampled_from(list(mappings(tree))), "section")
    again = data.draw(st.sampled_from(list(chosen)), "key")
    lines: list[str] = []
    places: list[int] = []

    def write(section: dict[str, Any], depth: int) -> None:
        entries = [*section.items(), *([(again, 0)] if section is chosen else [])]
        for key, value in entries:
            lines.append(f"{'  ' * depth}{key}:{'' if isinstance(value, dict) else f' {value}'}")
            if section is chosen and key == again:
                places.append(len(lines))
            if isinstance(value, dict):
                write(value, depth + 1)

    write(tree, 0)
    node = read_text("\n".join(lines), origin)
    assert isinstance(node, Node)
    problems = [problem.rule for problem in Reader(node).problems]
    assert problems == [f"this key is given twice, at line {places[0]} and line {places[1]}"]
    with pytest.raises(YAMLError):
        YAML(typ="safe", pure=True).load("\n".join(lines))


@given(st.dictionaries(NAMES, st.recursive(SCALARS, st.lists, max_leaves=4), min_size=1, max_size=5), st.booleans())
def test_every_value_knows_its_line(tree: dict[str, Any], mark: bool) -> None:
    """The origin of a value is the line of its key, counted from 1, also in a file with a byte order mark."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "a.yaml")
        lines = [f"{key}: {json.dumps(value)}\n" for key, value in tree.items()]
        file.write_text("".join(lines), "utf-8-sig" if mark else "utf-8")
        node = read_file(file)
    assert same(Reader(node).values, tree)
    assert [item.origin for item in node.value.values()] == [f"{file}:{at}" for at in range(1, len(tree) + 1)]
