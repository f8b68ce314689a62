"""Writes docs/rows.md: every row of the study before the template, and what became of it.  python tools/rows.py

The ids stand in the docstrings of tests that are not rendered. `tools/rows.yaml` has those of the project's tests, and
what became of rows that no test holds. They come from a study of the trainers this template learnt from: CT the older
template of this kind, QQ, MM, BS, AN, XP, KW, TP, ZN and PN other trainers and notes, R requirements, D defects not to
be repeated.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parent.parent
PROJECT = "{{cookiecutter.proj_name}}"
TABLE, OTHERS = REPO / "docs" / "rows.md", REPO / "tools" / "rows.yaml"
SYSTEMS = ("CT", "QQ", "MM", "BS", "AN", "XP", "PN", "KW", "TP", "ZN", "R", "D")
ROW = re.compile(rf"\b(?:{'|'.join(SYSTEMS)})-\d\d\b")

# What the first part of the work has to hold; each has a test at least.
SPINE = [
    "CT-01", "CT-02", "CT-03", "CT-04", "CT-05", "CT-06", "CT-08", "CT-09", "CT-10", "CT-11", "QQ-02", "QQ-03", "QQ-04",
    "QQ-05", "QQ-06", "R-01", "R-02", "R-03", "R-09", "R-17", "R-27", "R-39", "R-48", "D-16", "D-21", "D-22", "D-23",
    "D-24", "D-25", "D-26", "D-58", "D-60", "D-61",
    # Exact resume, and checkpoints.
    "R-33", "R-35", "R-60", "R-47", "R-34", "R-37", "R-20", "R-23", "R-53", "QQ-39", "MM-65", "D-03", "D-04", "D-05",
    "D-12", "D-13", "D-17", "D-30", "D-33", "D-39", "D-40", "D-48", "D-52", "D-69",
    # From one process to a cluster.
    "R-46", "R-57", "R-64", "R-14", "R-66", "R-36", "CT-12", "CT-13", "CT-14", "CT-15", "CT-16", "CT-17", "CT-18",
    "D-01", "D-02", "D-11", "D-29", "D-45", "D-46", "MM-68", "MM-69", "MM-72", "MM-73", "MM-74", "MM-75", "MM-76",
    "MM-77", "TP-01", "TP-02", "TP-03", "TP-04", "TP-12", "TP-13", "TP-14", "QQ-43", "QQ-44", "QQ-45", "QQ-56", "QQ-57",
]  # fmt: skip

ASKED = {
    "CT-01": "train.py shows the whole way, from config to training, on one screen",
    "CT-02": "settings come from a YAML file, with numbers, nulls and lists written as people write them",
    "CT-03": "any key can be set on the command line by its dotted name; an unknown one is refused",
    "CT-04": "lists on the command line, as 0,1,2 or [0, 1]",
    "CT-05": "the config is a typed object, and goes to plain data and back without loss",
    "CT-06": "each default is written in one place",
    "CT-07": "the option that old launchers add is tolerated",
    "CT-08": "a run has a folder of its own, and never overwrites another run's",
    "CT-09": "a run keeps its resolved config, command, code and versions",
    "CT-10": "job.sh repeats the run, with its launcher and seed, from any folder",
    "CT-11": "all data lie below one folder that can be set, the same on every process",
    "CT-12": "gpu_ids -1 computes on the CPU, with several processes too",
    "CT-13": "each process gets one of the devices asked for, and sets it before it joins the others",
    "CT-14": "torchrun's variables say who a process is; an explicit setting goes before all variables",
    "CT-15": "Slurm's variables say who a process is; lists of nodes are read as scontrol reads them",
    "CT-16": "nccl on CUDA and gloo on the CPU, unless another is asked for",
    "CT-17": "two jobs on one machine do not meet at the same port",
    "CT-18": "the options of DDP are settings; accumulated gradients are exchanged once a step",
    "CT-19": "what only the main process does never holds an exchange",
    "CT-20": "one seed decides everything; without one, a seed is drawn and recorded",
    "CT-21": "optimizers by name, with their arguments checked",
    "CT-22": "one function says which parameters go into which group; frozen ones go into none",
    "CT-23": "multistep, exponential, poly, cosine and warm-up schedules",
    "CT-24": "the rate changes with every step, not once an epoch",
    "CT-25": "gradients are clipped by norm or by value, and the norm is logged",
    "CT-26": "the limit of clipping can change once a warm-up is over",
    "CT-27": "largest gradients, and every parameter's, on request",
    "CT-28": "losses by name, weighted and summed, each part kept",
    "CT-29": "metrics by name, computed over the whole dataset",
    "CT-30": "averages weigh every sample alike",
    "CT-31": "models by name, with the keys of their section as arguments",
    "CT-32": "datasets by name for each split",
    "CT-33": "files are found by the ending of their name",
    "CT-34": "two entries of one name are an error that names both places",
    "CT-35": "batches of any nesting move to the device",
    "CT-38": "each split has its own loader; validation is in order and complete",
    "CT-42": "validation on all processes, feeding best and early stop",
    "CT-43": "evaluation while training leaves numbers and pictures in a folder",
    "CT-44": "evaluation before the first step, if asked for",
    "CT-45": "evaluate.py works alone, with a config of its own if given",
    "CT-46": "one evaluation loop, for training and alone",
    "CT-47": "a save after so many seconds, at the exact place",
    "CT-48": "numbered checkpoints every so many epochs, the newest kept",
    "CT-49": "the end of a run is saved",
    "CT-50": "Ctrl-C and termination save before the end, also in the middle of a save, and the exit code tells",
    "CT-51": "resume everything, or only take the weights",
    "CT-52": "weights that do not fit are listed",
    "CT-53": "weights are saved and loaded without wrappers",
    "CT-54": "resume from a file, a run's folder, or by the run's name alone",
    "CT-55": "a text log on terminal and in a file, which a resume adds to",
    "CT-56": "a loss line with every part, smoothed and raw, for all processes",
    "CT-57": "times for a step and to the end",
    "CT-58": "TensorBoard scalars and images, brought to the disk in time, without leftovers of a lost attempt",
    "CT-59": "pictures of training and validation, in TensorBoard and as files",
    "CT-60": "few methods for a project to fill in",
    "CT-61": "one step of training is one method, to be changed",
    "CT-62": "a sample operator in C++ and CUDA: the smallest, on matrices, with accessors",
    "CT-63": "a sample operator with settings and a backward kernel, for all that PyTorch does with operators",
    "CT-64": "a generator that checks the names, and never renders over a project",
    "CT-65": "documentation travels with the project",
    "CT-66": "the user's package can have another name, in every file",
    "CT-67": "the project's licence is the user's choice and in the user's name",
    "CT-68": "renaming leaves everything outside the project alone",
    "CT-69": "one command builds the operators: optional, again only when needed, with a remedy when it fails",
    "CT-70": "operator and reference are compared: values, gradients, times, finite differences",
    "CT-71": "an operator saves nothing and computes no gradient without need",
    "CT-72": "text that teaches how a kernel is written",
    "CT-73": "tests run on a CPU, with two processes where needed",
    "CT-74": "a schedule can be drawn",
    "CT-87": "the test part is kept out of choosing",
    "CT-88": "each split has a section of its own",
    "QQ-01": "the engine never reaches up",
    "QQ-02": "a key of one's own is like all others: in files, on the command line, in the help",
    "QQ-03": "--key value, --key=value and switches; typed, and strict about what does not fit",
    "QQ-04": "a closed schema, in the program and for the editor",
    "QQ-05": "$BASE takes over other files, by paths relative to the file; loops are reported",
    "QQ-06": "5e-4 is a number, environment variables are asked for by name",
    "QQ-07": "a config can be made from the schema",
    "QQ-10": "a task knows model and data, not the trainer",
    "QQ-11": "a task's few methods",
    "QQ-15": "one number chooses the best",
    "QQ-17": "a request to stop or save is agreed on by all processes",
    "QQ-19": "plug-ins are called with the trainer before it starts",
    "QQ-20": "state of one's own is in every checkpoint",
    "QQ-21": "which of two lengths ends a run follows one rule",
    "QQ-22": "steps and periods count optimizer steps, also with accumulation",
    "QQ-23": "accumulation weighs every sample alike, in the last window too",
    "QQ-24": "clipping by the norm of all parameters",
    "QQ-25": 'lengths as "0.5epoch" or "200step"',
    "QQ-26": "a plateau schedule moves after validations",
    "QQ-27": "warm-up asked for in the config takes effect",
    "QQ-28": "schedules by name, nothing evaluated as code",
    "QQ-29": "optimizers by name",
    "QQ-30": "a module says which of its parameters have no weight decay",
    "QQ-32": "a second stage with other settings or another optimizer",
    "QQ-34": "averaged weights, updated with every optimizer step",
    "QQ-35": "a save and its recovery",
    "QQ-36": "everything a run is made of is in a checkpoint",
    "QQ-37": "an old checkpoint goes only after the new one is there",
    "QQ-38": "resume and taking over weights are two settings",
    "QQ-39": "a resume inside an epoch",
    "MM-65": "a resume does not read again what was used",
    "QQ-40": "early stop by patience or bounds, remembered across a resume",
    "QQ-41": "the best value, with all that was measured then",
    "QQ-42": "a missing metric is no best and is said",
    "QQ-46": "a loss that is no number stops the run before a checkpoint is overwritten",
    "QQ-47": "the end of a run is recorded with state and reason",
    "QQ-49": "metrics.jsonl holds training, evaluation and saves",
    "QQ-50": "a log record shows the line that wrote it",
    "QQ-51": "a progress bar on a terminal only",
    "QQ-53": "the number of parameters at the start",
    "QQ-54": "double precision for checks, for model and batches",
    "MM-22": "losses are smoothed over a window, and shown raw as well",
    "MM-23": "one line holds epoch, step, rate, loss, time, data share and memory",
    "MM-25": "each process has its own log file; the errors of all reach the terminal",
    "MM-27": "one JSON object per line for all numbers",
    "MM-29": "a checkpoint is read without running code",
    "MM-30": "a report of keys that do not fit, refused unless allowed",
    "MM-31": "weights below a prefix",
    "MM-32": "keys of loaded weights can be renamed",
    "MM-34": "when and how many checkpoints are kept is a setting",
    "MM-35": "the best checkpoint by a chosen metric",
    "MM-36": "the newest checkpoint is found after a folder was moved",
    "MM-37": "checkpoint and run know seed, config, versions and code",
    "MM-38": "a resume compares what has changed",
    "MM-39": "resume and taking over weights are two things",
    "MM-44": "clipping by norm or value, with the norm in the log",
    "MM-45": "mixed precision with a scaler whose state is saved",
    "MM-48": "rates and decay per group of parameters, by patterns over their names",
    "MM-49": "every optimizer of torch by name, others by import path",
    "MM-51": "many schedules, also of torch, with lengths in steps or epochs",
    "MM-52": "a schedule's state is saved with plain values",
    "MM-53": "the schedule is called in the loop, where it can be seen",
    "MM-59": "the average of the weights begins later if wanted; both it and the weights can be evaluated",
    "MM-74": "a drawn seed is the same on every process",
    "MM-78": "seed and determinism are settings",
    "MM-97": "the norm before clipping is reported",
    "BS-07": "an old run of the same name is moved, not overwritten",
    "BS-08": "resume auto goes on where there is something, and starts where there is nothing",
    "BS-09": "a debug mode",
    "BS-10": "only known keys can be set from outside",
    "BS-11": "weights alone can be written and read",
    "BS-12": "a failed save is tried again, and never silent",
    "BS-13": "keys that do not fit are listed",
    "BS-14": "averaged weights",
    "BS-15": "which direction is better is said",
    "BS-16": "losses in the log are over all processes",
    "BS-17": "the log line has the rates of all groups, the time for a step and for data, and the time left",
    "BS-19": "versions are in the record",
    "AN-17": "one build for several operators",
    "AN-21": "asking for more GPUs than processes is refused",
    "KW-01": "a new operator is one C++ file and one CUDA file",
    "KW-02": "editors know the include paths",
    "XP-02": "C++ without CUDA, and Python without either, give the same numbers",
    "XP-03": "the commit is in the run's record",
    "PN-16": "one path of code with and without mixed precision",
    "PN-17": "gradients are unscaled before they are clipped",
    "PN-18": "the scaler is unscaled, stepped and updated once per optimizer step",
    "PN-19": "gradients are clipped by their common norm",
    "PN-21": "no weight decay for biases and norms, by one key",
    "R-01": "a loss is any callable, with its arguments mapped by the config",
    "R-02": "training and evaluate.py measure with the same code, and get the same number",
    "R-03": "--debug: a short run with checks on; a debugger in one process of a training, while the others wait",
    "R-04": "one log line with all that matters",
    "R-05": "TensorBoard by default, metrics.jsonl always",
    "R-06": "how often something is logged is a setting",
    "R-07": "every class of torch.optim, LBFGS too; a wrong argument names the right ones",
    "R-08": "entries by import path, without a decorator",
    "R-09": "a default config that shows every key with its meaning, and a command that shows origins",
    "R-10": "linter, formatter and type checker are set up and clean",
    "R-11": "the engine knows nothing of the project's own code",
    "R-12": "a record shows its file and line; levels can be set per module",
    "R-13": "the loop can be read in one place",
    "R-14": "one process fails or is killed: all end within 10 s, with its reason, and nothing is left running",
    "R-15": "a profiler that can be switched on",
    "R-16": "the registry is flat, and leads to file and line of what is meant",
    "R-17": "for every value, the file and line that set it",
    "R-18": "a batch may be a dict, tuple or dataclass",
    "R-20": "the best checkpoint follows a metric and a direction, across a resume",
    "R-22": "a metric's contract is small",
    "R-23": "checkpoints hold plain values and load without running code",
    "R-24": "every parameter is in exactly one named group, and all rates are logged",
    "R-25": "parts of a model are named by patterns",
    "R-27": "a run begins by telling what will happen when",
    "R-30": "what is done to a batch is visible in the loop",
    "R-31": "a hint when training waits for data",
    "R-33": "random streams are part of a checkpoint",
    "R-34": "keys of loaded weights can be picked, renamed and left out",
    "R-35": "augmentation differs between epochs, and not between runs, workers or processes",
    "R-36": "a fixed order from building to the optimizer",
    "R-37": "fine-tuning from given weights",
    "R-38": "warm-up counts inside the length of a schedule",
    "R-39": "the collate function is a setting: by name, by path, or the dataset's own",
    "R-43": "a project that packaging tools understand",
    "R-44": "a part of the model can stay in 32 bits under autocast, by three documented lines",
    "R-45": "metrics are lines of JSON, with the run first, and can be read back",
    "R-46": "all processes agree on a signal, save, stop at one step, and go on as if nothing had been",
    "R-47": "a resume compares the config with the run's own",
    "R-48": "job.sh repeats launcher, settings and seed, and says when the code has changed",
    "R-49": "averaged weights are saved, resumed and evaluated",
    "R-50": "double precision for everything that is a float",
    "R-51": "stages of a run: until when, what is frozen, optimizer, schedule, losses, data",
    "R-52": "rates and decay per group",
    "R-53": "plug-ins, with their state in the checkpoint",
    "R-54": "TF32 is a setting",
    "R-60": "the place inside an epoch is one number, and nothing is read twice",
    "R-61": "the rate is a function of the step",
    "R-63": "a run's length in steps or epochs",
    "R-64": "one process per device asked for; what does not agree is refused before anything starts",
    "R-65": "a project can take over a newer template",
    "R-66": "each sample is evaluated once, however many processes there are",
    "R-67": "configs build on each other instead of being copied",
    "R-69": "wrappers stay inside the trainer",
    "D-01": "evaluation must not go through the DDP wrapper",
    "D-02": "validation on several processes must see all data, once",
    "D-03": "a save inside an epoch must not lose the rest of it",
    "D-04": "a kill while saving must leave a checkpoint that loads",
    "D-05": "a resume must bring back random streams, schedule and best value",
    "D-08": "the CUDA sources that ship must compile",
    "D-09": "a renamed project must still run its tests",
    "D-10": "the tests that ship must pass",
    "D-11": "paths must be known on every process",
    "D-12": "weights load alike with and without DDP",
    "D-13": "a checkpoint of another model must be refused",
    "D-14": "each optimizer on offer must work",
    "D-15": "LBFGS needs its closure",
    "D-16": "a floor must not lift the rate, and a dead key must not be accepted",
    "D-17": "a resume at a milestone must not drop the rate twice",
    "D-18": "a warm-up must not begin with a rate of 0",
    "D-19": "one rule for all periods",
    "D-20": "an empty dataset must be explained",
    "D-21": "1.5e-3 and +3 are numbers",
    "D-22": "a misspelt key is an error with a suggestion",
    "D-23": "no option is ignored, and none swallows the next",
    "D-24": "a key below a value that is no section is explained",
    "D-25": "nested and empty lists stay what they are, 007 stays text",
    "D-26": "a config is data: no tags, no code, no hidden options",
    "D-27": "a resume must not delete the log",
    "D-28": "a record must not point at the logger itself",
    "D-29": "errors of other processes must be seen",
    "D-30": "a run's folder can be resumed, whatever checkpoints it has",
    "D-31": "job.sh must not depend on the folder it is called from",
    "D-32": "the scripts that ship must run",
    "D-33": "the best checkpoint must be complete, and the old one stay until it is written",
    "D-34": "loading must not run code",
    "D-35": "what early stop has counted must survive a resume",
    "D-36": "a resume must not read what was used",
    "D-37": "which losses are summed must be explicit",
    "D-38": "workers must not repeat their random numbers every epoch",
    "D-39": "a checkpoint of several processes must load in one",
    "D-40": "state of one's own must reach the file",
    "D-41": "what the config asks for must have an effect",
    "D-42": "a missing config is an error, and the schema is applied",
    "D-43": "two bases may share a base",
    "D-44": "text of a config must not be run",
    "D-45": "missing devices are explained",
    "D-46": "ports, time limits and the end of process groups",
    "D-47": "losses must not be read in every step",
    "D-48": "curves go on after a resume, without overlap",
    "D-49": "the logged loss must be that of all processes",
    "D-50": "averaged weights, accumulation, clipping, precision: in the core",
    "D-51": "a look at gradients must not disturb",
    "D-52": "checkpoints must not pile up",
    "D-53": "the optimizer gets what is trained, matched by name",
    "D-54": "kernels: device, stream, errors, precision, sizes; an old build must not be loaded in silence",
    "D-55": "comparing must work without a GPU, for any size",
    "D-57": "small values keep their digits",
    "D-58": "the recorded config is the one that was used, and stays",
    "D-59": "an interrupted run must not end with code 0",
    "D-60": "evaluation must not be a second program with a copied config",
    "D-61": "a missing split must be said, never replaced",
    "D-62": "averaged weights must be saved, and not replace the others",
    "D-63": "any name or text that is accepted must work everywhere",
    "D-64": "versions have bounds",
    "D-65": "saves must be whole and loads safe",
    "D-66": "no exchange per batch of an evaluation",
    "D-67": "0 is a seed; processes and workers must not repeat each other",
    "D-69": "which rate a resumed run goes on with is said",
    "MM-68": "metrics of the whole set are gathered, computed once, and the value given to all",
    "MM-69": "results of single samples need no cutting, since nothing is padded",
    "MM-72": "every exchange works in a single process too, where it does nothing",
    "MM-73": "objects are gathered over gloo, not through files",
    "MM-75": "MPI's variables, and a real mpirun, start a run like the others",
    "MM-76": "threads, open files, cuDNN and the start of workers are set as the run needs them",
    "MM-77": "all processes of a run agree on its folder",
    "QQ-43": "several evaluation sets by name, read again at every evaluation",
    "QQ-44": "whole-set metrics from results kept on the CPU, with a warning when they are large",
    "QQ-45": "no sample counts twice on several processes",
    "QQ-56": "what a Slurm task is told is enough: rank, world size, device, address, port",
    "QQ-57": "helpers that know rank 0 without a group, and gather unequal tensors",
    "R-57": "workers can be started without fork",
    "TP-01": "an error is shown so that it can be mended: what, where, at which samples, and a hint",
    "TP-02": "rank, local rank, world size, device and the exchanges come from one place",
    "TP-03": "gradients travel by nccl or gloo, whoever started the processes",
    "TP-04": "one failing process ends all",
    "TP-12": "the program starts its processes itself, one for each device, with their devices set",
    "TP-13": "the main function stays short however the run is started",
    "TP-14": "a config file with values changed on the command line",
    "MM-82": "a model can be compiled by a setting",
    "MM-83": "activations of chosen blocks can be recomputed, with keyword arguments and without re-entrance",
    "QQ-59": "parts of a model can be frozen, before anything is wrapped",
    "R-58": "activation checkpointing by patterns, with equal gradients",
    "TP-31": "compiling is a setting, not a wrapper in user code",
    "CT-77": "peak memory is measured",
    "PN-02": "peak memory is measured",
    "MM-11": "all workers share one long list",
    "R-59": "all workers share one long list",
    "MM-16": "the collate function is named in the config",
    "MM-81": "batch norm over all processes",
    "MM-95": "what stays random on a GPU is named",
    "BS-03": "a batch is copied while the one before it is computed",
    "AN-04": "metrics of training",
    "AN-08": "data that lie on the GPU already",
    "AN-18": "the scripts that ship are run",
    "AN-19": "a guide, whose files exist",
    "PN-03": "evaluation leaves every module in the mode it had",
}


def rows_of_tests(repo: Path = REPO) -> dict[str, list[str]]:
    """Return the row ids with the tests that hold them, as `folder/file.py::name`, in the order of files."""
    found: dict[str, list[str]] = {}
    named: dict[str, str] = yaml.safe_load((repo / "tools" / "rows.yaml").read_text(encoding="utf-8"))["project"]
    for test, rows in named.items():
        for row in rows.split():
            found.setdefault(row, []).append(f"{PROJECT}/tests/{test}")
    for folder in (Path("proofs"), Path("tests")):
        for file in sorted((repo / folder).rglob("test_*.py")):
            for name, text in _docstrings(file):
                for row in dict.fromkeys(ROW.findall(text)):
                    found.setdefault(row, []).append(f"{file.relative_to(repo).as_posix()}::{name}")
    return found


def _docstrings(file: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name, ast.get_docstring(node) or ""


def others() -> dict[str, tuple[str, str]]:
    """Return the rows that no test names: what each asks, and what became of it.

    Raises `SystemExit` if one is given twice.
    """
    given: dict[str, Any] = yaml.safe_load(OTHERS.read_text(encoding="utf-8"))
    rows = [(row, what, f"{'by' if '.py::' in what else 'feature:'} {_shown(what)}")
            for what, ids in given["held"].items() for row in ids.split()]  # fmt: skip
    rows += [(row, ASKED[other], f"as {other}") for other, ids in given["same"].items() for row in ids.split()]
    rows += [
        (row, each["what"], f"not here: {each['why']}") for each in given["left out"] for row in each["rows"].split()
    ]
    found = {row: (ASKED.get(row) or (what if ".py::" not in what else ""), fate) for row, what, fate in rows}
    if len(found) < len(rows):
        names = [row for row, _, _ in rows]
        raise SystemExit(f"given twice in {OTHERS.name}: {', '.join(sorted({n for n in names if names.count(n) > 1}))}")
    return found


def _shown(name: str) -> str:
    return f"`{name}`" if ".py::" in name else name


def table(found: dict[str, list[str]]) -> str:
    """docs/rows.md. Raises `SystemExit` for an id without words."""
    if unknown := sorted(found.keys() - ASKED.keys()):
        raise SystemExit(f"say in tools/rows.py what these rows ask: {', '.join(unknown)}")
    rest = {row: each for row, each in others().items() if row not in found}
    fates = [fate.partition(" ")[0] for _, fate in rest.values()]
    held = len(fates) - fates.count("as") - fates.count("not")
    lines = [
        "# The rows of the study, and what became of each",
        "",
        "Written by `python tools/rows.py` from docstrings of tests and from `tools/rows.yaml`. `project/`",
        f"stands for the project in the template, `{PROJECT}/`, and so for every rendered one;",
        "`proofs/` are tests of the same files that rendered projects do not carry, `tests/` the",
        "template's own. The ids come from a study of other trainers: CT, QQ, MM, BS, AN, XP,",
        "KW, TP, ZN and PN what they do, R what was missed, D defects that must not come back.",
        "",
        f"Of {len(found) + len(rest)} rows, {len(found)} are named by tests, {held} are held by the tests of a row of",
        f"features.md or by one test, {fates.count('as')} ask what another asks, {fates.count('not')} are not here.",
        "",
        "| row | what it asks | tests, or what became of it |",
        "|---|---|---|",
    ]
    for row in sorted({**found, **rest}, key=_place):
        names = "<br>".join(f"`{test.replace(PROJECT, 'project')}`" for test in found.get(row, ()))
        what, fate = rest.get(row, ("", ""))
        lines.append(f"| {row} | {ASKED.get(row, what)} | {names or fate} |")
    return "\n".join(lines) + "\n"


def _place(row: str) -> tuple[int, str]:
    return SYSTEMS.index(row.partition("-")[0]), row


if __name__ == "__main__":
    TABLE.write_text(table(rows_of_tests()), encoding="utf-8")
    print(f"wrote {TABLE.relative_to(Path.cwd()) if TABLE.is_relative_to(Path.cwd()) else TABLE}")
