"""List the tools: python -m tools"""

import ast
from pathlib import Path

HERE = Path(__file__).parent

if __name__ == "__main__":
    print("Each has --help.\n")
    for file in sorted([*HERE.glob("*.py"), *HERE.glob("*/__main__.py")]):
        name = file.relative_to(HERE).with_suffix("").as_posix().removesuffix("/__main__")
        if not name.startswith("__"):
            about, _, _ = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")
            print(f"python -m tools.{name:<8}  {about.partition(': python')[0].rstrip('.')}")
