"""Registries: names to classes, found in files, checked by signature before anything is built."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

import pytest

from common.base.errors import UserError
from common.config import ConfigError, Problem, section
from common.config.registry import Registered, Registry, file_of
from cli.command_line import parse, table
from tests.conftest import PROJECT

MODEL_FILE = """\
from pathlib import Path
from typing import Literal
from boxes import REGISTRY


@REGISTRY.register()
class Conv:
    built = []

    def __init__(self, data_dir, width: int, rate: float = 0.1, size: tuple[int, int] = (1, 1),
                 where: Path = Path(), kind: Literal["a", "b"] = "a", name: str = "", extra=None, depth: int = None):
        self.built.append(self)
        self.given = (data_dir, width, rate, size, where, kind, name, extra, depth)


@REGISTRY.register("short")
def make(data_dir, *, loose: "Missing" = 1, **more):
    return data_dir, loose, more
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """A registry that has scanned a package `boxes` in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("common.config.arguments.PROJECT", tmp_path)  # types are checked in the project's own classes
    found = Registry("model", provided=("data_dir",))
    (tmp_path / "boxes").mkdir()
    (tmp_path / "boxes" / "__init__.py").write_text("REGISTRY = None\n")
    importlib.import_module("boxes").REGISTRY = found  # type: ignore[attr-defined]
    write("boxes/deep/conv_model.py", MODEL_FILE)
    write("boxes/empty_model.py", "")
    write("boxes/other.py", "raise RuntimeError('not for us')")
    found.scan("boxes")
    table(found)  # the first look-up imports the files
    yield found
    for name in [name for name in sys.modules if name.partition(".")[0] in ("boxes", "outside", "half")]:
        del sys.modules[name]


def look(registry: Registry) -> None:
    registry.scan("boxes")
    table(registry)


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    importlib.invalidate_caches()


def problems(registry: Registry, section: Any, **options: Any) -> list[str]:
    return [f"{p.key}={p.value}: {p.rule}; {p.hint}" for p in registry.check(section, "model", **options)]


def test_scan_finds_files_by_suffix_at_any_depth(registry: Registry) -> None:
    """No list of imports to keep; a file that registers nothing is fine, other files are left alone."""
    assert registry.get("Conv").__name__ == "Conv"
    assert registry.get("short").__name__ == "make"
    assert "boxes.other" not in sys.modules


def test_where_a_name_leads(registry: Registry) -> None:
    """File and line, one step from the config to the code; the table shows all with signatures."""
    assert file_of(registry.get("Conv")) == "boxes/deep/conv_model.py:6"
    assert file_of(registry.get("short")) == "boxes/deep/conv_model.py:16"
    assert file_of(registry.get("Conv")) == "boxes/deep/conv_model.py:6"
    assert re.search(r"\.py:\d+$", file_of(registry.get("json.JSONDecoder")))
    assert file_of(len) == "module builtins"
    lines = table(registry).splitlines()
    assert lines[0] == "model:"
    assert re.fullmatch(r"  Conv +boxes/deep/conv_model.py:6 +\(data_dir, width: int, .*\)", lines[1])


def test_an_unknown_name_says_what_to_do(registry: Registry) -> None:
    """The nearest name, where to add."""
    with pytest.raises(UserError) as caught:
        registry.get("Cnov")
    for piece in ("Cnov", "did you mean Conv?",
                  "add @MODEL_REGISTRY.register() to a class or function in boxes/.../<name>_model.py"):  # fmt: skip
        assert piece in str(caught.value)
    with pytest.raises(UserError, match="known: Conv, short"):
        registry.get("xyz")


def test_two_of_one_name_are_refused(registry: Registry) -> None:
    """The error names both places; in one file, too."""
    write("boxes/twin_model.py", "from boxes import REGISTRY\n\n@REGISTRY.register()\nclass Conv: ...\n")
    with pytest.raises(UserError, match=r"Conv is used twice, at boxes/deep/conv_model.py:6 and boxes/twin_model.py:3"):
        look(registry)
    body = "@REGISTRY.register('same')\nclass {}: ...\n"
    write("boxes/same_model.py", f"from boxes import REGISTRY\n{body.format('A')}{body.format('B')}")
    with pytest.raises(UserError, match=r"same_model.py:2 and boxes/same_model.py:4"):
        look(registry)


def test_importing_a_file_again_is_no_duplicate(registry: Registry) -> None:
    """Spawned workers, pickling and `python -m` run a file a second time."""
    del sys.modules["boxes.deep.conv_model"]
    before = registry.get("Conv")
    look(registry)
    assert registry.get("Conv") is not before


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        ("import os\nimport boxes.no_such_thing\n", ["boxes/bad_model.py:2", "boxes.no_such_thing"]),
        ("import os\nfrom os import no_such_thing\n", ["boxes/bad_model.py:2", "ImportError"]),
        ("import json.no_such_thing\n", ["boxes/bad_model.py:1", "json.no_such_thing"]),
        ("x = 1\ny = x / 0\n", ["boxes/bad_model.py:2", "ZeroDivisionError"]),
        ("x = 1\ndef f(:\n", ["boxes/bad_model.py:2", "SyntaxError", "line 2"]),
        ("import boxes.wrong\n", ["boxes/wrong.py:2", "SyntaxError"]),
        ("raise ModuleNotFoundError('get it by hand')\n", ["boxes/bad_model.py:1", "get it by hand"]),
    ],
)
def test_a_file_that_does_not_import_is_named(registry: Registry, text: str, boxes: list[str]) -> None:
    """File and line in the message, and the type of the error."""
    write("boxes/wrong.py", "x = 1\ndef f(:\n")
    write("boxes/bad_model.py", text)
    with pytest.raises(UserError) as caught:
        look(registry)
    assert all(piece in str(caught.value) for piece in boxes), caught.value


def test_a_file_that_needs_a_missing_package_is_left_out(registry: Registry) -> None:
    """Others are found; what it registered before it failed is not; it is named once something is not found."""
    entry = "from boxes import REGISTRY\n@REGISTRY.register()\nclass {}: ...\n"
    write("boxes/a_model.py", "import boxes.z_model\n" + entry.format("Half") + "from no_such_thing.deep import x\n")
    write("boxes/b_model.py", "import boxes.helper\n")
    write("boxes/helper.py", "import also_missing\n")
    write("boxes/z_model.py", entry.format("Whole"))
    look(registry)
    assert registry.get("Whole").__name__ == "Whole"
    assert registry.import_files() == []
    listed = [
        "boxes/a_model.py:5 needs no_such_thing, which is not installed, so the file is skipped",
        "boxes/b_model.py:1 needs also_missing, which is not installed, so the file is skipped",
    ]
    assert registry.left_out == listed
    assert [line.strip() for line in table(registry).splitlines()[-2:]] == listed
    with pytest.raises(UserError) as caught:
        registry.get("Half")
    assert all(line in str(caught.value) for line in listed)
    assert problems(registry, {"type": "Conv", "width": 1}) == []
    assert listed[0] in problems(registry, {"type": "Half"})[0]


def test_import_paths(registry: Registry) -> None:
    """Anything importable can be named without registering it; a class in a class, and "module:Class" too."""
    write("outside.py", "class A:\n    class B: ...\n    def __init__(self, x: int): self.x = x\nvalue = 3\n")
    write("half.py", "import no_such_thing\n")
    assert registry.build({"type": "outside.A", "x": 2}).x == 2
    assert registry.get("outside:A.B") is registry.get("outside.A").B  # type: ignore[attr-defined]
    for name, words in {
        "outside.AA": "'outside' has no attribute 'AA'; did you mean A?",
        "outside.value": "is int, not a class or function",
        "nowhere.at.all": "No module named 'nowhere'",
        "nowhere:A": "No module named 'nowhere'",
        "half.A": "No module named 'no_such_thing'",
        ".x": "invalid format",
        "a:": "No module named 'a'",
    }.items():
        with pytest.raises(UserError, match=re.escape(words)):
            registry.get(name)


def test_nn_losses_by_path(registry: Registry) -> None:
    """Classes of torch are checked by their signatures, tensors are left alone."""
    path = "torch.nn.CrossEntropyLoss"
    assert problems(Registry("loss"), {"type": path, "reduction": "none", "label_smoothing": 0}) == []
    found = problems(Registry("loss"), {"weight": 1}, default_type=path, ignore=("weight",))
    assert found == []
    assert "did you mean label_smoothing?" in problems(Registry("loss"), {"type": path, "label_smothing": 0.1})[0]


CHECKS: list[tuple[Any, list[str]]] = [
    ({"type": "Conv", "width": 1}, []),
    ({"type": "Conv", "width": 1, "rate": 1, "size": [1, 2], "where": "x", "kind": "b", "extra": {"a": [1]}}, []),
    ({"type": "Conv", "width": 1, "depth": None}, []),
    ({"type": "short", "anything": 1, "loose": "x"}, []),
    ({"type": "Conv"}, ["model.width", "is required by Conv (boxes/deep/conv_model.py:6)"]),
    ({"type": "Conv", "widht": 1, "width": 1}, ["model.widht=1", "is not an argument of Conv", "did you mean width?"]),
    ({"type": "Conv", "zzz": 1, "width": 1}, ["valid arguments: width, rate, size, where, kind, name, extra, depth"]),
    ({"type": "Conv", "width": "1"}, ["model.width=1", "must be a valid integer: an argument of Conv"]),
    ({"type": "Conv", "width": True}, ["must be a valid integer"]),
    ({"type": "Conv", "width": 1.5}, ["must be a valid integer"]),
    ({"type": "Conv", "width": 1, "size": [1]}, ["model.size", "Field required"]),
    ({"type": "Conv", "width": 1, "kind": "c"}, ["must be 'a' or 'b'"]),
    ({"type": "Conv", "width": 1, "name": 7}, ["must be a valid string"]),
    ({"type": "Conv", "width": 1, "data_dir": "x"}, ["model.data_dir=x", "remove this key"]),
    ({"type": "Cov", "width": 1}, ["model.type=Cov", "did you mean Conv?"]),
    ({"width": 1}, ["model.type", "must name a model", "one of Conv, short"]),
    ({"type": 3}, ["model.type=3", "must name a model"]),
    ("Conv", ["model=Conv", "must be a section"]),
    ({"type": "nothing.at.all"}, ["model.type", "No module named 'nothing'"]),
    ({"type": "json.JSONDecoder"}, []),
]


@pytest.mark.parametrize(("given", "boxes"), CHECKS, ids=[str(given) for given, _ in CHECKS])
def test_arguments_are_checked_by_signature(registry: Registry, given: Any, boxes: list[str]) -> None:
    """Unknown, missing, wrongly typed and reserved arguments; nothing is built to find out."""
    found = problems(registry, given)
    assert len(found) == bool(boxes), found
    assert all(piece in found[0] for piece in boxes), found
    assert registry.get("Conv").built == []  # type: ignore[attr-defined]


def test_what_the_program_supplies(registry: Registry) -> None:
    """An object at an import path gets it only if it takes it."""
    write("outside.py", "def plain(x): return x\ndef more(x, data_dir): return x, data_dir\n")
    assert registry.build({"type": "outside.plain", "x": 2}, data_dir="d") == 2
    assert registry.build({"type": "outside.more", "x": 2}, data_dir="d") == (2, "d")


def test_several_problems_and_a_default_type(registry: Registry) -> None:
    """All problems of a section at once; the section's own name can be its type."""
    assert len(problems(registry, {"type": "Conv", "a": 1, "rate": "x"})) == 3
    assert problems(registry, {"width": 1, "weight": 2}, default_type="Conv", ignore=("weight",)) == []
    assert "model=Cnv" in problems(registry, {}, default_type="Cnv")[0]


