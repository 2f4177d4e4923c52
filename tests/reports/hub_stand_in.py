"""The part of the Hugging Face hub's HTTP interface that uploading a model uses, on this machine."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_standin"


@dataclass
class Hub:
    """What was uploaded.

    Attributes:
      address: of the server.
      private: the repositories, and whether each is private.
      commits: for each one, its repository, its message and its files.
      large: contents of files in large-file storage, by digest.
    """

    address: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    commits: list[tuple[str, str, dict[str, bytes]]] = field(default_factory=list)
    large: dict[str, bytes] = field(default_factory=dict)


@contextlib.contextmanager
def hub() -> Iterator[Hub]:
    """Serve until the end of the block."""
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self, value: object, status: int = 200) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_PUT(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            state.large[self.path.rpartition("/")[2]] = data
            self.answer({})

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path == "/api/validate-yaml":
                return self.answer({"errors": [], "warnings": []})
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.answer({"error": "Invalid username or password."}, 401)
            if self.path == "/api/repos/create":
                asked = json.loads(data)
                name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
                there = name in state.private
                private = bool(asked.get("private")) or asked.get("visibility") == "private"
                state.private.setdefault(name, private)
                return self.answer({"url": f"{state.address}/{name}"}, 409 if there else 200)
            if re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/main", self.path):
                files = [{"path": file["path"], "shouldIgnore": False} for file in json.loads(data)["files"]]
                for file in files:
                    file["uploadMode"] = "lfs" if file["path"].endswith(".safetensors") else "regular"
                return self.answer({"files": files})
            if self.path.endswith(".git/info/lfs/objects/batch"):
                objects = json.loads(data)["objects"]
                for item in objects:
                    upload = {"href": f"{state.address}/large/{item['oid']}", "header": {}}
                    item["actions"] = {"upload": upload}
                return self.answer({"transfer": "basic", "objects": objects})
            if commit := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", self.path):
                message, files = "", {}
                for line in map(json.loads, data.decode().splitlines()):
                    value = line["value"]
                    if line["key"] == "header":
                        message = value["summary"]
                    elif line["key"] == "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    elif line["key"] == "lfsFile":
                        files[value["path"]] = state.large[value["oid"]]
                state.commits.append((commit[1], message, files))
                oid = f"{len(state.commits):040x}"
                url = f"{state.address}/{commit[1]}/commit/{oid}"
                return self.answer({"success": True, "commitUrl": url, "commitOid": oid})
            return self.answer({"error": f"no such path: {self.path}"}, 404)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
