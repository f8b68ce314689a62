"""What SECURITY.md promises: what the project's code never does, and where its processes listen."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import TEMPLATE

# Pickles that a process writes and reads itself, in memory; nothing of a file or of another program.
OWN_PICKLES = {
    "common/checkpoint/file.py",  # names the error that torch.load raises
    "library/data/shared_list.py",
}
# On several hosts the connection that tells of failures has to be reachable from the others; it wants a key.
REACHABLE = {"common/failure/hub.py": "(interface, 0)"}
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
CODE_IN_A_FILE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "commands.getoutput"}

MISTAKES = {
    "import torch\ntorch.load('a')": "weights_only",
    "import torch\ntorch.load('a', weights_only=False)": "weights_only",
    "from torch import load\nload('a')": "weights_only",
    "import torch.serialization as s\ns.load('a')": "weights_only",
    "import yaml\nyaml.load(text, yaml.Loader)": "yaml",
    "from yaml import unsafe_load": "yaml",
    "import yaml\nclass L(yaml.FullLoader): pass": "yaml",
    "import subprocess\nsubprocess.run(x, shell=True)": "shell",
    "import subprocess as s\ns.Popen(x, shell=flag)": "shell",
    "import os\nos.system(x)": "shell",
    "from os import popen\npopen(x)": "shell",
    "import pickle": "pickle",
    "from joblib import load": "pickle",
    "import numpy as np\nnp.load(x, allow_pickle=True)": "pickle",
    "import pandas as pd\npd.read_pickle(x)": "pickle",
    "eval(x)": "eval",
    "exec(x)": "eval",
    "import builtins\nbuiltins.eval(x)": "eval",
    "import tarfile\ntarfile.open(x).extractall()": "unpack",
    "import socket\nsocket.create_server(('', 0))": "listen",
    "s.bind(('0.0.0.0', 1))": "listen",
    "import uvicorn\nuvicorn.run(app, host='0.0.0.0')": "listen",
    "parser.add_argument('--host', default='0.0.0.0')": "listen",
    "from jinja2 import Environment\nEnvironment(loader=x)": "escape",
}


def full_names(tree: ast.Module) -> dict[str, str]:
    """Return what each imported name stands for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return found


def name_of(node: ast.expr, names: dict[str, str]) -> str:
    """Return the dotted name of an expression, as if nothing had been imported under another one."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value, names)}.{node.attr}"
    return ""


def problems(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield what breaks a promise, and where."""
    names = full_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
            if {module.partition(".")[0] for module in modules} & CODE_IN_A_FILE:
                yield "pickle", node
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = name_of(node, names)
            if re.fullmatch(r"yaml\.((?!Safe|CSafe|Base).*Loader|.*unsafe\w*|(full_)?load(_all)?)", name):
                yield "yaml", node
            if name in SHELLS:
                yield "shell", node
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "yaml"
            and {a.name for a in node.names} & {"unsafe_load", "load"}
        ):
            yield "yaml", node
        if isinstance(node, ast.Call):
            yield from problems_of_call(node, name_of(node.func, names))


def problems_of_call(call: ast.Call, name: str) -> Iterator[tuple[str, ast.AST]]:
    words = {word.arg: word.value for word in call.keywords}
    last = name.rpartition(".")[2]

    def is_true(key: str) -> bool:
        return isinstance(value := words.get(key), ast.Constant) and value.value is True

    if name.startswith("torch.") and last == "load" and name != "torch.export.load" and not is_true("weights_only"):
        yield "weights_only", call
    if name.removeprefix("builtins.") in ("eval", "exec"):
        yield "eval", call
    if "shell" in words:
        yield "shell", call
    if last == "read_pickle" or ("allow_pickle" in words and not _is_false(words["allow_pickle"])):
        yield "pickle", call
    if last in ("extractall", "unpack_archive"):
        yield "unpack", call
    if name == "jinja2.Environment" and not is_true("autoescape"):
        yield "escape", call
    addresses = [words["host"]] if "host" in words and last == "run" else []
    if last in ("create_server", "bind") and len(call.args) == 1 and isinstance(call.args[0], ast.Tuple):
        addresses = [call.args[0].elts[0]]
    if last == "add_argument" and any(isinstance(arg, ast.Constant) and arg.value == "--host" for arg in call.args):
        addresses = [words["default"]]
    for address in addresses:
        # A host that was asked for on the command line comes as `options.host`; its default is checked above.
        if (
            not (isinstance(address, ast.Constant) and address.value in LOOPBACK)
            and ast.unparse(address) != "options.host"
        ):
            yield "listen", call


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.parametrize(("text", "kind"), MISTAKES.items())
def test_the_search_finds_mistakes(text: str, kind: str) -> None:
    assert kind in {found for found, _ in problems(ast.parse(text))}


def test_the_code_keeps_the_promises() -> None:
    """No code in a loaded file runs, nothing goes through a shell, nothing listens on an address that others reach."""
    files = [file for file in TEMPLATE.rglob("*.py") if file.relative_to(TEMPLATE).parts[0] != "tests"]
    assert len(files) > 200
    found, allowed = [], set()
    for file in files:
        path = file.relative_to(TEMPLATE).as_posix()
        for kind, node in problems(ast.parse(file.read_text(encoding="utf-8"))):
            is_ours = kind == "pickle" and path in OWN_PICKLES
            is_ours |= kind == "listen" and ast.unparse(node.args[0]) == REACHABLE.get(path)  # type: ignore[attr-defined]
            if is_ours:
                allowed.add(path)
            else:
                found.append(f"{path}:{getattr(node, 'lineno', 0)}: {kind}")
    assert found == []
    assert allowed == OWN_PICKLES | REACHABLE.keys()


LISTENING = '''
import os
from pathlib import Path

import torch


def addresses(process: int) -> list[str]:
    """Return where a process listens, as in /proc/net/tcp."""
    open_files = set()
    for link in Path("/proc", str(process), "fd").iterdir():
        try:
            open_files.add(os.readlink(link))
        except OSError:  # it was closed just now
            pass
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [words[1].partition(":")[0] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in open_files]


def loss(output, batch):
    others = [os.getppid()] if "RANK" in os.environ else []
    found = [address for process in (os.getpid(), *others) for address in addresses(process)]
    Path(os.environ["SEEN"], str(os.getpid())).write_text(" ".join(found))
    return torch.nn.functional.cross_entropy(output["logits"], batch["label"])
'''


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("processes", [1, 2])
def test_where_a_training_listens(tmp_path: Path, processes: int) -> None:
    """One process listens nowhere; several of one host, and the program that started them, on 127.0.0.1 only."""
    (tmp_path / "listening.py").write_text(LISTENING)
    (tmp_path / "seen").mkdir()
    keys = f"--progress.max_steps 1 --num_workers 0 --gpu_ids -1 --dist.processes {processes}".split()
    command = [sys.executable, "train.py", "--config", "configs/default.yaml", "--dir.runs_dir", str(tmp_path / "runs")]
    variables = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "SEEN": str(tmp_path / "seen"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command += ["--loss", "{where: {type: listening.loss}}", *keys]
    done = subprocess.run(command, cwd=TEMPLATE, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [file.read_text().split() for file in (tmp_path / "seen").iterdir()]
    assert len(seen) == processes
    if processes == 1:
        assert seen == [[]]
    else:
        assert all(addresses for addresses in seen)
        assert {address for addresses in seen for address in addresses} == {"0100007F"}
