"""The tables of a report."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.base.text import number
from common.config.problem import ABSENT
from common.config.show import dump
from common.run.paths import RunPaths
from support import compare
from support.read import RunFiles
from support.report.curves import COLOURS, is_setting, twins_of_all
from support.report.page import Html, details, joined, table, tag

_MOST_WARNINGS = 30
_WARNING = re.compile(r"^\d{4}-\d\d-\d\d \S+ (?:WARNING|ERROR|CRITICAL) .*", re.MULTILINE)


def value_of(value: float | None) -> Html:
    """A number in a few digits; all its digits are in the title."""
    return Html("–") if value is None else tag("data", number(value).strip(), value=repr(value), title=repr(value))


def state(run: RunFiles) -> Html:
    shows_reason = run.state == "stopped" or run.reason == "early_stop"
    return tag("span", f"{run.state}: {run.reason}" if shows_reason else run.state, class_=f"state {run.state}")


def when(attempt: Mapping[str, Any]) -> str:
    return str(attempt.get("time", ""))[:16].replace("T", " ")


def results(run: RunFiles) -> Html:
    """Every value: last of training, best and last of validation, last of evaluation, and those of evaluate.py."""
    columns: dict[str, Mapping[str, float]] = {}
    last = run.last
    if "train" in last:
        columns["train, last"] = {name: value for name, value in last["train"].items() if not is_setting(name)}
    if run.best:
        columns[f"val, best (step {run.best['step']:,})"] = run.measured("val")[run.best["step"]]
    for event in ("val", "eval"):
        if event in last:
            columns[f"{event}, last (step {max(run.measured(event)):,})"] = last[event]
    columns |= compare.evaluations(run)
    names = dict.fromkeys(name for values in columns.values() for name in values)
    rows = [[name, *(value_of(values.get(name)) for values in columns.values())] for name in names]
    return table(["", *columns], rows, class_="numbers") if rows else Html("")


def table_of_runs(runs: Sequence[RunFiles], names: Sequence[str]) -> Html:
    """A row for each run: its best validation, steps and time; code and host if they differ."""
    groups = list(compare.ranked(runs).values())
    first = groups[0][:1] if len(groups) == 1 else []
    where = {
        "code": [str(_last_attempt(run).get("git", {}).get("commit"))[:10] for run in runs],
        "host": [str(_last_attempt(run).get("host")) for run in runs],
    }
    where = {name: values for name, values in where.items() if len(set(values)) > 1}
    rows = []
    for at, (run, name) in enumerate(zip(runs, names, strict=True)):
        best: Html | str = "–"
        if run.best:
            value = value_of(run.best["value"])
            best = joined([f"{run.best['metric']} ", tag("b", value) if run in first else value])
        rest = [f"{run.step:,}", compare.duration(compare.seconds(run)), *(each[at] for each in where.values())]
        rows.append([tag("span", name, class_=f"dot c{at % COLOURS}"), state(run), best, *rest])
    return table(["run", "state", "best validation", "steps", "time", *where], rows, class_="attempts")


def keys_of_all(runs: Sequence[RunFiles], names: Sequence[str]) -> Html:
    """The keys that differ among the runs, with a column for each run."""
    keys = compare.differing(runs)
    rows = [[tag("code", key), *(compare.shown(run.config.get(key, "–")) for run in runs)] for key in keys]
    return table(["key", *names], rows) if rows else tag("p", "No key differs.", class_="about")


def _last_attempt(run: RunFiles) -> dict[str, Any]:
    return run.attempts[-1] if run.attempts else {}


def results_of_all(runs: Sequence[RunFiles], names: Sequence[str]) -> Html:
    """A row for each value, a column for each run, the best of a row in bold."""
    results, same = [compare.results(run) for run in runs], twins_of_all(runs)
    is_alike = len({compare.ranking(run)[1] for run in runs}) == 1  # the same data: the best of a row has a meaning
    rows = []
    for name in dict.fromkeys(name for each in results for name in each):
        if name.partition(".")[2] in same:
            continue
        values = [each.get(name) for each in results]
        known = [value for value in values if is_alike and value is not None and value == value]
        sign = -1 if known and compare.mode(runs[0], name.partition(".")[2]) == "max" else 1
        best = min(known, key=lambda value: sign * value, default=None)
        cells = [tag("b", value_of(value)) if value == best and len(known) > 1 else value_of(value) for value in values]
        rows.append([name.replace(".", " ", 1), *cells])
    note = "val: at the best validation of each run; eval: at its last evaluation during training."
    return joined([table(["", *names], rows, class_="numbers"), tag("p", note, class_="about")]) if rows else Html("")


def changes(run: RunFiles) -> Html:
    """The keys that differ from configs/default.yaml; nothing without that file."""
    if not run.config or not compare.defaults():
        return Html("")
    rows = [[tag("code", key), "–" if old is ABSENT else compare.shown(old), compare.shown(new)]
            for key, old, new in compare.changed(run)]  # fmt: skip
    if not rows:
        return tag("p", "Every key has the value of configs/default.yaml.", class_="about")
    return table(["key", "configs/default.yaml", "this run"], rows)


def whole_config(run: RunFiles) -> Html:
    text = "".join(f"{key}: {dump(value, flow=True)}\n" for key, value in run.config.items())
    return details(f"All {len(run.config)} keys", tag("pre", text)) if text else Html("")


def attempts(run: RunFiles) -> Html:
    """One row for each start or resume."""
    began = {each.get("attempt"): each.get("resume_step") for each in run.records if each["event"] == "run"}
    rows = []
    for at, attempt in enumerate(run.attempts, 1):
        step = began.get(attempt.get("attempt", at))
        start = "the beginning" if step is None else f"step {step:,}"
        processes = f"{attempt.get('world_size')} by {attempt.get('launcher')}"
        rows.append(
            [str(at), when(attempt), start, str(attempt.get("host")), processes, tag("code", _command(attempt))]
        )
    return (
        table(["attempt", "time", "from", "host", "processes", "command"], rows, class_="attempts")
        if rows
        else Html("")
    )


def _command(attempt: Mapping[str, Any]) -> str:
    words = [str(word) for word in attempt.get("argv", [])]
    return " ".join(["python", Path(words[0]).name, *words[1:]]) if words else str(attempt.get("command"))


def stages(run: RunFiles) -> Html:
    rows = [[str(each.get("stage")), f"{each['step']:,}", "; ".join(map(str, each.get("changed", [])))]
            for each in run.records if each["event"] == "stage"]  # fmt: skip
    return table(["stage", "from step", "what changed"], rows) if rows else Html("")


def environment(run: RunFiles) -> Html:
    if not run.attempts:
        return Html("")
    last, git = run.attempts[-1], run.attempts[-1].get("git", {})
    code = f"{git.get('commit') or 'unknown'} on {git.get('branch')}" + ", with uncommitted changes" * bool(
        git.get("dirty")
    )
    about = {
        "code": code if git.get("commit") else f"unknown: {git.get('note', '')}",
        **{name: value for name, value in last.get("versions", {}).items() if value},
        "machine": last.get("host"),
        "CPU threads": last.get("cpu_threads"),
        "seed": last.get("seed"),
        **last.get("environment", {}),
        "full command": last.get("command"),
        "folder": last.get("working_directory"),
    }
    return details("Environment", table(["", ""], [[name, tag("code", str(value))] for name, value in about.items()]))


def warnings(run: RunFiles) -> Html:
    try:
        text = RunPaths(run.path).log_file().read_text(errors="replace")
    except OSError:
        return Html("")
    found = _WARNING.findall(text)
    if not found:
        return Html("")
    more = f"the first {_MOST_WARNINGS} of " if len(found) > _MOST_WARNINGS else ""
    lines = tag("pre", "\n".join(found[:_MOST_WARNINGS]))
    return details(f"Warnings in train.log: {more}{len(found)}", lines)
