"""Does this machine's sandbox hold? The known escapes, tried from inside, and the limits, seen from outside.

A worker runs it before its first episode, and does not start where a probe was not held: kernels, container runtimes
and system policies change under us, and each of these has let something through that looked closed.
"""

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tidemill.core.errors import SandboxError
from tidemill.core.records import Layer, Record, Tree
from tidemill.core.seams import ExecResult, Sandbox, SandboxLimits, SandboxTier
from tidemill.sandboxes.layers import installed_layer

LIMITS = SandboxLimits(memory_bytes=96 << 20, max_processes=24, disk_bytes=24 << 20, output_bytes=1 << 18)
DEVICES = (
    "console core fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero".split()  # noqa: SIM905
)
TIMEOUT_S = 60.0
SHARED = {("/",), *(("/", name) for name in ("usr", "etc", "opt", "tmp", "workspace"))}
"""Folders that a sandbox has too, of its own or to read."""

SUICIDE = "import os; assert os.getppid() == 2; os.kill(2, 9); os.kill(-1, 9)"


class Probe(Record, frozen=True):
    """One thing that was tried."""

    name: str
    held: bool
    detail: str


async def run(tier: SandboxTier, layer: Layer | None = None) -> list[Probe]:
    """Open a sandbox and try. `layer` is any that is built already: by default the bare interpreter's is made for it.
    Raises `SandboxUnavailable` where none opens at all."""
    if tier.tier == "local":  # and trying there would be the harm itself
        return [Probe(name="tier", held=False, detail="the local tier is no sandbox: use the namespaces tier")]
    with _bait() as told:
        sandbox = await tier.open(Tree(files=()), layer or installed_layer(), LIMITS)
        try:
            found = await _escapes(sandbox, told)
            for probe in (_output, _time, _leftovers, _memory, _suicide):
                found.append(await probe(sandbox))
        finally:
            await sandbox.close()
    return found


def broken(probes: list[Probe]) -> str:
    """What was not held, in one line; empty where all was."""
    return "; ".join(f"{probe.name}: {probe.detail}" for probe in probes if not probe.held)


@contextlib.contextmanager
def _bait() -> Iterator[dict[str, Any]]:
    """What a sandbox would reach if it could: sockets of the host, files, a secret in our environment."""
    secret = secrets.token_hex(16)
    name = f"tidemill-selftest-{secret[:8]}"
    leaked = os.memfd_create(name, 0)  # inheritable: no MFD_CLOEXEC
    with socket.socket() as loopback, socket.socket(socket.AF_UNIX) as abstract:
        loopback.bind(("127.0.0.1", 0))
        loopback.listen()
        abstract.bind("\0" + name)
        abstract.listen()
        os.environ["TIDEMILL_SELFTEST"] = secret
        try:
            yield {
                "secret": secret,
                "port": loopback.getsockname()[1],
                "abstract": name,
                "paths": [str(path) for path in (Path.home(), Path(__file__)) if path.parts[:2] not in SHARED],
                "devices": DEVICES,
                "disk_bytes": LIMITS.disk_bytes,
                "max_processes": LIMITS.max_processes,
            }
        finally:
            del os.environ["TIDEMILL_SELFTEST"]
            os.close(leaked)


async def _escapes(sandbox: Sandbox, told: dict[str, Any]) -> list[Probe]:
    source = Path(__file__).with_name("escapes.py").read_text()
    result = await sandbox.python(source, timeout_s=TIMEOUT_S, stdin=json.dumps(told).encode())
    try:
        found = json.loads(result.stdout)
        return [Probe(name=name, held=held, detail=detail) for name, held, detail in found]
    except ValueError:
        said = result.stderr[-400:].decode(errors="replace")
        raise SandboxError(f"the self-test did not finish in its sandbox ({result.status}): {said}") from None


def _probe(name: str, held: bool, result: ExecResult) -> Probe:
    return Probe(name=name, held=held, detail=f"{result.status}, exit code {result.exit_code}, {result.wall_s:.2f} s")


async def _output(sandbox: Sandbox) -> Probe:
    result = await sandbox.run(["sh", "-c", "yes flood"], timeout_s=TIMEOUT_S)
    held = result.status == "output_limit" and len(result.stdout) <= LIMITS.output_bytes
    return _probe("output_flood", held, result)


async def _time(sandbox: Sandbox) -> Probe:
    result = await sandbox.run(["sh", "-c", "trap '' TERM INT; while :; do :; done"], timeout_s=0.3)
    return _probe("endless_loop", result.status == "timeout" and result.wall_s < 10, result)


async def _leftovers(sandbox: Sandbox) -> Probe:
    """A process that leaves its session and lives on between two commands."""
    await sandbox.run(["sh", "-c", "setsid sh -c 'sleep 600 & exec sleep 600' >/dev/null 2>&1 &"], timeout_s=TIMEOUT_S)
    count = "import os; print(sum(n.isdigit() for n in os.listdir('/proc')))"
    result = await sandbox.python(count, timeout_s=TIMEOUT_S)
    seen = result.stdout.strip().decode(errors="replace")
    return Probe(name="leftovers", held=seen == "3", detail=f"{seen} processes: init, the agent and who counts are 3")


async def _memory(sandbox: Sandbox) -> Probe:
    source = "kept = [bytes(bytearray(b'x') * (8 << 20)) for _ in range(64)]; print(len(kept))"
    result = await sandbox.python(source, timeout_s=TIMEOUT_S)
    return _probe("memory", result.status == "oom" or result.exit_code != 0, result)


async def _suicide(sandbox: Sandbox) -> Probe:
    """Killing the agent is no way out of a bad verdict: it is told as the command's own doing."""
    first = await sandbox.python(SUICIDE, timeout_s=TIMEOUT_S)
    later = await sandbox.run(["true"], timeout_s=TIMEOUT_S)
    return _probe("agent_killed", (first.status, later.status) == ("killed", "killed"), later)
