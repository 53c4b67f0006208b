"""A stand-in for a wandb server: it keeps GraphQL calls and rows of a run.

It answers calls that save a workspace, and those that begin, continue and feed a run. It has no answer to calls about
artifacts, and so takes no tables.
"""

import gzip
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "0" * 40


@dataclass(kw_only=True)
class WandbServer:
    """Listens on this machine while its context is open."""

    url: str = ""
    refusal: str = ""
    """The message with which mutations fail; empty if they succeed."""
    calls: list[dict] = field(default_factory=list)
    """GraphQL requests: `query` and `variables`."""
    rows: list[dict] = field(default_factory=list)
    """Rows of the one run."""
    is_frozen: bool = False
    """Whether requests get no answer."""
    end: threading.Event = field(default_factory=threading.Event)
    """When it is set, nothing listens any more."""

    def views(self) -> list[dict]:
        """Variables of the mutations that save a view."""
        return [call["variables"] for call in self.calls if "upsertView" in call["query"]]

    def answer(self, call: dict) -> dict:
        self.calls.append(call)
        if "upsertBucket" in call["query"]:
            project = {"id": "project", "name": "megatron-rl", "entity": {"id": "team", "name": "team"}}
            bucket = {"id": "run", "name": call["variables"]["name"], "displayName": "run", "project": project}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if "RunResumeStatus" in call["query"]:
            return {"data": {"model": self._model()}}
        if "CreateRunFiles" in call["query"]:
            files = [{"name": name, "uploadUrl": f"{self.url}/files"} for name in call["variables"]["files"]]
            return {"data": {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}}
        if "upsertView" not in call["query"]:
            viewer = {"id": "user", "entity": "team", "username": "user", "flags": "{}", "teams": {"edges": []}}
            return {"data": {"viewer": viewer}}
        if self.refusal:
            return {"errors": [{"message": self.refusal}], "data": {"upsertView": None}}
        view = {"id": "view", "name": call["variables"]["name"]}
        return {"data": {"upsertView": {"view": view, "inserted": True}}}

    def _model(self) -> dict | None:
        """The run's project with the run, from which a resumed run learns its last step."""
        if not self.rows:
            return None
        bucket = {"id": "run", "name": "run", "displayName": "run", "tags": [], "wandbConfig": json.dumps({"t": 1})}
        bucket |= {"summaryMetrics": "{}", "config": "{}", "eventsTail": "[]"}
        bucket |= {"logLineCount": 0, "historyLineCount": len(self.rows), "eventsLineCount": 0}
        bucket["historyTail"] = json.dumps([json.dumps(self.rows[-1])])
        return {"id": "project", "name": "megatron-rl", "entity": {"id": "team", "name": "team"}, "bucket": bucket}

    def keep(self, stream: dict) -> None:
        """Keep the rows of a call to the file stream."""
        if history := (stream.get("files") or {}).get("wandb-history.jsonl"):
            self.rows[history["offset"] :] = [json.loads(line) for line in history["content"]]


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    server = WandbServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if server.is_frozen:
                time.sleep(600)  # in a daemon thread
            content = self.rfile.read(int(self.headers["Content-Length"]))
            answer = {}  # the client also uploads files, and reports measurements of itself
            if self.path == "/graphql":
                answer = server.answer(json.loads(content))
            elif self.path.endswith("/file_stream"):
                is_packed = self.headers["Content-Encoding"] == "gzip"
                server.keep(json.loads(gzip.decompress(content) if is_packed else content))
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self) -> None:
            self.do_POST()

        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        server.url = f"http://127.0.0.1:{listener.server_port}"
        serving = threading.Thread(target=listener.serve_forever)
        serving.start()

        def close() -> None:
            server.end.wait()
            listener.shutdown()
            listener.server_close()

        closing = threading.Thread(target=close)
        closing.start()
        try:
            yield server
        finally:
            server.end.set()
            closing.join()
            serving.join()
