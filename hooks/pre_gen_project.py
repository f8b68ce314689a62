"""Stops at an answer that would make a broken project, with one sentence, before anything is written.

Rendered and run by cookiecutter in the new, still empty folder; a non-zero exit makes it remove that folder again.
The update tool runs it too: no prompt, no network, no git.
"""

import json
import keyword
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

# Raw and triple-quoted, so that no answer can end the string: JSON never holds three quotes in a row.
ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")
# As they were given, before cookiecutter evaluated them as templates; the update tool does not pass them.
GIVEN = json.loads(r"""{{ (_cookiecutter | default({})) | tojson }}""")

WHAT_NOW = "Nothing was created; start again with another answer."
if "COPIER_OPERATION" in os.environ:  # it has copied the files already
    WHAT_NOW = "Start again with another answer; of a new folder nothing is left, in an old one delete what was copied."

LONGEST = 64  # some file systems end at 143 bytes a name, and run folders, logs and jobs are named after the project
LONGEST_PACKAGE = 24  # lines of code that name the package have room for as much: `make lint` passes

# Windows opens a device for these names, whatever their case and whatever follows the first dot.
DEVICES = {"con", "prn", "aux", "nul"} | {f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10)}

# Top-level names that the project's own code, tools or dependencies use.
FOLDERS = {
    "build",
    "cli",
    "common",
    "configs",
    "data",
    "dist",
    "docs",
    "env",
    "examples",
    "experiments",
    "library",
    "ops",
    "parts",
    "scripts",
    "tests",
    "tools",
    "venv",
}
SCRIPTS = {"analyze", "conftest", "evaluate", "export", "predict", "setup", "train"}
# Modules of what the project needs, of what that needs in turn, and of what the pages advise to install. A package of
# such a name would be imported in its place.
LIBRARIES = {
    "absl", "annotated_types", "anyio", "ast_serialize", "braceexpand", "certifi", "cfgv", "clang_format", "click",
    "cloudpickle", "contourpy", "copier", "cruft", "cycler", "datasets", "dateutil", "distlib", "execnet",
    "fastapi", "filelock", "fonttools", "fsspec", "functorch", "google", "grpc", "huggingface_hub", "hypothesis",
    "identify", "iniconfig", "isympy", "jinja2", "joblib", "kiwisolver", "librt", "loguru", "markdown",
    "markupsafe", "matplotlib", "mlflow", "mpl_toolkits", "mpmath", "mypy", "mypy_extensions", "mypyc", "narwhals",
    "networkx", "nodeenv", "numpy", "onnx", "onnxruntime", "onnxscript", "optuna", "packaging", "pandas",
    "pathspec", "peft", "pil", "pillow", "pip", "pkg_resources", "platformdirs", "pluggy", "pre_commit", "psutil",
    "py", "pydantic", "pydantic_core", "pygments", "pylab", "pyparsing", "pytest", "pytz", "python_discovery",
    "regex", "requests", "ruff", "safetensors", "schedulefree", "scipy", "setuptools", "six", "sklearn",
    "starlette", "sympy", "tensorboard", "tensorboard_data_server", "threadpoolctl", "timm", "tokenizers", "torch",
    "torchgen", "torchmetrics", "torchvision", "tqdm", "transformers", "triton", "typing_extensions",
    "typing_inspection", "tzdata", "urllib3", "uv", "uvicorn", "virtualenv", "wandb", "webdataset", "werkzeug", "wheel",
    "xdist", "yaml",
}  # fmt: skip
# Packages whose name on PyPI is not that of their module: a project of such a name would require itself.
DISTRIBUTIONS = {
    "absl-py", "fonttools", "grpcio", "protobuf", "pre-commit", "pytest-xdist", "python-dateutil", "pyyaml",
    "scikit-learn", "types-pyyaml", "types-tqdm",
}  # fmt: skip
# `sys.stdlib_module_names` is new in Python 3.10, and cookiecutter itself may run on an older one.
STDLIB = {name.lower() for name in getattr(sys, "stdlib_module_names", sys.builtin_module_names)}
KEYWORDS = {word.lower() for word in keyword.kwlist} | {"case", "match", "type", "_"}


