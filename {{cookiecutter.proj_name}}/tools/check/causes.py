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

# By what differs first, in the recorder's words: whose code makes it.
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
# By kind of finding: the checks that it explains, best first; how good an explanation it is; what to do instead.
_KINDS: dict[str, tuple[tuple[str, ...], float, str]] = {
    "frozen": (_SPLITS, 4, "keep it in evaluation mode: fixed(...) of common.task, or a train() of its own"),
    "change": ((*_RESUMES, "workers", *_SPLITS), 2, _SAVE),
    "time": (("seed", "workers", *_RESUMES, *_SPLITS), 0, f"it is another one in each process: {_DRAW}"),
    "order": (("seed", "workers", *_RESUMES), 0, "the order is arbitrary: use sorted(...), and zlib.crc32 for a hash"),
    "generator": (("workers", *_RESUMES, *_SPLITS), 0, _DRAW),
    "silent": (("workers", *_RESUMES, "evaluation"), 1, "`random = False` promises that nothing is drawn: remove it"),
    "reader": (("workers", "processes"), 1, "let no sample depend on who reads it"),
    "rank": (("processes",), 1, "let nothing depend on the process: the engine deals out the samples"),
    "batch": (_SPLITS, 1, "use the mean of one value per sample: a batch is only a part of the samples of a step"),
    "file": (("kill", "twice", "resume", "damaged", "seed"), 1, f"a file of its own is not the checkpoint's: {_SAVE}"),
    "kept": ((*_RESUMES, "workers"), -1, _SAVE),
    "saved": (_RESUMES, -1, "return all that a step changes, to the last bit, and set it again"),
}
# By kind of finding: lines of code that may be one.
_LINES = {
    "time": r"\b(time|time_ns|perf_counter|monotonic|now|utcnow|today|getpid|getppid|gethostname|uuid[14]|urandom"
    r"|token_hex|get_ident|SystemRandom)\(|\b(default_rng|Random|RandomState|seed)\(\)",
    "order": r"^(?!.*(\b(sorted|len|min|max)\(| in \{| in set\()).*(\b(listdir|scandir|walk|r?i?glob|iterdir)\("
    r"|(?<![.\w])(hash|id|set|frozenset)\(|\{[^:{}]+ for )",
    "generator": r"\b(default_rng|Random|RandomState|Generator)\(",
    "silent": r"\b(torch|random)\.(rand\w*|normal|uniform|choice|shuffle|bernoulli|multinomial|gauss)\(",
    "reader": r"get_worker_info\(",
    "rank": r"\b(get_rank|get_world_size|device_count)\(|['\"](LOCAL_)?(RANK|WORLD_SIZE|SLURM_PROCID)['\"]",
    "batch": r"\.(mean|std|var|norm|sum|max|min)\(((dim|axis)=)?\(?0\b|\.sum\(\)|reduction=['\"]sum",
    "file": r"\bopen\(.*['\"][wax]|\bwrite_(text|bytes)\(|\.(save|dump)\(|\batexit\.register\(",
    "kept": r"^self\.[\w.\[\]]+(: [^=]+)? [-+*/|&]?= ",
    "saved": r"^def (load_state_dict|state_dict|get_extra_state|set_extra_state)\(",
}
_SETS_UP = ("", "__init__", "set_epoch", "share", "state_dict", "load_state_dict", "get_extra_state", "set_extra_state")
_FAR = 6  # points behind the best suspect, with which another one is not shown


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
        for module, names in re.findall(r"^\s*from ([\w.]+) import (.+)", "\n".join(_text(file)), re.MULTILINE):
            for each in (module, *(f"{module}.{inner}" for inner in re.findall(r"\w+", names))):
                places.setdefault(each.replace(".", "/") + ".py", at)
    counting = {note["file"] for note in parts if note["role"] == "metric"}  # where sums and counts are as they must be
    ranked: dict[tuple[str, int], tuple[float, Suspect]] = {}
    for found, suspect in _findings(notes):
        checks, score, _ = _KINDS[found]
        if suspect.file in counting and found in ("batch", "kept") and ".mean(" not in suspect.text:
            continue
        if check in checks and suspect.file in places and not (found in ("time", "order") and repeats):
            at = places[suspect.file]
            score += 6 * (found == "saved" and kind == "state" and at == 0)  # the optimizer's: it comes back as another
            score += 3 * (at < len(wanted)) - at - checks.index(check) / 2
            score += 5 * (found in ("time", "order") and repeats is False)
            best = ranked.get((suspect.file, suspect.line))
            ranked[suspect.file, suspect.line] = max(best or (score, suspect), (score, suspect), key=lambda one: one[0])
    order = sorted(ranked.values(), key=lambda one: -one[0])
    likely = [suspect for score, suspect in order if score > order[0][0] - _FAR]
    makers = sorted((each for each in parts if each["role"] in wanted), key=lambda each: wanted.index(each["role"]))
    metrics = [each for each in makers if each["role"] == "metric" and each["name"] in name]
    method = "merge" if kind == "merged value" else "update"
    for each in metrics or ([] if likely else makers):
        lines = [at for at, function, _ in _code(each["file"]) if each in metrics and function == method]
        suspect = Suspect(each["file"], lines[-1] if lines else each["line"], f"{each['name']} makes {name}")
        likely.insert(0 if each in metrics else len(likely), suspect)
    return list(dict.fromkeys(likely))[:3]


