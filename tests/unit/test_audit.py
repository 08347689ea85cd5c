"""The audit holds on an honest run, and notices each way of damaging one."""

import fcntl
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
import zstandard

from support.synthetic_run import synthetic_run
from tidemill.core.blobs import FolderBlobs, blob_hash
from tidemill.models.config import config_from_hf
from tidemill.models.flops import flops_per_token
from tidemill.reports.audit import NoRun, audit
from tidemill.reports.audit.flops import forward_flops_per_token
from tidemill.reports.audit.resources import leftover_processes

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_run(tmp_path_factory.mktemp("audit") / "run")


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    return shutil.copytree(honest, tmp_path / "run")


def failed(folder: Path) -> set[str]:
    return {line.name for line in audit(folder, num_parity=12).lines if line.ok is False}


def sql(folder: Path, statement: str, *values: object) -> list[tuple[Any, ...]]:
    with sqlite3.connect(folder / "journal.sqlite") as db:
        db.execute("PRAGMA ignore_check_constraints = ON")
        return db.execute(statement, values).fetchall()


def put(folder: Path, record: dict[str, Any]) -> tuple[str, str]:
    """Store a record, as a service would; returns blob and digest."""
    plain = msgspec.msgpack.encode(record, order="deterministic")
    return FolderBlobs(folder / "blobs").put(zstandard.compress(plain)), blob_hash(plain)


def get(folder: Path, name: str) -> dict[str, Any]:
    return msgspec.msgpack.decode(zstandard.decompress(FolderBlobs(folder / "blobs").get(name)))


