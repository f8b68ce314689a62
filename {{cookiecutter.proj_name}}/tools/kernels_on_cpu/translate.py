"""A .cu file as C++, each line where it was."""

import re

COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
LAUNCH = re.compile(r"(\s*)<<<(.*?)>>>(\s*)\(", re.DOTALL)
ALIGN = r"(?:(?:__align__|alignas)\([^)]*\)\s*)?"
DYNAMIC_SHARED = re.compile(rf"extern\s+{ALIGN}__shared__\s+{ALIGN}([^;]+?)\s*(\w+)\s*\[\s*\]\s*;")
SHARED = re.compile(rf"(?:(?:static|volatile)\s+)*{ALIGN}__shared__\s+{ALIGN}([^;]+);")
KEY = re.compile(r"(LIBRARY_IMPL\(\s*\w+\s*,\s*)CUDA\b")


def translate(text: str) -> str:
    """Return a .cu file as C++, each line where it was: launches, shared memory, and the device of its operators."""
    text = without_comments(text)
    for match in reversed([*LAUNCH.finditer(text)]):
        start = _start_of_callee(text, match.start())
        kernel = f"[&](auto... arguments) {{ {text[start : match.start()]}(arguments...); }}"
        text = f"{text[:start]}on_cpu::launch({kernel},{match[1]} {match[2]}){match[3]}({text[match.end() :]}"
    text = DYNAMIC_SHARED.sub(_dynamic_shared, text)
    return KEY.sub(r"\1CPU", SHARED.sub(_shared, text))


def without_comments(text: str) -> str:
    """Return C++ without its comments."""
    return COMMENT.sub(_without_comment, text)


def _without_comment(match: re.Match[str]) -> str:
    if match[0].startswith('"'):
        return match[0]
    return " " + "\n" * match[0].count("\n")


def _start_of_callee(text: str, end: int) -> int:
    """Return where the expression that ends at `end` begins: names, ::, and what brackets enclose after a name."""
    depth = 0
    at = end
    while at > 0:
        character = text[at - 1]
        if character in ">])":
            depth += 1
        elif character in "<[(" and depth > 0:
            depth -= 1
        elif depth == 0 and not (character.isalnum() or character in "_:."):
            break
        at -= 1
    return at


def _dynamic_shared(match: re.Match[str]) -> str:
    reference = f"static {match[1]}*& {match[2]} = reinterpret_cast<{match[1]}*&>(on_cpu::dynamic_shared);"
    lines = match[0].count("\n")
    return "\n" * lines + " ".join(reference.split())


def _shared(match: re.Match[str]) -> str:
    """Shared memory is a reference to memory of the block: `float x[8], y` becomes a type and a reference for each."""
    declared = match[1]
    types = declared
    references = ""
    for part in re.split(r",(?![^<(\[]*[>)\]])", declared):
        named = re.search(r"(\w+)\s*(?:\[.*)?$", part, re.DOTALL)
        if named is None:
            continue
        name = named[1]
        types = re.sub(rf"\b{name}\b(?=\s*(?:\[|,|$))", f"{name}_shared", types, count=1)
        references += f" static char {name}_key; auto& {name} = on_cpu::shared_as<{name}_shared>(&{name}_key);"
    lost = match[0].count("\n") - types.count("\n")
    return "\n" * lost + f"typedef {types};{references}"