def unsaved(notes: list[dict[str, Any]]) -> list[Suspect]:
    """Return at most three lines that change what no checkpoint holds, but not of metrics, which begin anew."""
    found = [note for note in notes if note["kind"] == "change" and note["role"] != "metric"]
    return list(dict.fromkeys(suspect for _, suspect in _findings(found)))[:3]


def _findings(notes: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Suspect]]:
    """What the runs noted and what the files of the owner say, with the kind of each finding."""
    for note in notes:
        file, kind = note.get("file", ""), note["kind"]
        if kind == "module":
            draws = any("random = False" in text for text in _text(file))
            for line, function, text in _code(file):
                for kind in [kind for kind, pattern in _LINES.items() if re.search(pattern, text)]:
                    if (kind != "silent" or draws) and (kind != "kept" or function not in _SETS_UP):
                        where = f" in {function}" if function else ""
                        yield kind, Suspect(file, line, f"`{text[:70]}`{where}", _KINDS[kind][2])
        elif kind in ("frozen", "change") and file and (line := _line(note)):
            what = ".".join(filter(None, (note["name"], note["attribute"])))
            text = f"`{what}` changes from step to step, and no checkpoint holds it"
            if kind == "frozen":
                text = f"the buffers of {note['type']} {note['name']} change, though its weights are frozen"
            yield kind, Suspect(file, line, text, _KINDS[kind][2])


def _line(note: Mapping[str, Any]) -> int:
    """The line where an attribute or variable is changed; 0 if the owner's code does not change it."""
    name, code = re.escape(note["attribute"]), _code(note["file"])
    assigned = rf"\b{name}(\[.*\])?(: [^=]+)? (\S+)?= |\b{name}, .* = "
    if note["kind"] == "frozen":
        return next((at for at, _, text in code if re.search(rf"self\.{assigned}", text)), note["line"])
    if not name:  # a default value, or a variable of a closure
        own = note["name"].rpartition(".")[2]
        return next((at for at, _, text in code if text.startswith(f"def {own}(")), 0)
    later = [
        (at, text) for at, function, text in code if function not in ("", "__init__") and f"def {function}" not in text
    ]
    later = [(at, text) for at, text in later if not re.search(rf"self\.{name} = epoch$", text)]  # of set_epoch
    patterns = [
        rf"\b{name}(\[.*\])? \S+= ",
        assigned,
        rf"\b{name}(\[.*\])?\.\w+\(",
        *[rf"\b{name}\b"] * (not note["steady"]),
    ]
    return next((at for pattern in patterns for at, text in later if re.search(pattern, text)), 0)


@cache
def _text(file: str) -> list[str]:
    return (PROJECT / file).read_text(encoding="utf-8").splitlines()


@cache
def _code(file: str) -> list[tuple[int, str, str]]:
    """The lines of a file that do something: number, function ("" outside of one), text."""
    functions: dict[int, str] = {}
    for node in ast.walk(tree := ast.parse("\n".join(_text(file)))):
        for inner in ast.walk(node) if isinstance(node, (ast.FunctionDef, ast.Module)) else ():
            if (line := getattr(inner, "lineno", 0)) and not isinstance(inner, ast.Constant):
                functions[line] = getattr(node, "name", "")
    documented = [
        node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    for node in documented:
        functions.pop(node.lineno, None)
    return [(line, function, _text(file)[line - 1].strip()) for line, function in sorted(functions.items())]
