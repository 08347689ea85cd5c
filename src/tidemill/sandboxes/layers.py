"""Environment layers: a folder with an interpreter and packages, that any user can read and a sandbox mounts at /opt.

Layout, as the sandbox sees it: `/opt/python` (an ordinary prefix, packages in its `site-packages`), `/opt/pycache` (all
bytecode, by `PYTHONPYCACHEPREFIX`; the workspace's is mounted into it) and `/opt/agent.pyc`.
"""

import importlib.metadata
import importlib.util
import json
import marshal
import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tidemill.core.errors import SandboxUnavailable, UsageError
from tidemill.core.records import Layer
from tidemill.sandboxes.trees import UNCHECKED_HASH, write_bytecode

FORMAT = 2
"""Raise it when a layer is built differently: it is part of the cache's key."""
PREFIX = "/opt/python"
PYCACHE = "/opt/pycache"
AGENT = "/opt/agent.pyc"
MAJOR_MINOR = f"python{sys.version_info.major}.{sys.version_info.minor}"
SITE = f"{PREFIX}/{sys.platlibdir}/{MAJOR_MINOR}/site-packages"
WITHOUT = {"__pycache__", "test", "tests", "idlelib", "turtledemo", "ensurepip", "site-packages", "dist-packages"}
"""Folders of the standard library that a sandbox does without."""


def running_python() -> str:
    return ".".join(str(part) for part in sys.version_info[:3])


def installed_layer(names: Sequence[str] = ()) -> Layer:
    """The running interpreter with these installed distributions, at their versions, and all that they require."""
    found: dict[str, str] = {}
    wanted = list(names)
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in found:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise UsageError(f"{name} is not installed here: pip install {name}") from None
        found[name] = distribution.version
        for line in distribution.requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)
    return Layer(python=running_python(), packages=tuple(sorted(f"{name}=={found[name]}" for name in found)))


def build_layer(layer: Layer, folder: Path) -> None:
    """Fill `folder`. Raises `SandboxUnavailable` where this machine cannot provide the interpreter or a package."""
    if layer.python != running_python():
        raise SandboxUnavailable(
            f"the task wants Python {layer.python}, and this worker runs {running_python()}: "
            f"start the worker with Python {layer.python}, or make the tasks again with this one"
        )
    prefix = folder / "python"
    (prefix / "bin").mkdir(parents=True)
    (folder / "pycache" / "workspace").mkdir(parents=True)
    (folder / "agent.pyc").touch()
    _copy_interpreter(prefix)
    site = folder / SITE.removeprefix("/opt/")
    site.mkdir(parents=True)
    _copy_packages(layer.packages, site)
    if "dist-packages" in (Path(os.__file__).parent / "site.py").read_text():  # Debian's looks there only
        other = prefix / "lib" / f"python{sys.version_info.major}"
        other.mkdir(parents=True, exist_ok=True)
        (other / "dist-packages").symlink_to(SITE)
    _make_bytecode(prefix, folder / "pycache" / PREFIX.lstrip("/"))


# --- interpreter ---------------------------------------------------------------------------------------------


def _copy_interpreter(prefix: Path) -> None:
    executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    target = prefix / "bin" / MAJOR_MINOR
    shutil.copy(executable, target)
    target.chmod(0o755)
    for name in ("python", "python3"):
        (target.parent / name).symlink_to(MAJOR_MINOR)
    library = prefix / sys.platlibdir / MAJOR_MINOR
    base = {"installed_base": sys.base_prefix, "base": sys.base_prefix}
    base |= {"installed_platbase": sys.base_exec_prefix, "platbase": sys.base_exec_prefix}
    for source in dict.fromkeys((Path(os.__file__).parent, Path(sysconfig.get_path("platstdlib", vars=base)))):
        if source.is_dir():
            shutil.copytree(source, library, ignore=_ignore, dirs_exist_ok=True, ignore_dangling_symlinks=True)
    for path in _foreign_libraries([target, *library.glob("lib-dynload/*.so")]):
        shutil.copy(path, prefix / "lib" / path.name)
    for path in (*prefix.rglob("*"), prefix):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path == target else 0o644)


def _ignore(folder: str, names: list[str]) -> set[str]:
    return {n for n in names if n in WITHOUT or n.startswith("config-") or n.endswith((".a", ".pyc"))}


