"""From a small package to a task set on disk and back, with every rule of validity."""

import asyncio
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from support.tiny_package import FILES, SOURCE, tiny_layout
from tidemill.core.errors import TaskError, TidemillError, UsageError
from tidemill.core.records import encode
from tidemill.core.seams import SandboxTier
from tidemill.sandboxes.local import LocalTier
from tidemill.tasks import commands
from tidemill.tasks.check import check
from tidemill.tasks.export import export_task
from tidemill.tasks.folder import TaskSet, load
from tidemill.tasks.manifest import Manifest, best_split_seed, dump, load_manifest, split_of
from tidemill.tasks.materialize import materialize
from tidemill.tasks.packages import PackagePin
from tidemill.tasks.spans import same_tree
from tidemill.tasks.synth import SynthesisConfig, synthesize
from tidemill.tasks.vault import FolderVault, MemoryVault

CONFIG = SynthesisConfig(max_per_function=2, max_tries_per_function=4)
MATERIALS = [(PackagePin(name="tiny", version="1"), tiny_layout())]


@pytest.fixture(scope="module")
def tier() -> Iterator[SandboxTier]:
    tier = LocalTier("synth", i_know_this_is_not_a_sandbox=True)
    yield tier
    asyncio.run(tier.close())


@pytest.fixture(scope="module")
def manifest(tier: SandboxTier) -> Manifest:
    return asyncio.run(synthesize("tiny", MATERIALS, tier, CONFIG))


@pytest.fixture(scope="module")
def taskset(manifest: Manifest, tmp_path_factory: pytest.TempPathFactory) -> TaskSet:
    out = tmp_path_factory.mktemp("sets") / "tiny"
    return asyncio.run(materialize(manifest, out, materials=MATERIALS))


def test_every_function_brings_tasks(manifest: Manifest) -> None:
    assert {entry.qualname for entry in manifest.functions} == {"clamp", "initials", "Tally.plus"}
    assert len(manifest.tasks) >= 5


def test_a_task_tells_no_solution(taskset: TaskSet) -> None:
    vault = FolderVault(taskset.folder / "vault")
    for task in taskset.tasks:
        verifier = vault.verifier(task.id)
        files = {file.path: file.data.decode() for file in taskset.workspace(task).files}
        assert not same_tree(files["src/tiny/words.py"], SOURCE)
        assert set(task.shown_checks) <= set(verifier.fail_to_pass)
        hidden = {id_.split("[")[0].split("::")[-1] for id_ in (*verifier.fail_to_pass, *verifier.pass_to_pass)}
        shown = {id_.split("[")[0].split("::")[-1] for id_ in task.shown_checks}
        assert not any(f"def {name}(" in files["tests/test_words.py"] for name in hidden - shown)
        assert "setup.py" not in files
        assert task.provenance["operator"] not in task.statement
        assert verifier.allowed_paths == ("src/tiny/words.py",)
        first, last = task.data["first_line"], task.data["last_line"]
        assert isinstance(first, int) and isinstance(last, int)
        lines = files["src/tiny/words.py"].split("\n")[first - 1 : last]
        assert lines[0].strip().startswith(f"def {str(task.data['function']).split('.')[-1]}(")


def test_tasks_are_sound(taskset: TaskSet, tier: SandboxTier) -> None:
    vault = FolderVault(taskset.folder / "vault")
    assert asyncio.run(check(taskset, vault, tier, sample=3)) == []


def test_an_unsound_task_is_found(taskset: TaskSet, tier: SandboxTier) -> None:
    task = taskset.tasks[0]
    verifier = FolderVault(taskset.folder / "vault").verifier(task.id)
    call = msgspec.structs.replace(verifier.calls[0], expected="'another'")
    spoilt = msgspec.structs.replace(
        verifier,
        calls=(call, *verifier.calls[1:]),
        fail_to_pass=(*verifier.fail_to_pass, verifier.pass_to_pass[0]),
        pass_to_pass=verifier.pass_to_pass[1:],
    )
    one = TaskSet(taskset.folder, [task], list(taskset.layers.values()))
    problems = [item.problem for item in asyncio.run(check(one, MemoryVault([spoilt]), tier))]
    assert any("passes with the fault in place" in text for text in problems)
    assert any("1 recorded calls differ on the healthy version" in text for text in problems)


def test_a_manifest_makes_the_same_set_again(manifest: Manifest, taskset: TaskSet, tmp_path: Path) -> None:
    again = asyncio.run(
        materialize(load_manifest(taskset.folder / "manifest.json"), tmp_path / "b", materials=MATERIALS)
    )
    assert dump(manifest) == (again.folder / "manifest.json").read_text()
    for name in ("tasks.jsonl", "layers.jsonl", "vault/index.json"):
        assert (again.folder / name).read_bytes() == (taskset.folder / name).read_bytes()
    assert oct((again.folder / "vault").stat().st_mode)[-3:] == "700"
    with pytest.raises(UsageError, match="is not empty"):
        asyncio.run(materialize(manifest, tmp_path / "b", materials=MATERIALS))


