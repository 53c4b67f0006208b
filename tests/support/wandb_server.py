"""A stand-in for a wandb server: it answers the GraphQL calls that save a workspace, and keeps them."""

import json
import threading
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

    def views(self) -> list[dict]:
        """Variables of the mutations that save a view."""
        return [call["variables"] for call in self.calls if "upsertView" in call["query"]]

    def answer(self, call: dict) -> dict:
        self.calls.append(call)
        if "upsertView" not in call["query"]:
            viewer = {"id": "user", "entity": "team", "username": "user", "flags": "{}", "teams": {"edges": []}}
            return {"data": {"viewer": viewer}}
        if self.refusal:
            return {"errors": [{"message": self.refusal}], "data": {"upsertView": None}}
        view = {"id": "view", "name": call["variables"]["name"]}
        return {"data": {"upsertView": {"view": view, "inserted": True}}}


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    server = WandbServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            # the client also reports measurements of itself
            answer = server.answer(json.loads(content)) if self.path == "/graphql" else {}
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        server.url = f"http://127.0.0.1:{listener.server_port}"
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()
