"""`tidemill eval`, from the command line to the tables, with tasks of our own in the local tier."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.chat_server import Answer, chat_server, reply, turns
from support.mend_task import mend_task_set
from support.small_policy import small_policy_run
from tidemill.core.blobs import FolderBlobs, get_record
from tidemill.core.records import Episode
from tidemill.episodes.mend import TOOLS
from tidemill.reports.evaluation import read_rows
from tidemill.run import cli
from tidemill.run.services.context import tasks_folder

REPAIR = ("edit", {"line": 3, "old": ">", "new": "<"})


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mend_task_set(tmp_path_factory.mktemp("set") / "tasks", num=2)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def evaluate(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval", "--tier", "local", "--slots", "2", *map(str, arguments)])
    return int(str(ended.value.code))


def episodes(path: Path) -> list[Episode]:
    blobs = FolderBlobs(path.parent / "episodes")
    return [get_record(blobs, row.episode, Episode) for row in read_rows(path)]


def said(episode: Episode) -> list[str]:
    return [call.name for segment in episode.segments for step in segment.steps for call in step.calls]


@pytest.mark.parametrize("agent, share", [("oracle", 1.0), ("noop", 0.0)])
def test_who_knows_solves_all_and_who_does_nothing_none(
    agent: str, share: float, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("--agent", agent, "--tasks", tasks) == 0
    rows = read_rows(Path("evals", f"{agent}-heldout.jsonl"))
    assert [row.solved for row in rows] == [bool(share)] * 2
    out = capsys.readouterr().out
    assert [agent, "2", f"{share:.3f}"] in [line.split()[:3] for line in out.splitlines()]
    assert "even" in out and "odd" in out


@pytest.mark.parametrize("agent", ["blind", "inverse"])
def test_who_guesses_tests_each_guess_once_and_submits_what_passes(agent: str, tasks: Path) -> None:
    out = Path("blind.jsonl")
    assert evaluate("--agent", agent, "--tasks", tasks, "--out", out, "--samples", "5") == 0
    rows = read_rows(out)
    assert len(rows) == 10
    for row, episode in zip(rows, episodes(out), strict=True):
        told = [o.text for s in episode.segments[0].steps for o in s.observations]
        calls = said(episode)
        assert calls.count("test") >= 3 or told[-1:] == ["passed"] or told[-2:] == ["passed", ""]
        assert "passed" not in told or calls[told.index("passed") + 1 :] == ["submit"]
        assert row.measures["num_edits_refused"] == row.measures["malformed_calls"] == 0
        assert row.turns <= 12
    assert {row.solved for row in rows} == {True, False}, "guesses hit now and then"
    assert len({tuple(said(episode)) for episode in episodes(out)}) > 1


def test_a_chat_model_plays_by_the_rules(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script(messages: list[dict[str, Any]]) -> Answer:
        steps = [reply(("test", {})), reply(REPAIR), reply(("test", {})), reply(("submit", {}))]
        return steps[sum(message["role"] == "assistant" for message in messages)]

    with chat_server(script) as server:
        assert evaluate("--endpoint", server.url, "--tasks", tasks, "--out", "chat.jsonl", "--temperature", "0") == 0
        told = {tool["function"]["name"]: tool["function"] for tool in server.requests[0]["tools"]}
        assert list(told) == [tool.name for tool in TOOLS]
        assert told["edit"]["parameters"]["required"] == ["line", "old", "new"]
        first = server.requests[0]["messages"][1]["content"]
        assert "clamp gives wrong results" in first and "3|    if value > low:" in first
        num_requests = len(server.requests)
        assert evaluate("--endpoint", server.url, "--tasks", tasks, "--out", "chat.jsonl", "--temperature", "0") == 0
        assert len(server.requests) == num_requests, "what is done is not done again"
    rows = read_rows(Path("chat.jsonl"))
    assert [(row.solved, row.turns, row.sampled_tokens) for row in rows] == [(True, 4, 28)] * 2
    assert "tiny" in capsys.readouterr().out


def test_an_evaluation_that_was_cut_off_goes_on(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The endpoint dies after the first attempt: one line, exit code 1, the row kept; more samples go on from it."""
    answers = turns(reply(REPAIR), reply(("submit", {})), (401, "no"))
    options = ("--tasks", tasks, "--out", "rows.jsonl", "--model", "tiny", "--slots", "1")
    with chat_server(answers) as server:
        assert evaluate("--endpoint", server.url, *options) == 1
    told = capsys.readouterr().err
    assert "401" in told and told.count("\n") == 1
    assert len(read_rows(Path("rows.jsonl"))) == 1
    with Path("rows.jsonl").open("ab") as file:
        file.write(b'{"version": 0, "ta')  # a kill in the middle of a line
    with chat_server(turns(reply(("flag_impossible", {})))) as other:
        about = json.loads(Path("rows.about.json").read_text()) | {"endpoint": other.url}
        Path("rows.about.json").write_text(json.dumps(about))
        assert evaluate("--endpoint", other.url, *options, "--samples", "2") == 0
        assert len(other.requests) == 3
    rows = read_rows(Path("rows.jsonl"))
    assert sorted(row.outcome for row in rows) == ["flagged_impossible"] * 3 + ["submitted"]


