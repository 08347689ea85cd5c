"""Checks that run inside a sandbox, and the reading of what they report: shared by grading, tools and synthesis.

Two scripts, each for `Sandbox.python`, and a parser on the host for each:

| script          | stdin                               | parser                               | runs                 |
|-----------------|-------------------------------------|--------------------------------------|----------------------|
| `pytest_source` | `pytest_stdin(nonce, ids)`          | `parse_statuses(stdout, nonce, ids)` | tests, under pytest  |
| `replay_source` | `replay_stdin(nonce, module, expr)` | `parse_replay(stdout, nonce, num)`   | calls, without it    |

Both move the real standard output away before any code of the workspace runs, and put a nonce before each line, so
that printing cannot forge a result. Code that shares their interpreter still could (law 10): therefore a verdict needs
both, and the replay never learns the expected values. Replay in a sandbox that has not preloaded pytest.

Modules are found in the workspace's top folder, and in its `src/` where that is no package.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from tidemill.core.records import Record

Status = Literal["passed", "failed", "error", "skipped", "xfailed", "xpassed", "missing"]

PYTEST_PRELOAD = (
    *("json", "pdb", "pytest", "resource", "unittest.mock", "decimal", "fractions", "datetime", "_pytest._argcomplete"),
    *("_pytest.assertion", "_pytest.debugging", "_pytest.fixtures", "_pytest.helpconfig", "_pytest.main"),
    *("_pytest.mark", "_pytest.monkeypatch", "_pytest.python", "_pytest.recwarn", "_pytest.reports"),
    *("_pytest.runner", "_pytest.skipping", "_pytest.tmpdir", "_pytest.unittest"),
)
"""What `Sandbox.python(pytest_source(), preload=...)` should have imported before it forks."""


class TestReport(Record, frozen=True):
    """What pytest said about one test id. Untrusted where the agent's code ran in the same process."""

    __test__ = False

    id: str
    status: Status
    message: str = ""
    """Of a failure: exception type and text; an assertion brings its values."""
    where: str = ""
    """Of a failure: the innermost line of the workspace outside the tests, as `path:line`; else empty."""
    statement: str = ""
    """Of a failure: the statement of the test that failed."""
    parameters: str = ""
    """Of a failure of a parametrized test: names and values."""


def new_nonce() -> str:
    """A word that only this run of a script knows."""
    return secrets.token_hex(16)


# --- pytest --------------------------------------------------------------------------------------------------


def pytest_stdin(nonce: str, ids: Sequence[str], *, rewrite: bool = True, cpu_s: int = 10) -> bytes:
    """The request for `pytest_source`. Without `rewrite`, assertions bring no values, and a run is quicker.

    More than `cpu_s` seconds of CPU end the run, however busy the machine is: the verdict does not depend on its load.
    """
    return json.dumps({"nonce": nonce, "ids": list(ids), "rewrite": rewrite, "cpu_s": cpu_s}).encode()


def parse_statuses(stdout: bytes, nonce: str, ids: Sequence[str]) -> dict[str, TestReport]:
    """One report per expected id, in order; an id that was not reported is `missing`. Reports that are not asked
    for, repeated or malformed are ignored: the first one of an id stands, unless a later one is worse."""
    found: dict[str, TestReport] = {}
    wanted = set(ids)
    for item in report_lines(stdout, nonce):
        if not isinstance(item, dict):
            continue
        fields = {key: item.get(key, "") for key in ("id", "status", "message", "where", "statement", "parameters")}
        if not all(isinstance(value, str) for value in fields.values()):
            continue
        id_, status = fields["id"], fields["status"]
        if id_ not in wanted or status not in get_args(Status):
            continue
        if id_ in found and found[id_].status != "passed":
            continue
        found[id_] = TestReport(**fields)
    return {id_: found.get(id_, TestReport(id=id_, status="missing")) for id_ in ids}


def all_passed(reports: Mapping[str, TestReport]) -> bool:
    """True where every expected id was reported and passed. Skipped, xfailed and missing ids are failures."""
    return bool(reports) and all(report.status == "passed" for report in reports.values())


def failure_text(reports: Mapping[str, TestReport], max_chars: int = 300) -> str:
    """What the agent is told: the first failure, with its values, in few characters; `passed` where there is none."""
    failures = [report for report in reports.values() if report.status != "passed"]
    if not failures:
        return "passed" if reports else "no checks"
    first = failures[0]
    text = f"{first.status}: {_compact(first.message)}" if first.message else first.status
    if first.where:
        text += f" (at {first.where})"
    text = _cut(text, max_chars)
    for extra in (first.statement, first.parameters):
        room = max_chars - len(text) - 4
        if extra and room >= 20:
            text += "\n in " + _cut(_plain(" ".join(extra.split())), room)
    return text


