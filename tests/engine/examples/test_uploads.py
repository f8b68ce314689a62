"""The uploads of examples/uploads, to servers of this machine that speak the protocols; nothing leaves it.

The clients are the real ones: fsspec (WebHDFS) and huggingface_hub. S3, Google and Azure need packages and accounts.
"""

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
from safetensors.torch import load as load_safetensors

from tests.conftest import Runs, load


class Server(BaseHTTPRequestHandler):
    """What both share: a request fails as long as `down` is not used up."""

    files: dict[str, bytes]
    down = 0

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def answer(self, code: int = 200, body: Any = None, **headers: str) -> None:
        self.send_response(code)
        data = b"" if body is None else json.dumps(body).encode()
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        return data

    def handle_one(self) -> None:
        data, cls = self.body(), type(self)
        if cls.down:
            cls.down -= 1
            self.answer(503, {})
        else:
            self.serve(urlparse(self.path).path, data)

    do_GET = do_PUT = do_POST = handle_one

    def serve(self, path: str, data: bytes) -> None:
        raise NotImplementedError


class Hdfs(Server):
    """WebHDFS: a file is created and appended to in two requests each; the second goes where the first one says."""

    def serve(self, path: str, data: bytes) -> None:
        path, query = path.removeprefix("/webhdfs/v1"), parse_qs(urlparse(self.path).query)
        op, port = query["op"][0], self.server.server_address[1]
        if op == "MKDIRS":
            self.answer(body={"boolean": True})
        elif "data" not in query:
            self.answer(307, Location=f"http://127.0.0.1:{port}{self.path}&data=true")
        else:
            self.files[path] = data if op == "CREATE" else self.files[path] + data
            self.answer(201)


class Hub(Server):
    """A Hugging Face hub, as far as a commit of small files needs it."""

    made: list[str]
    commits: list[str]

    def serve(self, path: str, data: bytes) -> None:
        if path == "/api/repos/create":
            asked = json.loads(data)
            is_new = asked["name"] not in self.made
            self.made.append(asked["name"])
            self.answer(200 if is_new else 409, {"url": f"http://127.0.0.1/me/{asked['name']}", "name": asked["name"]})
        elif path == "/api/validate-yaml":
            self.answer(body={"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(data)["files"]
            ]
            self.answer(body={"files": files})
        elif "/commit/" in path:
            for line in map(json.loads, data.splitlines()):
                if line["key"] == "header":
                    self.commits.append(line["value"]["summary"])
                elif line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            address = f"http://127.0.0.1:{self.server.server_address[1]}/me/digits/commit/{'0' * 40}"
            self.answer(body={"commitUrl": address, "commitOid": "0" * 40})
        else:
            self.answer(body={"sha": "0" * 40, "siblings": [], "id": "me/digits"})


@pytest.fixture
def serve() -> Iterator[Any]:
    """Start a server of this kind; its port."""
    servers = []

    def start(kind: type[Server]) -> tuple[type[Any], int]:
        handler = type(kind.__name__, (kind,), {"files": {}, "made": [], "commits": []})
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        Thread(target=servers[-1].serve_forever, daemon=True).start()
        return handler, servers[-1].server_address[1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_checkpoints_are_copied_to_a_bucket(runs: Runs, serve: Any) -> None:
    """Those that were named; an upload that fails is said, and the next save tries with its own files."""
    handler, port = serve(Hdfs)
    handler.down = 2
    where = f"to: 'webhdfs://127.0.0.1:{port}/lab', names: [latest.pt, 'step_*']"
    words = ["--progress.epoch_save_checkpoint", "1", "--checkpoint.keep", "1"]
    words += ["--checkpoint.after_save", f"[{{type: 'examples.uploads.bucket:Upload', {where}}}]"]
    folder = runs.train(*words, name="mine") / "checkpoints"
    last = (folder / "step_00000010.pt").read_bytes()
    assert handler.files["/lab/mine/latest.pt"] == handler.files["/lab/mine/step_00000010.pt"] == last
    assert "/lab/mine/best.pt" not in handler.files
    assert "failed with latest.pt of step 5: HTTPError: 503" in (folder.parent / "train.log").read_text()


def test_a_package_that_is_missing_is_missed_before_the_start(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Not at the first save."""
    assert runs.fail("--checkpoint.after_save", "[{type: 'examples.uploads.bucket:Upload', to: 's3://lab'}]") == 1
    assert "Install s3fs" in capsys.readouterr().err
    assert not (runs.root / "run" / "checkpoints" / "latest.pt").exists()


def test_a_run_goes_on_from_the_bucket(runs: Runs, tmp_path: Path) -> None:
    """On another machine, where the rest of its folder is not."""
    section = f"[{{type: 'examples.uploads.bucket:Upload', to: 'file://{tmp_path}/bucket'}}]"
    runs.train("--checkpoint.after_save", section, name="here")
    resume = ("--resume", str(tmp_path / "bucket" / "here" / "latest.pt"), "--progress.epoch", "3")
    assert load(runs.train(*resume, name="there"))["position"]["step"] == 15


def test_weights_are_published_on_a_hub(runs: Runs, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that load, the config, and a card with the result, each time the model was the best so far."""
    handler, port = serve(Hub)
    handler.down = 1
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    words = ("--checkpoint.after_save", "[{type: 'examples.uploads.hub:publish', repo: me/digits}]")
    folder = runs.train(*words, name="mine")
    best = load(folder, "best")
    assert handler.commits[-1] == f"step {best['position']['step']} of mine"
    weights = load_safetensors(handler.files["model.safetensors"])
    assert weights.keys() == best["model"].keys()
    assert all(weights[name].equal(best["model"][name]) for name in weights)
    card = handler.files["README.md"].decode()
    assert card.startswith("---\nlicense: other\n") and f"- Accuracy: {best['values']['Accuracy']:.6g}" in card
    assert "batch_size: 32" in handler.files["config.yaml"].decode()