def test_faults_are_told_and_tried_again(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = reply(("flag_impossible", {})), (400, "no such thing")
    options = ("--tasks", tasks, "--num", "1", "--slots", "1")
    with chat_server(turns(reply(("test", {})), bad)) as server:
        assert evaluate("--endpoint", server.url, *options) == 1
        assert "1 of 1 attempts failed" in capsys.readouterr().err
        server.script = turns(good)
        assert evaluate("--endpoint", server.url, *options) == 0
    (path,) = Path("evals").glob("*.jsonl")
    assert [row.outcome for row in read_rows(path)] == ["flagged_impossible"]


def test_a_checkpoint_is_examined_with_the_run_s_own_tasks(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = small_policy_run(Path("runs/small"))
    shutil.copytree(tasks, tasks_folder(folder))
    for _ in range(2):
        assert evaluate("--checkpoint", f"{folder.path}@0", "--temperature", "0", "--out", "a.jsonl") == 0
    assert evaluate("--checkpoint", folder.path, "--out", "b.jsonl", "--against", "a.jsonl") == 0
    first, newest = read_rows(Path("a.jsonl")), read_rows(Path("b.jsonl"))
    assert ({row.version for row in first}, {row.version for row in newest}) == ({0}, {1})
    assert {g.temperature for e in episodes(Path("a.jsonl")) for s in e.segments[0].steps for g in [s.generation]} == {
        0
    }
    out = capsys.readouterr().out
    assert "small@1" in out and "difference" in out
    assert evaluate("--checkpoint", f"{folder.path}@7") == 2
    assert "no version 7" in capsys.readouterr().err


def test_greedy_attempts_repeat(tasks: Path) -> None:
    folder = small_policy_run(Path("runs/small"))
    for name in ("a.jsonl", "b.jsonl"):
        assert evaluate("--checkpoint", folder.path, "--tasks", tasks, "--temperature", "0", "--out", name) == 0
    texts = [
        {e.task_id: [step.text for s in e.segments for step in s.steps] for e in episodes(Path(name))}
        for name in ("a.jsonl", "b.jsonl")
    ]
    assert texts[0] == texts[1]


def test_another_evaluation_s_file_is_refused(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate("--agent", "noop", "--tasks", tasks, "--out", "x.jsonl") == 0
    assert evaluate("--agent", "oracle", "--tasks", tasks, "--out", "x.jsonl") == 2
    assert "agent noop, not oracle" in capsys.readouterr().err
    Path("y.jsonl").write_text("something\n")
    assert evaluate("--agent", "oracle", "--tasks", tasks, "--out", "y.jsonl") == 2
    assert "no evaluation" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, agent, changed",
    [
        ("harness_hash", "oracle", "tidemill.episodes.conduct.HARNESS_VERSION"),
        ("reward_version", "noop", "tidemill.episodes.mend.MEND_VERSION"),
    ],
)
def test_rows_of_another_harness_or_reward_are_not_mixed_in(
    name: str,
    agent: str,
    changed: str,
    tasks: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ("--agent", agent, "--tasks", tasks, "--out", "x.jsonl")
    assert evaluate(*options, "--num", "1") == 0
    (episode,) = episodes(Path("x.jsonl"))
    monkeypatch.setattr(changed, "next")
    assert evaluate(*options) == 2
    assert f"holds an evaluation with {name} {getattr(episode, name)}, not " in capsys.readouterr().err
    assert len(read_rows(Path("x.jsonl"))) == 1


def test_a_chat_model_has_a_harness_hash_of_its_own(tasks: Path) -> None:
    with chat_server(turns(reply(("flag_impossible", {})))) as server:
        assert evaluate("--endpoint", server.url, "--tasks", tasks, "--out", "x.jsonl", "--num", "1") == 0
    about = json.loads(Path("x.about.json").read_text())
    (episode,) = episodes(Path("x.jsonl"))
    assert (about["harness_hash"], about["reward_version"]) == (episode.harness_hash, episode.reward_version)


@pytest.mark.parametrize(
    "arguments, code, told",
    [
        (["--tasks", "t"], 2, "give one of them"),
        (["--agent", "noop", "--endpoint", "http://x", "--tasks", "t"], 2, "2 of --endpoint"),
        (["--agent", "noop"], 2, "--tasks is missing"),
        (["--agent", "noop", "--tasks", "nowhere"], 1, "nowhere is no task set"),
        (["--agent", "noop", "--tasks", "t", "--samples", "0"], 2, "--samples is 0"),
        (["--agent", "noop", "--tasks", "t", "--temperature", "0", "--samples", "2"], 2, "same attempt again"),
        (["--agent", "noop", "--tasks", "t", "--temperature", "-1"], 2, "--temperature is -1.0"),
        (["--agent", "noop", "--tasks", "TASKS", "--split", "dev"], 2, "no dev task"),
        (["--agent", "noop", "--tasks", "t", "--against", "x"], 2, "x is no file"),
        (["--endpoint", "here", "--tasks", "TASKS"], 2, "no URL"),
        (["--endpoint", "http://127.0.0.1:9/v1", "--tasks", "TASKS"], 1, "cannot be reached"),
        (["--endpoint", "http://127.0.0.1:9/v1", "--tasks", "TASKS", "--model", "m"], 1, "start the server"),
        (["--endpoint", "http://x", "--tasks", "TASKS", "--api-key-env", "NO_KEY_HERE"], 2, "NO_KEY_HERE"),
        (["--checkpoint", "nowhere@3"], 1, "holds no run"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], code: int, told: str, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tasks) if word == "TASKS" else word for word in arguments]
    assert evaluate(*given) == code
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_a_model_has_to_be_chosen_where_there_are_several(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with chat_server(turns(reply()), models=["small", "large"]) as server:
        assert evaluate("--endpoint", server.url, "--tasks", tasks) == 2
    assert "small, large: choose with --model" in capsys.readouterr().err
