"""Third-party packages as task material: fetched by the ordinary pip client, pinned, and read without unpacking.

An archive's files go from the archive into memory: nothing of it is ever written to a path that the archive chose.
"""

import hashlib
import os
import re
import stat
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement

from tidemill.core.errors import TaskError, UsageError
from tidemill.core.records import Record

MAX_FILE_BYTES = 1 << 20
MAX_TOTAL_BYTES = 64 << 20
Files = dict[str, bytes]
"""Relative POSIX path → content."""


class PackagePin(Record, frozen=True):
    """One exact archive of one package."""

    name: str
    version: str
    kind: Literal["sdist", "wheel"] = "sdist"
    sha256: str = ""
    """Of the archive; empty: not known yet."""
    requires: tuple[str, ...] = ()
    """Other packages that its modules or tests import."""
    license: str = ""


def parse_requirement(text: str) -> PackagePin | None:
    """`NAME==VERSION` as a pin; None where the text has another form (a folder)."""
    match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)", text)
    return PackagePin(name=match[1], version=match[2]) if match else None


def cache_folder() -> Path:
    """`$TIDEMILL_CACHE`, else a folder of this user's own. Raises `UsageError` where it belongs to somebody else."""
    configured = os.environ.get("TIDEMILL_CACHE")
    if configured:
        folder = Path(configured)
    elif os.getuid() == 0:
        folder = Path("/var/tmp/tidemill-0")  # a home of root is out of reach for the sandboxes' users
    else:
        folder = Path.home() / ".cache" / "tidemill"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise UsageError(f"cannot make the cache folder {folder}: {error.strerror}; set TIDEMILL_CACHE") from error
    if status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
        raise UsageError(f"the cache folder {folder} can be written by others; set TIDEMILL_CACHE to a folder of yours")
    return folder


def fetch(pin: PackagePin, *, timeout_s: float = 300) -> tuple[Path, PackagePin]:
    """The archive, from the cache or by `pip download`, and the pin with its hash.

    Raises `TaskError` where pip finds no such package or version, or where the bytes are not the pinned ones.
    """
    folder = cache_folder() / "packages" / f"{pin.name}-{pin.version}-{pin.kind}"
    archive = _only_archive(folder)
    if archive is None:
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as temporary:
            _pip_download(pin, Path(temporary), timeout_s)
            if _only_archive(Path(temporary)) is None:
                raise TaskError(f"pip brought no {pin.kind} of {pin.name}=={pin.version}")
            try:
                os.rename(temporary, folder)
            except OSError:
                if not folder.exists():
                    raise
            else:
                os.mkdir(temporary)  # for the context manager to remove
        archive = _only_archive(folder)
    assert archive is not None
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if pin.sha256 and found != pin.sha256:
        raise TaskError(
            f"{archive} has sha256 {found}, not {pin.sha256} as pinned: delete {folder}, and if it happens again, "
            f"this {pin.name}=={pin.version} is another one than the task set was made from"
        )
    return archive, PackagePin(
        name=pin.name, version=pin.version, kind=pin.kind, sha256=found, requires=pin.requires, license=pin.license
    )


def _only_archive(folder: Path) -> Path | None:
    found = [path for path in sorted(folder.glob("*")) if path.name.endswith((".tar.gz", ".zip", ".whl"))]
    return found[0] if len(found) == 1 else None


def _pip_download(pin: PackagePin, folder: Path, timeout_s: float) -> None:
    hashed = f" --hash=sha256:{pin.sha256}" if pin.sha256 else ""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{pin.name}=={pin.version}{hashed}\n")
    form = ["--no-binary", pin.name] if pin.kind == "sdist" else ["--only-binary", pin.name]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", *form, "--dest", str(folder), "--requirement", str(requirements)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise TaskError(f"pip download {pin.name}=={pin.version} took more than {timeout_s:.0f} s") from None
    finally:
        requirements.unlink()
    if done.returncode == 0:
        return
    errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    if any("No matching distribution" in line or "Could not find a version" in line for line in errors):
        raise TaskError(f"pip finds no {pin.kind} of {pin.name}=={pin.version}: check the name and the version")
    raise TaskError(
        f"pip cannot fetch {pin.name}=={pin.version}: {errors[0] if errors else done.stderr.strip()[-300:]}"
    )


def read_archive(archive: Path) -> Files:
    """The regular files of an sdist (without its top folder) or a wheel. Raises `TaskError` for a hostile archive."""
    try:
        if archive.name.endswith(".tar.gz"):
            return _strip_top(_bounded(_tar_members(archive), archive))
        return _bounded(_zip_members(archive), archive)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise TaskError(f"{archive} cannot be read: {error}; delete it and fetch it again") from error


def _tar_members(archive: Path) -> Iterator[tuple[str, int, bytes]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isreg() and member.size <= MAX_FILE_BYTES:
                file = tar.extractfile(member)
                assert file is not None
                yield member.name, member.size, file.read(MAX_FILE_BYTES + 1)


def _zip_members(archive: Path) -> Iterator[tuple[str, int, bytes]]:
    with zipfile.ZipFile(archive) as wheel:
        for info in wheel.infolist():
            if not info.is_dir() and info.file_size <= MAX_FILE_BYTES:
                with wheel.open(info) as file:
                    yield info.filename, info.file_size, file.read(MAX_FILE_BYTES + 1)


def _bounded(members: Iterator[tuple[str, int, bytes]], archive: Path) -> Files:
    files: Files = {}
    total = 0
    for name, size, data in members:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise TaskError(f"{archive} holds the path {name!r}, which leads out of it")
        if len(data) != size:
            raise TaskError(f"{archive} lies about the size of {name!r}")
        total += size
        if total > MAX_TOTAL_BYTES:
            raise TaskError(f"{archive} holds more than {MAX_TOTAL_BYTES >> 20} MiB")
        files[str(path)] = data
    return files


def _strip_top(files: Files) -> Files:
    tops = {path.split("/", 1)[0] for path in files}
    if len(tops) != 1:
        return files
    return {path.split("/", 1)[1]: data for path, data in files.items() if "/" in path}


_SKIPPED = {"__pycache__", "node_modules", "venv", "build", "dist", "site-packages"}


def read_repository(folder: Path) -> Files:
    """The regular files of a working copy, without hidden folders, environments, caches and links."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder and no NAME==VERSION")
    files: Files = {}
    total = 0
    for root, names, found in os.walk(folder):
        names[:] = sorted(name for name in names if name not in _SKIPPED and not name.startswith("."))
        names[:] = [name for name in names if not (Path(root) / name / "pyvenv.cfg").exists()]
        for name in sorted(found):
            path = Path(root) / name
            if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
                continue
            data = path.read_bytes()
            total += len(data)
            if total > MAX_TOTAL_BYTES:
                raise TaskError(f"{folder} holds more than {MAX_TOTAL_BYTES >> 20} MiB: give the package's own folder")
            files[path.relative_to(folder).as_posix()] = data
    return files


def declared_requirements(files: Files) -> tuple[str, ...]:
    """Names of the packages that a repository's `pyproject.toml` says it needs here; none where it says nothing.

    Raises `TaskError` where the file cannot be read.
    """
    try:
        project = tomllib.loads(files.get("pyproject.toml", b"").decode()).get("project", {})
        needed = [Requirement(line) for line in project.get("dependencies", [])]
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, InvalidRequirement, AttributeError, TypeError) as error:
        raise TaskError(f"pyproject.toml cannot be read: {error}") from error
    return tuple(sorted({one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})}))
