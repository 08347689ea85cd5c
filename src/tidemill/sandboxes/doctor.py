"""What this machine can do for sandboxes, and how to mend what it lacks. For `tidemill doctor`."""

import os
import platform
import subprocess
import sys
from pathlib import Path

from tidemill.core.errors import SandboxError
from tidemill.core.records import Record
from tidemill.sandboxes import cgroups, profile
from tidemill.sandboxes.cache import Cache, first_slot_uid
from tidemill.sandboxes.layers import installed_layer, running_python
from tidemill.sandboxes.seccomp import filter_bytes


class Fact(Record, frozen=True):
    """One thing about this machine."""

    name: str
    ok: bool
    detail: str
    mend: str = ""
    """What to do where it is not ok."""


MEND_NAMESPACES = (
    "allow unprivileged user namespaces: sysctl -w user.max_user_namespaces=10000 kernel.unprivileged_userns_clone=1 "
    "(Debian), kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); in a container, run it with a seccomp profile "
    "that allows unshare and mount (docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined)"
)
MEND_GROUPS = (
    "run as root, or let systemd hand them to you: systemd-run --user --scope -p Delegate=yes COMMAND; "
    "without them memory is limited for each process only, and CPU share not at all"
)

_PROBE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def check(value, what):
    if value != 0:
        number = ctypes.get_errno()
        print(what + ": " + os.strerror(number)); sys.exit(1)
uid = int(sys.argv[1])
if uid:
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
    libc.prctl(4, 1, 0, 0, 0)
uid, gid = os.getuid(), os.getgid()
check(libc.unshare(0x10020000), "unshare")
for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
    with open("/proc/self/" + name, "w") as file:
        file.write(text)
if sys.argv[2] == "overlay":
    here = sys.argv[3]
    check(libc.mount(b"tmpfs", here.encode(), b"tmpfs", 6, b"size=1m"), "mount tmpfs")
    for name in ("lower", "upper", "work", "merged"):
        os.mkdir(here + "/" + name)
    options = f"lowerdir={here}/lower,upperdir={here}/upper,workdir={here}/work,userxattr"
    check(libc.mount(b"overlay", (here + "/merged").encode(), b"overlay", 0, options.encode()), "mount overlay")
    with open(here + "/merged/x", "w") as file:
        file.write("x")
print("works")
"""


def facts(cache_root: Path | None = None) -> list[Fact]:
    """All of them, the ones that others stand on first. Takes about a second, and builds nothing large."""
    cache = Cache(cache_root)
    found = [_system(), _interpreter(cache)]
    if all(fact.ok for fact in found):
        found += [_namespaces(), _overlay(cache), _bwrap(cache), _seccomp(), *_groups()]
    return found


def _system() -> Fact:
    name = f"{platform.system()} {platform.release()} on {platform.machine()}"
    mend = "sandboxes need Linux: run the workers on a Linux machine, or in a Linux virtual machine"
    return Fact(name="system", ok=sys.platform.startswith("linux"), detail=name, mend=mend)


def _interpreter(cache: Cache) -> Fact:
    try:
        cache.open()
        layer = installed_layer(["pytest"])
    except SandboxError as error:
        return Fact(name="interpreter", ok=False, detail=str(error), mend="see the message")
    where = f"Python {running_python()} of {sys.base_prefix}"
    detail = f"{where} is copied into {cache.root}, with {len(layer.packages)} packages or more"
    return Fact(name="interpreter", ok=True, detail=detail)


def _probe(what: str, folder: Path) -> tuple[bool, str]:
    uid = first_slot_uid() if os.geteuid() == 0 else 0
    command = [sys.executable, "-I", "-S", "-c", _PROBE, str(uid), what, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30, cwd="/")
    said = (done.stdout + done.stderr).strip().splitlines() or ["no answer"]
    return done.returncode == 0, said[-1]


def _namespaces() -> Fact:
    ok, detail = _probe("namespaces", Path("/"))
    return Fact(name="user namespaces", ok=ok, detail=detail, mend=MEND_NAMESPACES)


def _overlay(cache: Cache) -> Fact:
    ok, detail = _probe("overlay", cache.folder("mount"))
    return Fact(
        name="overlay", ok=ok, detail=detail, mend="use Linux 5.11 or later, with overlayfs; " + MEND_NAMESPACES
    )


def _bwrap(cache: Cache) -> Fact:
    try:
        path = profile.find_bwrap(cache)
    except SandboxError as error:
        return Fact(name="bubblewrap", ok=False, detail=str(error), mend=profile.MEND_BWRAP)
    done = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=False)
    detail = f"{done.stdout.strip() or done.stderr.strip()} at {path}"
    return Fact(name="bubblewrap", ok=done.returncode == 0, detail=detail, mend=profile.MEND_BWRAP)


def _seccomp() -> Fact:
    try:
        size = len(filter_bytes())
        actions = Path("/proc/sys/kernel/seccomp/actions_avail").read_text().split()
    except (SandboxError, OSError) as error:
        mend = "use a kernel with CONFIG_SECCOMP_FILTER, on x86_64 or aarch64"
        return Fact(name="seccomp", ok=False, detail=str(error), mend=mend)
    ok = {"kill_process", "errno"} <= set(actions)
    return Fact(name="seccomp", ok=ok, detail=f"a filter of {size // 8} instructions", mend="use Linux 4.14 or later")


def _groups() -> list[Fact]:
    groups = cgroups.detect()
    version = f"cgroup version {groups.version}" if groups.version else "no control groups are delegated to us"
    held = [name for name in ("memory", "pids", "cpu") if groups.holds(name)]
    weaker = {
        "memory": "of each process only (RLIMIT_AS); oom is not told apart",
        "pids": "by RLIMIT_NPROC, counted per sandbox",
        "cpu": "not limited",
    }
    found = []
    for name, otherwise in weaker.items():
        detail = f"{version}: {groups.parents[name]}" if name in held else f"{version}: {otherwise}"
        found.append(Fact(name=f"limit {name}", ok=name in held or name == "pids", detail=detail, mend=MEND_GROUPS))
    return found
