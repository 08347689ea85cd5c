"""The run folder: one run, one recipe, one owner at a time.

RUN/ run.json lock token journal.sqlite blobs/ store/ events/ logs/ services/ checkpoints/
     metrics.jsonl eval.jsonl proc.jsonl report.html halted
"""

import errno
import fcntl
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

import msgspec

from tidemill.core.errors import RunFolderError
from tidemill.core.files import write_whole
from tidemill.core.records import Record

FIRST_PORT = 20_000
NUM_PORTS = 12_000
"""Below the range from which Linux takes the ports of outgoing connections: a service that is started again finds its
port free."""


class RunInfo(Record, frozen=True):
    """`run.json`: which run this is."""

    run_id: str
    recipe: str
    """Digest of the recipe."""
    recipe_name: str
    created_s: float


class ServiceInfo(Record, frozen=True):
    """`services/<who>.json`: where a service is, and how to know its process again."""

    who: str
    pid: int
    start_ticks: int
    """Start of the process since boot (field 22 of `/proc/<pid>/stat`): a pid alone may have been given to another."""
    started_s: float
    port: int | None
    starts: int
    """How often it was started since the supervisor began."""


@final
class RunFolder:
    """Paths and small files of a run. Making the object touches nothing; `prepare` does."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    @property
    def run_file(self) -> Path:
        return self.path / "run.json"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    @property
    def token_file(self) -> Path:
        return self.path / "token"

    @property
    def halted_file(self) -> Path:
        return self.path / "halted"

    @property
    def journal(self) -> Path:
        return self.path / "journal.sqlite"

    @property
    def blobs(self) -> Path:
        return self.path / "blobs"

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def services(self) -> Path:
        return self.path / "services"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def eval(self) -> Path:
        return self.path / "eval.jsonl"

    @property
    def proc(self) -> Path:
        return self.path / "proc.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    # --- identity --------------------------------------------------------------------------------------------

    def prepare(self, *, recipe: str, recipe_name: str) -> RunInfo:
        """Create the folder of a new run, or open that of an earlier one with the same recipe digest.

        Raises `RunFolderError` where another recipe made it, or where it holds files but no run. Hold the lock.
        """
        if self.run_file.exists():
            info = self.info()
            if info.recipe != recipe:
                raise RunFolderError(
                    f"{self.path} holds a run of another recipe ({info.recipe_name}, {info.recipe[:12]}; this is "
                    f"{recipe_name}, {recipe[:12]}): choose another folder with --out, put the recipe back, or give "
                    "the same overrides"
                )
        else:
            strangers = sorted(p.name for p in self.path.iterdir() if not _is_own(p.name)) if self.path.exists() else []
            if strangers:
                raise RunFolderError(
                    f"{self.path} is not empty ({', '.join(strangers[:3])}) and holds no run: choose another folder"
                )
            self.path.mkdir(parents=True, exist_ok=True)
            info = RunInfo(
                run_id=f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}",
                recipe=recipe,
                recipe_name=recipe_name,
                created_s=time.time(),
            )
        for folder in (self.blobs, self.store, self.events, self.logs, self.services, self.checkpoints):
            folder.mkdir(exist_ok=True)
        if not self.token_file.exists():
            write_whole(self.token_file, secrets.token_urlsafe(32).encode())
        write_whole(self.run_file, msgspec.json.format(msgspec.json.encode(info)))  # last: with it, the folder is whole
        return info

    def info(self) -> RunInfo:
        """Raises `RunFolderError` where this is no run folder."""
        try:
            return msgspec.json.decode(self.run_file.read_bytes(), type=RunInfo)
        except FileNotFoundError:
            raise RunFolderError(f"{self.path} holds no run: it has no run.json") from None
        except msgspec.DecodeError as error:
            raise RunFolderError(f"{self.run_file} is damaged ({error}): start in a new folder") from error

    def token(self) -> str:
        """The access token of every port of this run."""
        try:
            return self.token_file.read_text().strip()
        except FileNotFoundError:
            raise RunFolderError(f"{self.path} holds no run: it has no token") from None

    # --- ownership -------------------------------------------------------------------------------------------

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only owner. Ends with the process, however that ends. Raises `RunFolderError` where another lives."""
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = self.lock_file.read_text().strip() or "unknown"
                raise RunFolderError(
                    f"{self.path} is in use by process {owner}: stop that run first (tidemill stop {self.path})"
                ) from None
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(handle)

    def owner(self) -> int | None:
        """Process id of the living owner; None where nobody holds the run."""
        try:
            handle = os.open(self.lock_file, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = self.lock_file.read_text().strip()
            return int(text) if text.isdigit() else None
        finally:
            os.close(handle)
        return None

    # --- halting ---------------------------------------------------------------------------------------------

    def write_halt(self, cause: str) -> None:
        """A service says why the run must stop, before it exits with the code of a halt. The first cause stands."""
        if not self.halted_file.exists():
            write_whole(self.halted_file, cause.encode())

    def halt_cause(self) -> str:
        """Empty where nothing halted the run."""
        return self.halted_file.read_text().strip() if self.halted_file.exists() else ""

    def clear_halt(self) -> None:
        self.halted_file.unlink(missing_ok=True)

    # --- services --------------------------------------------------------------------------------------------

    def log(self, who: str) -> Path:
        return self.logs / f"{who}.log"

    def announce(self, info: ServiceInfo) -> None:
        write_whole(self.services / f"{info.who}.json", msgspec.json.encode(info))

    def forget(self, who: str) -> None:
        (self.services / f"{who}.json").unlink(missing_ok=True)

    def service(self, who: str) -> ServiceInfo | None:
        """None where it was never started, or is known to have ended."""
        try:
            return msgspec.json.decode((self.services / f"{who}.json").read_bytes(), type=ServiceInfo)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def all_services(self) -> list[ServiceInfo]:
        found = (self.service(path.stem) for path in sorted(self.services.glob("*.json")))
        return [info for info in found if info is not None]

    def choose_ports(self, whos: list[str]) -> dict[str, int]:
        """A free port of this machine for each service, to be kept for the whole run (a service that is started again
        is found where it was). Ports of an earlier start are kept where they are still free."""
        # Runs beside each other begin at different places, so that they seldom meet.
        place = int.from_bytes(hashlib.sha256(str(self.path).encode()).digest()[:4], "big")
        ports: dict[str, int] = {}
        for who in whos:
            for _ in range(NUM_PORTS):
                port = FIRST_PORT + place % NUM_PORTS
                place += 1
                if is_free(port):
                    ports[who] = port
                    break
            else:
                raise RunFolderError(
                    f"no free port for {who} between {FIRST_PORT} and {FIRST_PORT + NUM_PORTS}: stop another server"
                )
        return ports


def _is_own(name: str) -> bool:
    """What a `prepare` that was killed before it wrote `run.json` may have left."""
    known = {"lock", "token", "blobs", "store", "events", "logs", "services", "checkpoints"}
    return name in known or name.startswith((".token-", ".run.json-"))


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of 127.0.0.1 now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            return False
    return True
