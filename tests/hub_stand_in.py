"""A small local server that speaks the part of the hub's HTTP interface that a push uses, and can fail on purpose."""

import base64
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "a-token-of-the-stand-in"


@dataclass
class Hub:
    """What the server holds. fail: requests ("PUT", "commit", ..) and how many of them are still to be answered with 500."""

    address: str = ""
    private: dict[str, bool] = field(default_factory=dict)  # by repository
    objects: dict[str, bytes] = field(default_factory=dict)  # large files by their SHA-256
    files: dict[str, bytes] = field(default_factory=dict)  # "owner/name/path", as committed
    seen: Counter[str] = field(default_factory=Counter)
    fail: Counter[str] = field(default_factory=Counter)
    writable: bool = True


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, status: int, body: Any = None) -> None:
            content = json.dumps(body if body is not None else {}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def stopped(self, what: str) -> bool:
            """Count the request; answer it if it is refused or must fail."""
            hub.seen[what] += 1
            if what != "PUT" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.answer(401, {"error": "Invalid credentials"})
            elif what in ("create", "commit") and not hub.writable:
                self.answer(403, {"error": "You don't have the rights"})
            elif hub.fail[what] > 0:
                hub.fail[what] -= 1
                self.answer(500, {"error": "planted"})
            else:
                return False
            return True

        def do_GET(self) -> None:
            repo = "/".join(self.path.split("/")[3:5]).partition("?")[0]
            if self.stopped("info"):
                return
            known = repo in hub.private
            about = {"id": repo, "sha": "0" * 40, "private": hub.private.get(repo), "siblings": [], "tags": []}
            self.answer(200 if known else 404, about if known else {"error": "Repository not found"})

        def do_PUT(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            if not self.stopped("PUT"):
                hub.objects[self.path.rpartition("/")[2]] = content
                self.answer(200)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/api/repos/create":
                self.create(json.loads(body))
            elif self.path == "/api/validate-yaml":
                self.answer(200, {"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                self.preupload(json.loads(body))
            elif self.path.endswith("/info/lfs/objects/batch"):
                self.batch(json.loads(body))
            elif "/commit/" in self.path:
                self.commit([json.loads(line) for line in body.splitlines()])
            else:
                self.answer(404, {"error": self.path})

        def create(self, asked: dict[str, Any]) -> None:
            if self.stopped("create"):
                return
            repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            known = repo in hub.private
            hub.private.setdefault(repo, asked.get("private", False) or asked.get("visibility") == "private")
            self.answer(409 if known else 200, {"url": f"{hub.address}/{repo}"})

        def preupload(self, asked: dict[str, Any]) -> None:
            if not self.stopped("preupload"):
                modes = [
                    {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith("safetensors") else "regular",
                     "shouldIgnore": False}
                    for f in asked["files"]
                ]  # fmt: skip
                self.answer(200, {"files": modes})

        def batch(self, asked: dict[str, Any]) -> None:
            if not self.stopped("batch"):
                objects = [
                    {"oid": o["oid"], "size": o["size"]}
                    | ({} if o["oid"] in hub.objects else {"actions": {"upload": {"href": f"{hub.address}/put/{o['oid']}"}}})
                    for o in asked["objects"]
                ]
                self.answer(200, {"transfer": "basic", "objects": objects})

        def commit(self, lines: list[dict[str, Any]]) -> None:
            if self.stopped("commit"):
                return
            repo = "/".join(self.path.split("/")[3:5])
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    hub.files[f"{repo}/{value['path']}"] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    content = hub.objects[value["oid"]]
                    assert sha256(content).hexdigest() == value["oid"]
                    hub.files[f"{repo}/{value['path']}"] = content
            self.answer(200, {"commitUrl": f"{hub.address}/{repo}/commit/{'1' * 40}", "commitOid": "1" * 40})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