def problem_with_project(name):
    """Return what is wrong with the project's name, or None."""
    if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?", name):
        return "use letters, digits, _ and -, with a letter first and a letter or digit last"
    packages = DISTRIBUTIONS | {library.replace("_", "-") for library in LIBRARIES}
    if re.sub(r"[-_]+", "-", name).lower() in packages:
        return "the project needs a package of that name, or may need it, and cannot be one itself"
    return too_long(name, LONGEST) or taken(name, {"common": "the engine's folder"})


def problem_with_custom(name):
    """Return what is wrong with the name of the user's own package, or None."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        return "it becomes a Python package, so use letters, digits and _, with a letter first"
    names = {**dict.fromkeys(FOLDERS, "a folder"), **dict.fromkeys(SCRIPTS, "a script")}
    names.update(dict.fromkeys(LIBRARIES, "a library"))
    if name != "custom" and name.lower() == "custom":
        return "it differs from 'custom' in case only, which some file systems cannot tell apart"
    return too_long(name, LONGEST_PACKAGE) or taken(name, names)


def too_long(name, limit):
    return f"it has {len(name)} characters, and {limit} is the limit" if len(name) > limit else None


def taken(name, names):
    """Compared without case, because macOS and Windows file systems do so."""
    lower = name.lower()
    if lower in KEYWORDS:
        return "it is a word of the Python language"
    if lower in STDLIB:
        return "Python's standard library has a module of that name"
    if lower in DEVICES:
        return "Windows reserves that name for a device"
    return f"the project already uses that name for {names[lower]}" if lower in names else None


def problem_with_text(text):
    """Return what is wrong with a one-line text, or None. Quotes, backslashes, '#' and other letters are all fine."""
    forbidden = ("Cc", "Cs", "Zl", "Zp")  # control characters, halves of a character, line and paragraph separators
    if any(unicodedata.category(character) in forbidden for character in text):
        return "it must be one line of text without control characters"
    return None


def problem_with_braces(text):
    """What is wrong with an answer as it was given, or None."""
    openings = ["{" + second for second in ("{", "%", "#")]  # in two parts: this file is a template itself
    if any(opening in text for opening in openings):
        return f"{', '.join(openings)} begin code of the template language, which each update would run"
    return None


def problem_with_line_ends(text):
    """Return what is wrong with line ends that somebody's settings ask for, or None."""
    if text != "\n":
        return "lines of this project end in LF, or its shell scripts would not run; delete the key from your settings"
    return None


def remove_parents():
    """For a name such as a/b, cookiecutter removes b when this program has ended: a goes then, too, if it is empty."""
    folder = Path.cwd()
    is_nested = re.fullmatch(r"[^/.][^/]*(/[^/.][^/]*)+", ANSWERS["proj_name"])
    if not is_nested or not folder.as_posix().endswith(f"/{ANSWERS['proj_name']}"):  # copier names the folder itself
        return
    parents = [str(parent) for parent in folder.parents][: ANSWERS["proj_name"].count("/")]
    wait = """
import os, sys, time
for _ in range(100):
    time.sleep(0.05)
    if not os.path.exists(sys.argv[1]):
        for parent in sys.argv[2:]:
            os.rmdir(parent)
        break
"""
    subprocess.Popen([sys.executable, "-c", wait, str(folder), *parents], cwd=folder.anchor, stderr=subprocess.DEVNULL)


def main():
    checks = (
        ("proj_name", problem_with_project),
        ("custom_name", problem_with_custom),
        ("description", problem_with_text),
        ("author_name", problem_with_text),
        ("_new_lines", problem_with_line_ends),
    )
    for key, check in checks:
        value = str(ANSWERS[key])
        given = str(GIVEN.get(key, value))
        if problem := problem_with_braces(given) or problem_with_braces(value):
            value = given
        problem = problem or check(value)
        if problem:
            remove_parents()
            sys.exit(
                f"\n{key} {value!r} cannot be used: {problem}.\n{WHAT_NOW} What follows is the tool's own report.\n"
            )


if __name__ == "__main__":
    main()
