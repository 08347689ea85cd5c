"""The tier for training: bubblewrap in a user namespace, as root or as an ordinary user.

Three layers of processes: the worker asks a launcher (`launcher.py`), whose child drops to an unused user id, makes a
private user and mount namespace with a sized tmpfs in it, and becomes `bwrap`, which builds the sandbox proper
(`profile.py`) in a namespace nested in that one, and starts the agent (`agent.py`). Nothing is mounted on the host.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from tidemill.core.errors import SandboxFault, SandboxUnavailable
from tidemill.core.records import Layer, Tree, digest
from tidemill.core.seams import Sandbox, SandboxLimits
from tidemill.sandboxes import cgroups, layers, profile, trees
from tidemill.sandboxes.cache import Cache, Slots
from tidemill.sandboxes.host import AgentSandbox, Link, LinkLost
from tidemill.sandboxes.owners import Owner, check_label
from tidemill.sandboxes.processes import tree_cpu_s
from tidemill.sandboxes.seccomp import filter_bytes

START_S = 30.0
END_S = 3.0
MAX_AGE_S = 14 * 86400.0
MEND = "run `tidemill doctor` to see what this machine lacks"


@dataclass(frozen=True, kw_only=True)
class _Ground:
    """What all sandboxes of a tier stand on."""

    bwrap: Path
    etc: Path
    agent: Path
    mount_point: Path
    groups: cgroups.Cgroups
    slots: Slots
    filter_hex: str


@final
class NamespacesTier:
    """Opens sandboxes that hold against hostile code. `label` names the run, for `reap`."""

    tier = "namespaces"

    def __init__(self, label: str, *, cache: Path | None = None) -> None:
        self._label = check_label(label)
        self._cache = Cache(cache)
        self._ground: _Ground | None = None
        self._launcher: Launcher | None = None
        self._lock = threading.Lock()
        self._live: set[AgentSandbox] = set()
        self._proved = False

    async def open(self, tree: Tree, layer: Layer, limits: SandboxLimits) -> Sandbox:
        """A fresh sandbox. Raises `SandboxUnavailable` where this machine cannot run one, or lacks the layer;
        `SandboxFault` where one did not start although others have."""
        ground = self._ground
        if ground is None:
            ground = await asyncio.to_thread(self._prepare)
        uid = ground.slots.take()
        bubble = Bubble(self._owner(), ground.slots, uid)
        try:
            folders = self._found(tree, layer, uid)
            if folders is None:
                folders = await asyncio.to_thread(self._build, tree, layer, uid)
            bubble.group(ground.groups, limits)
            request = self._request(ground, folders, bubble, limits)
            sandbox = await self._start(bubble, request, limits)
        except BaseException:
            await asyncio.shield(bubble.kill())
            bubble.release()
            raise
        self._live.add(sandbox)
        bubble.when_released = lambda: self._live.discard(sandbox)
        return sandbox

    def reap(self) -> int:
        self._cache.open()
        return self._owner().reap()

    async def close(self) -> None:
        """Ends the sandboxes that are still open, and the launcher. The tier can be used again afterwards."""
        for sandbox in list(self._live):
            await sandbox.close()
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            await asyncio.to_thread(launcher.close)
        if self._ground is not None:
            self._ground.slots.close()
            self._owner().close()
            self._ground = None

    # --- preparation -----------------------------------------------------------------------------------------

    def _owner(self) -> Owner:
        return Owner(self._cache.folder("owners"), self._label)

    def _prepare(self) -> _Ground:
        with self._lock:
            if self._ground is None:
                if not sys.platform.startswith("linux"):
                    raise SandboxUnavailable(f"sandboxes of this tier need Linux, and this is {sys.platform}")
                self._cache.open()
                for kind in ("layers", "bases", "bytecode", "agents", "bwrap", "etc"):
                    self._cache.prune(kind, MAX_AGE_S)
                self._ground = _Ground(
                    bwrap=profile.find_bwrap(self._cache),
                    etc=profile.build_etc(self._cache),
                    agent=profile.build_agent(self._cache),
                    mount_point=self._cache.folder("mount"),
                    groups=cgroups.detect(),
                    slots=Slots(self._cache.folder("slots")),
                    filter_hex=filter_bytes().hex(),
                )
            return self._ground

    def _names(self, tree: Tree, layer: Layer, uid: int | None) -> list[tuple[str, str]]:
        tree_name = digest(tree)[:32]
        owned = tree_name if uid is None else f"{tree_name}-{uid}"
        return [
            ("layers", profile.layer_name(layer, layers.FORMAT)),
            ("bases", owned),
            ("bytecode", f"{tree_name}-{sys.implementation.cache_tag}"),
        ]

    def _found(self, tree: Tree, layer: Layer, uid: int | None) -> list[Path] | None:
        """Layer, base and bytecode, where this process has used them before."""
        found = [self._cache.is_sound(*name) for name in self._names(tree, layer, uid)]
        whole = [path for path in found if path is not None]
        return whole if len(whole) == len(found) else None

    def _build(self, tree: Tree, layer: Layer, uid: int | None) -> list[Path]:
        make = (
            lambda folder: layers.build_layer(layer, folder),
            lambda folder: trees.unpack(tree, _inside(folder), uid),
            lambda folder: trees.compile_tree(tree, _inside(folder), profile.WORKSPACE),
        )
        names = self._names(tree, layer, uid)
        return [self._cache.build(*name, each) for name, each in zip(names, make, strict=True)]

    def _request(self, ground: _Ground, folders: list[Path], bubble: "Bubble", limits: SandboxLimits) -> dict[str, Any]:
        layer, base, bytecode = folders
        rlimits = {
            "RLIMIT_CORE": 0,
            "RLIMIT_NOFILE": limits.max_open_files,
            "RLIMIT_MEMLOCK": 1 << 16,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_NPROC": limits.max_processes + cgroups.OWN_PROCESSES,
        }
        if not ground.groups.holds("memory"):  # the next best: of each process, not of all together
            rlimits["RLIMIT_AS"] = limits.memory_bytes
        return {
            "uid": bubble.uid,
            "cgroups": bubble.cgroup.join_files(),
            "filter": ground.filter_hex,
            "mount_point": str(ground.mount_point),
            "tmpfs": f"size={limits.disk_bytes},nr_inodes={limits.max_inodes},mode=755",
            "rlimits": rlimits,
            "argv": profile.bwrap_arguments(
                bwrap=ground.bwrap,
                etc=ground.etc,
                agent=ground.agent,
                layer=layer,
                base=base / "files",
                bytecode=bytecode / "files",
                mount=ground.mount_point,
            ),
        }

    # --- start -----------------------------------------------------------------------------------------------

    async def _start(self, bubble: "Bubble", request: dict[str, Any], limits: SandboxLimits) -> AgentSandbox:
        if self._launcher is not None and not self._launcher.is_alive():
            self._launcher.close()
            self._launcher = None
        if self._launcher is None:
            self._launcher = Launcher()
        ours, theirs = socket.socketpair()
        err_r, err_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        link = Link(ours)
        try:
            try:
                with contextlib.closing(theirs):
                    bubble.spawn(self._launcher, request, theirs.fileno(), err_w)
            finally:
                os.close(err_w)
            try:
                async with asyncio.timeout(START_S):
                    await bubble.started()
                    await link.receive(b"\0" * 8, 0)
            except (LinkLost, TimeoutError, OSError) as error:
                raise self._failure(error, err_r) from error
        except BaseException:
            link.close()
            raise
        finally:
            os.close(err_r)
        self._proved = True
        return AgentSandbox(self.tier, link, bubble, limits)

    def _failure(self, error: BaseException, err_r: int) -> SandboxFault | SandboxUnavailable:
        try:
            said = os.read(err_r, 4096).decode(errors="replace").strip()
        except BlockingIOError:
            said = ""
        what = "; ".join(said.splitlines()[-2:]) or f"{type(error).__name__} {error}".strip()
        if self._proved or isinstance(error, TimeoutError):
            return SandboxFault(f"a sandbox did not start: {what}")
        return SandboxUnavailable(f"sandboxes do not start on this machine: {what}; {MEND}")


@final
class Launcher:
    """The worker's handle on the process that starts sandboxes."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
        script = str(Path(__file__).with_name("launcher.py"))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", script, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                cwd="/",
                start_new_session=True,
            )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, request: Mapping[str, Any], fds: list[int]) -> None:
        socket.send_fds(self._control, [json.dumps(request).encode()], fds)

    def close(self) -> None:
        """Every sandbox of it dies too."""
        self._control.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@final
