"""A scripted server of chat completions on 127.0.0.1: it answers what it is told, and keeps what it was asked."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]
"""Status, body (a text is sent as it is), headers."""
Script = Callable[[list[dict[str, Any]]], Answer]
"""Messages of the request → the answer."""


def reply(*calls: tuple[str, Any], text: str = "", finish: str = "tool_calls", tokens: int = 7) -> Answer:
    """A completion with these (name, arguments) calls; arguments that are a text are sent unchanged."""
    tool_calls = [
        {
            "id": f"id-{number}",
            "type": "function",
            "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)},
        }
        for number, (name, given) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": text or None, "tool_calls": tool_calls or None}
    usage = {"prompt_tokens": 50, "completion_tokens": tokens}
    return 200, {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage}


@dataclass
class ChatServer:
    script: Script
    models: list[str] = field(default_factory=lambda: ["tiny"])
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        if path == "/v1/models":
            return 200, {"data": [{"id": name} for name in self.models]}
        if path != "/v1/chat/completions":
            return 404, {"error": {"message": f"no {path}"}}
        self.requests.append(body)
        return self.script(body["messages"])


@contextmanager
def chat_server(script: Script, **options: Any) -> Iterator[ChatServer]:
    state = ChatServer(script, **options)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(state.answer(self.path, {}))

        def do_POST(self) -> None:
            state.keys.append(self.headers.get("authorization"))
            data = self.rfile.read(int(self.headers["content-length"]))
            self._send(state.answer(self.path, json.loads(data)))

        def _send(self, answer: Answer) -> None:
            status, body, *rest = answer
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in (rest[0] if rest else {}).items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def turns(*answers: Answer) -> Script:
    """One answer after another; the last one for ever."""
    rest = list(answers)

    def script(messages: list[dict[str, Any]]) -> Answer:
        return rest.pop(0) if len(rest) > 1 else rest[0]

    return script
