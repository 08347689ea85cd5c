"""The process that starts sandboxes: `launcher.py CONTROL_FD`, one per tier, standard library only, single-threaded.

It is apart from the worker because its children unshare, mount and drop privileges between fork and exec, which no
process with threads may do; and because they die with it (`PR_SET_PDEATHSIG`), and it dies with the worker (end of
file on the control socket).

Control socket (SOCK_SEQPACKET), a JSON message per sandbox with three descriptors: agent socket, status socket,
stderr. Status socket: we write `P pid start_ticks` after the fork and `X wait_status cpu_s` when nothing is left of the
sandbox; the host writes `K` to end it, and `F` where that was not enough.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
from typing import Any, NoReturn

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_NOSUID, MS_NODEV = 2, 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
SIGKILL = 9
MAX_MESSAGE = 1 << 17
EXIT_REFUSED = 97
"""The kernel or the host refused a step of the set-up."""


class Setup:
    """What a child does between fork and exec."""

    def __init__(self, libc: ctypes.CDLL, request: dict[str, Any]) -> None:
        self.libc = libc
        self.request = request
        self.step = "start"

    def call(self, name: str, *arguments: object) -> None:
        self.step = name
        if getattr(self.libc, name)(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def execute(self, fds: list[int]) -> NoReturn:
        try:
            self.prepare(fds)
        except BaseException as error:
            os.write(2, f"{self.step}: {error}\n".encode())
        os._exit(EXIT_REFUSED)

    def prepare(self, fds: list[int]) -> None:
        request = self.request
        parent = os.getppid()
        self.descriptors(fds)
        os.setsid()
        for path in request["cgroups"]:
            self.step = f"join cgroup {path}"
            write(path, "0")
        uid = request["uid"]
        if uid is not None:  # never as the host's root: the kernel judges sysctls by the global uid
            self.step = "setuid"
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        self.call("prctl", PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(EXIT_REFUSED)
        self.call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # setuid took it away, and with it /proc/self/uid_map
        self.namespace()
        self.workspace()
        self.limits()
        self.step = f"exec {request['argv'][0]}"
        for number in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.chdir("/")
        os.execve(request["argv"][0], request["argv"], {})

    def descriptors(self, fds: list[int]) -> None:
        """0 and 1: nothing; 2: stderr; 3: the agent's socket; 4: the filter; nothing else goes through."""
        content = os.memfd_create("seccomp")
        os.write(content, bytes.fromhex(self.request["filter"]))
        os.lseek(content, 0, os.SEEK_SET)
        null = os.open(os.devnull, os.O_RDWR)
        agent, _, stderr = fds
        # first away from the numbers that we are about to fill
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in (null, null, stderr, agent, content)]
        for number, fd in enumerate(high):
            os.dup2(fd, number)
        os.closerange(len(high), 1 << 16)

    def namespace(self) -> None:
        """A user namespace of our own, in which a private mount is allowed, and which no one else sees."""
        uid, gid = os.geteuid(), os.getegid()
        self.call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
        self.step = "map user"
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{uid} {uid} 1")
        write("/proc/self/gid_map", f"{gid} {gid} 1")

    def workspace(self) -> None:
        mount_point = self.request["mount_point"]
        options = self.request["tmpfs"].encode()
        self.call("mount", b"tmpfs", mount_point.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options)
        self.step = "make folders"
        for name, mode in (("upper", 0o755), ("work", 0o755), ("tmp", 0o1777), ("shm", 0o1777)):
            os.mkdir(f"{mount_point}/{name}")
            os.chmod(f"{mount_point}/{name}", mode)

    def limits(self) -> None:
        """Set inside the user namespace: there RLIMIT_NPROC counts this sandbox alone (Linux 5.14)."""
        for name, value in self.request["rlimits"].items():
            self.step = f"limit {name}"
            number = getattr(resource, name)
            hard = resource.getrlimit(number)[1]
            allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (allowed, allowed))


class Launcher:
    """The loop: new sandboxes, ended ones, and requests to end one."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.poll = select.poll()
        self.poll.register(control.fileno(), select.POLLIN)
        self.by_pidfd: dict[int, tuple[int, int]] = {}
        self.by_status: dict[int, int] = {}

    def serve(self) -> None:
        while True:
            for fd, _ in self.poll.poll():
                if fd == self.control.fileno():
                    self.accept()
                elif fd in self.by_pidfd:
                    self.ended(fd)
                elif fd in self.by_status:
                    self.asked(fd)

    def accept(self) -> None:
        data, fds, _, _ = socket.recv_fds(self.control, MAX_MESSAGE, 3)
        if not data:  # the worker is gone; our children die with us
            os._exit(0)
        request = json.loads(data)
        pid = os.fork()
        if pid == 0:
            Setup(self.libc, request).execute(fds)
        agent, status, stderr = fds
        os.close(agent)
        os.close(stderr)
        os.set_blocking(status, False)
        send(status, f"P {pid} {start_ticks(pid)}\n")
        pidfd = os.pidfd_open(pid)
        self.by_pidfd[pidfd] = (pid, status)
        self.by_status[status] = pid
        for fd in (pidfd, status):
            self.poll.register(fd, select.POLLIN)

    def ended(self, pidfd: int) -> None:
        pid, status = self.by_pidfd[pidfd]
        ended, wait_status, usage = os.wait4(pid, os.WNOHANG)
        if not ended:  # an event of an earlier descriptor of this number
            return
        del self.by_pidfd[pidfd]
        self.poll.unregister(pidfd)
        os.close(pidfd)
        cpu_s = usage.ru_utime + usage.ru_stime
        known = {other for other, _ in self.by_pidfd.values()}
        for orphan in children(os.getpid()):
            if orphan not in known:  # the sandbox's init, whose parent went first
                os.kill(orphan, SIGKILL)
                _, _, more = os.wait4(orphan, 0)
                cpu_s += more.ru_utime + more.ru_stime
        send(status, f"X {wait_status} {cpu_s:.6f}\n")
        if self.by_status.pop(status, None) is not None:
            self.poll.unregister(status)
        os.close(status)

    def asked(self, status: int) -> None:
        pid = self.by_status[status]
        try:
            word = os.read(status, 16)
        except BlockingIOError:  # an event of an earlier descriptor of this number
            return
        if not word:  # the host let go of it
            self.poll.unregister(status)
            del self.by_status[status]
        inner = [] if b"F" in word else children(pid)
        for target in inner or [pid]:  # init first: its end empties the pid namespace, and its parent tells us
            try:
                os.kill(target, SIGKILL)
            except ProcessLookupError:
                continue


def children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def start_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def send(fd: int, text: str) -> None:
    with contextlib.suppress(OSError):  # the host may not listen any more
        os.write(fd, text.encode())


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    Launcher(socket.socket(fileno=fd)).serve()


if __name__ == "__main__":
    main()
