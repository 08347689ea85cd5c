"""One task as a folder of its own: Harbor's format, with a `[tidemill]` table in `task.toml`.

    task.toml  instruction.md  environment/{Dockerfile,workspace/…}  tests/{test.sh,grade.py,request.json,files/…}
    solution/{solve.sh,files/…}   only where asked for

Harbor copies `tests/` into the container only after the agent has ended; `grade.py` lays the hidden tests over the
workspace, runs them and the recorded calls, and writes 1 or 0 to `/logs/verifier/reward.txt`.
"""

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from tidemill.core import checks
from tidemill.core.records import Layer, Task, Tree, Verifier
from tidemill.core.seams import Vault
from tidemill.tasks.folder import TaskSet, check_new

_GRADE = r'''
"""Grades /workspace: every test must pass, and every recorded call must give what it gave on the healthy version."""

import json
import secrets
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(script: str, request: dict) -> list:
    nonce = secrets.token_hex(16)
    done = subprocess.run(
        [sys.executable, "-B", "-c", (HERE / script).read_text()],
        input=json.dumps(request | {"nonce": nonce}).encode(),
        stdout=subprocess.PIPE,
        cwd="/workspace",
        timeout=120,
    )
    lines = done.stdout.decode(errors="replace").splitlines()
    return [json.loads(line[len(nonce) + 1 :]) for line in lines if line.startswith(nonce + " ")]


def main() -> None:
    request = json.loads((HERE / "request.json").read_text())
    for source in sorted((HERE / "files").rglob("*")):
        if source.is_file():
            target = Path("/workspace") / source.relative_to(HERE / "files")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            target.write_bytes(source.read_bytes())
    calls = run("replay.py", {"module": request["module"], "expressions": request["expressions"], "cpu_s": 30})
    tests = run("run_pytest.py", {"ids": request["ids"], "rewrite": False, "cpu_s": 60})
    equal = {index for index, text in calls if text == request["expected"][index]}
    status = {}
    for item in tests:
        if status.get(item["id"], "passed") == "passed":
            status[item["id"]] = item["status"]
    solved = len(equal) == len(request["expected"]) and all(status.get(id_) == "passed" for id_ in request["ids"])
    Path("/logs/verifier").mkdir(parents=True, exist_ok=True)
    Path("/logs/verifier/reward.txt").write_text("1.0\n" if solved else "0.0\n")


main()
'''


def export_task(taskset: TaskSet, vault: Vault, task_id: str, out: Path, *, solution: bool = False) -> Path:
    """Write one task to a new folder. Raises `UsageError` where it exists, `TaskError` where there is no such task."""
    task = taskset.task(task_id)
    verifier = vault.verifier(task_id)
    check_new(out)
    _write(out / "task.toml", task_toml(task))
    _write(out / "instruction.md", task.statement + "\n")
    _write(out / "environment" / "Dockerfile", _dockerfile(taskset.layer(task)))
    _write_tree(out / "environment" / "workspace", taskset.workspace(task))
    _write(out / "tests" / "test.sh", '#!/bin/sh\npython3 -B -I "$(dirname "$0")/grade.py"\n', executable=True)
    _write(out / "tests" / "grade.py", _GRADE.lstrip())
    _write(out / "tests" / "replay.py", checks.replay_source())
    _write(out / "tests" / "run_pytest.py", checks.pytest_source())
    _write(out / "tests" / "request.json", json.dumps(_request(verifier), indent=1) + "\n")
    _write_tree(out / "tests" / "files", verifier.files)
    if solution:
        copy = '#!/bin/sh\ncp -R "$(dirname "$0")/files/." /workspace/\n'
        _write(out / "solution" / "solve.sh", copy, executable=True)
        _write_tree(out / "solution" / "files", verifier.gold)
    return out


def _request(verifier: Verifier) -> dict[str, Any]:
    return {
        "ids": [*verifier.fail_to_pass, *verifier.pass_to_pass],
        "module": verifier.module,
        "expressions": [call.expression for call in verifier.calls],
        "expected": [call.expected for call in verifier.calls],
    }


def task_toml(task: Task) -> str:
    """`task.toml` of a task: Harbor's tables, and our own record of it."""
    ours = msgspec.to_builtins(task)
    nested = {key: ours.pop(key) for key in ("data", "limits", "provenance")}
    name = re.sub(r"[^a-z0-9-]+", "-", task.id.lower()).strip("-")
    tables: dict[str, dict[str, Any]] = {
        "": {"schema_version": "1.4"},
        "task": {"name": f"tidemill/{name}", "description": task.statement},
        "agent": {"timeout_sec": task.limits.wall_s, "network_mode": "no-network"},
        "verifier": {"timeout_sec": 300.0},
        "environment": {"network_mode": "no-network", "workdir": "/workspace"},
        "tidemill": {key: value for key, value in ours.items() if value is not None and key != "statement"},
    }
    tables |= {f"tidemill.{key}": value for key, value in nested.items()}
    lines: list[str] = []
    for table, values in tables.items():
        lines += [f"\n[{table}]"] if table else []
        lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _toml(value: str | int | float | bool | list[str]) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _dockerfile(layer: Layer) -> str:
    packages = " ".join(layer.packages)
    return (
        f"FROM python:{layer.python}-slim\n"
        f"RUN pip install --no-cache-dir --no-deps {packages}\n"
        "COPY workspace /workspace\n"
        "WORKDIR /workspace\n"
    )


def _write(path: Path, text: str, *, executable: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755 if executable else 0o644)


def _write_tree(folder: Path, tree: Tree) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in tree.files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data)
        path.chmod(0o755 if file.executable else 0o644)
