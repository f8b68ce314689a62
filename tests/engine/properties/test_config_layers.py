"""Merging, references, checks and writing of configs, for any layers of any values."""

import math
import string
from collections.abc import Mapping
from dataclasses import field
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from common.base.text import flat
from common.config import ConfigError, dump, resolve, section
from common.config.problem import DEFAULT, RESERVED
from common.config.reading import Reader
from common.config.schema import suggest, walk
from common.config.source import read_text
from engine.properties.alike import same
from tests.conftest import CONFIG
from custom.config import Config


@section
class Inner:
    """A section below another."""

    count: int = 1
    """whole"""
    rate: float = 0.5
    """any number"""
    text: str = "plain"
    """text"""
    maybe: int | None = None
    """a number or none"""
    flag: bool = False
    """yes or no"""
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    """numbers"""


@section
class Root:
    """The whole."""

    width: int = 8
    """whole"""
    label: str = "run"
    """text"""
    first: Inner = field(default_factory=Inner)
    """a section"""
    second: Inner = field(default_factory=Inner)
    """a section"""
    free: dict[str, Any] = field(default_factory=dict)
    """anything"""


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=10)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
INNER = st.fixed_dictionaries(
    {},
    optional={
        "count": st.integers(-(10**9), 10**9),
        "rate": FLOATS,
        "text": TEXT,
        "maybe": st.none() | st.integers(0, 99),
        "flag": st.booleans(),
        "sizes": st.lists(st.integers(-9, 9), max_size=3),
    },
)
NAMES = st.text("abcdef", min_size=1, max_size=3)
FREE = st.dictionaries(NAMES, st.integers(0, 9) | FLOATS | TEXT | st.none() | st.lists(TEXT, max_size=2), max_size=3)
LAYERS = st.fixed_dictionaries(
    {}, optional={"width": st.integers(0, 99), "label": TEXT, "first": INNER, "second": INNER, "free": FREE}
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(TEXT.filter(lambda key: key != "$REPLACE"), inner, max_size=4)
    ),
    max_leaves=12,
)


