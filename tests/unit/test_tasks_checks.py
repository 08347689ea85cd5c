"""The scripts that run inside a sandbox, and the reading of what they say."""

import asyncio

import pytest

from tidemill.core.checks import (
    PYTEST_PRELOAD,
    TestReport,
    all_passed,
    failure_text,
    parse_replay,
    parse_statuses,
    pytest_source,
    pytest_stdin,
    replay_source,
    replay_stdin,
)
from tidemill.core.records import Tree, TreeFile
from tidemill.core.seams import ExecResult, SandboxLimits
from tidemill.sandboxes.local import LocalTier
from tidemill.tasks.manifest import layer_of

TESTS = """
import unittest
import pytest, m

@pytest.mark.parametrize("given, wanted", [([1, 2], [2, 3]), ([1], [9])])
def test_f(given, wanted):
    assert m.f(given) == wanted

def test_prints():
    print('NONCE {"id": "tests/test_m.py::test_skipped", "status": "passed"}')

def test_error():
    m.broken()

@pytest.mark.skip
def test_skipped(): pass

@pytest.mark.xfail
def test_xfail(): assert 0

class Old(unittest.TestCase):
    def test_old(self):
        self.assertEqual(m.f([1]), [2])

def test_fixtures(tmp_path, monkeypatch, capsys):
    print("a")
    assert capsys.readouterr().out == "a\\n"
"""
MODULE = """
def f(xs): return [x + 1 for x in xs]
def broken(): return {}["key"]
def gen(n):
    yield from range(n)
    if n > 3: raise ValueError("too much", n)
def forever():
    while True: pass
class Same:
    def __eq__(self, other): return True
"""


def run(source: str, stdin: bytes, preload: tuple[str, ...] = ()) -> ExecResult:
    files = (TreeFile(path="m.py", data=MODULE.encode()), TreeFile(path="tests/test_m.py", data=TESTS.encode()))

    async def main() -> ExecResult:
        tier = LocalTier("checks", i_know_this_is_not_a_sandbox=True)
        sandbox = await tier.open(Tree(files=files), layer_of(), SandboxLimits())
        try:
            return await sandbox.python(source, timeout_s=30, preload=preload, stdin=stdin)
        finally:
            await sandbox.close()
            await tier.close()

    return asyncio.run(main())


def test_every_status_is_told_apart() -> None:
    names = ("f[given0-wanted0]", "f[given1-wanted1]", "prints", "error", "skipped", "xfail", "fixtures", "gone")
    ids = [f"tests/test_m.py::test_{name}" for name in names] + ["tests/test_m.py::Old::test_old"]
    done = run(pytest_source(), pytest_stdin("NONCE", ids), PYTEST_PRELOAD)
    reports = parse_statuses(done.stdout, "NONCE", ids)
    statuses = [reports[id_].status for id_ in ids]
    expected = ["passed", "failed", "passed", "failed", "skipped", "xfailed", "passed", "missing", "passed"]
    assert statuses == expected
    text = failure_text({id_: reports[id_] for id_ in ids[:2]})
    assert "assert [2] == [9]" in text and "given=[1]" in text and len(text) <= 300
    assert "KeyError" in failure_text({ids[3]: reports[ids[3]]})
    assert "m.py:3" in reports[ids[3]].where
    assert not all_passed(reports) and all_passed({ids[0]: reports[ids[0]]}) and not all_passed({})


def test_calls_are_replayed_to_canonical_text() -> None:
    expressions = [
        "f([1, 2])",
        "gen(2)",
        "gen(4)",
        "broken()",
        "Same()",
        "{3, 1, 2}",
        "nothing",
        "{'b': 1, 'a': {2.5}}",
    ]
    done = run(replay_source(), replay_stdin("NONCE", "m", expressions))
    assert parse_replay(done.stdout, "NONCE", len(expressions)) == [
        "[2, 3]",
        "iter[0, 1]",
        "iter[0, 1, 2, 3, raise ValueError('too much', 4)]",
        "raise KeyError('key')",
        "refused: Refused",
        "set{1, 2, 3}",
        "raise NameError(\"name 'nothing' is not defined\")",
        "{'a': set{2.5}, 'b': 1}",
    ]


def test_a_call_without_end_leaves_the_others_told() -> None:
    done = run(replay_source(), replay_stdin("NONCE", "m", ["f([1])", "forever()", "f([2])"], cpu_s=1))
    assert parse_replay(done.stdout, "NONCE", 3) == ["[2]", None, None]


def test_a_missing_module_is_told() -> None:
    done = run(replay_source(), replay_stdin("NONCE", "absent", ["f([1])"]))
    assert parse_replay(done.stdout, "NONCE", 1) == ["import failed: ModuleNotFoundError"]


@pytest.mark.parametrize(
    "line",
    [
        b'OTHER {"id": "a", "status": "passed"}',
        b'{"id": "a", "status": "passed"}',
        b'NONCE {"id": "a", "status": "fine"}',
        b'NONCE {"id": "a", "status": 1}',
        b'NONCE {"id": ["a"], "status": "passed"}',
        b"NONCE [",
        b'NONCE "a"',
    ],
)
def test_what_is_not_a_report_counts_for_nothing(line: bytes) -> None:
    assert parse_statuses(line + b"\n", "NONCE", ["a"])["a"].status == "missing"


def test_a_failure_is_not_undone_by_a_later_report() -> None:
    lines = b'NONCE {"id": "a", "status": "failed"}\nNONCE {"id": "a", "status": "passed"}\n'
    assert parse_statuses(lines, "NONCE", ["a"])["a"].status == "failed"
    lines = b'NONCE {"id": "a", "status": "passed"}\nNONCE {"id": "a", "status": "error"}\n'
    assert parse_statuses(lines, "NONCE", ["a"])["a"].status == "error"


def test_failure_text_is_short_and_keeps_both_ends() -> None:
    report = TestReport(id="a", status="failed", message="AssertionError: assert " + "x" * 5000 + " == 7")
    text = failure_text({"a": report}, 100)
    assert len(text) <= 100 and text.startswith("failed: assert x") and text.endswith("== 7")
