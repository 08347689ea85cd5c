"""From a healthy package and a row of the manifest to a task, its workspace and its hidden verifier. Pure."""

import ast
import hashlib
from collections.abc import Sequence

from tidemill.core.errors import TaskError
from tidemill.core.records import Record, RecordedCall, Split, Task, Tree, Verifier, digest
from tidemill.tasks.layout import Layout, cut_tests, module_name, support_files, tree
from tidemill.tasks.manifest import DEFAULT_LIMITS, FunctionEntry, TaskEntry
from tidemill.tasks.operators import Mutation, apply
from tidemill.tasks.packages import PackagePin
from tidemill.tasks.spans import FunctionSpan, functions, parse


class BuiltTask(Record, frozen=True):
    task: Task
    """Without repository and layer: those are hashes that the task set's folder gives."""
    workspace: Tree
    verifier: Verifier


def target(source: str, qualname: str) -> FunctionSpan:
    """The one definition of a function that runs: overloads are passed over."""
    spans = [span for span in functions(source) if span.qualname == qualname]
    if not spans:
        raise TaskError(f"no function {qualname!r}")
    return spans[-1]


def test_files(layout: Layout, ids: Sequence[str], trees: dict[str, ast.Module] | None = None) -> dict[str, str]:
    """The test files of these ids, with only the functions that they name, and what all test files stand on.

    `trees` keeps syntax trees by path from one call to the next: a test file may be large, and many tasks use it.
    """
    trees = {} if trees is None else trees
    wanted: dict[str, list[str]] = {}
    for id_ in ids:
        wanted.setdefault(id_.split("::", 1)[0], []).append(id_)
    for path in wanted:
        if path not in trees:
            trees[path] = parse(layout.tests[path])
    cut = {path: cut_tests(layout.tests[path], names, trees[path]) for path, names in wanted.items()}
    return support_files(layout) | cut


def build(
    pin: PackagePin,
    layout: Layout,
    function: FunctionEntry,
    row: TaskEntry,
    *,
    split: Split,
    trees: dict[str, ast.Module] | None = None,
) -> BuiltTask:
    """Raises `TaskError` where the row does not fit the source. `trees`: as in `test_files`, one per package."""
    gold = layout.sources[function.path]
    end = row.start + len(row.old)
    mutation = Mutation(operator=row.operator, line=0, start=row.start, end=end, old=row.old, new=row.new)
    faulty = apply(gold, mutation)
    span = target(faulty, function.qualname)
    shown = [function.tests[index] for index in row.shown]
    failing = [function.tests[index] for index in row.fail]
    passing = [id_ for index, id_ in enumerate(function.tests) if index not in row.fail]
    module = module_name(function.path)
    mark = hashlib.sha256(f"{row.operator}/{row.start}/{row.old}/{row.new}".encode()).hexdigest()[:6]
    task_id = f"{module}.{function.qualname}-{mark}"
    task = mend_task(
        task_id,
        function.path,
        span,
        shown,
        split=split,
        provenance={
            "package": pin.name,
            "version": pin.version,
            "license": pin.license,
            "module": module,
            "function": function.qualname,
            "operator": row.operator,
        },
    )
    workspace = tree(dict(layout.sources), dict(layout.data), test_files(layout, shown, trees), {function.path: faulty})
    verifier = Verifier(
        task_id=task_id,
        fail_to_pass=tuple(failing),
        pass_to_pass=tuple(passing),
        files=tree(test_files(layout, function.tests, trees)),
        allowed_paths=(function.path,),
        calls=tuple(RecordedCall(expression=expression, expected=expected) for expression, expected in function.calls),
        module=module,
        gold=tree({function.path: gold}),
    )
    return BuiltTask(task=task, workspace=workspace, verifier=verifier)


def fingerprint(built: BuiltTask) -> str:
    """What the manifest pins: all of a task but the interpreter that runs it."""
    parts = [
        digest(built.task),
        digest(built.workspace),
        digest(built.verifier),
    ]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def mend_task(
    task_id: str, path: str, span: FunctionSpan, shown: Sequence[str], *, split: Split, provenance: dict[str, str]
) -> Task:
    """What the agent is told of a faulty function, the same in training and in service. Knows no solution.

    Without repository and layer. `span`: of the function as it is in the faulty file. `shown`: by `shown_checks`.
    """
    return Task(
        id=task_id,
        family="mend",
        environment="mend",
        split=split,
        statement=_statement(span.qualname, path, shown),
        repository=None,
        layer=None,
        limits=DEFAULT_LIMITS,
        shown_checks=tuple(shown),
        data={
            "path": path,
            "module": module_name(path),
            "function": span.qualname,
            "first_line": span.start_line,
            "body_line": span.body_line,
            "last_line": span.end_line,
        },
        provenance=provenance,
    )


def shown_checks(failing: Sequence[str]) -> tuple[str, ...]:
    """Of the tests that fail, those that the agent sees: the one with the shortest name, and one of another function
    where there is one."""
    by_length = sorted(failing, key=lambda id_: (len(id_), id_))
    others = [id_ for id_ in by_length if id_.split("[")[0] != by_length[0].split("[")[0]]
    return (*by_length[:1], *others[:1])


def _statement(qualname: str, path: str, shown: Sequence[str]) -> str:
    names = list(dict.fromkeys(id_.split("[", 1)[0].split("::")[-1] for id_ in shown))
    checks = " and ".join(names)
    verb = "fail" if len(names) > 1 else "fails"
    return f"{qualname} in {path} has a fault: {checks} {verb}. Mend the function."