def _compact(message: str) -> str:
    """An assertion as pytest words it, without addresses: its first line."""
    lines = [_plain(line.strip()) for line in message.splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[0].removeprefix("AssertionError: ")


def _plain(text: str) -> str:
    """Without addresses: equal failures are to give equal texts."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    head = (max_chars - 3) * 2 // 3
    return f"{text[:head]}...{text[len(text) - (max_chars - 3 - head) :]}"


# --- replay --------------------------------------------------------------------------------------------------


def replay_stdin(nonce: str, module: str, expressions: Sequence[str], *, cpu_s: int = 5) -> bytes:
    """The request for `replay_source`: expressions over the names of `module`."""
    return json.dumps({"nonce": nonce, "module": module, "expressions": list(expressions), "cpu_s": cpu_s}).encode()


def parse_replay(stdout: bytes, nonce: str, num: int) -> list[str | None]:
    """The canonical text of each expression's result, or None where none was reported (a crash, a timeout)."""
    found: list[str | None] = [None] * num
    for item in report_lines(stdout, nonce):
        if not isinstance(item, list) or len(item) != 2:
            continue
        index, text = item
        if isinstance(index, int) and isinstance(text, str) and 0 <= index < num and found[index] is None:
            found[index] = text
    return found


def report_lines(stdout: bytes, nonce: str) -> list[object]:
    """What a script wrote to its private channel; anything else in the output is ignored."""
    prefix = nonce.encode() + b" "
    items: list[object] = []
    for line in stdout.split(b"\n"):
        if line.startswith(prefix):
            try:
                items.append(json.loads(line[len(prefix) :]))
            except (ValueError, RecursionError):
                continue
    return items


# --- sources -------------------------------------------------------------------------------------------------

_SETUP = r"""
import json, os, sys

def _private():
    request = json.loads(sys.stdin.buffer.read())
    nonce = request.pop("nonce")
    if request.get("cpu_s"):
        import resource
        resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_s"], request["cpu_s"] + 1))
    channel = os.dup(1)
    os.set_inheritable(channel, False)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    sys.stdin, sys.stdout, sys.stderr = (open(os.devnull, mode) for mode in "rww")
    sys.dont_write_bytecode = True
    source = os.path.join(os.getcwd(), "src")
    if os.path.isdir(source) and not os.path.exists(os.path.join(source, "__init__.py")):
        sys.path.insert(0, source)
    sys.path.insert(0, os.getcwd())
    def write(item):
        line = (nonce + " " + json.dumps(item) + "\n").encode()
        while line:
            line = line[os.write(channel, line):]
    return request, write
"""

_PYTEST = (
    _SETUP
    + r"""
OFF = "cacheprovider faulthandler junitxml logging pastebin doctest terminal setuponly setupplan \
stepwise threadexception unraisableexception legacypath pytester pytester_assertions subtests warnings"

def main():
    request, write = _private()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ.pop("PYTEST_PLUGINS", None)
    import pytest
    ids = dict.fromkeys(request["ids"])
    here = os.getcwd() + os.sep
    files = [file for file in dict.fromkeys(id_.split("::")[0] for id_ in ids) if os.path.isfile(file)]
    places = {os.getcwd()}
    for file in files:
        parts = file.split("/")
        places.update(here + "/".join(parts[:end + 1]) for end in range(len(parts)))
        places.add(here + "/".join([*parts[:-1], "__init__.py"]))
    worst = {}
    messages = {}

    def describe(excinfo, item):
        try:
            text = str(excinfo.value)
        except Exception:
            text = "?"
        where = statement = ""
        for entry in excinfo.traceback:
            path = str(entry.path)
            if path == str(item.path):
                statement = str(entry.statement)
            elif path.startswith(here):
                where = "%s:%d" % (path[len(here):], entry.lineno + 1)
        spec = getattr(item, "callspec", None)
        try:
            values = ", ".join("%s=%r" % pair for pair in spec.params.items()) if spec else ""
        except Exception:
            values = ""
        return {"message": "%s: %s" % (excinfo.type.__name__, text[:4000]), "where": where,
                "statement": statement[:1000], "parameters": values[:1000]}

    class Reporter:
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(self, item, call):
            report = yield
            status = report.outcome
            if hasattr(report, "wasxfail"):
                status = "xpassed" if status == "passed" else "xfailed"
            elif status == "failed" and call.when != "call":
                status = "error"
            if status != "passed" and worst.get(item.nodeid, "passed") == "passed":
                worst[item.nodeid] = status
                if call.excinfo is not None:
                    messages[item.nodeid] = describe(call.excinfo, item)
            if call.when == "teardown":
                status = worst.get(item.nodeid, "passed")
                write({"id": item.nodeid, "status": status, **messages.get(item.nodeid, {})})
            return report

        def pytest_ignore_collect(self, collection_path):
            # pytest would look into every file and folder beside the wanted ones
            return str(collection_path) not in places

        def pytest_collection_modifyitems(self, items):
            items[:] = [item for item in items if item.nodeid in ids]

        @pytest.hookimpl(wrapper=True)
        def pytest_make_collect_report(self, collector):
            report = yield
            if report.failed:
                call = getattr(report, "call", None)
                if call is not None and call.excinfo is not None:
                    found = describe(call.excinfo, collector)
                else:
                    found = {"message": str(report.longrepr)[-2000:]}
                for id_ in ids:
                    if id_.split("::")[0] == collector.nodeid.split("::")[0]:
                        write({"id": id_, "status": "error", **found})
            return report

    options = ["-c", os.devnull, "--rootdir", os.getcwd(), "-s", "--import-mode=importlib",
               "--continue-on-collection-errors", "--assert=" + ("rewrite" if request["rewrite"] else "plain")]
    for name in OFF.split():
        options += ["-p", "no:" + name]
    if files:
        pytest.main(options + files, plugins=[Reporter()])

try:
    main()
finally:
    os._exit(0)
"""
)

_CANONICAL = r"""
class Refused(Exception):
    pass

def canonical(value, budget=None):
    # A text that is equal for equal results: sets and dictionaries sorted, iterators drained up to a cap.
    import collections, datetime, decimal, fractions
    budget = [2000] if budget is None else budget
    budget[0] -= 1
    if budget[0] < 0:
        raise Refused("too large")
    kind = type(value)
    if value is None or value is Ellipsis or value is NotImplemented or kind in (bool, int, float, complex, str, bytes):
        return repr(value)
    if kind in (datetime.date, datetime.time, datetime.datetime, datetime.timedelta, decimal.Decimal,
                fractions.Fraction, bytearray, range):
        return repr(value)
    inner = lambda items: [canonical(item, budget) for item in items]
    if kind is list:
        return "[" + ", ".join(inner(value)) + "]"
    if kind is tuple:
        return "(" + ", ".join(inner(value)) + ("," if len(value) == 1 else "") + ")"
    if kind in (set, frozenset):
        return kind.__name__ + "{" + ", ".join(sorted(inner(value))) + "}"
    if kind in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
        pairs = [canonical(key, budget) + ": " + canonical(item, budget) for key, item in value.items()]
        return (kind.__name__ if kind is not dict else "") + "{" + ", ".join(sorted(pairs)) + "}"
    if kind in (collections.deque, type({}.keys()), type({}.values()), type({}.items())):
        return kind.__name__ + "[" + ", ".join(inner(value)) + "]"
    if kind is type and value.__module__ == "builtins":
        return "class " + value.__name__
    if isinstance(value, BaseException):
        return raised(value, budget)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind.__name__ + "(" + ", ".join(inner(tuple.__iter__(value))) + ")"
    if hasattr(kind, "__next__"):
        texts = []
        try:
            while len(texts) < 1000:
                try:
                    item = next(value)
                except StopIteration:
                    break
                texts.append(canonical(item, budget))
            else:
                texts.append("...")
        except Refused:
            raise
        except Exception as error:
            texts.append("raise " + raised(error, budget))
        return "iter[" + ", ".join(texts) + "]"
    raise Refused(kind.__name__)

def raised(error, budget=None):
    return type(error).__name__ + "(" + ", ".join(canonical(item, budget) for item in error.args) + ")"
"""

_REPLAY = (
    _SETUP
    + _CANONICAL
    + r"""
def main():
    request, write = _private()
    import importlib
    failure = None
    names = {}
    try:
        names.update(vars(importlib.import_module(request["module"])))
    except BaseException as error:
        failure = "import failed: " + type(error).__name__
    for index, expression in enumerate(request["expressions"]):
        if failure is not None:
            write([index, failure])
            continue
        try:
            try:
                text = canonical(eval(expression, dict(names)))
            except Refused:
                raise
            except Exception as error:
                text = "raise " + raised(error)
        except BaseException as error:
            text = "refused: " + type(error).__name__
        write([index, text])

try:
    main()
finally:
    os._exit(0)
"""
)


def pytest_source() -> str:
    """The script that runs test ids under pytest."""
    return _PYTEST


def replay_source() -> str:
    """The script that evaluates expressions and reports the canonical text of each result."""
    return _REPLAY


def setup_source() -> str:
    """Opens the private channel: `request, write = _private()`, for other scripts that report to `report_lines`."""
    return _SETUP


def canonical_source() -> str:
    """Defines `canonical(value) -> str`, which raises its `Refused`, and `raised(error) -> str`."""
    return _CANONICAL
