"""The known escapes, tried from inside: `selftest.py` runs this file in a sandbox. It imports nothing of ours.

Reads from stdin what the host has prepared; writes a JSON list of [name, held, detail].
"""

import ctypes
import errno
import fcntl
import functools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

Finding = tuple[bool, str]

CLONE_NEWUSER = 0x10000000
TIOCSTI = 0x5412
AF_VSOCK, AF_NETLINK, AF_PACKET, AF_ALG = 40, 16, 17, 38
SYSCALLS = {
    "x86_64": {"keyctl": 250, "bpf": 321, "io_uring_setup": 425, "ptrace": 101, "clone": 56, "clone3": 435},
    "aarch64": {"keyctl": 219, "bpf": 280, "io_uring_setup": 425, "ptrace": 117, "clone": 220, "clone3": 435},
}


def fails(action: Callable[[], object], what: str) -> Finding:
    """It must raise `OSError`."""
    try:
        value = action()
    except OSError as error:
        return True, f"{what}: {errno.errorcode.get(error.errno or 0, error)}"
    return False, f"{what}: allowed ({value!r})"


def all_of(*findings: Finding) -> Finding:
    broken = [detail for held, detail in findings if not held]
    return not broken, "; ".join(broken or [detail for _, detail in findings])


def syscall(name: str, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    value = libc.syscall(SYSCALLS[os.uname().machine][name], *arguments)
    if value < 0:
        raise OSError(ctypes.get_errno(), name)
    return int(value)


def each_fails(action: Callable[[Any], object], values: Iterable[Any]) -> Finding:
    return all_of(*(fails(functools.partial(action, value), str(value)) for value in values))


def open_for_writing(path: str) -> int:
    return os.open(path, os.O_WRONLY)


def open_socket(family: int) -> socket.socket:
    return socket.socket(family, socket.SOCK_STREAM)


# --- probes --------------------------------------------------------------------------------------------------


def core_pattern(told: dict[str, Any]) -> Finding:
    """Code as the host's root, where the sandbox's user is the host's."""
    names = ("kernel/core_pattern", "vm/drop_caches", "kernel/modprobe", "kernel/hostname")
    return each_fails(open_for_writing, [f"/proc/sys/{name}" for name in names])


def init_environment(told: dict[str, Any]) -> Finding:
    """What the launcher's environment held is readable in that of the namespace's first process."""
    seen = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    seen.append(file.read())
            except OSError:
                continue
    leaked = any(told["secret"].encode() in text for text in seen)
    with open("/proc/1/environ", "rb") as file:
        of_init = file.read()
    return not leaked and not of_init.strip(b"\0"), f"{len(of_init)} bytes in /proc/1/environ"


def descriptors(told: dict[str, Any]) -> Finding:
    """A descriptor that the worker left inheritable."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                numbers = os.listdir(f"/proc/{entry}/fd")
            except OSError:
                continue
            for number in numbers:
                try:
                    target = os.readlink(f"/proc/{entry}/fd/{number}")
                except OSError:
                    continue
                if not target.startswith(("/dev/null", "pipe:", "socket:", "anon_inode:", f"/proc/{entry}", "/proc")):
                    found.append(f"{entry}:{number}={target}")
    return not found, ", ".join(found) or "pipes and sockets of the sandbox only"


def families(told: dict[str, Any]) -> Finding:
    """A network namespace does not stop AF_VSOCK."""
    return each_fails(open_socket, (AF_VSOCK, AF_NETLINK, AF_PACKET, AF_ALG))


def network(told: dict[str, Any]) -> Finding:
    def connect(address: tuple[str, int]) -> object:
        with socket.socket() as sock:
            sock.settimeout(2.0)
            sock.connect(address)
            return sock.getpeername()

    here = fails(lambda: connect(("127.0.0.1", told["port"])), "the host's loopback")
    return all_of(here, fails(lambda: connect(("1.1.1.1", 53)), "outside"))


def abstract_socket(told: dict[str, Any]) -> Finding:
    def connect() -> object:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect("\0" + told["abstract"])
            return sock.getpeername()

    return fails(connect, "abstract socket of the host")


def namespaces(told: dict[str, Any]) -> Finding:
    """A nested user namespace would bring all capabilities back, over new attack surface."""
    libc = ctypes.CDLL(None, use_errno=True)

    def unshare() -> int:
        if libc.unshare(CLONE_NEWUSER) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        return 0

    def clone() -> int:
        pid = syscall("clone", CLONE_NEWUSER | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        return pid

    return all_of(fails(unshare, "unshare"), fails(clone, "clone"), fails(lambda: syscall("clone3", 0, 0), "clone3"))


def terminal(told: dict[str, Any]) -> Finding:
    """TIOCSTI types into the terminal that the worker was started from."""
    _, other = os.openpty()
    return all_of(
        fails(lambda: fcntl.ioctl(other, TIOCSTI, b"x"), "TIOCSTI"),
        fails(lambda: os.open("/dev/tty", os.O_RDWR), "controlling terminal"),
    )


def kernel(told: dict[str, Any]) -> Finding:
    """Interfaces that no namespace separates."""
    return all_of(
        fails(lambda: syscall("keyctl", 0, -3, 1), "keyctl"),
        fails(lambda: syscall("bpf", 0, 0, 0), "bpf"),
        fails(lambda: syscall("io_uring_setup", 1, 0), "io_uring"),
        fails(lambda: syscall("ptrace", 0, 0, 0, 0), "ptrace"),
    )


def foreign_abi(told: dict[str, Any]) -> Finding:
    """The x32 ABI has numbers that a filter for x86_64 would not know."""
    if os.uname().machine != "x86_64":
        return True, "there is no x32 here"
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).syscall(0x40000000 | 39)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status), f"wait status {status}"


def privileges(told: dict[str, Any]) -> Finding:
    with open("/proc/self/status") as file:
        fields = dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
    sets = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    held = all(int(fields[name], 16) == 0 for name in sets)
    held = held and fields["NoNewPrivs"] == "1" and fields["Seccomp"] == "2"
    return held, f"capabilities {fields['CapEff']}, no_new_privs {fields['NoNewPrivs']}, seccomp {fields['Seccomp']}"


def processes(told: dict[str, Any]) -> Finding:
    pids = [entry for entry in os.listdir("/proc") if entry.isdigit()]
    return len(pids) <= 4, f"{len(pids)} processes to be seen"


def host_files(told: dict[str, Any]) -> Finding:
    names = ["/etc/shadow", "/root", "/home", "/var", "/sys/kernel", "/boot", "/run/docker.sock", "/.oldroot"]
    seen = [path for path in [*names, *told["paths"]] if os.path.lexists(path)]
    return not seen, ", ".join(seen) or "none of the host's files"


def read_only(told: dict[str, Any]) -> Finding:
    paths = ("/x", "/dev/x", "/etc/x", "/usr/x", "/opt/x", "/opt/python/bin/x", "/opt/pycache/workspace/x")
    return each_fails(os.mkdir, paths)


def devices(told: dict[str, Any]) -> Finding:
    names = [n for n in os.listdir("/dev") if n not in told["devices"]]
    made = fails(lambda: os.mknod("/workspace/mem", 0o020600, os.makedev(1, 1)), "mknod")
    return all_of(made, (not names, f"devices {names}"))


def disk(told: dict[str, Any]) -> Finding:
    """One budget over the workspace, /tmp and /dev/shm."""
    written = 0
    block = bytes(1 << 20)
    files = []
    try:
        for folder in ("/dev/shm", "/tmp", "/workspace"):
            files.append(os.path.join(folder, "filler"))
            fd = os.open(files[-1], os.O_WRONLY | os.O_CREAT)
            try:
                while written <= 2 * told["disk_bytes"]:
                    written += os.write(fd, block)
            except OSError:
                continue
            finally:
                os.close(fd)
    finally:
        for path in files:
            os.unlink(path)
    return written <= told["disk_bytes"], f"{written >> 20} MiB could be written, of {told['disk_bytes'] >> 20}"


def fork_bomb(told: dict[str, Any]) -> Finding:
    read, write = os.pipe()
    pids: list[int] = []
    refused = False
    try:
        while len(pids) < told["max_processes"] + 64:
            try:
                pid = os.fork()
            except OSError:
                refused = True
                break
            if pid == 0:
                os.close(write)
                os.read(read, 1)
                os._exit(0)
            pids.append(pid)
    finally:
        os.close(write)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return refused, f"{len(pids)} processes, then refused" if refused else f"{len(pids)} processes and no end"


def host_processes(told: dict[str, Any]) -> Finding:
    """Signals to everyone must reach no one outside; the host looks whether its own child lives."""
    for number in range(3, 200):
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            continue
        except OSError:
            return False, f"pid {number} is someone else's"
    return True, "no process but ours"


PROBES = (
    core_pattern, init_environment, descriptors, families, network, abstract_socket, namespaces, terminal, kernel,
    foreign_abi, privileges, processes, host_files, read_only, devices, disk, fork_bomb, host_processes,
)  # fmt: skip


def main() -> None:
    if os.getppid() != 2:  # outside of a sandbox these are not probes but damage
        sys.exit("this file runs in a sandbox only")
    told = json.loads(sys.stdin.read())
    found = []
    for probe in PROBES:
        start = time.monotonic()
        try:
            held, detail = probe(told)
        except Exception as error:
            held, detail = False, f"the probe failed: {type(error).__name__}: {error}"
        found.append([probe.__name__, held, f"{detail} ({time.monotonic() - start:.2f} s)"])
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
