"""`tidemill agent` on a small repository: mended, not mended, and what it refuses. Nothing is written unasked."""

import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from support.small_policy import small_policy_run
from support.small_repository import write_repository
from tidemill.core.records import ToolCall
from tidemill.core.seams import Chunk, EngineStatus, GenerationRequest, Weights
from tidemill.episodes.generation import Sampling
from tidemill.episodes.mend import TOOLS
from tidemill.episodes.scripted import ScriptedEngine
from tidemill.run import policy as policies
from tidemill.run.cli import main
from tidemill.run.policy import open_policy
from tidemill.tasks import packages
from tidemill.text.compact import CompactRenderer

NUMBERS = "src/small/numbers.py"
FAULT = ("if value < low:", "if value > low:")
RIGHT = ("edit", {"line": 3, "old": "> low", "new": "< low"})
SUBMIT = ("submit", {})
TEST = ("test", {})
Turns = Sequence[tuple[str, dict[str, str | int]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_policy_run(tmp_path_factory.mktemp("policy") / "run").path


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = write_repository(tmp_path / "repo")
    path = folder / NUMBERS
    path.write_text(path.read_text().replace(*FAULT))
    path.chmod(0o640)
    return folder


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, run: Path) -> Callable[..., None]:
    """Puts a script in the place of the policy. `before`: called when it is asked for its first turn."""

    def install(turns: Turns, before: Callable[[], object] = lambda: None) -> None:
        renderer = CompactRenderer(open_policy(str(run), None).tokenizer)
        rest = iter([renderer.say([ToolCall(id="", name=name, arguments=arguments)]) for name, arguments in turns])

        def script(prompt_ids: list[int]) -> list[int]:
            before()
            return next(rest)

        class Engine:
            def __init__(self, config: object, on_death: object) -> None:
                self.inner = ScriptedEngine(script)

            def swap(self, version: int, weights: Weights) -> bool:
                return True

            def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
                return self.inner.generate(request)

            async def status(self) -> EngineStatus:
                return await self.inner.status()

            async def close(self) -> None:
                await self.inner.close()

        monkeypatch.setattr("tidemill.engines.embedded.EmbeddedEngine", Engine)
        monkeypatch.setattr("tidemill.run.agent.mending.sampling_of", lambda recipe: Sampling())  # no grammar binds it

    return install


def agent(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["agent", "--tier", "local", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mode) for path in files}


# --- mended --------------------------------------------------------------------------------------------------


def test_a_mended_function_is_told_turn_by_turn_and_given_as_a_diff(
    repo: Path, run: Path, says: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    says([TEST, RIGHT, TEST, SUBMIT])
    before = contents(repo)
    assert agent("--repo", repo, "--run", run) == 0
    told = capsys.readouterr().out
    lines = told.splitlines()
    assert f"policy    version 1 of {run}" in lines
    assert "tests     3 of 23 fail" in lines
    assert f"function  clamp in {NUMBERS}, lines 4 to 10: 3 failing and 0 passing tests reach it" in lines
    turns = lines[lines.index("try 1 of 4: clamp") + 1 :]
    assert turns[0] == "  test" and turns[1].startswith("      failed: assert 0 == 1")
    assert "  edit 3 '> low' -> '< low'" in turns and "      passed" in turns and "  submit" in turns
    assert "mended    all tests were run again: 23 of 23 pass, none is worse" in turns
    assert contents(repo) == before, "without --apply, nothing is written"
    diff = told[told.index("--- a/") : told.index("nothing was written")]
    copy = shutil.copytree(repo, tmp_path / "copy")
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=copy, check=True)
    assert FAULT[0] in (copy / NUMBERS).read_text()


@pytest.mark.parametrize("tier", ["local", "namespaces"])
def test_apply_writes_the_file_and_keeps_its_mode(
    repo: Path, run: Path, says: Callable[..., None], capsys: pytest.CaptureFixture[str], tier: str
) -> None:
    says([RIGHT, TEST, SUBMIT])
    before = contents(repo)
    code = agent("--repo", repo, "--run", run, "--apply", "--tier", tier)
    if code and tier == "namespaces" and "tidemill doctor" in (err := capsys.readouterr().err):
        pytest.skip(err)
    assert code == 0
    after = contents(repo)
    changed = {path for path in after if after[path] != before.get(path)}
    assert changed == {NUMBERS} and after.keys() == before.keys()
    assert FAULT[0].encode() in after[NUMBERS][0] and after[NUMBERS][1] == before[NUMBERS][1]


def test_a_file_that_was_changed_meanwhile_is_left_alone(
    repo: Path, run: Path, says: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    says([RIGHT, SUBMIT], before=lambda: (repo / NUMBERS).write_text("# rewritten\n"))
    assert agent("--repo", repo, "--run", run, "--apply") == 1
    assert "has changed since it was read: nothing was written" in capsys.readouterr().err
    assert (repo / NUMBERS).read_text() == "# rewritten\n"


def test_one_test_can_be_asked_for(
    repo: Path, run: Path, says: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    words = repo / "src/small/words.py"
    words.write_text(words.read_text().replace("right -= 1", "right -= 2"))
    says([RIGHT, SUBMIT])
    assert agent("--repo", repo, "--run", run, "--test", "tests/test_small.py::test_clamp", "--file", NUMBERS) == 0
    assert "none is worse" in capsys.readouterr().out


def test_an_attempt_that_breaks_another_test_is_no_success(
    repo: Path, run: Path, says: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    says([RIGHT, ("read", {"start": 13}), ("edit", {"line": 5, "old": "+=", "new": "-="}), SUBMIT, RIGHT, SUBMIT])
    assert agent("--repo", repo, "--run", run, "--tries", "2", "--function", "clamp") == 0
    told = capsys.readouterr().out
    assert "but 3 tests that passed before do not pass now, such as tests/test_small.py::test_digits" in told
    assert "try 2 of 2: clamp" in told


# --- not mended ----------------------------------------------------------------------------------------------


def test_a_policy_that_cannot_mend_it_says_so(repo: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(repo)
    assert agent("--repo", repo, "--run", run, "--tries", "2", "--version", "0", "--apply") == 1
    told = capsys.readouterr().out
    assert "try 2 of 2: clamp" in told and "      no call: " in told
    assert told.splitlines()[-1].startswith("not mended in 2 tries")
    assert contents(repo) == before


def test_what_the_tests_print_cannot_steer_the_terminal(
    repo: Path, run: Path, says: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = repo / NUMBERS
    path.write_text(
        path.read_text().replace("    if value > low:", "    if True:\n        raise ValueError('\\x1b[2J')")
    )
    says([TEST, ("flag_impossible", {})])
    assert agent("--repo", repo, "--run", run, "--tries", "1", "--function", "clamp") == 1
    told = capsys.readouterr().out
    assert "\x1b" not in told and "\\x1b[2J" in told


def test_another_harness_than_in_training_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = open_policy(str(run), None)
    assert "not known" in policy.harness_line(TOOLS)
    monkeypatch.setattr(policies, "trained_harness", lambda folder: "f" * 64)
    assert "but it was trained in ffffffffffff" in policy.harness_line(TOOLS)
    now = policies.harness_hash(TOOLS, policy.renderer().name)
    monkeypatch.setattr(policies, "trained_harness", lambda folder: now)
    assert policy.harness_line(TOOLS) == f"{now[:12]}, as in training"


# --- refused -------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of an exit with 2."""
    assert agent(*arguments) == 2
    line = capsys.readouterr().err
    assert line.startswith("tidemill agent: ") and line.count("\n") == 1
    return line


def test_bad_places_are_refused(repo: Path, run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "outside.py").write_text("x = 1\n")
    (repo / "src/small/linked.py").symlink_to(tmp_path / "outside.py")
    here = ("--repo", repo, "--run", run)
    assert "'nowhere' is no folder" in refused(capsys, "--repo", "nowhere", "--run", run)
    assert "no importable package" in refused(capsys, "--repo", tmp_path / "empty", "--run", run)
    assert "is outside of" in refused(capsys, *here, "--file", "../outside.py")
    assert "is outside of" in refused(capsys, *here, "--file", tmp_path / "outside.py")
    assert "symbolic link" in refused(capsys, *here, "--file", "src/small/linked.py")
    assert "is no file of" in refused(capsys, *here, "--file", "src/small/none.py")
    assert "is no module of the package" in refused(capsys, *here, "--file", "tests/test_small.py")
    assert "no failing test reaches gcd: they reach clamp in" in refused(capsys, *here, "--function", "gcd")
    assert "no test 'tests/test_x.py' was run" in refused(capsys, *here, "--test", "tests/test_x.py")
    assert "passes: give the id" in refused(capsys, *here, "--test", "tests/test_small.py::test_gcd")
    assert "--tries 0: give 1 or more" in refused(capsys, *here, "--tries", "0")


def test_a_folder_with_nothing_to_mend_is_refused(
    repo: Path, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ("--repo", repo, "--run", run)
    with (repo / "pyproject.toml").open("a") as file:
        file.write('dependencies = ["nowhere-at-all>=1"]\n')
    assert "needs nowhere-at-all, which is not installed here: pip install" in refused(capsys, *here)
    (repo / "pyproject.toml").write_text("")
    assert "needs nowhere, which is not installed" in refused(capsys, *here, "--requires", "nowhere")
    write_repository(repo)
    assert "no test fails (23 run): nothing to mend" in refused(capsys, *here)
    shutil.rmtree(repo / "tests")
    assert "has no tests" in refused(capsys, *here)
    monkeypatch.setattr(packages, "MAX_TOTAL_BYTES", 100)
    assert "holds more than" in refused(capsys, *here)


def test_a_run_without_a_policy_is_refused(
    repo: Path, run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "has published a version: give --run DIR, or train one" in refused(capsys, "--repo", repo)
    assert "holds no run: it has no run.json" in refused(capsys, "--repo", repo, "--run", tmp_path / "none")
    empty = small_policy_run(tmp_path / "runs" / "young", num_versions=0)
    assert "has published no version yet" in refused(capsys, "--repo", repo, "--run", empty.path)
    assert "no version 7: give --version 0 to 1" in refused(capsys, "--repo", repo, "--run", run, "--version", "7")
    os.symlink(run, tmp_path / "runs" / "old")
    assert open_policy(None, None).folder.path == run, "the run that published last"


def test_a_function_that_is_too_long_for_the_policy_is_refused(
    repo: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = repo / NUMBERS
    long = "".join(f"    unused_{number} = [value, low, high, {number}]\n" for number in range(95))
    path.write_text(path.read_text().replace("    if value > low:", f"{long}    if value > low:"))
    assert "and this policy reads 1536: name a shorter --function" in refused(capsys, "--repo", repo, "--run", run)
