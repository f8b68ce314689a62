"""The configuration through its door: YAML files and command lines in, a checked configuration or one message out."""

import dataclasses
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, TypeAdapter

from common.config import ConfigError, Problem, resolve, section
from common.config.registry import Registry
from cli import command_line
from cli.command_line import parse
from cli.config_text import help_text
from tests.config.test_config import Config, Optim, load, refusal, write


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("text", ["007", "1.50", "true", "no", "1e400", "exp #3", "a: b", "*.png", "[x", "1,2"])
def test_a_text_field_takes_what_was_typed(text: str) -> None:
    """`name` is the text as typed, `1.50` is not turned into 1.5."""
    assert load("", "--name", text).config.name == text
    if text in ("007", "1.50", "true", "no"):
        assert load(f"name: {text}\ntags: [{text}]").values["name"] == text
        assert load(f"tags: [{text}]").config.tags == [text]


FILES = [
    ("name: x\noptim:\n\tlr: 1\n", ["a.yaml:3", "'\\t' that cannot start"]),
    ("name: x\nname: y\n", ["name = 'y'", "a.yaml:2", "twice", "a.yaml:1"]),
    ("optim: {lr: 1}\noptim: {lr: 2}\n", ["optim  (a.yaml:2)", "1 problem:", "twice", "a.yaml:1"]),
    ("- 1\n", ["a.yaml:1", "mapping"]),
    (
        "name: x\nval: !!python/object/apply:os.system [echo]\n",
        ["a.yaml:2", "the tag", "python/object/apply:os.system"],
    ),
    ("name: [x\n", ["a.yaml:", "YAML"]),
    ("name: x\n---\nname: y\n", ["a.yaml:", "single document"]),
    ("name: a\x07\n", ["a.yaml:1", "control character"]),
    ("val: {[1]: x}\n", ["a.yaml:1", "a key must be a string", "quote it"]),
    ("loss: &a\n  x: *a\n", ["a.yaml:", "recursive"]),
    ("optim:\n  $BASE: x.yaml\n", ["optim.$BASE", "a.yaml:2", "unknown key"]),
    ("val: {$REPLACE: 3}\n", ["$REPLACE", "a.yaml:1", "true or false"]),
]


@pytest.mark.parametrize(("text", "pieces"), FILES, ids=[pieces[-1] for _, pieces in FILES])
def test_a_bad_file_is_refused_with_its_line(text: str, pieces: list[str]) -> None:
    """No Python tags, no bombs; tabs, twice-given keys, ... each with file and line."""
    message = refusal(text)
    assert all(piece in message for piece in pieces), message


def test_files_that_are_not_text_or_not_there() -> None:
    """A missing file is an error, with its path; bytes that are no UTF-8 name the line; empty is fine."""
    Path("b.yaml").write_bytes(b"name: x\nval: \xff\n")
    cases = {
        "b.yaml": ["b.yaml:2", "UTF-8"],
        "a.yml": ["a.yml is not a file"],
        ".": ["is not a file"],
        "~no\\one": ["is not a file"],
    }
    for name, pieces in cases.items():
        with pytest.raises(ConfigError) as caught:
            parse(Config, ["--config", name])
        assert all(piece in str(caught.value) for piece in pieces)
    assert load("").config == Config()
    assert load("\ufeffname: x").config.name == "x"


def test_anchors_and_merge_keys() -> None:
    """Plain YAML means of not repeating oneself work."""
    found = load("val: &v {a: 1, b: 2}\nloss:\n  <<: *v\n  b: 3\n")
    assert found.values["loss"] == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("base", "pieces"),
    [
        ("b.yaml", ["a.yaml -> b.yaml -> a.yaml", "b.yaml:2"]),
        ("a.yaml", ["a.yaml -> a.yaml", "a.yaml:1"]),
        ("none.yaml", ["none.yaml", "a.yaml:1", "is not a file"]),
        ("[b.yaml, 3]", ["$BASE", "3 is not a file"]),
        (".", ["is not a file", "a.yaml:1"]),
        ("null", ["$BASE = 'None'", "a.yaml:1", "None is not a file"]),
        ("{a: b}", ["{'a': 'b'} is not a file"]),
        ("${env:NOT_SET_HERE}/b.yaml", ["NOT_SET_HERE is not set", "a.yaml:1"]),
    ],
)
def test_bases_that_cannot_be(base: str, pieces: list[str]) -> None:
    """A loop is reported with its chain, a missing base with the line that names it."""
    write("b.yaml", "name: b\n$BASE: a.yaml\n" if base != "[b.yaml, 3]" else "name: b\n")
    message = refusal(f"$BASE: {base}\n")
    assert all(piece in message for piece in pieces), message


