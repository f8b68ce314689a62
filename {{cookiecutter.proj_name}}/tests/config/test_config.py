"""The configuration through its door: YAML files and command lines in, a checked configuration or one message out."""

import math
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from common.config import ConfigError, Problem, Resolved, dump, section
from cli.command_line import parse


class EvenWidth:
    """A check attached to a field; keeps `batch` when `type` changes."""

    ignore = ("batch",)

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        if isinstance(value.get("width"), int) and value["width"] % 2:
            yield Problem(f"{key}.width", value["width"], "must be even", f"try {value['width'] + 1}")


@section
class Inner:
    """Moving average."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """weight of the old average"""


@section
class Optim:
    """How weights change. More text."""

    lr: Annotated[float, Field(gt=0)] = 1e-3
    """learning rate"""
    eta_min: float = 0.0
    kind: Literal["adam", "sgd"] = "adam"
    steps: list[int] = field(default_factory=lambda: [50, 80])
    type: str = "constant"
    inner: Inner = field(default_factory=Inner)

    def problems(self) -> Iterator[Problem]:
        if self.eta_min > self.lr:
            yield Problem("eta_min", self.eta_min, "must not be above lr")


@section
class Config:
    """Everything."""

    name: str = "default"
    resume: str | None = None
    folder: Path | None = None
    gpu_ids: int | list[int] = -1
    """-1 is the CPU"""
    flag: bool = False
    tags: list[str] = field(default_factory=list)
    optim: Optim = field(default_factory=Optim)
    model: Annotated[dict[str, Any], EvenWidth()] = field(default_factory=lambda: {"type": "Conv", "width": 4})
    loss: dict[str, Any] = field(default_factory=dict)
    val: dict[str, Any] | None = None


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")
    return name


def load(text: str, *argv: str, **options: Any) -> Resolved[Config]:
    return parse(Config, ["--config", write("a.yaml", text), *argv], **options)


def refusal(text: str, *argv: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *argv, **options)
    return str(caught.value)


SCALARS = [
    *[(text, float(text)) for text in ("1e-5", "1E5", "+1.5e3", ".5", "1.5e-3", "1.", "inf", "-inf")],
    (".inf", math.inf),
    *[(text, int(text)) for text in ("0", "-3", "+3", "12")],
    *[(text, True) for text in ("true", "True", "TRUE")],
    *[(text, None) for text in ("null", "None", "~", "")],
    *[(text, text) for text in ("007", "12:30:00", "no", "on", "2020-01-01", "0x10", "1_000", "none", "a,b", "1e")],
    ('"3"', "3"),
    ("[[1, 2], [3, 4]]", [[1, 2], [3, 4]]),
    ("[]", []),
    ("{a: 1e3}", {"a": 1000.0}),
]


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalars_mean_the_same_in_file_and_command_line(text: str, value: Any) -> None:
    """Numbers as YAML 1.2 has them; `no`, `007` and times are text; lists nest."""
    for found in (load(f"loss: {{}}\nval:\n  x: {text}\n"), load("", f"--val.x={text}")):
        assert found.values["val"]["x"] == value
        assert type(found.values["val"]["x"]) is type(value)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """${env:VAR} and ${env:VAR:-default}; an unset one is an error with its line; $$ is a dollar."""
    monkeypatch.setenv("WHO", "me")
    monkeypatch.setenv("LR", "1e-2")
    monkeypatch.delenv("NONE_SUCH", raising=False)
    text = 'name: "x-${env:WHO}-${env:NONE_SUCH:-b}-$$-$HOME"\noptim: {lr: "1e-3"}\n'
    found = load(text, "--optim.lr", "${env:LR}")
    assert (found.config.name, found.config.optim.lr) == ("x-me-b-$-$HOME", 0.01)
    assert "a.yaml:2" in (message := refusal("optim:\n  type: ${env:NONE_SUCH}\n"))
    assert "NONE_SUCH is not set" in message
    assert "${env:NAME}" in refusal("name: ${a:b}\n")
    assert load("name: ${env:NONE_SUCH}\n", "--name", "x").config.name == "x", "an overridden value is never needed"


def test_base_order_and_origin() -> None:
    """Paths relative to the includer, child wins, a shared default undoes nothing."""
    write("sub/default.yaml", "name: d\ngpu_ids: 1\noptim: {lr: 1, eta_min: 0.5, steps: [1, 2]}\n")
    write("sub/b.yaml", "$BASE: default.yaml\nname: b\noptim: {lr: 2}\n")
    write("c.yaml", "$BASE: ./sub/default.yaml\n\noptim:\n  steps: [3]\n")
    found = load("$BASE: [sub/b.yaml, c.yaml]\nresume: r\n")
    assert (found.config.name, found.config.gpu_ids, found.config.resume) == ("b", 1, "r")
    assert (found.config.optim.lr, found.config.optim.eta_min, found.config.optim.steps) == (2, 0.5, [3])
    assert found.origins["optim.lr"] == "sub/b.yaml:3"
    assert found.origins["optim.steps"] == "c.yaml:4"
    assert found.origins["optim.kind"] == "default"


def test_a_new_type_drops_the_old_ones_arguments() -> None:
    """In a free section; what is no argument stays, a section with a schema stays, $REPLACE drops all."""
    write("b.yaml", "model: {type: A, width: 2, batch: 8}\nloss: {L1: {weight: 1}}\noptim: {type: x, lr: 3}\n")
    assert load("$BASE: b.yaml\nmodel: {type: B, depth: 1}").values["model"] == {"batch": 8, "type": "B", "depth": 1}
    assert load("$BASE: b.yaml\nmodel: {type: A, depth: 1}").values["model"]["width"] == 2
    for argv in (["--model.depth", "1", "--model.type", "B"], ["--model.type", "B", "--model.depth", "1"]):
        assert load("$BASE: b.yaml", *argv).values["model"] == {"batch": 8, "type": "B", "depth": 1}
    assert load("$BASE: b.yaml", "--optim.type", "y").config.optim.lr == 3
    assert load("$BASE: b.yaml\nloss: {$REPLACE: true, L2: {}}").values["loss"] == {"L2": {}}
    assert load("$BASE: b.yaml\nloss: {L2: {}}").values["loss"] == {"L1": {"weight": 1}, "L2": {}}


OVERRIDES = [
    (["--optim.lr", "1e-5"], "optim.lr", 1e-5),
    (["--optim.lr=1.5e-3"], "optim.lr", 1.5e-3),
    (["--optim.lr", "2"], "optim.lr", 2.0),
    (["--gpu_ids", "-1"], "gpu_ids", -1),
    (["--gpu_ids", "0,1,2"], "gpu_ids", [0, 1, 2]),
    (["--gpu_ids", "[0, 1]"], "gpu_ids", [0, 1]),
    (["--optim.steps", "-1,+2"], "optim.steps", [-1, 2]),
    (["--tags", "a,007"], "tags", ["a", "007"]),
    (["--name", "a,b"], "name", "a,b"),
    (["--name=-x"], "name", "-x"),
    (["--name", '"007"'], "name", "007"),
    (["--name=--flag"], "name", "--flag"),
    (["--flag"], "flag", True),
    (["--flag", "false"], "flag", False),
    (["--flag", "--name", "x"], "flag", True),
    (["--resume", "null"], "resume", None),
    (["--folder", "/x"], "folder", "/x"),
    (["--val.type", "X"], "val", {"type": "X"}),
    (["--val", "{type: X, n: [1]}"], "val", {"type": "X", "n": [1]}),
    (["--val", "null"], "val", None),
    (["--loss", "{L2: {weight: 2}}"], "loss", {"L2": {"weight": 2}}),
    (["--model.width", "6"], "model", {"type": "Conv", "width": 6}),
]


@pytest.mark.parametrize(("argv", "key", "value"), OVERRIDES, ids=[" ".join(argv) for argv, _, _ in OVERRIDES])
def test_overrides(argv: list[str], key: str, value: Any) -> None:
    """Two forms, typed by the schema; below a null, through a default."""
    found: Any = load("resume: r\n", *argv).values
    for part in key.split("."):
        found = found[part]
    assert found == value
    assert type(found) is type(value)


WRONG = [
    ("", ["--optim.lrr", "0.1"], ["optim.lrr = 0.1", "command line: --optim.lrr 0.1", "did you mean optim.lr?"]),
    ("optim:\n  lrr: 0.1\n", [], ["optim.lrr = 0.1", "a.yaml:2", "did you mean optim.lr?"]),
    ("lr: 1\n", [], ["lr = 1", "did you mean optim.lr?"]),
    ("decay: 1\n", [], ["did you mean optim.inner.decay?"]),
    ("Flag: true\n", [], ["did you mean flag?"]),
    ("optim: {lr: abc}\n", [], ["optim.lr = 'abc'", "must be a valid number", "a.yaml:1"]),
    ("optim: {lr: 1e400}\n", [], ["optim.lr = inf", "must be a finite number"]),
    ("optim: {lr: null}\n", [], ["optim.lr = null", "must be a valid number"]),
    ("optim: 3\n", [], ["optim = 3", "must be a mapping"]),
    ("gpu_ids: true\n", [], ["gpu_ids = true", "must be a valid integer or a list"]),
    ("gpu_ids: 1.0\n", [], ["gpu_ids = 1.0"]),
    ("gpu_ids: [0, a]\n", [], ["gpu_ids[1] = 'a'", "must be a valid integer"]),
    ("optim:\n  steps:\n    - 1\n    - x\n", [], ["optim.steps[1] = 'x'", "a.yaml:4", "must be a valid integer"]),
    ("optim: {inner: {decay: 1}}\n", [], ["optim.inner.decay = 1", "must be less than 1"]),
    ("optim: {kind: adm}\n", [], ["optim.kind = 'adm'", "must be 'adam' or 'sgd'"]),
    ("flag: yes\n", [], ["flag = 'yes'", "must be a valid boolean"]),
    ("name: {a: 1}\n", [], ["name", "must be a valid string"]),
    ("folder: {a: 1}\n", [], ["folder", "must be a valid string"]),
    ("model: {width: 3}\n", [], ["model.width = 3", "must be even; try 4", "a.yaml:1"]),
    ("optim:\n  lr: 0.1\n  eta_min: 1\n", [], ["optim.eta_min = 1", "a.yaml:3", "must not be above lr"]),
    ("", ["--optim.eta_min", "1"], ["command line: --optim.eta_min 1", "must not be above lr"]),
    ("", ["--name"], ["needs a value"]),
    ("", ["--name", "--flag"], ["needs a value"]),
    ("", ["--optim.lr", "1", "--optim.lr=2"], ["--optim.lr", "more than once"]),
    ("", ["--name.a", "1"], ["name", "--name.a 1", "must be a valid string"]),
    ("name: x\n", ["--name.a", "1"], ["name", "--name.a 1", "must be a valid string"]),
    ("", ["--val", "null", "--val", "{}"], ["more than once"]),
    ("", ["--optim..lr", "1"], ["unknown key"]),
    ("", ["optim.lr=1"], ["unexpected argument 'optim.lr=1'", "write --key value"]),
    ("", ["--gpu_ids", "0", "1"], ["unexpected argument '1'"]),
    ("", ["--gpu_ids", "[0,"], ["gpu_ids = '[0,'", "quotes"]),
    ("", ["--print-confg"], ["did you mean --print-config?"]),
    ("", ["--config=b.yaml"], ["more than once"]),
]


@pytest.mark.parametrize(("text", "argv", "pieces"), WRONG, ids=[f"{file!r} {argv}" for file, argv, _ in WRONG])
def test_mistakes_are_explained(text: str, argv: list[str], pieces: list[str]) -> None:
    """Key, value, rule, origin, nearest right name."""
    message = refusal(text, *argv)
    assert all(piece in message for piece in pieces), message
    assert "has 1 problem:" in message, message


def test_every_problem_at_once() -> None:
    """Unknown keys, types, limits, checks and files are reported together."""
    text = "optim: {lrr: 1, inner: {decay: 2}}\nmodel: {width: 3}\nname: x\nname: y\ngpu_ids: x\n"
    message = refusal(text, "--kind", "x")
    assert all(key in message for key in ("optim.lrr", "optim.inner.decay", "model.width", "name", "gpu_ids", "kind ="))
    assert "6 problems" in message


def test_debug_layers_its_own_values_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--debug lays a file over the config, and under the command line."""
    monkeypatch.setattr("cli.command_line.PROJECT", tmp_path)
    write("configs/debug.yaml", "gpu_ids: 5\noptim:\n  lr: 5\nmodel: {width: 8}\n")
    found = load("name: x\nmodel: {type: Conv}", "--debug", "--optim.lr", "6")
    assert (found.config.name, found.config.gpu_ids, found.config.optim.lr) == ("x", 5, 6)
    assert found.values["model"] == {"type": "Conv", "width": 8}
    assert found.origins["gpu_ids"] == "configs/debug.yaml:1"
    assert load("name: x").config.gpu_ids == -1


