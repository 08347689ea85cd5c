"""What runs inside a sandbox to find out about a healthy package: which test reaches which function, and which calls
of functions, written in literals, its tests make.

Used by synthesis only; grading uses `core.checks`.
"""

import json
from collections.abc import Sequence

from tidemill.core.checks import canonical_source, report_lines, setup_source
from tidemill.core.records import Record

MAX_CALLS = 24
"""Different calls recorded per function."""
MAX_EXPRESSION_CHARS = 120


class TestProbe(Record, frozen=True):
    """One test on the healthy package."""

    __test__ = False

    id: str
    status: str
    seconds: float
    reached: tuple[str, ...]
    """Functions, as `path:qualname`."""


class SuiteProbe(Record, frozen=True):
    tests: tuple[TestProbe, ...]
    calls: dict[str, list[str]]
    """`path:qualname` → expressions over the names of that module."""
    errors: tuple[str, ...]
    """Test files that could not be collected, with the cause."""
    finished: bool


class CallProbe(Record, frozen=True):
    expression: str
    result: str
    reached: tuple[str, ...]


def suite_stdin(nonce: str, files: Sequence[str], sources: Sequence[str], *, trace: bool, cpu_s: int = 120) -> bytes:
    request = {"nonce": nonce, "files": list(files), "sources": list(sources), "trace": trace, "cpu_s": cpu_s}
    return json.dumps(request | {"max_calls": MAX_CALLS, "max_chars": MAX_EXPRESSION_CHARS}).encode()


def parse_suite(stdout: bytes, nonce: str) -> SuiteProbe:
    tests: list[TestProbe] = []
    errors: list[str] = []
    calls: dict[str, list[str]] = {}
    finished = False
    for item in report_lines(stdout, nonce):
        assert isinstance(item, dict)
        if "error" in item:
            errors.append(f"{item['file']}: {item['error']}")
        elif "calls" in item:
            calls, finished = item["calls"], True
        else:
            tests.append(
                TestProbe(
                    id=item["id"], status=item["status"], seconds=item["s"], reached=tuple(sorted(item["reached"]))
                )
            )
    return SuiteProbe(tests=tuple(tests), calls=calls, errors=tuple(errors), finished=finished)


def calls_stdin(nonce: str, module: str, sources: Sequence[str], expressions: Sequence[str], *, cpu_s: int) -> bytes:
    request = {"nonce": nonce, "module": module, "sources": list(sources), "expressions": list(expressions)}
    return json.dumps(request | {"cpu_s": cpu_s}).encode()


def parse_calls(stdout: bytes, nonce: str, expressions: Sequence[str]) -> list[CallProbe]:
    found: list[CallProbe] = []
    for item in report_lines(stdout, nonce):
        assert isinstance(item, list)
        index, result, reached = item
        found.append(CallProbe(expression=expressions[index], result=result, reached=tuple(sorted(reached))))
    return found


def suite_source() -> str:
    return setup_source() + _TRACE + _SUITE


def calls_source() -> str:
    return setup_source() + canonical_source() + _TRACE + _CALLS


_TRACE = r"""
class Tracer:
    # Sees the start of every Python function; keeps code objects alive, so that their ids stay theirs.
    def __init__(self, sources, on_call=None):
        here = os.getcwd() + os.sep
        self.paths = {here + path: path for path in sources}
        self.known = {}
        self.reached = set()
        self.on_call = on_call

    def __call__(self, frame, event, arg):
        code = frame.f_code
        entry = self.known.get(id(code))
        if entry is None:
            path = self.paths.get(code.co_filename)
            name = code.co_qualname
            outer = name.split(".<locals>")[0]
            key = None if path is None or outer.startswith("<") else path + ":" + outer
            entry = self.known[id(code)] = (code, key, name == outer)
        if entry[1] is not None:
            self.reached.add(entry[1])
            if entry[2] and self.on_call is not None:
                self.on_call(entry[1], frame)
        return None
"""