def test_build_hands_over_typed_arguments(registry: Registry) -> None:
    """A path for `Path`, a tuple for a tuple, a float for an int; `ignore`d keys stay behind; input unchanged."""
    given = {"type": "Conv", "width": 2, "rate": 1, "size": [3, 4], "where": "a/b", "weight": 9}
    built = registry.build(given, ignore=("weight",), data_dir="d")
    assert built.given == ("d", 2, 1.0, (3, 4), Path("a/b"), "a", "", None, None)
    assert given["size"] == [3, 4]
    assert registry.build({"type": "short", "z": 1}, data_dir="d") == ("d", 1, {"z": 1})


def test_markers_report_through_the_config(registry: Registry) -> None:
    """Registry problems come with the line they were written on, together with all others."""

    @section
    class Config:
        name: str = "x"
        model: Annotated[dict[str, Any] | None, Registered(registry, ignore=("batch",))] = None
        collate: Annotated[str | None, Registered(registry)] = None
        loss: Annotated[dict[str, Any], _Each(registry)] = field(default_factory=dict)

    model = "model:\n  type: Conv\n  batch: 1\n  widht: 1\n"
    write("a.yaml", f"nam: 1\n{model}collate: shrt\nloss: {{short: null, Conv: {{}}}}\n")
    with pytest.raises(ConfigError) as caught:
        parse(Config, ["--config", "a.yaml"])
    message = str(caught.value)
    for piece in ("5 problems", "did you mean name?", "a.yaml:5", "model.width  (a.yaml:2)", "did you mean short?",
                  "loss.Conv.width  (a.yaml:7)"):  # fmt: skip
        assert piece in message, message
    write("b.yaml", "model: {type: Conv, width: 1, batch: 4}\n")
    found = parse(Config, ["--config", "b.yaml", "--model.type", "short"])
    assert found.config.model == {"batch": 4, "type": "short"}


def test_start_up_stays_light() -> None:
    """Reading a config and asking for help must not wait for torch."""
    code = "import sys, cli.command_line; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=True)


class _Each:
    def __init__(self, registry: Registry):
        self.registry = registry

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        for name, part in value.items():
            yield from self.registry.check(part or {}, f"{key}.{name}", default_type=name)
