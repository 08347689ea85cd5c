"""The process inside a sandbox that takes commands over a socket: `agent.py FD WORKSPACE SITE`.

Standard library only, and little of it, because each sandbox pays for its start. It is copied into the sandbox and
never imported by Tidemill. Requests come marshalled from the host, which it trusts;
the host trusts none of its replies.

Request: u32 length, then `marshal` of (nonce, operation, arguments). Reply, little-endian: u32 length, nonce [8], u8
status, i32 exit code, u64 wall us, u64 CPU us, u32 length of out, out, err.
"""

import gc
import marshal
import os
import select
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

OK, TIMEOUT, DISK_FULL, OUTPUT_LIMIT = 0, 1, 2, 3
SIGKILL = 9
SIGPIPE = 13
NAMESPACE_PID = 2
"""Our pid where we are the only program of a pid namespace; on a host, pid 2 is the kernel's."""

Answer = tuple[int, int, float, float, bytes, bytes]
"""Status, exit code, wall seconds, CPU seconds, out, err."""


class Agent:
    """One connection; one command at a time."""

    def __init__(self, fd: int, workspace: str) -> None:
        self.fd = fd
        self.workspace = workspace
        self.contained = os.getpid() == NAMESPACE_PID
        self.preloaded: set[str] = set()

    def serve(self) -> None:
        self.reply(b"\0" * 8, (OK, 0, 0.0, 0.0, b"", b""))
        operations: dict[str, Callable[..., Answer]] = {
            "run": self.run,
            "python": self.python,
            "write": self.write,
            "collect": self.collect,
        }
        while True:
            head = self.read(4)
            nonce, operation, arguments = marshal.loads(self.read(int.from_bytes(head, "little")))
            self.reply(nonce, operations[operation](**arguments))

    def read(self, num: int) -> bytes:
        """Ends the agent, and with it the sandbox, when the host has gone."""
        pieces = []
        while num:
            piece = os.read(self.fd, min(num, 1 << 20))
            if not piece:
                os._exit(0)
            pieces.append(piece)
            num -= len(piece)
        return b"".join(pieces)

    def reply(self, nonce: bytes, answer: Answer) -> None:
        status, code, wall_s, cpu_s, out, err = answer
        body = b"".join(
            (
                nonce,
                status.to_bytes(1, "little"),
                code.to_bytes(4, "little", signed=True),
                int(wall_s * 1e6).to_bytes(8, "little"),
                int(cpu_s * 1e6).to_bytes(8, "little"),
                len(out).to_bytes(4, "little"),
                out,
                err,
            )
        )
        view = memoryview(len(body).to_bytes(4, "little") + body)
        while view:
            view = view[os.write(self.fd, view) :]

    # --- commands --------------------------------------------------------------------------------------------

    def run(self, argv: list[str], timeout_s: float, stdin: bytes, env: dict[str, str], cap: int) -> Answer:
        def body() -> NoReturn:
            import _signal as signal  # type: ignore[import-not-found]  # `signal` itself imports `enum`

            os.environ.update(env)
            signal.signal(SIGPIPE, signal.SIG_DFL)
            try:
                os.execvp(argv[0], argv)
            except OSError as error:
                os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
            os._exit(127)

        return self.supervise(body, timeout_s, stdin, cap)

    def python(self, source: str, timeout_s: float, stdin: bytes, preload: list[str], cap: int) -> Answer:
        for name in preload:
            if name not in self.preloaded:
                self.preloaded.add(name)
                try:
                    __import__(name)
                except Exception:  # the source will meet the same failure, and can tell it better
                    continue
        gc.freeze()  # a collection in the fork would touch, and so copy, every page of what it inherits

        def body() -> NoReturn:
            run_main(source, self.workspace)

        return self.supervise(body, timeout_s, stdin, cap)

    def write(self, files: list[tuple[str, bytes, bool]]) -> Answer:
        for path, data, executable in files:
            target = os.path.join(self.workspace, path)
            try:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                if os.path.lexists(target):
                    os.unlink(target)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(target, flags, 0o755 if executable else 0o644)
                try:
                    view = memoryview(data)
                    while view:
                        view = view[os.write(fd, view) :]
                finally:
                    os.close(fd)
            except OSError as error:
                return OK, 1, 0.0, 0.0, b"", f"{path}: {error.strerror}".encode()
        return OK, 0, 0.0, 0.0, b"", b""

    def collect(self, paths: list[str], max_bytes: int) -> Answer:
        pieces = []
        for index, path in enumerate(paths):
            data = read_regular(self.workspace, path, max_bytes)
            if data is not None:
                pieces += [index.to_bytes(4, "little"), len(data).to_bytes(4, "little"), data]
        return OK, 0, 0.0, 0.0, b"".join(pieces), b""

    # --- supervision -----------------------------------------------------------------------------------------

    def supervise(self, body: Callable[[], NoReturn], timeout_s: float, stdin: bytes, cap: int) -> Answer:
        """Fork, run `body`, and end everything that it started."""
        start = time.monotonic()
        full_before = disk_is_full(self.workspace)
        (in_r, in_w), (out_r, out_w), (err_r, err_w) = os.pipe(), os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(self.fd)
                os.setsid()
                for fd, number in ((in_r, 0), (out_w, 1), (err_w, 2)):
                    os.dup2(fd, number)
                for fd in (in_r, in_w, out_r, out_w, err_r, err_w):
                    os.close(fd)
                prefer_as_victim()
                body()
            finally:
                os._exit(126)
        for fd in (in_r, out_w, err_w):
            os.close(fd)
        pipes = Pipes(in_w, out_r, err_r, stdin, cap)
        status = pipes.pump(pid, start + timeout_s)
        signal_group(pid)
        _, wait_status, usage = os.wait4(pid, 0)
        self.sweep()
        if not pipes.drain() and status == OK:
            status = OUTPUT_LIMIT
        if status == OK and disk_is_full(self.workspace) and (wait_status or not full_before):
            status = DISK_FULL
        code = os.waitstatus_to_exitcode(wait_status)
        wall_s = time.monotonic() - start
        return status, code, wall_s, usage.ru_utime + usage.ru_stime, b"".join(pipes.out), b"".join(pipes.err)

    def sweep(self) -> None:
        """Kill whatever a command has left running. In a pid namespace of our own that is everyone but us and init."""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            if self.contained:
                try:
                    os.kill(-1, SIGKILL)
                except OSError:  # no one is left
                    return
            elif not self.kill_children():
                return
            time.sleep(0.001)

    def kill_children(self) -> bool:
        """Without a pid namespace we are a subreaper: orphans become our children. False where there are none."""
        pid = os.getpid()
        try:
            with open(f"/proc/{pid}/task/{pid}/children") as file:
                children = [int(word) for word in file.read().split()]
        except OSError:
            return False
        for child in children:
            try:
                os.kill(child, SIGKILL)
                os.waitpid(child, 0)
            except OSError:
                continue
        return bool(children)