def change_evaluation(folder: Path, change: Change) -> None:
    """Change the first episode of the first evaluation; nothing but its own content can give it away."""
    lines = (folder / "eval.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    episode = get(folder, row["episode"])
    change(episode)
    row["episode"], _ = put(folder, episode)
    (folder / "eval.jsonl").write_text("\n".join([json.dumps(row), *lines[1:]]) + "\n")


def change_batch(folder: Path, index: int, change: Change) -> None:
    """Change a batch wherever it is recorded: blob, digest and manifest agree afterwards."""
    [(blob,)] = sql(folder, 'SELECT blob FROM batches WHERE "index" = ?', index)
    batch = get(folder, blob)
    change(batch)
    blob, digest = put(folder, batch)
    sql(folder, 'UPDATE batches SET blob = ?, digest = ? WHERE "index" = ?', blob, digest, index)
    change_manifest(folder, index + 1, lambda manifest: manifest.update(batch=digest))


def change_manifest(folder: Path, version: int, change: Change) -> None:
    path = folder / "store" / "versions" / f"{version:08d}.json"
    stat = path.stat()
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    os.utime(path, (stat.st_atime, stat.st_mtime))


def change_array(record: dict[str, Any], name: str, change: Callable[[np.ndarray], None]) -> None:
    values = np.frombuffer(record[name]["data"], dtype=record[name]["dtype"]).copy()
    change(values.reshape(record[name]["shape"]))
    record[name]["data"] = values.tobytes()


def generation(episode: dict[str, Any], step: int = 0) -> dict[str, Any]:
    return episode["segments"][0]["steps"][step]["generation"]


def test_an_honest_run_passes(honest: Path) -> None:
    report = audit(honest)
    assert report.ok, report.table()
    assert [line.name for line in report.lines if line.ok is None] == []
    assert report.line("accounting closes").figures == {"accepted": 14, "trained": 12, "queued": 0, "rejected": 2}
    assert report.line("ages").figures["max"] == 1
    assert report.line("sampled tokens").figures["spanning"] > 0
    assert 0 < report.line("logprob parity").figures["max"] < 1e-6, "float32 rounding of the recorded logprobs"
    assert report.line("blocked buildings").figures["learner_waiting"] > 0
    assert report.line("cpu of the buildings").figures["learner_cpu_s"] > 10
    assert report.note == "ended at version 3 of 3"


def test_the_report_is_a_table_and_json(honest: Path) -> None:
    report = audit(honest, num_parity=4)
    assert "16 hold, 0 failed" in report.table()
    assert json.loads(report.to_json())["ok"] is True
    assert report.line("logprob parity").figures["generations"] == 4


# --- accounting ----------------------------------------------------------------------------------------------


def test_a_trained_group_marked_as_rejected(run: Path) -> None:
    sql(run, "UPDATE groups SET state = 'rejected', reason = 'x', batch = NULL WHERE batch = 0")
    assert "accounting closes" in failed(run)


def test_a_trained_attempt_that_never_finished(run: Path) -> None:
    sql(run, "UPDATE attempts SET outcome = NULL, state = 'free' WHERE id = 'rl-000000-0'")
    assert "accounting closes" in failed(run)


def test_a_group_moved_to_another_batch(run: Path) -> None:
    sql(run, "UPDATE groups SET batch = 2 WHERE id = 'rl-000000'")
    assert "accounting closes" in failed(run)


def test_a_missing_episode(run: Path) -> None:
    [(blob,)] = sql(run, "SELECT episode FROM attempts WHERE id = 'rl-000001-0'")
    FolderBlobs(run / "blobs").path(blob).unlink()
    assert {"episodes", "whole groups", "ages"} <= failed(run)


def test_a_damaged_episode(run: Path) -> None:
    [(blob,)] = sql(run, "SELECT episode FROM attempts WHERE id = 'rl-000001-0'")
    path = FolderBlobs(run / "blobs").path(blob)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    assert "damaged" in audit(run).line("episodes").detail


@pytest.mark.parametrize(
    ("column", "value"),
    [("reward", 0.5), ("sampled_tokens", 1), ("total_tokens", 1), ("outcome", "loop"), ("oldest_version", 7)],
)
def test_a_journal_row_that_is_not_its_episode(run: Path, column: str, value: object) -> None:
    sql(run, f"UPDATE attempts SET {column} = ? WHERE id = 'rl-000002-0'", value)
    line = audit(run).line("episodes")
    assert line.ok is False
    assert "rl-000002-0" in line.detail


def test_two_attempts_with_one_episode(run: Path) -> None:
    [(blob,)] = sql(run, "SELECT episode FROM attempts WHERE id = 'rl-000000-1'")
    sql(run, "UPDATE attempts SET episode = ? WHERE id = 'rl-000000-0'", blob)
    assert {"episodes", "exactly once"} <= failed(run)


def test_a_rejection_without_a_reason(run: Path) -> None:
    sql(run, "UPDATE groups SET reason = ' ' WHERE state = 'rejected'")
    assert failed(run) == {"rejections"}


# --- exactly once --------------------------------------------------------------------------------------------


def test_an_attempt_in_two_batches(run: Path) -> None:
    [(blob,)] = sql(run, 'SELECT blob FROM batches WHERE "index" = 0')
    first = get(run, blob)["items"][0]
    change_batch(run, 1, lambda batch: batch["items"].__setitem__(0, first))
    assert {"exactly once", "accounting closes"} <= failed(run)


def test_a_batch_that_was_changed_after_it_was_assigned(run: Path) -> None:
    [(blob,)] = sql(run, 'SELECT blob FROM batches WHERE "index" = 0')
    batch = get(run, blob)
    batch["items"].reverse()
    blob, _ = put(run, batch)
    sql(run, 'UPDATE batches SET blob = ? WHERE "index" = 0', blob)
    assert failed(run) == {"exactly once"}


def test_a_version_made_from_another_batch(run: Path) -> None:
    change_manifest(run, 2, lambda manifest: manifest.update(batch="0" * 64))
    assert failed(run) == {"exactly once"}


def test_an_update_that_was_made_twice(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"stage": "rl", "step": 99, "version": 3}) + "\n")
    assert failed(run) == {"exactly once"}


def test_tokens_that_were_not_trained(run: Path) -> None:
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["num_loss_tokens"] -= 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert failed(run) == {"exactly once"}


def test_half_a_group(run: Path) -> None:
    change_batch(run, 1, lambda batch: batch["items"].pop())
    assert {"whole groups", "accounting closes"} <= failed(run)