def test_a_changed_source_is_noticed(manifest: Manifest, tmp_path: Path) -> None:
    other = tiny_layout(src__tiny__words=SOURCE + "\n# more\n")
    with pytest.raises(TaskError, match="does not come out as in the manifest"):
        asyncio.run(materialize(manifest, tmp_path / "b", materials=[(MATERIALS[0][0], other)]))
    assert list(tmp_path.iterdir()) == []


def test_synthesis_repeats_itself(manifest: Manifest, tier: SandboxTier) -> None:
    again = asyncio.run(synthesize("tiny", MATERIALS, tier, CONFIG))
    assert encode(again) == encode(manifest)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"tests__test_words": "import tiny.words\ndef test_a(): assert 0\n"},
            "1 of 1 tests fail on the unchanged code",
        ),
        ({"tests__test_words": "import absent\ndef test_a(): pass\n"}, "not one test could be collected.*absent"),
        ({"tests__test_words": "def test_a(): pass\n"}, "no usable function"),
    ],
)
def test_packages_that_bring_nothing(tier: SandboxTier, changes: dict[str, str], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        asyncio.run(synthesize("tiny", [(MATERIALS[0][0], tiny_layout(**changes))], tier, CONFIG))


def test_damaged_sets_are_told_by_file_and_line(taskset: TaskSet, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="is no task set"):
        load(tmp_path)
    lines = (taskset.folder / "tasks.jsonl").read_text()
    (tmp_path / "tasks.jsonl").write_text(lines + '{"id": 1}\n')
    (tmp_path / "layers.jsonl").write_text("")
    with pytest.raises(TaskError, match=f"tasks.jsonl, line {len(taskset.tasks) + 1}"):
        load(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(lines)
    bare = load(tmp_path)
    with pytest.raises(TaskError, match=r"workspace of task .* cannot be read"):
        bare.workspace(bare.tasks[0])
    with pytest.raises(TaskError, match="no layer"):
        bare.layer(bare.tasks[0])
    with pytest.raises(TaskError, match="no task 'x'"):
        bare.task("x")
    with pytest.raises(TaskError, match="cannot open the vault"):
        FolderVault(tmp_path / "vault")


def test_splits_go_by_module() -> None:
    names = [f"pkg.m{index // 3}" for index in range(60)]
    seed = best_split_seed(names, 1)
    sizes = {split: sum(split_of(name, seed) == split for name in names) for split in ("train", "dev", "heldout")}
    assert abs(sizes["train"] - 42) <= 6 and abs(sizes["dev"] - 6) <= 3 and abs(sizes["heldout"] - 12) <= 6


def test_one_task_in_harbors_format(taskset: TaskSet, tmp_path: Path) -> None:
    vault = FolderVault(taskset.folder / "vault")
    task = taskset.tasks[0]
    out = export_task(taskset, vault, task.id, tmp_path / "one")
    table = tomllib.loads((out / "task.toml").read_text())
    assert table["tidemill"]["id"] == task.id and table["tidemill"]["data"] == task.data
    assert table["schema_version"] == "1.4" and (out / "instruction.md").read_text() == task.statement + "\n"
    assert not (out / "solution").exists()
    request = json.loads((out / "tests" / "request.json").read_text())
    assert set(task.shown_checks) < set(request["ids"]) and len(request["expected"]) >= 2
    compile((out / "tests" / "grade.py").read_text(), "grade.py", "exec")
    export_task(taskset, vault, task.id, tmp_path / "two", solution=True)
    assert (tmp_path / "two" / "solution" / "files" / "src" / "tiny" / "words.py").read_text() == SOURCE


def test_commands(taskset: TaskSet, tier: SandboxTier, tmp_path: Path) -> None:
    repository = tmp_path / "tiny"
    for path, data in FILES.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_bytes(data)
    config = SynthesisConfig(max_per_function=1, max_tries_per_function=2, max_functions=1)
    code, lines = asyncio.run(commands.synth(str(repository), tmp_path / "out", tier, config))
    assert code == 0 and lines[-1] == f"wrote {tmp_path / 'out'}"
    made = load(tmp_path / "out")
    code, lines = commands.show(made.folder, made.tasks[0].id)
    assert code == 0 and any("def " in line for line in lines)
    code, lines = asyncio.run(commands.solve(made.folder, made.tasks[0].id, tier))
    assert code == 0 and lines[0].startswith("no patch: not solved") and lines[1].startswith("oracle patch: solved")
    code, lines = asyncio.run(commands.check_set(made.folder, tier))
    assert (code, lines) == (0, [f"{len(made.tasks)} of {len(made.tasks)} tasks are sound"])


@pytest.mark.parametrize("source, message", [("boltons", "give the version too"), ("./absent", "no folder")])
def test_wrong_sources(tier: SandboxTier, tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(TidemillError, match=message) as caught:
        asyncio.run(commands.synth(source, tmp_path / "out", tier, CONFIG))
    assert caught.value.exit_code == 2