NASTY = [
    "no",
    "007",
    "1e-5",
    "null",
    "",
    " x",
    "a: b",
    "#",
    "${HOME}",
    "$$",
    "é",
    "1,2",
    "a\nb\x85",
    "<<",
    "1e999",
    "12:3",
]


def test_dump_loads_back_to_an_equal_config(capsys: pytest.CaptureFixture[str]) -> None:
    """Saved values and --print-config are both configurations that mean the same."""
    odd = {"list": [1, [2.5, {"x": None}]], "inf": math.inf, "tiny": 1e-300, "deep": {"a": {}}, "no": "off", "é b": 1}
    keys = {"$x": 1, "3": 2, "<<": 3, "a: b": 4, "": 5, **{f"k{at}": text for at, text in enumerate(NASTY)}}
    values = {"name": "${x}", "val": {"type": "V", "odd": odd, "nasty": NASTY, **keys}}
    first = parse(Config, ["--config", write("a.yaml", dump(values)), "--folder", "/x y"])
    assert first.values["val"] == values["val"]
    second = parse(Config, ["--config", write("b.yaml", dump(first.values))])
    assert second.config == first.config
    with pytest.raises(SystemExit) as stop:
        parse(Config, ["--config", "b.yaml", "--print-config"])
    assert not stop.value.code
    third = parse(Config, ["--config", write("c.yaml", capsys.readouterr().out)])
    assert third.config == first.config


def test_a_rule_in_post_init_is_reported_for_its_section() -> None:
    """A section of one's own may raise as any dataclass does; the message has the section's line."""

    @section
    class Own:
        a: int = 1

        def __post_init__(self) -> None:
            if self.a == 2:
                raise ValueError("a must not be 2")

    @section
    class Root:
        name: str = ""
        own: Own = field(default_factory=Own)

    with pytest.raises(ConfigError, match=r"2 problems[\s\S]*name = \[1\][\s\S]*own  \(a.yaml:2\)\n +a must not be 2"):
        parse(Root, ["--config", write("a.yaml", "name: [1]\nown: {a: 2}\n")])