def _foreign_libraries(binaries: Sequence[Path]) -> list[Path]:
    """Shared libraries that these need and that do not lie in the system's folders: libpython, mostly."""
    ldd = shutil.which("ldd")
    if ldd is None:
        raise SandboxUnavailable("there is no ldd on this machine (it comes with glibc): install it")
    shown = subprocess.run([ldd, *map(str, binaries)], capture_output=True, text=True, check=False).stdout
    found: dict[str, Path] = {}
    for line in shown.splitlines():
        name, arrow, rest = line.strip().partition(" => ")
        path = rest.rpartition(" (")[0]
        if arrow and path.startswith("/") and not path.startswith(("/lib", "/usr/")):
            found[name] = Path(path).resolve()
    return [_named(path, name) for name, path in found.items()]


def _named(path: Path, name: str) -> Path:
    """A library is looked for by the name that its users wrote down, not by that of the file behind links."""
    return path if path.name == name else path.parent / name


# --- packages ------------------------------------------------------------------------------------------------


def _copy_packages(packages: Sequence[str], site: Path) -> None:
    missing = [package for package in packages if not _copy_installed(package, site)]
    if not missing:
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--no-compile", "--target", str(site), *missing]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SandboxUnavailable(
            f"cannot install {' '.join(missing)} for sandboxes: {reason}; "
            f"pip install the same versions into {sys.prefix}, and they are copied from there"
        )


def _copy_installed(package: str, site: Path) -> bool:
    """Copy a distribution of the current environment. False where exactly this version is not installed here."""
    name, separator, version = package.partition("==")
    if not separator:
        raise UsageError(f"package {package!r} of a layer: name an exact version, as in name==1.2.3")
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    if distribution.version != version or not distribution.files:
        return False
    if json.loads(distribution.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"):
        return False
    for file in distribution.files:
        if ".." in file.parts or file.is_absolute() or "__pycache__" in file.parts:
            continue  # scripts and manual pages, outside of site-packages
        source = Path(str(distribution.locate_file(file)))
        if not source.is_file():
            return False
        target = site / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)
    return True


# --- bytecode ------------------------------------------------------------------------------------------------


def _make_bytecode(prefix: Path, folder: Path) -> None:
    """Bytecode for all of a prefix, under the names that the files will have in the sandbox. It is never checked
    against the sources, because both are mounted read-only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in sorted(prefix.rglob("*.py")):
            relative = str(path.relative_to(prefix))
            source = path.read_bytes()
            name = f"{PREFIX}/{relative}"
            code = _installed_code(relative, source, name)
            if code is None:
                try:
                    code = compile(source, name, "exec", dont_inherit=True, optimize=0)
                except (SyntaxError, ValueError, RecursionError, MemoryError):
                    continue
            write_bytecode(folder, relative, UNCHECKED_HASH + importlib.util.source_hash(source) + marshal.dumps(code))


def _installed_code(relative: str, source: bytes, name: str) -> CodeType | None:
    """What the running interpreter has already compiled of the same file: to rename is quicker than to compile."""
    for original in _originals(relative):
        try:
            info = original.stat()
            data = Path(importlib.util.cache_from_source(str(original), optimization="")).read_bytes()
        except (OSError, NotImplementedError):
            continue
        stamp = int(info.st_mtime).to_bytes(8, "little")[:4] + (info.st_size & 0xFFFFFFFF).to_bytes(4, "little")
        if data[:16] == importlib.util.MAGIC_NUMBER + bytes(4) + stamp and original.read_bytes() == source:
            return _renamed(marshal.loads(data[16:]), name)
    return None


def _originals(relative: str) -> Iterator[Path]:
    library = f"{sys.platlibdir}/{MAJOR_MINOR}/"
    inner = relative.removeprefix(library)
    if inner.startswith("site-packages/"):
        for folder in dict.fromkeys(sysconfig.get_path(key) for key in ("purelib", "platlib")):
            yield Path(folder) / inner.removeprefix("site-packages/")
    else:
        yield Path(os.__file__).parent / inner


def _renamed(code: CodeType, name: str) -> CodeType:
    constants = tuple(_renamed(item, name) if isinstance(item, CodeType) else item for item in code.co_consts)
    return code.replace(co_filename=name, co_consts=constants)
