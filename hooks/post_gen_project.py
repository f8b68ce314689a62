"""Removes the files that were not chosen, renames the user's package, and prints the next commands.

Rendered and run by cookiecutter in the new project. Safe to run again: the update tool does so in a temporary folder,
and `cookiecutter -f` in a folder that is in use. No prompt, no network, no git.
"""

import json
import os
import re
import shutil
from pathlib import Path

# Raw and triple-quoted, so that no answer can end the string: JSON never holds three quotes in a row.
ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")

# What tools leave behind when the template folder itself is linted and tested.
CACHES = {"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache"}
# Never ours to touch when a project is rendered over one that is in use.
PRIVATE = CACHES | {".git", ".venv", "venv", "experiments"}

# The operators and all that stands on them, file by file: a folder of the same name may hold the user's own.
OPS = {
    ".": [".clang-format", "configs/ops.yaml", "scripts/install_ops.sh", "custom/ops/saturating_model.py"],
    "common/ops": ["__init__.py", "__main__.py", "arguments.py", "build.py", "library.py", "load.py", "toolchain.py"],
    "custom/ops": ["__init__.py", "add_matrix.py", "compare.py", "scale_exp.py", "README.md"],
    "custom/ops/src": ["add_matrix.cpp", "add_matrix.cu", "kernels.h", "launch.cuh", "scale_exp.cpp", "scale_exp.cu"],
    "tests/ops": ["__init__.py", "conftest.py", "test_build.py", "test_operators.py", "test_training.py"],
}

# The examples: the folders, and the files that each may have. Beside them may lie examples of the user's own.
EXAMPLES = (
    "boxes", "distillation", "gan", "language_model", "metric_learning", "model_from_string", "regression",
    "reinforcement", "segmentation", "self_supervised", "serving", "stages", "stream", "text",
)  # fmt: skip
EXAMPLE_FILES = (
    "__init__.py", "config.yaml", "data.py", "metric.py", "model.py", "next_word.yaml", "server.py", "task.py",
)  # fmt: skip
EXAMPLE_TESTS = (
    "__init__.py",
    "runs.py",
    "test_analysis.py",
    "test_examples.py",
    "test_metrics.py",
    *(f"test_{name}.py" for name in EXAMPLES),
)

TEXT_SUFFIXES = {"", ".cfg", ".ini", ".json", ".md", ".sh", ".svg", ".toml", ".txt", ".yaml", ".yml"}
TEXT_SUFFIXES |= {".py", ".cpp", ".cu", ".cuh", ".h"}

# The places where "custom" is the package and not an English word. Each leaves customise, custom_name, my_custom,
# and "a custom loss" alone.
CUSTOM = re.compile(
    r"""
      (?<![\w./-])  custom (?= \.[A-Za-z_*] )          # custom.models: an import, a type in a config
    | (?<![\w-])    custom (?= / )                     # custom/models: a path
    | (?<= ["'`])   custom (?= (?: \* | \\ )? ["'`] )  # "custom", 'custom', `custom`, "custom*", \"custom\" in JSON
    | (?<= from\ )  custom (?= \ import\b )
    | (?<= import\ ) custom (?= [ \t]* (?: $ | [,;\#] | as\b ) )
    """,
    re.VERBOSE | re.MULTILINE,
)


def drop_unwanted(root, answers):
    """Removes whole files only, and folders only when that leaves them empty."""
    if answers["license"] == "none":
        (root / "LICENSE").unlink(missing_ok=True)
    if answers["ops"] == "no":
        for folder, names in OPS.items():
            for name in names:
                (root / folder / name).unlink(missing_ok=True)
        drop_empty(
            root / "custom" / "ops" / "src", root / "custom" / "ops", root / "common" / "ops", root / "tests" / "ops"
        )
        drop_from_schema(root / "configs" / "schema.json", "SaturatingModel")
    if answers["examples"] == "none":
        files = [f"{folder}/{name}" for folder in EXAMPLES for name in EXAMPLE_FILES]
        for name in ("__init__.py", "digits.py", "README.md", *files):
            (root / "examples" / name).unlink(missing_ok=True)
        for name in EXAMPLE_TESTS:
            (root / "tests" / "examples" / name).unlink(missing_ok=True)
        folders = [root / "examples" / folder for folder in EXAMPLES]
        drop_empty(*folders, root / "examples", root / "tests" / "examples")
    if answers["ci"] == "none":
        (root / ".github" / "workflows" / "ci.yml").unlink(missing_ok=True)
        drop_empty(root / ".github" / "workflows", root / ".github")


def drop_from_schema(path, name):
    """Removes a registered class from the schema for editors: its name, and the rule of its arguments."""
    rule = {"properties": {"type": {"const": name}}}

    def is_about_it(item):
        return item == name or (isinstance(item, dict) and item.get("if") == rule)

    def without(node):
        if isinstance(node, dict):
            return {key: without(item) for key, item in node.items()}
        return [without(item) for item in node if not is_about_it(item)] if isinstance(node, list) else node

    if path.is_file():
        path.write_text(json.dumps(without(json.loads(path.read_text())), indent=2) + "\n")


def drop_empty(*folders):
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def drop_caches(root):
    for folder, names, _ in os.walk(root):
        for name in CACHES & set(names):
            shutil.rmtree(Path(folder, name))
        names[:] = [name for name in names if name not in PRIVATE]


def rename_custom(root, name):
    """Renames the folder `custom` to `name`, and every mention of it as a package or a path."""
    if name == "custom":
        return
    move_into(root / "custom", root / name)
    for folder, names, files in os.walk(root):
        names[:] = [each for each in names if each not in PRIVATE]
        for file in files:
            rewrite(Path(folder, file), name)


def move_into(source, target):
    """Like a rename, but also onto a folder that exists: then file by file, the new one winning."""
    if not source.is_dir():
        return
    for path in sorted(source.rglob("*")):
        if path.is_file():
            destination = target / path.relative_to(source)
            destination.parent.mkdir(parents=True, exist_ok=True)
            path.replace(destination)
    shutil.rmtree(source)


def rewrite(path, name):
    """Bytes in, bytes out: the line endings and everything else stay as they are."""
    if path.suffix not in TEXT_SUFFIXES or path.is_symlink():
        return
    try:
        old = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return  # not a text, so it names no package
    new = CUSTOM.sub(name, old)
    if new != old:
        path.write_bytes(new.encode("utf-8"))


def print_next_steps(answers):
    print(f"""
{answers["proj_name"]} is ready. Next:

  cd {answers["proj_name"]}
  python -m pip install -r requirements.txt
  python train.py --config configs/default.yaml
  python evaluate.py --model_pt experiments/default/checkpoints/best.pt

With git, each run records its commit, and pre-commit can check your changes:

  git init && git add -A && git commit -m "Start"
""")


def main():
    root = Path.cwd()
    drop_unwanted(root, ANSWERS)
    drop_caches(root)
    rename_custom(root, ANSWERS["custom_name"])
    print_next_steps(ANSWERS)


if __name__ == "__main__":
    main()