class Bubble:
    """Process, control groups, user id and record of one sandbox, from before it starts to after it ended."""

    def __init__(self, owner: Owner, slots: Slots, uid: int | None) -> None:
        self.uid = uid
        self.cgroup = cgroups.Cgroup(version=0, folders={})
        self.when_released: Callable[[], object] = lambda: None
        self._owner = owner
        self._slots = slots
        self._record: Path | None = None
        self._status: socket.socket | None = None
        self._pid = 0
        self._said = b""
        self._ended = False
        self._released = False
        self._cpu_s = 0.0
        self._killing: asyncio.Task[None] | None = None

    def group(self, groups: cgroups.Cgroups, limits: SandboxLimits) -> None:
        """Announce the sandbox, then make its control groups: in that order nothing can be left unknown."""
        path = self._record = self._owner.reserve()
        name = f"tidemill-{self._owner.label}-{self._owner.name}-{path.stem}"
        self._owner.note(path, {"cgroups": [str(folder) for folder in groups.named(name)]})
        try:
            self.cgroup = groups.create(name, limits)
        except OSError as error:
            raise SandboxFault(f"cannot make control group {name}: {error}") from error

    def spawn(self, launcher: Launcher, request: Mapping[str, Any], agent_fd: int, err_fd: int) -> None:
        self._status, theirs = socket.socketpair()
        self._status.setblocking(False)
        with theirs:
            try:
                launcher.send(request, [agent_fd, theirs.fileno(), err_fd])
            except OSError as error:
                raise SandboxFault(f"the sandbox launcher is gone: {error}") from error

    async def started(self) -> None:
        """Until the launcher has told the process."""
        word, pid, start = (await self._line()).split() or ("", "", "")
        if word != "P":
            raise SandboxFault("the sandbox launcher died")
        self._pid = int(pid)
        if self._record is not None:
            folders = [str(folder) for folder in self.cgroup.unique()]
            self._owner.note(self._record, {"pid": self._pid, "start": int(start), "cgroups": folders})

    async def _line(self) -> str:
        """The next line from the launcher; empty at the end."""
        assert self._status is not None
        while b"\n" not in self._said:
            piece = await asyncio.get_running_loop().sock_recv(self._status, 4096)
            if not piece:
                return ""
            self._said += piece
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def cpu_s(self) -> float:
        if self._pid and not self._ended:
            used_s = self.cgroup.cpu_s()
            self._cpu_s = max(self._cpu_s, tree_cpu_s(self._pid) if used_s is None else used_s)
        return self._cpu_s

    def oom_kills(self) -> int:
        return self.cgroup.oom_kills()

    def fault(self) -> str:
        return "" if self._ended else "its launcher died"

    async def kill(self, grace_s: float = 0.0) -> None:
        if self._killing is None:
            self._killing = asyncio.ensure_future(self._kill(grace_s))
        await asyncio.shield(self._killing)

    async def _kill(self, grace_s: float) -> None:
        if self._status is None:
            return
        for word, patience_s in ((b"", grace_s), (b"K", END_S), (b"F", END_S)):  # init first; then bwrap itself
            try:
                async with asyncio.timeout(patience_s):
                    with contextlib.suppress(OSError):  # it has ended already, and what was said lies in the socket
                        await asyncio.get_running_loop().sock_sendall(self._status, word)
                    while (line := await self._line()) and not line.startswith("X"):
                        continue
            except (TimeoutError, OSError):
                continue
            if line:
                self._cpu_s = max(self.cpu_s(), float(line.split()[2]))
                self._ended = True
            return

    def release(self) -> None:
        if self._released:
            return
        self._released = True
        if self._status is not None:
            self._status.close()
        self.cgroup.remove()
        if self._record is not None:
            self._record.unlink(missing_ok=True)
        self._slots.give_back(self.uid)
        self.when_released()


def _inside(folder: Path) -> Path:
    """Beside the cache's own list of files."""
    path = folder / "files"
    path.mkdir(mode=0o755)
    return path
