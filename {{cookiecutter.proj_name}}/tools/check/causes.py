"""Where in the owner's code the likely cause of a difference is: what the runs noted, and what the code itself says.

The check that failed and what differs first decide which findings count, and in whose code: input is made by the data,
an output by the model, weights after equal gradients by the optimizer.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from common.run.paths import PROJECT

Note = Mapping[str, Any]
# By what differs first, in the recorder's words: whose code makes it.
_MAKERS = {
    "input": ("data", "task", "plugin"), "random": ("task", "model", "plugin", "data"), "output": ("model", "task"),
    "loss": ("loss", "task", "model"), "gradient": ("loss", "task", "model", "data", "plugin"),
    "weight": ("optimizer", "schedule", "plugin", "task"), "buffer": ("model", "task", "plugin"),
    "own buffer": ("task", "model", "loss"),
    "state": ("optimizer", "plugin", "schedule"), "value": ("metric", "task", "model", "loss", "data"),
}  # fmt: skip
_RESUMES, _SPLITS = ("resume", "kill", "twice", "damaged"), ("processes", "accumulate", "evaluation")
_DRAW = "draw from random, numpy or torch in __getitem__ or a transform: they are seeded for each sample"
_SAVE = "compute it (from task.at; of data, from index and epoch) or save it (a buffer, trainer.register_state)"
# By kind of finding: the checks that it explains, best first; how well it does; what to do instead; the lines of code
# that may be one ("" for what only a run shows).
_CAUSES: dict[str, tuple[tuple[str, ...], float, str, str]] = {
    "change": ((*_RESUMES, "workers", *_SPLITS), 2, _SAVE, ""),
    "time": (("seed", "workers", *_RESUMES, *_SPLITS), 0, f"its value differs between processes: {_DRAW}",
        r"\b(time|time_ns|perf_counter|monotonic|now|utcnow|today|getpid|getppid|gethostname|uuid[14]|urandom"
        r"|token_hex|get_ident|SystemRandom)\(|\b(default_rng|Random|RandomState|seed)\(\)"),
    "order": (("seed", "workers", *_RESUMES), 0, "the order is arbitrary: use sorted(...), and zlib.crc32 for a hash",
        r"^(?!.*(\b(sorted|len|min|max)\(| in \{| in set\()).*(\b(listdir|scandir|walk|r?i?glob|iterdir)\("
        r"|(?<![.\w])(hash|id|set|frozenset)\(|\{[^:{}]+ for )"),
    "generator": (("workers", *_RESUMES, *_SPLITS), 0, _DRAW, r"\b(default_rng|Random|RandomState|Generator)\("),
    "reader": (("workers", "processes"), 1, "let no sample depend on who reads it; the engine deals them out",
        r"\b(get_worker_info|get_rank|get_world_size)\(|['\"](LOCAL_)?(RANK|WORLD_SIZE|SLURM_PROCID)['\"]"),
    "batch": (_SPLITS, 1, "use the mean of one value per sample: a batch is only a part of the samples of a step",
        r"\.(mean|std|var|norm|sum|max|min)\(((dim|axis)=)?\(?0\b|\.sum\(\)|reduction=['\"]sum"),
    "frozen": (_SPLITS, 1, "if it has a batch norm, keep it in evaluation mode: fixed(...) of common.task",
        r"requires_grad(_\(| = )False"),
    "file": ((*_RESUMES, "seed"), 1, f"a file of its own is not the checkpoint's: {_SAVE}",
        r"\bopen\(.*['\"][wax]|\bwrite_(text|bytes)\(|\.(save|dump)\(|\batexit\.register\("),
    "saved": (_RESUMES, -1, "return all that a step changes, to the last bit, and set it again",
        r"^def (load_state_dict|state_dict|get_extra_state|set_extra_state)\("),
    "kept": ((*_RESUMES, "workers"), -1, _SAVE, r"^self\.[\w.\[\]]+(: [^=]+)? [-+*/|&]?= "),
}  # fmt: skip
# Where it is no finding that something is kept.
_SETS_UP = ("", "__init__", "set_epoch", "share", "state_dict", "load_state_dict", "get_extra_state", "set_extra_state")


@dataclass(frozen=True)
class Suspect:
    """A line that may be the cause: the file relative to the project, what is done there, and what to do instead."""

    file: str
    line: int
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}" + f"; {self.advice}" * bool(self.advice)


def suspects(check: str, kind: str, name: str, notes: Sequence[Note]) -> list[Suspect]:
    """Return at most three suspects, the most likely one first.

    Args:
        check: name of the check that failed.
        kind, name: of the first tensor that differs.
        notes: what the runs noted, see `tools.check.watch`.
    """
    makers, parts = _MAKERS[kind.removeprefix("merged ")], [note for note in notes if note["kind"] == "part"]
    parts.sort(key=lambda note: makers.index(note["role"]) if note["role"] in makers else len(makers))
    metrics = {note["file"] for note in parts if note["role"] == "metric"}  # which count and sum as they must
    places, scores = _places(parts, makers), dict[Suspect, float]()
    for cause, suspect in _findings(notes):
        checks, score, *_ = _CAUSES[cause]
        is_count = suspect.file in metrics and cause in ("batch", "kept") and ".mean(" not in suspect.text
        if suspect.file in places and check in checks and not is_count:
            place = places[suspect.file]
            score += 3 * (place < len(makers)) - place - checks.index(check) / 2
            score += 6 * (cause == "saved" and kind == "state" and place == 0)  # the optimizer's
            scores[suspect] = score
    files = list(places)  # of two that are as likely, the part that the run reaches first
    likely = sorted(scores, key=lambda suspect: (-scores[suspect], files.index(suspect.file)))
    used = [note for note in parts if note["role"] in makers]
    named = [note for note in used if note["role"] == "metric" and note["name"] in name]
    for note in reversed(named) if named or likely else used:
        start = rf"^(class|def) {note['name']}\b" if not named else "def merge" if "merged" in kind else "def update"
        likely.insert(0, Suspect(note["file"], _line(note["file"], start), f"{note['name']} makes {name}"))
    lines: dict[tuple[str, int], Suspect] = {}
    for suspect in likely:
        lines.setdefault((suspect.file, suspect.line), suspect)
    return list(lines.values())[:3]


def unsaved(notes: Sequence[Note]) -> list[Suspect]:
    """Return at most three lines that change what no checkpoint holds, but not of metrics, which begin anew."""
    changes = [note for note in notes if note["kind"] == "change" and note["role"] != "metric"]
    return list(dict.fromkeys(suspect for _, suspect in _findings(changes)))[:3]


def _places(parts: Sequence[Note], makers: Sequence[str]) -> dict[str, int]:
    """Return how far the files of these parts, and those that they import, are from what differs: 0, 1 and so on."""
    places: dict[str, int] = {}
    for note in parts:
        places.setdefault(note["file"], makers.index(note["role"]) if note["role"] in makers else len(makers))
    for file, place in list(places.items()):
        for module, names in re.findall(r"^\s*from ([\w.]+) import (.+)", _text(file), re.MULTILINE):
            for helper in (module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))):
                places.setdefault(helper.replace(".", "/") + ".py", place)
    return places


def _findings(notes: Sequence[Note]) -> Iterator[tuple[str, Suspect]]:
    """Yield what the runs noted and what the files of the owner say, with the kind of each finding."""
    for note in notes:
        if note["kind"] == "change" and (line := _line_of_change(note)):
            what = ".".join(filter(None, (note["name"], note["attribute"])))
            text = f"`{what}` changes from step to step, and no checkpoint holds it"
            yield "change", Suspect(note["file"], line, text, _SAVE)
        for line, function, text in _code(note["file"]) if note["kind"] == "module" else ():
            for cause, (_, _, advice, pattern) in _CAUSES.items():
                if pattern and re.search(pattern, text) and (cause != "kept" or function not in _SETS_UP):
                    where = f" in {function}" if function else ""
                    yield cause, Suspect(note["file"], line, f"`{text[:70]}`{where}", advice)


def _line_of_change(note: Note) -> int:
    """Return the line where an attribute or variable is changed; 0 if the owner's code does not change it."""
    if not note["attribute"]:  # a default value, or a variable of a closure
        return _line(note["file"], rf"^def {note['name'].rpartition('.')[2]}\(")
    name = rf"\b{re.escape(note['attribute'])}\b"
    item = rf"^(?!def ).*{name}(\[.*\])?"
    for change in (rf"{item} [^\s=!<>]+= ", rf"{item}(: [^=]+|, .*)? = (?!epoch$)", rf"{item}\.\w+\(", rf"{item}"):
        if line := _line(note["file"], change, outside=("", "__init__")):
            return line
    return 0


def _line(file: str, pattern: str, outside: Sequence[str] = ()) -> int:
    """Return the first line with a pattern, outside of these functions; 0 if there is none."""
    lines = [line for line, function, text in _code(file) if function not in outside and re.search(pattern, text)]
    return min(lines, default=0)


@cache
def _text(file: str) -> str:
    return (PROJECT / file).read_text(encoding="utf-8")


@cache
def _code(file: str) -> list[tuple[int, str, str]]:
    """Return the lines of a file that do something: number, function ("" outside of one), text."""
    functions: dict[int, str] = {}
    for block in ast.walk(ast.parse(_text(file))):  # inner functions come after those around them
        for node in ast.walk(block) if isinstance(block, (ast.FunctionDef, ast.Module)) else ():
            if hasattr(node, "lineno") and not isinstance(node, (ast.Constant, ast.Expr)):  # not docstrings
                functions[node.lineno] = getattr(block, "name", "")
    lines = _text(file).splitlines()
    return [(line, function, lines[line - 1].strip()) for line, function in sorted(functions.items())]
