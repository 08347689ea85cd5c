"""Every vault gives a task's verifier, whole, and says clearly when it has none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.core.errors import TaskError
from tidemill.core.records import RecordedCall, Tree, TreeFile, Verifier, digest
from tidemill.core.seams import Vault
from tidemill.tasks.vault import FolderVault, MemoryVault, write_vault

VERIFIER = Verifier(
    task_id="pkg.f-1",
    fail_to_pass=("t.py::test_a",),
    pass_to_pass=("t.py::test_b",),
    files=Tree(files=(TreeFile(path="t.py", data=b"def test_a(): pass\n"),)),
    allowed_paths=("pkg.py",),
    calls=(RecordedCall(expression="f(1)", expected="2"),),
    module="pkg",
    gold=Tree(files=(TreeFile(path="pkg.py", data=b"\xff\x00"),)),
)


def in_folder(folder: Path, verifiers: list[Verifier]) -> Vault:
    write_vault(folder / "vault", {item.task_id: item for item in verifiers})
    return FolderVault(folder / "vault")


def in_memory(folder: Path, verifiers: list[Verifier]) -> Vault:
    return MemoryVault(verifiers)


@pytest.mark.parametrize("make", [in_folder, in_memory])
def test_a_vault_gives_what_was_put_into_it(make: Callable[[Path, list[Verifier]], Vault], tmp_path: Path) -> None:
    vault = make(tmp_path, [VERIFIER])
    assert digest(vault.verifier("pkg.f-1")) == digest(VERIFIER)
    with pytest.raises(TaskError, match=r"no verifier for task 'pkg.f-2'"):
        vault.verifier("pkg.f-2")


def test_a_damaged_vault_is_refused(tmp_path: Path) -> None:
    in_folder(tmp_path, [VERIFIER])
    (blob,) = [path for path in (tmp_path / "vault" / "blobs").rglob("*") if path.is_file()]
    blob.write_bytes(blob.read_bytes()[:-1])
    with pytest.raises(TaskError, match=r"verifier of task 'pkg.f-1' cannot be read.*damaged"):
        FolderVault(tmp_path / "vault").verifier("pkg.f-1")
    (tmp_path / "vault" / "index.json").write_text("{")
    with pytest.raises(TaskError, match=r"index .* is damaged"):
        FolderVault(tmp_path / "vault")
