"""Resume state on disk: `torch.distributed.checkpoint` tensors and one small JSON file per step.

    CHECKPOINTS/step-00000012/tensors/…       masters, moments, random state
    CHECKPOINTS/step-00000012/learner.json    counters, position, model, and a hash of every tensor file

A step's folder is written aside and appears whole, by a rename; the last two are kept.
"""

import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from tidemill.core.errors import ModelError
from tidemill.core.records import Record

_NUM_KEPT = 2
_STEP_NAME = re.compile(r"step-(\d{8,})")


class LearnerState(Record, frozen=True):
    """All of the learner that is not a tensor."""

    model: dict[str, Any]
    """Of `config.json`."""
    stage: str
    stage_step: int
    step: int
    version: int
    position: dict[str, int]
    """In the stage's data; empty in RL, where the version says all."""


class _Manifest(Record, frozen=True):
    state: LearnerState
    files: dict[str, str]
    """Path under `tensors/` → xxh3-128."""


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps that can be resumed, in order."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for name in os.listdir(folder) if (match := _STEP_NAME.fullmatch(name)))


def save_checkpoint(folder: Path, state: LearnerState, tensors: dict[str, Tensor]) -> Path:
    """Write one step; returns its folder. Raises `OSError` (disk full, …) with earlier steps untouched."""
    folder.mkdir(parents=True, exist_ok=True)
    _tidy(folder)
    target = folder / f"step-{state.step:08d}"
    aside = folder / f".new-{target.name}"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.|tidemill\.updates")
            save_tensors(dict(tensors), checkpoint_id=aside / "tensors", no_dist=True)
        manifest = _Manifest(state=state, files=_hashes(aside / "tensors"))
        _write_durably(aside / "learner.json", msgspec.json.encode(manifest))
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise _cause(error) from None
    _sync_folder(aside / "tensors")
    _sync_folder(aside)
    if target.exists():  # the same step, done again
        os.rename(target, folder / f".old-{target.name}")
    os.rename(aside, target)
    _sync_folder(folder)
    for old in [folder / f".old-{target.name}", *_outdated(folder)]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def read_state(folder: Path) -> LearnerState | None:
    """Of the newest step, every file verified; None where there is none. Raises `ModelError` for a damaged one."""
    _tidy(folder)
    steps = checkpoint_steps(folder)
    return _verified(folder / f"step-{steps[-1]:08d}").state if steps else None


def fill_tensors(folder: Path, step: int, tensors: dict[str, Tensor]) -> None:
    """Copy a step's tensors into `tensors`, in place. Raises `ModelError` where they do not fit."""
    path = folder / f"step-{step:08d}"
    _verified(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.|tidemill\.updates")
        try:
            load_tensors(dict(tensors), checkpoint_id=path / "tensors", no_dist=True)
        except (CheckpointException, RuntimeError, ValueError, KeyError, OSError) as error:
            reason = str(_cause(error)).splitlines()[0]
            raise ModelError(f"checkpoint {path} does not fit this learner: {reason}") from error


def _cause(error: BaseException) -> BaseException:
    """What went wrong on the first failed rank: the library wraps it in an exception that nothing expects."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _verified(path: Path) -> _Manifest:
    mend = f"delete {path} to resume from the one before, or from the stage's start"
    try:
        manifest = msgspec.json.decode((path / "learner.json").read_bytes(), type=_Manifest)
        found = _hashes(path / "tensors")
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"checkpoint {path} is damaged ({error}): {mend}") from None
    if found != manifest.files:
        wrong = sorted(name for name, value in manifest.files.items() if found.get(name) != value)
        raise ModelError(f"checkpoint {path} is damaged (file {', '.join(wrong) or 'list'}): {mend}")
    return manifest


def _hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): xxhash.xxh3_128_hexdigest(path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _tidy(folder: Path) -> None:
    """Of a learner that was killed while saving (one process writes here): drop what is half-written, and put back a
    step that was moved aside before its replacement came."""
    for left in folder.glob(".old-step-*"):
        standing = folder / left.name.removeprefix(".old-")
        if standing.exists():
            shutil.rmtree(left)
        else:
            os.rename(left, standing)
    for left in folder.glob(".new-step-*"):
        shutil.rmtree(left)


def _outdated(folder: Path) -> list[Path]:
    return [folder / f"step-{step:08d}" for step in checkpoint_steps(folder)[:-_NUM_KEPT]]


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
