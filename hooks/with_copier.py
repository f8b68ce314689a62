"""Makes a project of what copier has copied: what cookiecutter does with the same folder, and then the same two hooks.

    python hooks/with_copier.py ANSWERS COMMIT FILE

copier runs it as a task in the new project, with the answers as JSON, the template's commit if it has one, and the file
for the answers. Needs only what copier itself needs.
"""

import fnmatch
import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

from jinja2 import Environment, StrictUndefined

TEMPLATE = Path(__file__).resolve().parent.parent
HOOKS = ("pre_gen_project", "post_gen_project")


def main(answers, commit, file):
    answers = json.loads(answers)
    config = json.loads((TEMPLATE / "cookiecutter.json").read_text(encoding="utf-8"))
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)

    def render(text):
        return environment.from_string(text).render(cookiecutter=context)

    context = {key: answers[key] for key in config if not key.startswith("_")}
    context["__year"] = datetime.now(timezone.utc).strftime("%Y")  # cookiecutter's {% now %} is its own
    context["__author"] = render(config["__author"])
    context |= {"_template": answers["_src_path"], "_commit": commit, "_repo_dir": str(TEMPLATE), "_record": file}
    context["_new_lines"] = config["_new_lines"]  # copier leaves line ends as they are
    before, after = (render((TEMPLATE / "hooks" / f"{name}.py").read_text(encoding="utf-8")) for name in HOOKS)
    run(before)
    for path in rendered(config["_copy_without_render"]):
        Path(path).write_bytes(render(path.read_text(encoding="utf-8")).encode("utf-8"))
    run(after)


def rendered(patterns):
    """Returns the files of the new project that hold placeholders."""
    folder = TEMPLATE / "{{cookiecutter.proj_name}}"
    paths = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in paths if not any(fnmatch.fnmatch(path.as_posix(), pattern) for pattern in patterns)]


def run(hook):
    done = subprocess.run([sys.executable, "-c", hook], check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main(*sys.argv[1:])
