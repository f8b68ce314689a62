"""Where the first weights come from: a file of the project, or a web address."""

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from common.base.errors import UserError
from common.failure.program import report_errors
import train
from tests.conftest import PROJECT, Runs, copy_of_project, load, run


class Server(ThreadingHTTPServer):
    """Serves `files`, by path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.address = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        body = self.server.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A web server, and an empty cache for what is downloaded."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def source(runs: Runs) -> Path:
    """A checkpoint."""
    folder = runs.train("--progress.max_steps", "1", "--progress.epoch_val", "-1", name="source")
    return folder / "checkpoints" / "latest.pt"


WORDS = ["--optim.lr", "1e-30", "--progress.max_steps", "1", "--progress.epoch_val", "-1"]


def start(runs: Runs, path: str, *words: str, name: str = "tuned") -> Path:
    return runs.train("--init_from.path", path, *WORDS, *words, name=name)


def starts_from(folder: Path, source: Path) -> bool:
    """Return whether a run that changed nothing by its rate of 1e-30 has the weights of `source`."""
    name = "features.0.0.weight"
    return torch.equal(load(folder)["model"][name], load(source.parents[1])["model"][name])


def refused(runs: Runs, capsys: pytest.CaptureFixture[str], path: str, *words: str) -> str:
    with pytest.raises(SystemExit) as ended, report_errors():
        train.main(runs.words("--init_from.path", path, *WORDS, *words, name="refused"))
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


def cached(folder: Path) -> list[str]:
    return [path.name for path in (folder / "cache").rglob("*") if path.is_file()]


def test_downloaded_once(runs: Runs, source: Path, server: Server, tmp_path: Path) -> None:
    """The same weights as from the file."""
    server.files["/some/best.pt"] = source.read_bytes()
    for name in ("first", "again"):
        assert starts_from(start(runs, f"{server.address}/some/best.pt", name=name), source)
    assert server.asked == ["/some/best.pt"]
    assert len(cached(tmp_path)) == 1


def test_files_of_one_name_are_not_mixed_up(runs: Runs, source: Path, server: Server, tmp_path: Path) -> None:
    server.files["/a/w.pt"] = source.read_bytes()
    torch.save({"x": torch.ones(1)}, tmp_path / "other.pt")
    server.files["/b/w.pt"] = (tmp_path / "other.pt").read_bytes()
    start(runs, f"{server.address}/a/w.pt")
    with pytest.raises(ValueError, match="no key of the file fits"):
        start(runs, f"{server.address}/b/w.pt", name="other")
    assert len(cached(tmp_path)) == 2


def test_no_network_and_no_file(
    runs: Runs, source: Path, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.files["/page.pt"] = b"<html>not found</html>"
    text = refused(runs, capsys, f"{server.address}/page.pt")
    assert "it is not a checkpoint" in text and f"{tmp_path}/cache/hub/checkpoints" in text
    assert "404" in refused(runs, capsys, f"{server.address}/none.pt")
    text = refused(runs, capsys, "http://127.0.0.1:1/w.pt")
    assert "http://127.0.0.1:1/w.pt cannot be downloaded" in text and "set path to it" in text
    assert "cannot be downloaded" in refused(runs, capsys, "https://no such host/w.pt")


@pytest.mark.slow
def test_two_processes_download_once(runs: Runs, source: Path, server: Server, tmp_path: Path) -> None:
    server.files["/w.pt"] = source.read_bytes()
    folder = start(runs, f"{server.address}/w.pt", "--dist.processes", "2")
    assert starts_from(folder, source)
    assert server.asked == ["/w.pt"]


def test_what_is_excluded_may_be_missing_in_the_model(runs: Runs, source: Path, tmp_path: Path) -> None:
    """As the head of a network that was trained for something else."""
    more = tmp_path / "more.pt"
    torch.save({**load(source.parents[1])["model"], "model.fc.bias": torch.zeros(3)}, more)
    with pytest.raises(UserError, match=r"Unexpected key.*model\.fc\.bias"):
        start(runs, str(more))
    assert starts_from(start(runs, str(more), "--init_from.exclude", "[model.fc.*]"), source)


def test_relative_to_the_project(runs: Runs, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for dir.*, in any working directory."""
    monkeypatch.chdir(tmp_path)
    below = Path("../" * 40 + str(source).lstrip("/"))  # relative to any folder
    start(runs, str(below), name="first")
    (tmp_path / "none.pt").write_bytes(source.read_bytes())
    with pytest.raises(ValueError, match=rf"there is no checkpoint {PROJECT}/none.pt"):
        start(runs, "none.pt", name="second")


@pytest.mark.slow
def test_the_project_counts_and_not_the_working_directory(runs: Runs, source: Path, tmp_path: Path) -> None:
    project = copy_of_project(tmp_path / "project")
    (project / "w.pt").write_bytes(source.read_bytes())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "w.pt").write_text("not weights")
    words = runs.words("--init_from.path", "w.pt", *WORDS, name="tuned")
    done = run([sys.executable, str(project / "train.py"), *words], cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert starts_from(runs.root / "tuned", source)
