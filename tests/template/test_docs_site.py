"""The docs site: built from a render without a warning, complete, searchable, and right in a real browser."""

import functools
import http.server
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from browser import browser
from real import REPORT
from support import REPO, TEMPLATE

pytestmark = pytest.mark.slow

LOOKED_AT = ["index.html", "docs/data_tools.html", "reference/keys.html", "reference/programs.html"]
SEARCH = """(async () => {
    const input = document.querySelector("input[name=query]");
    input.focus(); input.value = WORDS; input.dispatchEvent(new KeyboardEvent("keyup"));
    for (let tries = 0; tries < 100; tries++) {
        const found = [...document.querySelectorAll(".md-search-result__link")].map(link => link.getAttribute("href"));
        if (found.length) return found;
        await new Promise(resolve => setTimeout(resolve, 100));
    }
    return [];
})()"""


class Page(HTMLParser):
    """The links, the addresses of scripts, styles and pictures, and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.anchors = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.anchors |= {values.get("id", ""), values.get("name", "")}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        elif tag in ("img", "script", "iframe", "source") and "src" in values:
            self.loads.add(values["src"])
        elif tag == "link" and values.get("rel") != "canonical":
            self.loads.add(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "built"
    command = [sys.executable, "tools/docs_site.py", str(folder)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_every_page_is_there_and_every_link_leads_somewhere(site: Path) -> None:
    pages = {path.relative_to(site).as_posix(): Page(path.read_text("utf-8")) for path in site.rglob("*.html")}
    for source in TEMPLATE.glob("docs/**/*.md"):
        name = source.relative_to(TEMPLATE).with_suffix(".html").as_posix().replace("README.html", "index.html")
        assert name in pages
    wrong = []
    for name, page in pages.items():
        for link in page.links | page.loads:
            where = urlsplit(link)
            if where.scheme or where.netloc:
                if link in page.loads:
                    wrong.append(f"{name} loads {link}")  # fonts and scripts are the site's own
                continue
            target = (site / name).parent / unquote(where.path) if where.path else site / name
            if where.path.startswith("/"):
                continue  # 404.html, whose place nobody knows
            if not target.is_file():
                wrong.append(f"{name}: {link}")
            elif target.suffix == ".html" and where.fragment:
                there = pages[target.resolve().relative_to(site.resolve()).as_posix()]
                if unquote(where.fragment) not in there.anchors and not where.fragment.startswith("__"):
                    wrong.append(f"{name}: {link}")
    assert wrong == []


def test_keys_and_programs_are_complete(site: Path) -> None:
    """Every key of the default config, every program of the README; all of it in the search index."""
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    indexed = " ".join(entry["title"] + " " + entry["text"] for entry in index["docs"])
    section, names = "", []
    for line in (TEMPLATE / "configs" / "default.yaml").read_text("utf-8").splitlines():
        if found := re.match(r"(  )?(\w+):", line):
            section = section if found[1] else found[2]
            names.append(f"{section}.{found[2]}" if found[1] else section)
    assert len(names) > 90
    inner = ("loss.", "metric.", "model.", "task.")  # arguments of the sample parts
    assert [name for name in names if name not in indexed and not name.startswith(inner)] == []
    for program in ("train.py", "evaluate.py", "predict.py", "-m tools.runs", "-m tools.check", "-m tools.schema"):
        assert f"python {program}" in indexed
    assert "--print-config" in indexed


def test_the_site_in_a_browser(address: str) -> None:
    """Narrow and wide, light and dark: nothing sticks out or fails, nothing comes from elsewhere; search finds."""
    with browser() as tab:
        colours = set()
        for name in LOOKED_AT:
            for width in (360, 800, 1400):
                for dark in (False, True):
                    tab.open(f"{address}/{name}", width=width, dark=dark)
                    tab.wait("document.readyState === 'complete'")
                    wide = tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")
                    assert wide <= 0, f"{name} at {width}: {wide} pixels too wide"
                    colours.add((dark, tab.evaluate("getComputedStyle(document.body).backgroundColor")))
        assert len(colours) == 2, colours
        tab.open(f"{address}/index.html", width=1400)
        found = tab.evaluate(SEARCH.replace("WORDS", "'optim.lr_scheduler.warmup'"))
        assert any("reference/keys.html" in link for link in found), found
        assert tab.errors == []
        assert [url for url in tab.requests if not url.startswith((address, "data:", "blob:", "about:"))] == []
    REPORT.append("the docs site in Chromium, at three widths, light and dark")


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    command = [sys.executable, "tools/docs_site.py", str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 1
    assert "make docs SITE=" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