def test_groups_of_another_size(run: Path) -> None:
    change_batch(run, 1, lambda batch: batch.update(group_size=3))
    assert failed(run) == {"whole groups"}


@pytest.mark.parametrize("wrong", [1e-6, float("nan")])
def test_an_advantage_that_is_not_reward_minus_mean(run: Path, wrong: float) -> None:
    change_batch(run, 1, lambda batch: batch["items"][0].update(advantage=batch["items"][0]["advantage"] + wrong))
    assert failed(run) == {"whole groups"}


def test_a_control_is_named_and_its_advantages_are_recomputed(tmp_path: Path) -> None:
    """Rewards were dealt out anew over each batch: the audit deals them again, from the run's seed."""
    control = synthetic_run(tmp_path / "control", shuffled=True)
    line = audit(control, num_parity=1).line("whole groups")
    assert line.ok and "a control" in line.figure
    change_batch(control, 1, lambda batch: batch["items"][0].update(advantage=batch["items"][0]["advantage"] + 0.1))
    assert "whole groups" in failed(control)


def test_a_control_that_does_not_say_so_fails(tmp_path: Path) -> None:
    control = synthetic_run(tmp_path / "control", shuffled=True, seed=1)
    [(config,)] = sql(control, "SELECT value FROM meta WHERE key = 'config'")
    silent = json.dumps(json.loads(config) | {"shuffled_rewards": False})
    sql(control, "UPDATE meta SET value = ? WHERE key = 'config'", silent)
    assert failed(control) == {"whole groups"}


# --- ages and versions ---------------------------------------------------------------------------------------


def test_an_age_above_the_bound(run: Path) -> None:
    [(config,)] = sql(run, "SELECT value FROM meta WHERE key = 'config'")
    sql(run, "UPDATE meta SET value = ? WHERE key = 'config'", json.dumps(json.loads(config) | {"max_age": 0}))
    assert failed(run) == {"ages"}


def test_an_age_that_was_recorded_wrong(run: Path) -> None:
    change_batch(run, 2, lambda batch: batch["items"][0].update(oldest_version=batch["items"][0]["oldest_version"] + 1))
    assert failed(run) == {"ages"}


def test_a_gap_in_the_versions(run: Path) -> None:
    (run / "store" / "versions" / "00000001.json").unlink()
    assert "versions chain" in failed(run)


@pytest.mark.parametrize(
    "change",
    [{"run_id": "another"}, {"model": "0" * 64}, {"step": 1}, {"version": 7}, {"kind": "delta"}],
    ids=lambda change: next(iter(change)),
)
def test_a_version_of_another_chain(run: Path, change: dict[str, Any]) -> None:
    change_manifest(run, 2, lambda manifest: manifest.update(change))
    unreadable = {"version payloads", "logprob parity"} if "kind" in change else set()
    assert failed(run) == {"versions chain"} | unreadable


def test_a_damaged_manifest(run: Path) -> None:
    (run / "store" / "versions" / "00000002.json").write_text("{")
    assert "versions chain" in failed(run)


def weights_of(folder: Path, version: int) -> tuple[Path, str]:
    manifest = json.loads((folder / "store" / "versions" / f"{version:08d}.json").read_text())
    name = manifest["files"]["model.safetensors" if manifest["kind"] == "full" else "model.delta"]
    return FolderBlobs(folder / "store" / "blobs").path(name), name


