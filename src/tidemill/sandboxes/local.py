"""A fake for tests of what is built on sandboxes: the agent as a plain process, in a temporary folder, on this machine.

It is not a sandbox. What runs in it can read, write and send whatever the user can. There are no limits but time and
output, and no layer: programs get the running interpreter with what is installed for it.
"""

import asyncio
import contextlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import final

from tidemill.core.errors import SandboxFault, SandboxUnavailable
from tidemill.core.records import Layer, Tree
from tidemill.core.seams import Sandbox, SandboxLimits
from tidemill.sandboxes.cache import Cache
from tidemill.sandboxes.host import AgentSandbox, Link, LinkLost
from tidemill.sandboxes.owners import Owner, check_label, start_ticks
from tidemill.sandboxes.processes import kill_tree, running_in, tree_cpu_s
from tidemill.sandboxes.trees import unpack

START_S = 30.0


@final
class LocalTier:
    """Opens folders that protect nothing. For tests with code that you wrote yourself."""

    tier = "local"

    def __init__(
        self, label: str = "local", *, i_know_this_is_not_a_sandbox: bool = False, cache: Path | None = None
    ) -> None:
        if i_know_this_is_not_a_sandbox is not True:
            raise SandboxUnavailable(
                "the local tier runs untrusted code with all your rights: use the namespaces tier, "
                "or pass i_know_this_is_not_a_sandbox=True in a test with code of your own"
            )
        self._label = check_label(label)
        self._cache = Cache(cache)
        self._live: set[AgentSandbox] = set()

    async def open(self, tree: Tree, layer: Layer, limits: SandboxLimits) -> Sandbox:
        self._cache.open()
        body = LocalBody(Owner(self._cache.folder("local"), self._label))
        try:
            unpack(tree, body.workspace, None)
            link = body.spawn()
            try:
                async with asyncio.timeout(START_S):
                    await link.receive(b"\0" * 8, 0)
            except (LinkLost, TimeoutError) as error:
                link.close()
                raise SandboxFault(f"the agent did not start: {error}") from error
        except BaseException:
            await body.kill()
            body.release()
            raise
        sandbox = AgentSandbox(self.tier, link, body, limits)
        self._live.add(sandbox)
        body.when_released = lambda: self._live.discard(sandbox)
        return sandbox

    def reap(self) -> int:
        """Folders and processes of dead owners."""
        self._cache.open()
        return Owner(self._cache.folder("local"), self._label).reap()

    async def close(self) -> None:
        for sandbox in list(self._live):
            await sandbox.close()
        with contextlib.suppress(FileNotFoundError):
            Owner(self._cache.folder("local"), self._label).close()


@final
class LocalBody:
    """A process and a folder."""

    def __init__(self, owner: Owner) -> None:
        self.when_released: Callable[[], object] = lambda: None
        self._owner = owner
        self._record = owner.reserve()
        self._folder = self._record.with_suffix("")
        self.workspace = self._folder / "workspace"
        (self._folder / "tmp").mkdir(parents=True)
        self.workspace.mkdir()
        self._process: subprocess.Popen[bytes] | None = None
        self._cpu_s = 0.0

    def spawn(self) -> Link:
        ours, theirs = socket.socketpair()
        agent = str(Path(__file__).with_name("agent.py"))
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(self._folder / "tmp"),
            "TMPDIR": str(self._folder / "tmp"),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", agent, str(theirs.fileno()), str(self.workspace), ""],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )
        pid = self._process.pid
        self._owner.note(self._record, {"pid": pid, "start": start_ticks(pid), "cgroups": []})
        return Link(ours)

    def cpu_s(self) -> float:
        if self._process is not None and self._process.returncode is None:
            self._cpu_s = max(self._cpu_s, tree_cpu_s(self._process.pid))
        return self._cpu_s

    def oom_kills(self) -> int:
        return 0

    def fault(self) -> str:
        return ""

    async def kill(self, grace_s: float = 0.0) -> None:
        if self._process is not None and self._process.returncode is None:
            self.cpu_s()
            kill_tree(self._process.pid)
            self._process.wait()

    def release(self) -> None:
        for pid in running_in(self._folder):  # orphans of an agent that was killed from inside
            kill_tree(pid)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._record.unlink(missing_ok=True)
        self.when_released()
