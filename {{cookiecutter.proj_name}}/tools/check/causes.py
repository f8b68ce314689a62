"""Where in the owner's code the likely cause of a difference is: what the runs noted, and what the code itself says.

The check that failed and what differs first decide which findings count, and in whose code: input is made by the data,
an output by the model, weights after equal gradients by the optimizer.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from common.run.paths import PROJECT

# Whose code makes what differs first; what the recorder calls it.
_ROLES = {
    "input": ("data", "task", "plugin"), "random": ("task", "model", "plugin", "data"), "output": ("model", "task"),
    "loss": ("loss", "task", "model"), "gradient": ("loss", "task", "model", "data", "plugin"),
    "weight": ("optimizer", "schedule", "plugin", "task"), "buffer": ("model", "task", "plugin"),
    "state": ("optimizer", "plugin", "schedule"), "value": ("metric", "task", "model", "loss", "data"),
    "merged value": ("metric", "task", "model", "loss", "data"), "": ("data", "model", "task", "loss", "plugin"),
}  # fmt: skip
_RESUMES, _SPLITS = ("resume", "kill", "twice", "damaged"), ("processes", "accumulate", "evaluation")
_DRAW = "draw from random, numpy or torch in __getitem__ or a transform: they are seeded for each sample"
_SAVE = "derive it from the index and set_epoch, or save it: state_dict, a buffer, trainer.register_state"
_ORDERED = "use sorted(...), and zlib.crc32 for a hash"
# Kinds of findings: the checks that each explains, best first; how good an explanation it is; what to do instead.
_KINDS: dict[str, tuple[tuple[str, ...], float, str]] = {
    "frozen": (_SPLITS, 4, "keep it in evaluation mode: fixed(...) of common.task, or a train() of its own"),
    "change": ((*_RESUMES, "workers", *_SPLITS), 2, _SAVE),
    "time": (("seed", "workers", *_RESUMES, *_SPLITS), 0, f"it is another one in each process: {_DRAW}"),
    "order": (("seed", "workers", *_RESUMES), 0, f"the order is arbitrary: {_ORDERED}"),
    "generator": (("workers", *_RESUMES, *_SPLITS), 0, _DRAW),
    "reader": (("workers", "processes"), 1, "let no sample depend on who reads it"),
    "rank": (("processes",), 1, "let nothing depend on the process: the engine deals out the samples"),
    "batch": (_SPLITS, 1, "use the mean of one value per sample: a batch is only a part of the samples of a step"),
    "file": (("kill", "twice", "resume", "damaged", "seed"), 1, f"a file of its own is not the checkpoint's: {_SAVE}"),
    "silent": (("workers", *_RESUMES, "evaluation"), 1, "`random = False` promises that nothing is drawn: remove it"),
    "kept": ((*_RESUMES, "workers"), -1, _SAVE),
    "saved": (_RESUMES, -1, "return all that a step changes, to the last bit, and set it again"),
}
# Calls by the end of their name; "()" stands for a call without arguments.
_CALLS = {
    "time": r"time|time_ns|perf_counter|monotonic|now|utcnow|today|getpid|getppid|gethostname|uuid[14]|urandom"
    r"|token_hex|token_bytes|get_ident|SystemRandom|default_rng\(\)|Random\(\)|RandomState\(\)|seed\(\)",
    "order": "listdir|scandir|iterdir|r?i?glob|walk|hash|id|set|frozenset",
    "generator": r"default_rng|Random|RandomState|Generator(\(\))?",
    "reader": "get_worker_info",
    "rank": "get_rank|get_world_size|device_count",
    "file": r"write_text|write_bytes|torch\.save|np\.save|pickle\.dump|json\.dump|atexit\.register",
}
_RANK = re.compile(r"['\"](LOCAL_)?(RANK|WORLD_SIZE|SLURM_PROCID)['\"]")
_DRAWS = re.compile(r"(^|\.)(rand\w*|normal|uniform|choice|shuffle|bernoulli|multinomial|sample|gauss)$")
_RESTORES = ("state_dict", "load_state_dict", "get_extra_state", "set_extra_state")
_FAR = 6  # points behind the best suspect, with which another one is not shown
_SETS_UP = ("", "__init__", "set_epoch", "share", *_RESTORES)


@dataclass(frozen=True)
class Suspect:
    """A line that may be the cause: the file relative to the project, what is done there, and what to do instead."""

    file: str
    line: int
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}" + f"; {self.advice}" * bool(self.advice)


def suspects(check: str, kind: str, name: str, notes: list[dict[str, Any]], repeats: bool | None) -> list[Suspect]:
    """Return at most three suspects, the most likely one first.

    Args:
        check: name of the check that failed.
        kind, name: of the first tensor that differs.
        notes: what the runs noted, see `tools.check.watch`.
        repeats: whether the same seed twice gives the same; None if that was not tried.
    """
    wanted, parts = _ROLES[kind], [note for note in notes if note["kind"] == "part"]
    places: dict[str, int] = {}
    for note in parts:
        at = wanted.index(note["role"]) if note["role"] in wanted else len(wanted)
        places[note["file"]] = min(at, places.get(note["file"], at))
    for file, at in list(places.items()):  # helpers are in the place of those that import them
        for node in (node for _, node in _nodes(file) if isinstance(node, ast.ImportFrom)):
            for module in (f"{node.module}", *(f"{node.module}.{each.name}" for each in node.names)):
                places.setdefault(module.replace(".", "/") + ".py", at)
    ranked: dict[tuple[str, int], tuple[float, Suspect]] = {}
    for found, suspect in _findings(notes):
        checks, score, _ = _KINDS[found]
        if check in checks and not (found in ("time", "order") and repeats):
            at = places.get(suspect.file, 2 * len(wanted))
            score += 3 * (at < len(wanted)) - at - checks.index(check) / 2
            score += 5 * (found in ("time", "order") and repeats is False)
            if score > ranked.get((suspect.file, suspect.line), (-99, None))[0]:
                ranked[suspect.file, suspect.line] = score, suspect
    order = sorted(ranked.values(), key=lambda each: -each[0])
    best = [suspect for score, suspect in order if score > order[0][0] - _FAR]
    makers = sorted((each for each in parts if each["role"] in wanted), key=lambda each: wanted.index(each["role"]))
    measures = [each for each in makers if each["role"] == "metric" and each["name"] in name]
    for each in [*measures, *(makers if not best else [])]:
        names = ("merge", "compute") if kind == "merged value" else ("update", "results")
        line = _method(each["file"], names) if each["role"] == "metric" else each["line"]
        best.insert(0 if each in measures else len(best), Suspect(each["file"], line, f"{each['name']} makes {name}"))
    return best[:3]


def _findings(notes: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Suspect]]:
    """What the runs noted and what the files of the owner say, with the kind of each finding."""
    for note in notes:
        if note["kind"] == "module":
            yield from _in_code(note["file"])
        elif note["kind"] in ("frozen", "change") and note["file"] and (line := _assignment(note)):
            what = ".".join(filter(None, (note["name"], note["attribute"])))
            text = f"`{what}` changes from step to step, and no checkpoint holds it"
            if note["kind"] == "frozen":
                text = f"the buffers of {note['type']} {note['name']} change, though its weights are frozen"
            yield note["kind"], Suspect(note["file"], line, text, _KINDS[note["kind"]][2])


def _assignment(note: Mapping[str, Any]) -> int:
    """The line where an attribute or variable is changed; 0 if the owner's code does not change it."""
    name, best = rf"(^|[^\w]){re.escape(note['attribute'])}", (9, 0)
    inside = rf"{name}(\[.*\])?"
    for function, node in _nodes(note["file"]):
        rank = 9
        if note["kind"] == "frozen":
            made = isinstance(node, ast.Assign) and re.search(rf"{name}$", ast.unparse(node.targets[0]))
            rank = 1 if made and function == "__init__" else 9
        elif not note["attribute"]:  # a default value, or a variable of a closure
            rank = 1 if isinstance(node, ast.FunctionDef) and node.name == note["name"].rpartition(".")[2] else 9
        elif function in ("", "__init__"):
            continue
        elif isinstance(node, ast.AugAssign):
            rank = 1 if re.search(f"{inside}$", ast.unparse(node.target)) else 9
        elif isinstance(node, ast.Assign) and not (function == "set_epoch" and isinstance(node.value, ast.Name)):
            targets = [part for each in node.targets for part in (each.elts if isinstance(each, ast.Tuple) else [each])]
            rank = 2 if any(re.search(f"{inside}$", ast.unparse(each)) for each in targets) else 9
        elif isinstance(node, ast.Call) and function not in _RESTORES:
            called = re.search(rf"{inside}\.\w+$", ast.unparse(node.func))
            rank = 3 if called else 4 if not note["steady"] and re.search(rf"{name}\b", ast.unparse(node)) else 9
        best = min(best, (rank, getattr(node, "lineno", 0)))
    return best[1] if best[0] < 9 else note["line"] if note["kind"] == "frozen" else 0


