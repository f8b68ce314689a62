"""Stops at an answer that would make a broken project, with one sentence, before anything is written.

Rendered and run by cookiecutter in the new, still empty folder; a non-zero exit makes it remove that folder again.
The update tool runs it too: no prompt, no network, no git.
"""

import json
import keyword
import re
import sys
import unicodedata

# Raw and triple-quoted, so that no answer can end the string: JSON never holds three quotes in a row.
ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")

LONGEST = 64  # some file systems end at 143 bytes a name, and run folders, logs and jobs are named after the project

# Windows opens a device for these names, whatever their case and whatever follows the first dot.
DEVICES = {"con", "prn", "aux", "nul"} | {f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10)}

# Top-level names that the project's own code, tools or dependencies use.
FOLDERS = {
    "cli",
    "common",
    "configs",
    "data",
    "docs",
    "examples",
    "experiments",
    "library",
    "ops",
    "scripts",
    "tests",
    "tools",
    "venv",
}
SCRIPTS = {"analyze", "conftest", "evaluate", "export", "predict", "setup", "train"}
LIBRARIES = {
    "google", "loguru", "matplotlib", "numpy", "pil", "pillow", "pip", "pydantic", "pydantic_core", "pytest",
    "setuptools", "tensorboard", "torch", "torchvision", "tqdm", "triton", "yaml",
}  # fmt: skip
# `sys.stdlib_module_names` is new in Python 3.10, and cookiecutter itself may run on an older one.
STDLIB = {name.lower() for name in getattr(sys, "stdlib_module_names", sys.builtin_module_names)}
KEYWORDS = {word.lower() for word in keyword.kwlist} | {"case", "match", "type", "_"}


def problem_with_project(name):
    """Return what is wrong with the project's name, or None."""
    if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?", name):
        return "use letters, digits, _ and -, with a letter first and a letter or digit last"
    return too_long(name) or taken(name, {"common": "the engine's folder", "torch": "a library"})


def problem_with_custom(name):
    """Return what is wrong with the name of the user's own package, or None."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        return "it becomes a Python package, so use letters, digits and _, with a letter first"
    names = {**dict.fromkeys(FOLDERS, "a folder"), **dict.fromkeys(SCRIPTS, "a script")}
    names.update(dict.fromkeys(LIBRARIES, "a library"))
    if name != "custom" and name.lower() == "custom":
        return "it differs from 'custom' in case only, which some file systems cannot tell apart"
    return too_long(name) or taken(name, names)


def too_long(name):
    return f"it has {len(name)} characters, and {LONGEST} is the limit" if len(name) > LONGEST else None


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


def main():
    checks = (
        ("proj_name", problem_with_project),
        ("custom_name", problem_with_custom),
        ("description", problem_with_text),
        ("author_name", problem_with_text),
    )
    for key, check in checks:
        value = str(ANSWERS[key])
        problem = check(value)
        if problem:
            sys.exit(
                f"\n{key} {value!r} cannot be used: {problem}.\n"
                "Nothing was created; start again with another answer. What follows is cookiecutter's own report.\n"
            )


if __name__ == "__main__":
    main()