class Pipes:
    """The three pipes of a running command."""

    def __init__(self, in_w: int, out_r: int, err_r: int, stdin: bytes, cap: int) -> None:
        self.in_w, self.out_r, self.err_r = in_w, out_r, err_r
        self.stdin = memoryview(stdin)
        self.room = cap
        self.out: list[bytes] = []
        self.err: list[bytes] = []
        for fd in (in_w, out_r, err_r):
            os.set_blocking(fd, False)

    def pump(self, pid: int, deadline: float) -> int:
        """Until the command's own process ends, time runs out, or it has said too much."""
        end = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(end, select.POLLIN)
        poll.register(self.out_r, select.POLLIN)
        poll.register(self.err_r, select.POLLIN)
        if self.stdin:
            poll.register(self.in_w, select.POLLOUT)
        else:
            self.close_stdin()
        try:
            while True:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return TIMEOUT
                for fd, _ in poll.poll(left_s * 1000 + 1):
                    if fd == end:
                        return OK
                    if fd == self.in_w:
                        if not self.feed():
                            poll.unregister(fd)
                            self.close_stdin()
                    elif not self.take(fd):
                        poll.unregister(fd)
                    if self.room < 0:
                        return OUTPUT_LIMIT
        finally:
            os.close(end)

    def feed(self) -> bool:
        try:
            self.stdin = self.stdin[os.write(self.in_w, self.stdin[:65536]) :]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return bool(self.stdin)

    def take(self, fd: int) -> bool:
        """Read once. False at the end."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return True
        except OSError:
            return False
        (self.out if fd == self.out_r else self.err).append(data[: max(self.room, 0)])
        self.room -= len(data)
        return bool(data)

    def drain(self) -> bool:
        """What is left in the pipes, when no one writes any more. False where it was too much."""
        for fd in (self.out_r, self.err_r):
            while self.room >= 0:
                before = self.room
                if not self.take(fd) or self.room == before:
                    break
            os.close(fd)
        self.close_stdin()
        return self.room >= 0

    def close_stdin(self) -> None:
        if self.in_w >= 0:
            os.close(self.in_w)
            self.in_w = -1


def run_main(source: str, workspace: str) -> NoReturn:
    """Run a program as the interpreter would: `__main__`, the exit code, exit handlers, flushed streams."""
    module = type(sys)("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = ["-c"]
    sys.path.insert(0, workspace)
    gc.enable()
    code = 0
    try:
        exec(compile(source, "<string>", "exec", dont_inherit=True), module.__dict__)
    except SystemExit as error:
        code = exit_code(error.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = code or 120
    os._exit(code)


def exit_code(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    sys.stderr.write(f"{value}\n")
    return 1


def read_regular(workspace: str, path: str, max_bytes: int) -> bytes | None:
    """The file's content, or None: no component may be a link or `..`, and the last must be a regular file."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return None
    here = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            kind = os.O_NONBLOCK | os.O_NOCTTY if last else os.O_DIRECTORY
            inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=here)
            os.close(here)
            here = inner
        info = os.fstat(here)
        if info.st_mode & 0o170000 != 0o100000 or info.st_size > max_bytes:
            return None
        data = b""
        while len(data) <= max_bytes and (piece := os.read(here, min(max_bytes + 1 - len(data), 1 << 20))):
            data += piece
        return data if len(data) <= max_bytes else None
    except OSError:
        return None
    finally:
        os.close(here)


def disk_is_full(workspace: str) -> bool:
    info = os.statvfs(workspace)
    return info.f_bavail == 0 or (info.f_files > 0 and info.f_ffree == 0)


def prefer_as_victim() -> None:
    """Where memory runs out the command is to die, not the agent."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"1000")
        os.close(fd)
    except OSError:
        pass


def signal_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, SIGKILL)
        except OSError:
            continue


def become_subreaper() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def main() -> None:
    fd, workspace, site = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.set_inheritable(fd, False)
    sys.dont_write_bytecode = True
    sys.path[:] = [entry for entry in sys.path if not entry.endswith(".zip")]
    if site:
        sys.path.append(site)
    os.chdir(workspace)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    if null > 2:
        os.close(null)
    gc.disable()
    agent = Agent(fd, workspace)
    if not agent.contained:
        become_subreaper()
    agent.serve()


if __name__ == "__main__":
    main()