def test_a_damaged_payload(run: Path) -> None:
    path, _ = weights_of(run, 1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert "version payloads" in failed(run)


def test_a_tensor_hash_that_is_not_the_tensor_s(run: Path) -> None:
    change_manifest(run, 1, lambda manifest: manifest["tensors"].update({"model.norm.weight": "0" * 32}))
    assert failed(run) == {"version payloads"}


def test_other_weights_than_were_sampled_from(run: Path) -> None:
    """Every hash of the version is made to fit: the forward pass tells, and the versions whose deltas rest on it."""
    path, _ = weights_of(run, 0)
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start, end = header["model.norm.weight"]["data_offsets"]
    base = len(data) - max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    data[base + start + 1 : base + end : 2] = bytes((end - start) // 2 * [0x40])
    name = FolderBlobs(run / "store" / "blobs").put(bytes(data))

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"]["model.safetensors"] = name
        manifest["tensors"]["model.norm.weight"] = xxhash.xxh3_128_hexdigest(bytes(data[base + start : base + end]))

    change_manifest(run, 0, change)
    assert failed(run) == {"logprob parity", "version payloads"}


def test_tokens_of_a_version_before_it_was_published(run: Path) -> None:
    path = run / "store" / "versions" / "00000001.json"
    late = path.stat().st_mtime + 1000
    os.utime(path, (late, late))
    assert failed(run) == set(), "a copied folder has new times; the events still tell"
    events = run / "events" / "learner-0.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    events.write_text("".join(json.dumps(line) + "\n" for line in lines if line["what"] != "publish"))
    assert "versions in time" in failed(run)


# --- sampled tokens ------------------------------------------------------------------------------------------


def shift_position(episode: dict[str, Any]) -> None:
    generation(episode, 1)["position"] += 1


def positive_logprob(episode: dict[str, Any]) -> None:
    change_array(generation(episode), "logprobs", lambda values: values.__setitem__(0, 0.5))


def missing_logprob(episode: dict[str, Any]) -> None:
    change_array(generation(episode), "logprobs", lambda values: values.__setitem__(0, np.nan))


def version_back(episode: dict[str, Any]) -> None:
    change_array(generation(episode), "versions", lambda values: values.__setitem__(-1, values[0] - 1))


def unknown_version(episode: dict[str, Any]) -> None:
    change_array(generation(episode), "versions", lambda values: values.__setitem__(slice(None), 9))


def lost_token(episode: dict[str, Any]) -> None:
    tokens = generation(episode)["token_ids"]
    tokens["data"], tokens["shape"] = tokens["data"][:-4], [tokens["shape"][0] - 1]


def lost_rows(episode: dict[str, Any]) -> None:
    generation(episode, 1)["row_start"] += 1


def no_rows(episode: dict[str, Any]) -> None:
    for step in episode["segments"][0]["steps"]:
        step["generation"] |= {"kv_versions": {"data": b"", "dtype": "int32", "shape": [0]}, "routes": None}


def rewards_apart(episode: dict[str, Any]) -> None:
    episode["reward"] += 1.0


def unsupported_token(episode: dict[str, Any]) -> None:
    record = generation(episode)
    num = record["token_ids"]["shape"][0]
    first = np.frombuffer(record["token_ids"]["data"], np.int32)[0]
    ids = np.full(num, first + 1, np.int32)
    record["support_ids"] = {"data": ids.tobytes(), "dtype": "int32", "shape": [num]}
    offsets = np.arange(num + 1, dtype=np.int32)
    record["support_offsets"] = {"data": offsets.tobytes(), "dtype": "int32", "shape": [num + 1]}


def unrecorded_support(episode: dict[str, Any]) -> None:
    generation(episode)["top_k"] = 5


@pytest.mark.parametrize(
    "change",
    [
        shift_position,
        positive_logprob,
        missing_logprob,
        version_back,
        unknown_version,
        lost_token,
        rewards_apart,
        unsupported_token,
        unrecorded_support,
    ],
)
def test_tokens_that_cannot_have_been_sampled_so(run: Path, change: Change) -> None:
    change_evaluation(run, change)
    assert "sampled tokens" in failed(run)


def test_a_few_lost_rows_are_counted_and_many_are_noticed(run: Path) -> None:
    assert audit(run).line("sampled tokens").figures["unknown"] == 0
    change_evaluation(run, lost_rows)
    line = audit(run).line("sampled tokens")
    assert line.ok
    assert line.figures["unknown"] == 1
    change_evaluation(run, no_rows)
    assert audit(run).line("sampled tokens").figures["unknown"] > 10


def nudge_logprob(episode: dict[str, Any]) -> None:
    change_array(generation(episode), "logprobs", lambda values: values.__setitem__(0, values[0] - 1e-4))


def other_token(episode: dict[str, Any]) -> None:
    change_array(generation(episode), "token_ids", lambda values: values.__setitem__(0, (values[0] + 1) % 400))


def other_prompt(episode: dict[str, Any]) -> None:
    change_array(generation(episode), "prompt_ids", lambda values: values.__setitem__(3, (values[3] + 1) % 400))


def other_routes(episode: dict[str, Any]) -> None:
    change_array(generation(episode), "routes", lambda values: values.__setitem__(slice(None), [0, 1]))


def other_temperature(episode: dict[str, Any]) -> None:
    for step in episode["segments"][0]["steps"]:
        step["generation"]["temperature"] = 0.9


def impossible_routes(episode: dict[str, Any]) -> None:
    change_array(generation(episode), "routes", lambda values: values.__setitem__(slice(None), 77))


@pytest.mark.parametrize(
    "change", [nudge_logprob, other_token, other_prompt, other_routes, other_temperature, impossible_routes]
)
def test_logprobs_that_are_not_the_policy_s(run: Path, change: Change) -> None:
    change_evaluation(run, change)
    report = audit(run, num_parity=10_000)
    assert [line.name for line in report.lines if line.ok is False] == ["logprob parity"]


def test_rounding_of_float32_above_the_bound_is_told_and_allowed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.reports.audit.PARITY_TOLERANCE", 1e-8)
    line = audit(run).line("logprob parity")
    assert line.ok
    assert line.figures["above"] > 0
    assert "the rounding of float32" in line.detail
    change_evaluation(run, lambda e: change_array(generation(e), "logprobs", lambda v: v.__setitem__(0, v[0] - 2e-5)))
    assert audit(run, num_parity=10_000).line("logprob parity").ok is False


# --- the machine ---------------------------------------------------------------------------------------------


def test_samples_that_do_not_cover_the_run(run: Path) -> None:
    lines = (run / "proc.jsonl").read_text().splitlines()
    (run / "proc.jsonl").write_text("\n".join(lines[: len(lines) // 2]) + "\n")
    assert failed(run) == {"cpu of the buildings"}


def test_no_samples_of_the_learner(run: Path) -> None:
    lines = [line for line in (run / "proc.jsonl").read_text().splitlines() if "learner" not in line]
    (run / "proc.jsonl").write_text("\n".join(lines) + "\n")
    assert "cpu of the buildings" in failed(run)


def test_a_learner_that_works_while_it_says_that_it_waits(run: Path) -> None:
    path = run / "events" / "learner-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    updates = [line | {"what": "wait"} for line in lines if line["what"] == "update"]
    path.write_text("\n".join(json.dumps(line) for line in lines + updates) + "\n")
    assert failed(run) == {"blocked buildings"}


def test_a_ledger_without_a_model(run: Path) -> None:
    manifest = json.loads((run / "store" / "versions" / "00000000.json").read_text())
    FolderBlobs(run / "store" / "blobs").path(manifest["files"]["config.json"]).unlink()
    assert "flop ledger" in failed(run)


def test_the_ledger_counts_as_the_models_do(honest: Path) -> None:
    manifest = json.loads((honest / "store" / "versions" / "00000000.json").read_text())
    hf = json.loads(FolderBlobs(honest / "store" / "blobs").get(manifest["files"]["config.json"]))
    expected = flops_per_token(config_from_hf(hf), 31.0)
    assert forward_flops_per_token(hf, 31.0) == pytest.approx(expected, rel=1e-12)


def test_a_damaged_line_of_a_log(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_text("{nonsense\n" + path.read_text() + '{"cut off": ')
    assert "line 1" in audit(run).line("logs readable").detail


def test_lines_of_another_kind_are_damage_not_a_crash(run: Path) -> None:
    for path in (run / "proc.jsonl", run / "events" / "worker-0.jsonl"):
        path.write_text('{"another": "kind"}\n' + path.read_text())
    assert failed(run) == {"logs readable"}


def test_a_process_that_outlived_the_run(run: Path) -> None:
    wait = "import sys; print('up', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", wait, "tidemill-service", f"--run={run}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert [pid for pid, _ in leftover_processes(run)] == [process.pid]
        assert "no process left" in failed(run)
        process.communicate()
    assert leftover_processes(run) == []


def test_a_service_that_outlived_the_run(run: Path) -> None:
    """Known by pid and start time together: the pid alone may be another process's by now."""
    start_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    (run / "services").mkdir()
    path = run / "services" / "learner-0.json"
    path.write_text(json.dumps({"who": "learner-0", "pid": os.getpid(), "start_ticks": start_ticks}))
    assert failed(run) == {"no process left"}
    path.write_text(json.dumps({"who": "learner-0", "pid": os.getpid(), "start_ticks": start_ticks - 1}))
    assert failed(run) == set()


def test_a_labelled_process_is_left_over_whatever_its_command(run: Path) -> None:
    wait = "import sys; print('up', flush=True); sys.stdin.read()"
    env = {**os.environ, "TIDEMILL_RUN": f"{run.resolve()}#1"}
    with subprocess.Popen(
        [sys.executable, "-c", wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert [pid for pid, _ in leftover_processes(run)] == [process.pid]
        process.communicate()


def test_a_service_that_was_started_again_counts_from_zero(run: Path) -> None:
    before = audit(run, num_parity=1).line("cpu of the buildings").figures["learner_cpu_s"]
    lines = [json.loads(line) for line in (run / "proc.jsonl").read_text().splitlines()]
    mine = [line for line in lines if line["who"] == "learner-0"]
    for line in mine[len(mine) // 2 :]:
        line["pid"] = 2
        line["ticks"] -= mine[len(mine) // 2 - 1]["ticks"]
    (run / "proc.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    after = audit(run, num_parity=1).line("cpu of the buildings").figures["learner_cpu_s"]
    assert after == pytest.approx(before, abs=0.02)


def test_readers_of_a_run_are_not_left_over(run: Path) -> None:
    wait = "import sys; print('up', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", wait, "tidemill", "report", str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert leftover_processes(run) == []
        process.communicate()


def test_a_running_run_is_audited_as_far_as_it_is(run: Path) -> None:
    handle = os.open(run / "lock", os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        report = audit(run)
    finally:
        os.close(handle)
    assert report.note.startswith("running, at version 3")
    assert report.ok
    assert report.line("no process left").ok is None


def test_a_run_that_has_only_begun(run: Path) -> None:
    """Nothing to look at is neither a success nor a failure."""
    for name in ("store", "events"):
        shutil.rmtree(run / name)
    for name in ("metrics.jsonl", "proc.jsonl", "eval.jsonl"):
        (run / name).unlink()
    for table in ("tries", "attempts", "groups", "batches"):
        sql(run, f"DELETE FROM {table}")
    report = audit(run)
    assert report.ok
    assert report.line("logprob parity").ok is None
    assert "no process left" in {line.name for line in report.lines if line.ok}


# --- no run --------------------------------------------------------------------------------------------------


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(NoRun, match="no journal"):
        audit(tmp_path)
    with pytest.raises(NoRun, match="is no folder"):
        audit(tmp_path / "nothing")


def garbage(path: Path) -> None:
    path.write_bytes(b"not a database" * 1000)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def scribbled(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8192:20000] = b"\xff" * (20000 - 8192)
    path.write_bytes(bytes(data))


def other_tables(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE meta (key TEXT, value TEXT)")


@pytest.mark.parametrize("damage", [garbage, cut_off, scribbled, other_tables])
def test_a_damaged_journal_is_one_clear_line(run: Path, damage: Callable[[Path], None]) -> None:
    damage(run / "journal.sqlite")
    with pytest.raises(NoRun, match=r"journal\.sqlite (is damaged|cannot be read)") as caught:
        audit(run)
    assert "\n" not in str(caught.value)