_SUITE = r"""
import builtins, math

class NoLiteral(Exception):
    pass

def literal(value, names, depth=0):
    # Python text that builds an equal value, or NoLiteral. Never runs code of the value's own class.
    kind = type(value)
    if depth > 5:
        raise NoLiteral
    if value is None or value is Ellipsis or kind in (bool, int):
        return repr(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else "float(%r)" % repr(value)
    if kind in (str, bytes):
        if len(value) > 100:
            raise NoLiteral
        return repr(value)
    if kind in (list, tuple, set, frozenset, dict) and len(value) > 20:
        raise NoLiteral
    inner = lambda items: ", ".join(literal(item, names, depth + 1) for item in items)
    if kind is list:
        return "[" + inner(value) + "]"
    if kind is tuple:
        return "(" + inner(value) + ("," if len(value) == 1 else "") + ")"
    if kind in (set, frozenset):
        items = sorted(literal(item, names, depth + 1) for item in value)
        text = "{" + ", ".join(items) + "}" if items else "()"
        return kind.__name__ + "(" + text + ")" if kind is frozenset or not items else text
    if kind is dict:
        return "{" + ", ".join(literal(key, names, depth + 1) + ": " + literal(item, names, depth + 1)
                               for key, item in value.items()) + "}"
    if kind is range:
        return repr(value)
    if kind in (type(iter([])), type(iter(()))):
        made = value.__reduce__()
        rest = made[1][0][made[2] if len(made) > 2 else 0:]
        return "iter(" + literal(list(rest), names, depth + 1) + ")"
    if kind in (type, type(len)) and getattr(builtins, value.__name__, None) is value:
        return value.__name__
    if kind in (type, type(literal)) and names.get(value.__name__) is value and value.__name__.isidentifier():
        return value.__name__
    raise NoLiteral

class Recorder:
    def __init__(self, max_calls, max_chars):
        self.calls = {}
        self.tries = {}
        self.made = {}
        self.max_calls = max_calls
        self.max_chars = max_chars

    def __call__(self, key, frame):
        name = key.split(":")[1]
        constructing = name.endswith(".__init__")
        tries = self.tries.get(key, 0)
        if (tries >= 400 or len(self.calls.get(key, ())) >= self.max_calls) and not constructing:
            return
        self.tries[key] = tries + 1
        try:
            text = self.expression(name.split("."), frame)
        except (NoLiteral, RecursionError):
            return
        except Exception:
            return
        if text is not None and len(text) <= self.max_chars and not constructing:
            found = self.calls.setdefault(key, [])
            if text not in found:
                found.append(text)

    def expression(self, parts, frame):
        names = frame.f_globals
        code = frame.f_code
        if len(parts) == 1:
            function = names.get(parts[0])
            return parts[0] + self.arguments(function, code, frame, names, 0)
        if len(parts) != 2:
            raise NoLiteral
        owner = names.get(parts[0])
        if type(owner) is not type:
            raise NoLiteral
        member = owner.__dict__.get(parts[1])
        if isinstance(member, staticmethod):
            return ".".join(parts) + self.arguments(member.__func__, code, frame, names, 0)
        first = frame.f_locals[code.co_varnames[0]]
        if isinstance(member, classmethod):
            if first is not owner:
                raise NoLiteral
            return ".".join(parts) + self.arguments(member.__func__, code, frame, names, 1)
        if type(first) is not owner:
            raise NoLiteral
        if parts[1] in ("__init__", "__new__"):
            self.made.pop(id(first), None)
            text = parts[0] + self.arguments(member, code, frame, names, 1)
            if len(self.made) < 20000 and len(text) <= self.max_chars:
                self.made[id(first)] = (first, text)
            return None
        made = self.made.get(id(first))
        if made is None or made[0] is not first:
            raise NoLiteral
        if isinstance(member, property):
            return made[1] + "." + parts[1]
        return made[1] + "." + parts[1] + self.arguments(member, code, frame, names, 1)

    def arguments(self, function, code, frame, names, skip):
        count = code.co_argcount
        variables = code.co_varnames
        values = frame.f_locals
        while getattr(function, "__code__", None) is not code and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        defaults = {}
        if getattr(function, "__code__", None) is code:
            given = function.__defaults__ or ()
            defaults = dict(zip(variables[count - len(given):count], given))
            defaults.update(function.__kwdefaults__ or {})
        at = count + code.co_kwonlyargcount
        rest = ()
        if code.co_flags & 4:
            rest = values[variables[at]]
            at += 1
        more = values[variables[at]] if code.co_flags & 8 else {}
        texts = []
        named = False
        for index, variable in enumerate(variables[skip:count], skip):
            value = values[variable]
            if not rest and variable in defaults and value is defaults[variable]:
                named = True
                continue
            text = literal(value, names)
            if named and index < code.co_posonlyargcount:
                raise NoLiteral
            texts.append(variable + "=" + text if named else text)
        texts += [literal(value, names) for value in rest]
        for variable in variables[count:count + code.co_kwonlyargcount]:
            if variable not in defaults or values[variable] is not defaults[variable]:
                texts.append(variable + "=" + literal(values[variable], names))
        texts += [name + "=" + literal(value, names) for name, value in more.items() if name.isidentifier()]
        return "(" + ", ".join(texts) + ")"

def main():
    request, write = _private()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    import time
    import pytest
    recorder = Recorder(request["max_calls"], request["max_chars"])
    tracer = Tracer(request["sources"], recorder) if request["trace"] else None
    found = {}

    class Reporter:
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item):
            start = time.process_time()
            if tracer is not None:
                tracer.reached = set()
                recorder.made.clear()
                sys.settrace(tracer)
            try:
                return (yield)
            finally:
                sys.settrace(None)
                reached = sorted(tracer.reached) if tracer is not None else []
                write({"id": item.nodeid, "status": found.get(item.nodeid, "missing"), "reached": reached,
                       "s": time.process_time() - start})

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(self, item, call):
            report = yield
            status = report.outcome if not hasattr(report, "wasxfail") else "xfailed"
            if found.get(item.nodeid, "passed") == "passed":
                found[item.nodeid] = status
            return report

        @pytest.hookimpl(wrapper=True)
        def pytest_make_collect_report(self, collector):
            report = yield
            if report.failed:
                write({"file": collector.nodeid, "error": str(report.longrepr).strip().splitlines()[-1][-300:]})
            return report

    options = ["-c", os.devnull, "--rootdir", os.getcwd(), "-s", "--import-mode=importlib",
               "--continue-on-collection-errors", "--assert=plain"]
    for name in ("cacheprovider faulthandler junitxml logging pastebin doctest terminal threadexception "
                 "unraisableexception warnings").split():
        options += ["-p", "no:" + name]
    pytest.main(options + request["files"], plugins=[Reporter()])
    write({"calls": recorder.calls})

try:
    main()
finally:
    os._exit(0)
"""

_CALLS = r"""
def main():
    request, write = _private()
    import importlib
    names = dict(vars(importlib.import_module(request["module"])))
    tracer = Tracer(request["sources"])
    for index, expression in enumerate(request["expressions"]):
        tracer.reached = set()
        sys.settrace(tracer)
        try:
            try:
                text = canonical(eval(expression, dict(names)))
            except Refused:
                raise
            except Exception as error:
                text = "raise " + raised(error)
        except BaseException as error:
            text = "refused: " + type(error).__name__
        finally:
            sys.settrace(None)
        write([index, text, sorted(tracer.reached)])

try:
    main()
finally:
    os._exit(0)
"""