def laid(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the documented result: sections key by key, all else replaced."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = laid(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def values_of(config: Any) -> Any:
    """Return a configuration as plain data, with the types that its fields have."""
    return {key: values_of(value) if hasattr(value, "__dict__") else value for key, value in vars(config).items()}


def written(folder: str, layers: list[dict[str, Any]]) -> Path:
    """Write a file for each layer, each based on the one before; return the last."""
    for number, layer in enumerate(layers):
        base = f"$BASE: {number - 1}.yaml\n" if number else ""
        Path(folder, f"{number}.yaml").write_text(base + (dump(layer) if layer else ""), "utf-8")
    return Path(folder, f"{len(layers) - 1}.yaml")


DEFAULTS = {**values_of(Root()), "first": values_of(Inner()), "second": values_of(Inner())}


@pytest.mark.slow
@given(st.lists(LAYERS, min_size=1, max_size=4), LAYERS)
def test_later_layers_win_key_by_key(layers: list[dict[str, Any]], typed: dict[str, Any]) -> None:
    """Defaults, files in the order of their bases, and the command line: the last that gives a key decides it."""
    words = [f"--{key}={dump(value, flow=True)}" for key, value in flat(typed).items()]
    expected = reduce(laid, [*layers, typed], DEFAULTS)
    with TemporaryDirectory() as folder:
        resolved = resolve(Root, [written(folder, layers)], words)
    got = values_of(resolved.config)
    assert got == expected
    for key, value in flat(got).items():
        kind = type(flat(DEFAULTS).get(key, value))
        assert type(value) is kind or kind is type(None) or key.startswith("free"), key
    given_keys = set(flat(laid(reduce(laid, layers), typed)))
    for key in flat({name: value for name, value in got.items() if name != "free"}):
        assert (resolved.origins[key] == DEFAULT) is (key not in given_keys)


@given(ANYTHING, st.booleans())
@example({"a": ["no", "1e-3", "007", "", "~", "${a}", "$$", "<<", "\x85", "- ", "12:30", "None", "# x"]}, False)
def test_what_is_written_reads_back_equal(values: Any, flow: bool) -> None:
    """Any tree is equal, with its types, after `dump` and the reader, in block form and on one line."""
    text = dump({"key": values}, flow=flow)
    assert not flow or "\n" not in text
    node = read_text(text, lambda line: "")
    assert node is not None
    assert all(item.problem == "" for item in [node])
    assert same(Reader(node).values, {"key": values})


@given(LAYERS)
def test_a_stored_config_gives_the_same_again(layer: dict[str, Any]) -> None:
    """The values of a config, written and read as a config, are the same config."""
    with TemporaryDirectory() as folder:
        resolved = resolve(Root, [written(folder, [layer])])
        again = resolve(Root, [written(folder, [resolved.values])])
    assert same(again.values, resolved.values)
    assert values_of(again.config) == values_of(resolved.config)


KEYS = [key for key, _ in walk(Config)]
REAL = {*KEYS, *(option.removeprefix("--") for option in RESERVED), *RESERVED}


def refused(folder: str, text: str, *words: str) -> list[Any]:
    file = Path(folder, "mine.yaml")
    file.write_text(f"$BASE: {CONFIG}\n{text}", "utf-8")
    with pytest.raises(ConfigError) as caught:
        resolve(Config, [file], words)
    return caught.value.problems


OPEN = {section for section, _ in walk(Config) if section.partition(".")[0] in ("dataset", "model", "loss", "metric")}


@st.composite
def misspelt(draw: Any) -> tuple[str, str]:
    """Return a key of the schema, and the same with a letter dropped, doubled, changed or swapped."""
    key = draw(st.sampled_from([key for key in KEYS if key not in OPEN and len(key.rpartition(".")[2]) > 3]))
    above, _, name = key.rpartition(".")
    at = draw(st.integers(0, len(name) - 2))
    ways = [name[:at] + name[at + 1 :], name[: at + 1] + name[at:], f"{name[:at]}q{name[at + 1 :]}"]
    ways.append(name[:at] + name[at + 1] + name[at] + name[at + 2 :])
    wrong = f"{above}.{draw(st.sampled_from(ways))}".removeprefix(".")
    assume(wrong not in REAL and wrong.rpartition(".")[2] not in {k.rpartition(".")[2] for k in KEYS})
    return key, wrong


@settings(max_examples=max(15, settings.default.max_examples // 3))  # each reads the whole of a real config
@given(misspelt(), st.booleans())
def test_an_unknown_key_is_refused_with_a_real_one(keys: tuple[str, str], typed: bool) -> None:
    """A misspelt key is a problem of its own at its line or word, and what is suggested are keys that there are."""
    key, wrong = keys
    text, words = "", [f"--{wrong}", "1"]
    if not typed:
        parts = wrong.split(".")
        text, words = "".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(parts))[:-1] + " 1\n", []
    with TemporaryDirectory() as folder:
        problems = refused(folder, text, *words)
        expected = f"command line: --{wrong} 1" if typed else f"mine.yaml:{1 + len(wrong.split('.'))}"
    unknown = [problem for problem in problems if problem.key == wrong and problem.rule == "unknown key"]
    if key.startswith("optim.") and "scheduler" in key:  # its unknown keys are arguments of the schedule
        unknown = [problem for problem in problems if wrong.rpartition(".")[2] in problem.key]
        assert unknown
        return
    assert len(unknown) == 1
    assert unknown[0].origin.endswith(expected)
    hint = unknown[0].hint
    if hint.startswith("did you mean "):
        suggested = hint.removeprefix("did you mean ").removesuffix("?").split(" or ")
        assert set(suggested) <= REAL


@given(st.text(string.ascii_lowercase + "_", min_size=1, max_size=14))
def test_whatever_is_suggested_is_a_key(name: str) -> None:
    """For any word, in the root or a section, a suggestion is a key of the schema, in full."""
    known = {key for key, _ in walk(Root)} | {*RESERVED}
    for parent, above in ((Root, ""), (Inner, "first")):
        hint = suggest(Root, parent, above, name)
        assert not hint or set(hint.removeprefix("did you mean ").removesuffix("?").split(" or ")) <= known


@st.composite
def referring(draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a free section with references to earlier keys, in any order, and what it stands for."""
    names = [f"k{number}" for number in range(draw(st.integers(1, 7)))]
    section: dict[str, Any] = {}
    meant: dict[str, Any] = {}
    for at, name in enumerate(names):
        kind = draw(st.sampled_from(("plain", "whole", "inside") if at else ("plain",)))
        if kind == "plain":
            meant[name] = draw(st.integers() | FLOATS | TEXT | st.lists(st.integers(0, 9), max_size=2) | st.booleans())
            section[name] = dump(meant[name], flow=True)
        else:
            target = draw(st.sampled_from(names[:at]))
            if kind == "inside" and isinstance(meant[target], (str, int)) and not isinstance(meant[target], bool):
                meant[name] = f"a{meant[target]}$b"
                section[name] = f"'a${{free.{target}}}$b'"
            else:
                meant[name], section[name] = meant[target], f"${{free.{target}}}"
    order = draw(st.permutations(names))
    return {name: section[name] for name in order}, {name: meant[name] for name in order}


@given(referring())
def test_references_stand_for_their_targets(case: tuple[dict[str, str], dict[str, Any]]) -> None:
    """Through any chain, in any order of keys, a reference has the value and type of its target; inside text, text."""
    section, meant = case
    assume(all(len(str(value)) < 1000 for value in meant.values()))
    with TemporaryDirectory() as folder:
        file = Path(folder, "a.yaml")
        file.write_text("free:\n" + "".join(f"  {name}: {text}\n" for name, text in section.items()), "utf-8")
        resolved = resolve(Root, [file])
    assert same(resolved.config.free, meant)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_a_loop_of_references_is_refused_and_no_other(targets: list[int]) -> None:
    """Keys that refer to each other are refused exactly if one can be followed for ever."""
    names = [f"k{number}" for number in range(len(targets))]
    lines = [
        f"  {name}: {f'${{free.{names[target]}}}' if target < len(names) else 7}\n"
        for name, target in zip(names, targets, strict=True)
    ]

    def loops(at: int) -> bool:
        for _ in targets:
            if at < len(targets):
                at = targets[at]
        return at < len(targets)

    with TemporaryDirectory() as folder:
        file = Path(folder, "a.yaml")
        file.write_text("free:\n" + "".join(lines))
        if any(map(loops, range(len(targets)))):
            with pytest.raises(ConfigError, match="are circular"):
                resolve(Root, [file])
        else:
            assert resolve(Root, [file]).config.free == dict.fromkeys(names, 7)


@given(st.sampled_from(sorted(flat(DEFAULTS))), ANYTHING)
def test_a_value_of_another_type_is_refused_or_kept(key: str, value: Any) -> None:
    """A value fits its field without a change, or is refused by name: nothing is converted on the way."""
    assume(key != "free" and not (isinstance(value, float) and not math.isfinite(value)))
    tree = reduce(lambda inner, part: {part: inner}, reversed(key.split(".")), value)
    try:
        config = resolve(Root, [], stored=tree).config
    except ConfigError as error:
        problems = error.problems
    else:
        problems = []
    if problems:
        assert all(problem.key.startswith(key) or problem.key in key for problem in problems)
        return
    got = reduce(getattr, key.split("."), config)
    as_text = isinstance(got, str) and not isinstance(value, str)  # a field for text takes a number as it was typed
    assert as_text or (got == value and (type(got) is type(value) or type(value) is int))
