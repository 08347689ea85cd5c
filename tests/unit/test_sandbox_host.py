"""What the host makes of answers that nobody trusts."""

import asyncio
import contextlib
import marshal
import socket
from collections.abc import Callable

import pytest

from tidemill.core.errors import SandboxFault
from tidemill.core.seams import SandboxLimits
from tidemill.sandboxes import host
from tidemill.sandboxes.host import AgentSandbox, Link

LIMITS = SandboxLimits(output_bytes=1000)


class Body:
    """Counts what is asked of it."""

    def __init__(self, cause: str = "") -> None:
        self.num_killed = 0
        self.num_released = 0
        self.cause = cause

    def cpu_s(self) -> float:
        return 0.0

    def oom_kills(self) -> int:
        return 0

    async def kill(self, grace_s: float = 0.0) -> None:
        self.num_killed += 1

    def release(self) -> None:
        self.num_released += 1

    def fault(self) -> str:
        return self.cause


def answer(nonce: bytes, out: bytes = b"", err: bytes = b"", status: int = 0, out_bytes: int | None = None) -> bytes:
    body = nonce + bytes([status]) + (3).to_bytes(4, "little", signed=True) + bytes(16)
    body += (len(out) if out_bytes is None else out_bytes).to_bytes(4, "little") + out + err
    return len(body).to_bytes(4, "little") + body


def talk(
    reply: Callable[[bytes], bytes | None], check: Callable[[AgentSandbox, Body], object], cause: str = ""
) -> None:
    """A sandbox whose agent answers each request with `reply(nonce)`, or hangs up where that is None."""

    async def agent(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with sock, contextlib.suppress(ConnectionError):
            while head := await loop.sock_recv(sock, 4):
                data = b""
                while len(data) < int.from_bytes(head, "little"):
                    data += await loop.sock_recv(sock, 65536)
                said = reply(marshal.loads(data)[0])
                if said is None:
                    return
                await loop.sock_sendall(sock, said)

    async def main() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        task = asyncio.ensure_future(agent(theirs))
        body = Body(cause)
        sandbox = AgentSandbox("fake", Link(ours), body, LIMITS)
        await check(sandbox, body)  # type: ignore[misc]
        await sandbox.close()
        assert body.num_released == 1
        await task

    asyncio.run(main())


def test_an_answer_is_taken_apart() -> None:
    async def check(sandbox: AgentSandbox, body: Body) -> None:
        result = await sandbox.run(["x"], timeout_s=5)
        assert (result.status, result.exit_code, result.stdout, result.stderr) == ("ok", 3, b"out", b"err")
        assert body.num_killed == 0

    talk(lambda nonce: answer(nonce, b"out", b"err"), check)


@pytest.mark.parametrize(
    "reply",
    [
        lambda nonce: answer(bytes(8)),
        lambda nonce: answer(nonce, status=9),
        lambda nonce: answer(nonce, out_bytes=2**32 - 1),
        lambda nonce: answer(nonce, bytes(1001)),
        lambda nonce: (2**32 - 1).to_bytes(4, "little"),
        lambda nonce: bytes(4),
        lambda nonce: None,
    ],
    ids=["stale", "status", "lengths", "long", "endless", "short", "nothing"],
)
def test_a_forged_answer_ends_the_sandbox_and_is_the_commands_doing(reply: Callable[[bytes], bytes | None]) -> None:
    async def check(sandbox: AgentSandbox, body: Body) -> None:
        for _ in range(2):
            result = await sandbox.run(["x"], timeout_s=5)
            assert (result.status, result.stdout) == ("killed", b"")
        assert body.num_killed == 1

    talk(reply, check)


def test_silence_is_a_timeout_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "GRACE_S", 0.05)

    async def check(sandbox: AgentSandbox, body: Body) -> None:
        assert (await sandbox.run(["x"], timeout_s=0.05)).status == "timeout"
        assert (await sandbox.run(["x"], timeout_s=5)).status == "killed"
        assert body.num_killed == 1

    talk(lambda nonce: b"", check)


def test_files_that_were_not_asked_for_are_ignored() -> None:
    def item(index: int, length: int, data: bytes) -> bytes:
        return index.to_bytes(4, "little") + length.to_bytes(4, "little") + data

    async def check(sandbox: AgentSandbox, body: Body) -> None:
        assert await sandbox.collect(["a", "b", "c"], max_bytes=3) == {"b": b"yes"}

    for forged in (
        item(7, 1, b"x") + item(1, 3, b"yes"),
        item(1, 3, b"yes") + item(0, 4, b"long"),
        item(1, 3, b"yes") + b"rest",
        item(1, 3, b"yes") + item(2, 2**31, b"cut"),
    ):
        talk(lambda nonce, forged=forged: answer(nonce, forged), check)  # type: ignore[misc]


def test_a_cause_that_is_not_the_agents_is_a_fault() -> None:
    async def check(sandbox: AgentSandbox, body: Body) -> None:
        for _ in range(2):
            with pytest.raises(SandboxFault, match="its launcher died"):
                await sandbox.run(["x"], timeout_s=5)

    talk(lambda nonce: None, check, cause="its launcher died")


def test_before_any_command_a_death_is_a_fault() -> None:
    async def check(sandbox: AgentSandbox, body: Body) -> None:
        with pytest.raises(SandboxFault, match="before any command"):
            await sandbox.collect(["a"], max_bytes=3)

    talk(lambda nonce: None, check)
