"""A server that speaks as much of the Hub's HTTP interface as its own library needs to read and write repositories."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_BYTES = 1_000
"""Files above this size are in large file storage, with SHA-256; smaller ones are in git, with SHA-1"""


class HubServer:
    """Repositories ``{(kind, "org/name"): {commit: {path: bytes}}}``; the newest commit is ``main``."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], dict[str, dict[str, bytes]]] = {}
        self.stored: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.private: dict[str, bool] = {}
        self.lies: dict[str, bytes] = {}
        """Paths that are delivered with another content than the one whose checksum is announced"""
        server = self

        class Handler(_Handler):
            hub = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def commit(self, kind: str, repo: str, files: dict[str, bytes]) -> str:
        commits = self.repositories.setdefault((kind, repo), {})
        sha = hashlib.sha1(repr((kind, repo, len(commits), sorted(files.items()))).encode()).hexdigest()
        commits[sha] = files
        return sha

    def revision(self, kind: str, repo: str, name: str) -> str | None:
        commits = self.repositories.get((kind, repo))
        if not commits:
            return None
        return name if name in commits else list(commits)[-1] if name == "main" else None


def is_large(data: bytes) -> bool:
    return len(data) > LFS_BYTES


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer_read(body=False)

    def do_GET(self) -> None:
        self._answer_read(body=True)

    def do_PUT(self) -> None:
        data = self._body()
        self.hub.stored[hashlib.sha256(data).hexdigest()] = data
        self._send(200, b"")

    def do_POST(self) -> None:
        path, data = self._path(), self._body()
        if path == "/api/repos/create":
            asked = json.loads(data)
            kind, repo = (
                asked.get("type") or "model",
                f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"],
            )
            self.hub.repositories.setdefault((kind, repo), {})
            self.hub.private[repo] = bool(asked.get("private") or asked.get("visibility") == "private")
            self._json(
                200, {"url": f"{self.hub.endpoint}/{'datasets/' * (kind == 'dataset')}{repo}", "name": repo, "id": repo}
            )
        elif path == "/api/validate-yaml":  # of a README's first lines
            self._json(200, {"errors": [], "warnings": []})
        elif re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)/preupload/.+", path):
            files = json.loads(data)["files"]
            modes = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["size"] > LFS_BYTES else "regular",
                    "shouldIgnore": False,
                }
                for one in files
            ]
            self._json(200, {"files": modes})
        elif path.endswith("/info/lfs/objects/batch"):
            there = {"href": f"{self.hub.endpoint}/store"}
            objects = [
                {"oid": one["oid"], "size": one["size"], "actions": {"upload": there}}
                for one in json.loads(data)["objects"]
            ]
            self._json(200, {"transfer": "basic", "objects": objects})
        elif found := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)/commit/.+", path):
            sha = self._commit(found[1], found[2], [json.loads(line) for line in data.splitlines() if line.strip()])
            self._json(
                200,
                {
                    "commitUrl": f"{self.hub.endpoint}/{found[2]}/commit/{sha}",
                    "commitOid": sha,
                    "success": True,
                    "pullRequestUrl": None,
                },
            )
        else:
            self._json(404, {"error": f"no {path}"})

    def _commit(self, kind: str, repo: str, lines: list[dict[str, Any]]) -> str:
        commits = self.hub.repositories[kind, repo]
        files = dict(list(commits.values())[-1]) if commits else {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
        return self.hub.commit(kind, repo, files)

    def _answer_read(self, body: bool) -> None:
        path = self._path()
        if found := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            sha = self.hub.revision(found[1], found[2], found[3] or "main")
            if sha is None:
                return self._missing(
                    "RevisionNotFound" if (found[1], found[2]) in self.hub.repositories else "RepoNotFound", body
                )
            files = self.hub.repositories[found[1], found[2]][sha]
            return self._json(
                200,
                {"id": found[2], "sha": sha, "private": False, "siblings": [_sibling(*one) for one in files.items()]},
                body,
            )
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            kind, sha = (
                "dataset" if found[1] else "model",
                self.hub.revision("dataset" if found[1] else "model", found[2], found[3]),
            )
            data = self.hub.repositories[kind, found[2]][sha].get(found[4]) if sha else None
            if sha is None or data is None:
                return self._missing("EntryNotFound", body)
            tag = hashlib.sha256(data).hexdigest() if is_large(data) else git_sha1(data)
            data = self.hub.lies.get(found[4], data)
            return self._send(200, data, {"ETag": f'"{tag}"', "X-Repo-Commit": sha}, body)
        return self._missing("RepoNotFound", body)

    def _path(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        return path

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _missing(self, code: str, body: bool) -> None:
        self._send(404, b'{"error": "not found"}', {"X-Error-Code": code, "X-Error-Message": "not found"}, body)

    def _json(self, status: int, value: Any, body: bool = True) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"}, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None, body: bool = True) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


def _sibling(path: str, data: bytes) -> dict[str, Any]:
    one: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": git_sha1(data)}
    if is_large(data):
        one["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return one
