"""The host's end of a sandbox: commands to the agent inside, and what to make of its answers, which nobody trusts.

How blame is told: once the agent's own code may have run, a sandbox that dies has been killed by it, and every later
call says so (`killed`); it would otherwise pay to kill the sandbox before a bad verdict. A sandbox that dies before
that, or whose launcher died, is a `SandboxFault`.
"""

import asyncio
import marshal
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from tidemill.core.errors import SandboxError, SandboxFault
from tidemill.core.records import Tree
from tidemill.core.seams import ExecResult, ExecStatus, SandboxLimits
from tidemill.sandboxes.trees import check_path

GRACE_S = 10.0
"""How long past its own timeout an agent may keep us waiting: it has to be scheduled, and to import what is asked."""
HEAD_BYTES = 33
STATUSES: tuple[ExecStatus, ...] = ("ok", "timeout", "disk_full", "output_limit")
SIGKILL = 9


GRACE_S = 0.3


class LinkLost(Exception):
    """The agent hung up, or answered what is no answer."""


@dataclass(frozen=True)
class Reply:
    status: ExecStatus
    exit_code: int
    cpu_s: float
    out: bytes
    err: bytes


@final
class Link:
    """Frames over the agent's socket. The format is told in `agent.py`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    async def call(self, operation: str, arguments: dict[str, object], max_bytes: int) -> Reply:
        nonce = os.urandom(8)
        body = marshal.dumps((nonce, operation, arguments), 2)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._sock, len(body).to_bytes(4, "little") + body)
            return await self.receive(nonce, max_bytes)
        except (ConnectionError, OSError) as error:
            raise LinkLost(str(error)) from error

    async def receive(self, nonce: bytes, max_bytes: int) -> Reply:
        length = int.from_bytes(await self._read(4), "little")
        if not HEAD_BYTES <= length <= HEAD_BYTES + max_bytes:
            raise LinkLost(f"an answer of {length} bytes, where at most {max_bytes} were due")
        body = await self._read(length)
        out_bytes = int.from_bytes(body[29:33], "little")
        if body[:8] != nonce or body[8] >= len(STATUSES) or HEAD_BYTES + out_bytes > length:
            raise LinkLost("an answer that is none")
        return Reply(
            status=STATUSES[body[8]],
            exit_code=int.from_bytes(body[9:13], "little", signed=True),
            cpu_s=int.from_bytes(body[21:29], "little") / 1e6,
            out=body[HEAD_BYTES : HEAD_BYTES + out_bytes],
            err=body[HEAD_BYTES + out_bytes :],
        )

    async def _read(self, num: int) -> bytes:
        loop = asyncio.get_running_loop()
        pieces = []
        while num:
            piece = await loop.sock_recv(self._sock, min(num, 1 << 20))
            if not piece:
                raise LinkLost("it hung up")
            pieces.append(piece)
            num -= len(piece)
        return b"".join(pieces)

    def hung_up(self) -> bool:
        try:
            return self._sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._sock.close()


class Body(Protocol):
    """What holds the agent: how it is measured, and ended."""

    def cpu_s(self) -> float: ...

    def oom_kills(self) -> int: ...

    async def kill(self, grace_s: float = 0.0) -> None:
        """Nothing that runs is left when this returns. Idempotent. It may end by itself within `grace_s`."""
        ...

    def release(self) -> None:
        """After `kill`: give back what else it held. Idempotent."""
        ...

    def fault(self) -> str:
        """After `kill`: why it went, where that cannot have been the doing of what ran inside; else empty."""
        ...


@final
class AgentSandbox:
    """One live sandbox. Commands run one at a time; a cancelled one ends the sandbox."""

    def __init__(self, tier: str, link: Link, body: Body, limits: SandboxLimits) -> None:
        self.tier = tier
        self._link = link
        self._body = body
        self._limits = limits
        self._turn = asyncio.Lock()
        self._num_run = 0
        self._gone = ""
        self._fault = ""
        self._closed: asyncio.Task[None] | None = None
        self._num_oom = 0

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> ExecResult:
        if not argv or any("\0" in word for word in argv):
            raise ValueError(f"argv {list(argv)!r}: a program and its arguments, without NUL")
        arguments: dict[str, object] = {"argv": list(argv), "env": dict(env or {}), "stdin": stdin}
        return await self._execute("run", arguments, timeout_s)

    async def python(
        self, source: str, *, timeout_s: float, preload: Sequence[str] = (), stdin: bytes = b""
    ) -> ExecResult:
        return await self._execute("python", {"source": source, "preload": list(preload), "stdin": stdin}, timeout_s)

    async def write(self, files: Tree) -> None:
        """Raises `SandboxError` where the workspace does not take a file (its disk is full, a folder is in the way).
        In a sandbox that was killed from inside, nothing happens: its next command will tell."""
        content = [(check_path(file.path), file.data, file.executable) for file in files.files]
        reply = await self._ask("write", {"files": content}, 0.0, 4096)
        if reply is not None and reply.exit_code != 0:
            raise SandboxError(f"the workspace does not take {reply.err[:400].decode(errors='replace')}")

    async def collect(self, paths: Sequence[str], *, max_bytes: int) -> dict[str, bytes]:
        room = len(paths) * (max_bytes + 8)
        reply = await self._ask("collect", {"paths": list(paths), "max_bytes": max_bytes}, 0.0, room)
        return {} if reply is None else _unpack(reply.out, paths, max_bytes)

    @property
    def cpu_s(self) -> float:
        return self._body.cpu_s()

    async def close(self) -> None:
        if self._closed is None:
            self._closed = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closed)  # a caller that is cancelled must not leave half of it behind

    async def _close(self) -> None:
        grace_s = 0.0
        if not self._turn.locked():
            # The agent sees it, and ends by itself. What a killed pid namespace has used, the kernel tells no parent.
            self._link.close()
            grace_s = GRACE_S
        await self._body.kill(grace_s)
        async with self._turn:  # a command in flight has lost its agent, and leaves
            self._link.close()
        self._body.release()

    # --- calls -----------------------------------------------------------------------------------------------

    async def _execute(self, operation: str, arguments: dict[str, object], timeout_s: float) -> ExecResult:
        start_s, cpu_s = time.monotonic(), self._body.cpu_s()
        timed_out = False
        try:
            arguments |= {"timeout_s": timeout_s, "cap": self._limits.output_bytes}
            reply = await self._ask(operation, arguments, timeout_s, self._limits.output_bytes, is_command=True)
        except TimeoutError:
            reply, timed_out = None, True
        num_oom = self._body.oom_kills()
        is_oom, self._num_oom = num_oom > self._num_oom, num_oom
        status: ExecStatus = "killed"
        if timed_out or (reply is not None and reply.status == "timeout"):
            status = "timeout"
        elif is_oom:
            status = "oom"
        elif reply is not None:
            status = reply.status
        return ExecResult(
            status=status,
            exit_code=-SIGKILL if reply is None else reply.exit_code,
            stdout=b"" if reply is None else reply.out,
            stderr=b"" if reply is None else reply.err,
            wall_s=time.monotonic() - start_s,
            cpu_s=max(0.0, self._body.cpu_s() - cpu_s),
        )

    async def _ask(
        self, operation: str, arguments: dict[str, object], timeout_s: float, max_bytes: int, is_command: bool = False
    ) -> Reply | None:
        """None where what ran inside has ended the sandbox. Raises `SandboxFault`, and `TimeoutError` for a command."""
        async with self._turn:
            if self._closed is not None:
                raise SandboxFault("this sandbox was closed: open another one")
            if self._fault:
                raise SandboxFault(self._fault)
            if self._gone:
                return None
            if self._num_run == 0 and self._link.hung_up():
                await self._lost("it hung up")
            self._num_run += is_command
            try:
                async with asyncio.timeout(timeout_s + GRACE_S):
                    return await self._link.call(operation, arguments, max_bytes)
            except LinkLost as error:
                await self._lost(str(error))
                return None
            except TimeoutError:
                await self._lost("the agent did not answer", timed_out=True)
                if is_command:
                    raise
                return None
            except asyncio.CancelledError:
                self._gone = "a command was cancelled"
                await asyncio.shield(self._body.kill())
                raise

    async def _lost(self, what: str, timed_out: bool = False) -> None:
        await self._body.kill()
        cause = "" if timed_out else self._body.fault()
        if not cause and self._num_run == 0:
            cause = f"{what} before any command had run"
        self._gone = what
        if cause:
            self._fault = f"the sandbox is gone: {cause}"
            raise SandboxFault(self._fault)


def _unpack(data: bytes, paths: Sequence[str], max_bytes: int) -> dict[str, bytes]:
    """The files of a `collect` answer; of a forged one, at most what was asked for."""
    found: dict[str, bytes] = {}
    position = 0
    while position + 8 <= len(data):
        index = int.from_bytes(data[position : position + 4], "little")
        length = int.from_bytes(data[position + 4 : position + 8], "little")
        content = data[position + 8 : position + 8 + length]
        position += 8 + length
        if index < len(paths) and length <= max_bytes and len(content) == length:
            found[paths[index]] = content
    return found
