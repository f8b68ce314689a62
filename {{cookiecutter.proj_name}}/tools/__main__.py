"""List the tools: python -m tools"""

import ast
from pathlib import Path

HERE = Path(__file__).parent

if __name__ == "__main__":
    print("Programs around training; all of them have --help.\n")
    for file in sorted([*HERE.glob("*.py"), *HERE.glob("*/__main__.py")]):
        name = file.relative_to(HERE).with_suffix("").as_posix().removesuffix("/__main__")
        text = file.read_text(encoding="utf-8")
        if not name.startswith("__") and '"__main__"' in text:  # others belong to a program
            about, _, _ = (ast.get_docstring(ast.parse(text)) or "").partition("\n")
            print(f"python -m tools.{name:<10}  {about.partition(': python')[0].rstrip('.')}")
