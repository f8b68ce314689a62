"""The report of a run, report.html: one page that needs no other file, to read in a browser, to send and to print.

The page of several runs shows them side by side. Everything in it comes from the files of the runs.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from loguru import logger

from common.base.files import write_text
from common.base.text import number
from support import compare
from support.read import RunFiles, read_run
from support.report.charts import smooth
from support.report.curves import curves, curves_of_all, series, twins
from support.report.page import Html, joined, page, tag
from support.report.pictures import pictures
from support.report.tables import (
    attempts,
    changes,
    environment,
    keys_of_all,
    results,
    results_of_all,
    stages,
    state,
    table_of_runs,
    value_of,
    warnings,
    when,
    whole_config,
)

FILE = "report.html"


def write_report(folder: Path) -> None:
    """Write the report of a run into its folder. A failure is a warning: the run has ended well."""
    try:
        write_text(folder / FILE, report([read_run(folder)]))
    except Exception as error:  # noqa: BLE001 - any error
        again = shlex.join(["python", "-m", "tools.report", str(folder)])
        logger.warning("{} cannot be written: {!r}; try {}", folder / FILE, error, again)


def report(runs: Sequence[RunFiles]) -> str:
    """The page of one run, or of several side by side."""
    return _of_one(runs[0]) if len(runs) == 1 else _of_several(runs)


def _of_one(run: RunFiles) -> str:
    parts = [f"{run.step:,} steps", f"{compare.epoch(run):g} epochs", compare.duration(compare.seconds(run))]
    if run.attempts:
        parts += [f"started {when(run.attempts[0])}", f"on {run.attempts[-1].get('host')}"]
    return page(
        f"{run.name}: report",
        tag("header", tag("h1", run.name, state(run)), tag("p", " · ".join(parts), class_="about")),
        _notes([run]),
        _cards(run),
        _section("Curves", _charts(curves(run))),
        _section("Results", results(run)),
        _section("Pictures", pictures(run)),
        _section("Configuration", changes(run), whole_config(run)),
        _section("How it ran", attempts(run), stages(run), environment(run), warnings(run)),
        tag("footer", f"Made from the files in {run.path.resolve()}"),
    )


def _of_several(runs: Sequence[RunFiles]) -> str:
    names = names_of(runs)
    shown = [
        tag("h3", name) + some
        for name, run in zip(names, runs, strict=True)
        if (some := pictures(run, most=8, progress=False))
    ]
    return page(
        f"{len(runs)} runs: report",
        tag("header", tag("h1", f"{len(runs)} runs side by side"), tag("p", verdict(runs, names), class_="about")),
        _notes(runs),
        _section("Runs", table_of_runs(runs, names)),
        _section("Curves", _charts(curves_of_all(runs, names))),
        _section("Results", results_of_all(runs, names)),
        _section("Configuration", keys_of_all(runs, names)),
        _section("Pictures", Html("".join(shown))),
        tag("footer", f"Made from the files in {', '.join(str(run.path.resolve()) for run in runs)}"),
    )


def _section(title: str, *content: str) -> Html:
    """Empty if there is no content."""
    return tag("section", tag("h2", title), *content) if any(content) else Html("")


def _charts(charts: Sequence[Html]) -> Html:
    return tag("div", *charts, class_="charts") if charts else Html("")


def names_of(runs: Sequence[RunFiles]) -> list[str]:
    """Names that tell the runs apart: their paths where two have the same."""
    names = [run.name for run in runs]
    return [str(run.path) if names.count(run.name) > 1 else run.name for run in runs]


# --- the top ---------------------------------------------------------------------------------------------------------


def _notes(runs: Sequence[RunFiles]) -> Html:
    """Why runs failed, and which files are missing or damaged."""
    notes = []
    for run in runs:
        lines = [*([run.reason] if run.state == "failed" else []), *run.problems]
        if lines:
            notes.append(tag("p", tag("strong", f"{run.name}: "), "; ".join(lines), class_="notes"))
    return joined(notes)


def _cards(run: RunFiles) -> Html:
    """The numbers that are asked for first: the best validation, the last evaluation, the loss of training."""
    best, found = run.best, list[tuple[str, float, str]]()
    if best:
        found.append((f"best val {best['metric']}", best["value"], f"step {best['step']:,}"))
    same = twins(run)
    notes = {"val": f"at step {best['step']:,}" if best else "last validation", "eval": "last evaluation"}
    for name, value in sorted(compare.results(run).items(), key=lambda each: _is_loss(each[0])):
        split, _, metric = name.partition(".")
        if metric not in same and not (best and name == f"val.{best['metric']}"):
            found.append((f"{split} {metric}", value, notes[split]))
    if train := smooth(series(run, "train").get("loss", [])):
        found.append(("train loss", train[-1][1], "at the end"))
    cards = [
        tag(
            "li",
            tag("span", name),
            tag("b", value_of(value)),
            tag("span", note),
            class_="main" if best and not at else None,
        )
        for at, (name, value, note) in enumerate(found[:6])
    ]
    return tag("ul", *cards, class_="cards") if cards else Html("")


def _is_loss(name: str) -> bool:
    return name.rpartition(".")[2] == "loss"


def verdict(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    """Which run is best, or why that cannot be said."""
    groups = compare.ranked(runs)
    if len(groups) != 1:
        text = f"None is called the best: they were ranked by different things ({'; '.join(map(' on '.join, groups))})."
        return text if groups else "No run has a best validation yet."
    (((metric, _), (first, *_)),) = groups.items()
    best, name = first.best or {}, names[[run is first for run in runs].index(True)]
    return f"Best by val {metric}: {name}, {number(best['value']).strip()} at step {best['step']:,}."
