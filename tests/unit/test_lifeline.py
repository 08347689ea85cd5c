"""A task ends with the thread that it needs: alone, and in the services and commands that have an engine."""

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from support.mend_task import mend_task_set
from support.small_policy import small_policy_run
from support.small_repository import write_repository
from tidemill.core.errors import EngineUnavailable
from tidemill.deltas.store import FolderStore
from tidemill.engines.batcher import Batcher
from tidemill.run import cli
from tidemill.run.folder import RunFolder
from tidemill.run.lifeline import lifeline
from tidemill.run.services import engine, evaluator
from tidemill.run.services.context import open_context, overrides_file, tasks_folder, tokenizer_folder
from tidemill.text.tokenizer import Tokenizer

Died = Callable[[BaseException], None]
DEATH = "no memory left for the step"


def from_a_thread(died: Died, *errors: BaseException) -> None:
    for error in errors:
        threading.Thread(target=died, args=(error,)).start()


def run(block: Callable[[Died], Awaitable[object]]) -> None:
    async def inside() -> None:
        async with lifeline() as died:
            await block(died)

    asyncio.run(asyncio.wait_for(inside(), 30))


def test_a_death_ends_what_waits_and_the_first_one_is_told() -> None:
    cleaned = []

    async def block(died: Died) -> None:
        from_a_thread(died, RuntimeError("first"))
        try:
            await asyncio.Event().wait()
        finally:
            from_a_thread(died, RuntimeError("second"))
            await asyncio.sleep(0.05)
            cleaned.append(True)

    with pytest.raises(RuntimeError, match="first"):
        run(block)
    assert cleaned == [True], "a second death does not interrupt the cleaning up"


def test_what_a_death_leads_to_is_not_what_is_told() -> None:
    async def block(died: Died) -> None:
        died(RuntimeError("cause"))
        raise EngineUnavailable("it is away")

    with pytest.raises(RuntimeError, match="cause"):
        run(block)


def test_other_ends_stay_what_they_are() -> None:
    async def cancelled(died: Died) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async def fails(died: Died) -> None:
        raise EngineUnavailable("it is away")

    with pytest.raises(asyncio.CancelledError):
        run(cancelled)
    with pytest.raises(EngineUnavailable):
        run(fails)


def test_a_death_after_the_end_is_nobody_s() -> None:
    async def outside() -> None:
        async with lifeline() as died:
            pass
        died(RuntimeError("late"))
        await asyncio.sleep(0.01)

    asyncio.run(outside())


# --- where engines are ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run with a policy whose engine dies at its first step."""

    def step(self: Batcher) -> None:
        raise RuntimeError(DEATH)

    monkeypatch.chdir(tmp_path)
    made = small_policy_run(tmp_path / "run")
    shutil.copytree(mend_task_set(tmp_path / "set", num=2), tasks_folder(made))
    Tokenizer.from_files(FolderStore(made.store).load(0).tokenizer).save(tokenizer_folder(made))
    overrides_file(made).write_text('["--rollouts.tier", "local"]')
    monkeypatch.setattr(Batcher, "step", step)
    return made


@pytest.mark.parametrize("command", ["eval", "agent"])
def test_a_command_ends_with_its_engine(
    command: str, folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo = write_repository(tmp_path / "repo")
    numbers = repo / "src/small/numbers.py"
    numbers.write_text(numbers.read_text().replace("if value < low:", "if value > low:"))
    options = {"eval": ["--checkpoint"], "agent": ["--repo", str(repo), "--run"]}[command]
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--tier", "local", *options, str(folder.path)])
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert DEATH in told and told.count("\n") == 1


def test_the_evaluator_ends_with_its_engine(folder: RunFolder) -> None:
    with pytest.raises(RuntimeError, match=DEATH):
        asyncio.run(asyncio.wait_for(evaluator.serve(open_context(folder.path, "evaluator-0", {})), 60))


def test_the_engine_s_service_ends_with_its_follower(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def head(self: FolderStore) -> int:
        raise RuntimeError(DEATH)

    context = open_context(folder.path, "engine-0", folder.choose_ports(["engine-0"]))
    monkeypatch.setattr(FolderStore, "head", head)
    with pytest.raises(RuntimeError, match=DEATH):
        asyncio.run(asyncio.wait_for(engine.serve(context), 60))