def test_required_keys_are_named() -> None:
    """A key without default must be written."""

    @section
    class Needs:
        lr: Annotated[float, Field(gt=0)]

    with pytest.raises(ConfigError, match=r"1 problem:\n  lr .*\n      is required"):
        parse(Needs, ["--config", write("a.yaml", "")])


def test_config_option() -> None:
    """--config, --configs, -c and --config= name the file; without any, the program's default or an error."""
    write("a.yaml", "name: x")
    for argv in (["--config", "a.yaml"], ["--configs", "a.yaml"], ["-c", "a.yaml"], ["--config=a.yaml"]):
        assert parse(Config, [*argv, "--flag"]).config.name == "x"
    assert parse(Config, [], default="a.yaml").config.name == "x"
    assert parse(Config, ["--config", "a.yaml"], stored={"name": "y"}).config.name == "x"
    assert parse(Config, [], default="a.yaml", stored={"name": "y"}).config.name == "y"
    for argv in ([], ["--config"], ["--conf", "a.yaml"]):
        with pytest.raises(ConfigError, match="needs a file"):
            parse(Config, argv)


def test_values_are_complete_and_the_config_is_frozen() -> None:
    """Defaults live in the schema; values hold all keys; a config cannot be changed."""
    found = load("")
    assert list(found.values) == [item.name for item in dataclasses.fields(Config)]
    assert found.values["optim"]["inner"] == {"decay": 0.0}
    assert set(found.origins) >= {"name", "optim.inner.decay", "model.width", "val"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.config.name = "y"  # type: ignore[misc]
    assert resolve(Config, ["a.yaml"], ["--name", "z"]).config.name == "z"


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key with default and meaning; needs no config."""
    monkeypatch.setattr(command_line, "REGISTRIES", ())
    with pytest.raises(SystemExit) as stop:
        parse(Config, ["--help"])
    text = capsys.readouterr().out
    assert not stop.value.code
    assert text.strip() == help_text(Config, "train.py", "none").strip()
    assert "  --optim.inner.decay  0.0          # weight of the old average\n" in text
    assert "optim: How weights change." in text
    assert all(f"--{key} " in text for key in ("name", "gpu_ids", "optim.steps", "model", "config", "list", "debug"))
    assert max(map(len, text.splitlines())) <= 120


def test_list_prints_registries(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--list prints all, --list KIND one (singular or plural); an unknown kind names the kinds."""

    registries = (Registry("model"), Registry("loss"))
    monkeypatch.setattr(command_line, "REGISTRIES", registries)
    model, loss = (f"{each.kind}:" for each in registries)
    for words, expected in (("--list", f"{model}\n\n{loss}"), ("--list models", model), ("--list=loss", loss)):
        with pytest.raises(SystemExit):
            parse(Config, words.split())
        assert capsys.readouterr().out.strip() == expected
    registries[1].register()(Optim)
    registries[1].register("other")(load)
    with pytest.raises(SystemExit):
        parse(Config, ["--list", "loss"])
    found = capsys.readouterr().out
    assert "Optim" in found and "other" in found and "test_config.py:" in found
    with pytest.raises(ValueError, match="the kinds are model, loss"):
        parse(Config, ["--list", "x"])


def test_sections_are_plain_dataclasses() -> None:
    """A section works without any file, and refuses unknown keys by itself."""
    assert Optim(lr=2.0).lr == 2.0
    with pytest.raises(ValueError, match="lrr"):
        TypeAdapter(Optim).validate_python({"lrr": 1})


def test_a_key_that_stands_twice_in_a_base_is_not_lost() -> None:
    """The second section would replace the first without a word, also below a file that sets a key of it."""
    write("b.yaml", "optim: {eta_min: 0.5}\noptim: {lr: 2}\n")
    message = refusal("$BASE: b.yaml\noptim: {lr: 3}\n")
    assert "twice, at b.yaml:1 and b.yaml:2" in message and "1 problem:" in message


def test_configurations_share_no_default() -> None:
    """What a program does to one configuration does not reach the next."""
    load("").config.model["width"] = 8
    assert load("").config.model["width"] == 4


class Named:
    """A check attached to a section, or to a list of them."""

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        if "bad" in str(value):
            yield Problem(key, value, "is bad")


@section
class In:
    at: int
    note: str = ""


@section
class Pos:
    x: int = 0

    def problems(self) -> Iterator[Problem]:
        if self.x == 1:
            raise TypeError("a bug")
        if self.x < 0:
            yield Problem("x", self.x, "is below 0")


@section
class Items:
    few: Annotated[list[In], Field(max_length=1), Named()] = field(default_factory=list)
    own: Annotated[In | None, Named()] = None
    pair: tuple[In, ...] = ()
    by_name: dict[str, In] = field(default_factory=dict)
    one: Pos | None = None
    several: list[Pos] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    mode: Literal["auto", True, False] = "auto"
    ids: int | list[int] = 0


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("few: [{at: 1}, {at: 2}]", ["few = ", "at most 1 item"]),
        ("few: [{at: 1, note: bad}]", ["few = ", "is bad"]),
        ("own: {at: 1, note: bad}", ["own  (a.yaml:1)", "is bad"]),
        ("few: [{foo: 3}, {note: [1]}]", ["few[0].at  (", "is required", "[0].foo", "few[1].at", "few[1].note = [1]"]),
        ("by_name: {a: {at: 1, nte: x}}", ["by_name.a.nte = 'x'", "did you mean by_name.a.note?"]),
        ("one: {x: -1}", ["one.x = -1", "is below 0"]),
        ("several: [{x: 0}, {x: -1}]", ["several[1].x = -1", "is below 0"]),
        ("numbers: {p: a, q: 1, r: b}", ["numbers.p = 'a'", "numbers.r = 'b'"]),
        ("ids: [a, 1, b]", ["ids[0] = 'a'", "ids[2] = 'b'"]),
    ],
)
def test_mistakes_in_lists_and_mappings(text: str, pieces: list[str]) -> None:
    """Rules hold for sections, alone and in lists, as for plain values; each wrong item is named."""
    with pytest.raises(ConfigError) as caught:
        parse(Items, ["--config", write("a.yaml", text)])
    assert all(piece in str(caught.value) for piece in pieces), caught.value


