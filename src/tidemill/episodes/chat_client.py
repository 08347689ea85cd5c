"""A client of OpenAI-compatible chat completions with tools: one request, one whole reply.

| what the endpoint does                                        | what is raised                                       |
|---------------------------------------------------------------|------------------------------------------------------|
| answers 408, 409, 425, 429 or 5xx; goes away                  | `EngineUnavailable`: ask again, not before `retry_s` |
| refuses this request (another 4xx), or answers nonsense       | `RequestRefused`                                     |
| 401, 403; cannot be reached, refuses or answers nonsense      | `EngineError`: its URL, model or key is wrong        |
| before its first good reply                                   |                                                      |
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, final
from urllib.parse import urlsplit

import httpx
import msgspec

from tidemill.core.errors import EngineError, EngineUnavailable, RequestRefused, UsageError
from tidemill.core.records import Record
from tidemill.core.seams import ToolSpec
from tidemill.core.tools import function_schema

MAX_RETRY_AFTER_S = 60.0
_AWAY = frozenset({408, 409, 425, 429})


class ChatCall(Record, frozen=True):
    """A tool call as the model wrote it: nothing of it is checked."""

    id: str
    name: str
    arguments: str
    """JSON, or meant to be."""


class ChatReply(Record, frozen=True):
    text: str
    calls: tuple[ChatCall, ...]
    is_cut: bool
    """It ran into `max_tokens`."""
    prompt_tokens: int
    completion_tokens: int
    """Hidden thinking included, as the endpoint counts."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    content: str | list[Any] | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def tool_schema(tool: ToolSpec) -> dict[str, Any]:
    """As the API is told it: no other arguments."""
    schema = function_schema(tool)
    schema["function"]["parameters"]["additionalProperties"] = False
    return schema


@final
class ChatClient:
    """Use it within one event loop; any number of requests at once."""

    def __init__(self, endpoint: str, *, model: str = "", api_key: str | None = None) -> None:
        """`endpoint`: the base URL, such as `http://127.0.0.1:8000/v1`. Raises `UsageError` for one that is no URL."""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--endpoint {endpoint!r} is no URL: give a base such as http://127.0.0.1:8000/v1")
        self.endpoint = endpoint.rstrip("/").removesuffix("/chat/completions")
        self.model = model
        self.retry_at_s = 0.0
        """On the monotonic clock: not to be asked before, because it said so."""
        self._is_proved = False
        self._limit_name = "max_tokens"
        self._http = httpx.AsyncClient(
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(connect=10.0, read=None, write=30.0, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=parts.hostname not in ("127.0.0.1", "localhost", "::1"),
        )

    async def close(self) -> None:
        await self._http.aclose()

    @property
    def retry_s(self) -> float:
        """How long it asked to be left alone."""
        return max(0.0, self.retry_at_s - time.monotonic())

    async def models(self) -> list[str]:
        """Names that it serves. Raises `EngineError` where it does not tell."""
        response = await self._send("GET", "/models", None)
        try:
            return [model.id for model in msgspec.json.decode(response.content, type=_Models).data]
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.endpoint}/models gave no list of models ({error}): give --model") from None

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSpec],
        *,
        max_tokens: int,
        temperature: float,
    ) -> ChatReply:
        """One reply. See the top of the module for what it raises."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "tools": [tool_schema(tool) for tool in tools],
            "temperature": temperature,
            self._limit_name: max_tokens,
        }
        response = await self._send("POST", "/chat/completions", body)
        try:
            completion = msgspec.json.decode(response.content, type=_Completion)
            choice = completion.choices[0]
        except (msgspec.DecodeError, IndexError, UnicodeDecodeError) as error:
            self._refused(f"gave no chat completion ({error or 'no choices'}): {_shown(response)}")
        self._is_proved = True
        return ChatReply(
            text=_text(choice.message.content),
            calls=tuple(
                ChatCall(id=call.id or "", name=call.function.name or "", arguments=_json(call.function.arguments))
                for call in choice.message.tool_calls or ()
            ),
            is_cut=choice.finish_reason == "length",
            prompt_tokens=completion.usage.prompt_tokens,
            completion_tokens=completion.usage.completion_tokens,
        )

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        try:
            response = await self._http.request(method, f"{self.endpoint}{path}", json=body)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            told = f"{self.endpoint} cannot be reached ({type(error).__name__}: {error})"
            if not self._is_proved:
                raise EngineError(f"{told}: start the server, or correct --endpoint") from error
            raise EngineUnavailable(told) from error
        code = response.status_code
        if code == 200:
            return response
        told = f"answers {code}: {_shown(response)}"
        if code in (401, 403):
            raise EngineError(f"{self.endpoint} {told}: name the variable that holds its key with --api-key-env")
        if code in _AWAY or code >= 500:
            self._hold_back(response)
            raise EngineUnavailable(f"{self.endpoint} {told}")
        if code == 400 and body is not None and "max_tokens" in body and "max_completion_tokens" in response.text:
            self._limit_name = "max_completion_tokens"  # newer models know the limit by its new name alone
            body[self._limit_name] = body.pop("max_tokens")
            return await self._send(method, path, body)
        self._refused(told)

    def _refused(self, told: str) -> NoReturn:
        if not self._is_proved:
            raise EngineError(f"{self.endpoint} {told}: correct --endpoint or --model")
        raise RequestRefused(f"{self.endpoint} {told}")

    def _hold_back(self, response: httpx.Response) -> None:
        try:
            wait_s = float(response.headers.get("retry-after", "0"))
        except ValueError:  # a date: the growing pauses of the caller will do
            return
        if wait_s > 0:
            self.retry_at_s = max(self.retry_at_s, time.monotonic() + min(wait_s, MAX_RETRY_AFTER_S))


def _text(content: str | list[Any] | None) -> str:
    """Of parts, the text ones."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content or ""


def _json(arguments: str | dict[str, Any] | None) -> str:
    """Some servers send them parsed; a call without arguments may have none."""
    if isinstance(arguments, dict):
        return msgspec.json.encode(arguments).decode()
    return arguments or "{}"


def _shown(response: httpx.Response) -> str:
    """In one short line: a proxy may answer with a page."""
    return " ".join(response.text[:400].split())[:200] or "nothing"