def _in_code(file: str) -> Iterator[tuple[str, Suspect]]:
    """Calls in a file whose result need not be the same in each run, reader or process, and other doubtful lines."""
    nodes = _nodes(file)
    harmless = {id(inner) for _, node in nodes if isinstance(node, ast.Compare)
                or (isinstance(node, ast.Call) and ast.unparse(node.func) in ("sorted", "len", "min", "max"))
                for inner in ast.walk(node)}  # fmt: skip
    silent = any(isinstance(node, ast.Assign) and "random = False" in ast.unparse(node) for _, node in nodes)
    for function, node in nodes:
        kinds, text = list[str](), ""
        if isinstance(node, ast.Call):
            text, name = ast.unparse(node), ast.unparse(node.func)
            called = name if node.args or node.keywords else f"{name}()"
            kinds = [kind for kind, calls in _CALLS.items() if re.search(rf"(^|\.)({calls})(\(\))?$", called)]
            kinds = [kind for kind in kinds if not (kind == "order" and (id(node) in harmless or name[:5] == "self."))]
            over = {ast.unparse(each) for each in (*node.args[:1], *(each.value for each in node.keywords))}
            sums = re.search(r"\.(mean|std|var|norm|sum|max|min)$", name)
            kinds += ["batch"] * ("'sum'" in over or bool(sums and "0" in over) or (name[-4:] == ".sum" and not over))
            kinds += ["file"] * (name == "open" and bool(over & {"'w'", "'wb'", "'a'"} or re.search(r", '[wax]", text)))
            kinds += ["silent"] * (silent and bool(_DRAWS.search(name)))
        elif isinstance(node, (ast.Set, ast.SetComp)) and id(node) not in harmless:
            text, kinds = ast.unparse(node), ["order"]
        elif isinstance(node, ast.Subscript) and _RANK.search(ast.unparse(node)):
            text, kinds = ast.unparse(node), ["rank"]
        elif isinstance(node, (ast.Assign, ast.AugAssign)) and function not in _SETS_UP:
            text = ast.unparse(node)
            kinds = ["kept"] * text.startswith("self.")
        elif isinstance(node, ast.FunctionDef) and node.name in _RESTORES:
            text, kinds = f"{node.name} is written here", ["saved"]
        for kind in kinds:
            where = f" in {function}" if function else ""
            yield kind, Suspect(file, node.lineno, f"{text[:60]}{where}", _KINDS[kind][2])


def _method(file: str, names: tuple[str, ...]) -> int:
    """The line where the first of these methods begins to work."""
    found = [node for _, node in _nodes(file) if isinstance(node, ast.FunctionDef) and node.name in names]
    return max((each.body[-1].lineno for each in found[:1]), default=1)


@cache
def _nodes(file: str) -> tuple[tuple[str, Any], ...]:
    """All nodes of a file, with the name of the function that they are in; "" outside of functions."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            yield function, child
            yield from walk(child, child.name if isinstance(child, ast.FunctionDef) else function)

    return tuple(walk(ast.parse((PROJECT / file).read_text(encoding="utf-8")), ""))