def test_sections_in_lists_and_mappings() -> None:
    found = parse(Items, ["--config", write("a.yaml", "pair: [{at: 1}]\nby_name: {a: {at: 2}}\none: {x: 3}")])
    assert (found.config.pair, found.config.by_name, found.config.one) == ((In(at=1),), {"a": In(at=2)}, Pos(x=3))


def test_a_choice_of_text_and_other_values() -> None:
    assert parse(Items, ["--config", write("a.yaml", "mode: true")]).config.mode is True


def test_a_bug_in_a_rule_is_a_traceback() -> None:
    with pytest.raises(TypeError, match="a bug"):
        parse(Items, ["--config", write("a.yaml", "one: {x: 1}")])


def test_debug_without_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "PROJECT", tmp_path)
    assert "debug.yaml is not a file" in refusal("", "--debug")


def test_a_base_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASES", "many")
    write("many/far.yaml", "name: far")
    assert load("$BASE: ${env:BASES}/far.yaml").config.name == "far"


def test_a_long_list_without_an_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.config.source._LARGEST", 0)  # values more than letters
    assert len(load(f"val: {{x: [{'1,' * 1000}]}}").values["val"]["x"]) == 1000


def test_a_section_that_stands_twice_can_be_replaced() -> None:
    write("b.yaml", "optim: {eta_min: 0.5}\noptim: {lr: 2}\n")
    assert load("$BASE: b.yaml\noptim: {$REPLACE: True, lr: 3}\n").config.optim.lr == 3
