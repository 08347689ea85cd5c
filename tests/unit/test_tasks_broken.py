"""From a broken repository to the task that synthesis would have made of it."""

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from support.tiny_package import SOURCE, tiny_layout
from tidemill.core.errors import UsageError
from tidemill.core.records import digest
from tidemill.core.seams import SandboxTier
from tidemill.sandboxes.local import LocalTier
from tidemill.tasks.broken import Diagnosis, broken_by, diagnose, matching_tests, suspects, task_of
from tidemill.tasks.build import build
from tidemill.tasks.layout import Layout
from tidemill.tasks.manifest import layer_of
from tidemill.tasks.packages import PackagePin, declared_requirements
from tidemill.tasks.synth import SynthesisConfig, synthesize

PIN = PackagePin(name="tiny", version="local")
PATH = "src/tiny/words.py"


@pytest.fixture(scope="module")
def tier() -> Iterator[SandboxTier]:
    tier = LocalTier("broken", i_know_this_is_not_a_sandbox=True)
    yield tier
    asyncio.run(tier.close())


def with_source(text: str, **tests: str) -> Layout:
    layout = tiny_layout()
    more = {f"tests/{name}.py": content for name, content in tests.items()}
    return msgspec.structs.replace(layout, sources={**layout.sources, PATH: text}, tests={**layout.tests, **more})


def diagnosed(layout: Layout, tier: SandboxTier) -> Diagnosis:
    return asyncio.run(diagnose(PIN, layout, layer_of(), tier))


def test_the_task_is_the_one_of_training(tier: SandboxTier) -> None:
    config = SynthesisConfig(max_per_function=1, max_tries_per_function=3)
    manifest = asyncio.run(synthesize("tiny", [(PIN, tiny_layout())], tier, config))
    assert len(manifest.tasks) == 3
    for row in manifest.tasks:
        function = manifest.functions[row.function]
        trained = build(PIN, tiny_layout(), function, row, split="train")
        (faulty,) = [file.data.decode() for file in trained.workspace.files if file.path == function.path]
        found = diagnosed(with_source(faulty), tier)
        suspect = suspects(found)[0]
        assert (suspect.path, suspect.qualname) == (function.path, function.qualname)
        served = task_of(found, suspect)
        for name in ("statement", "shown_checks", "data", "family", "environment"):
            assert getattr(served.task, name) == getattr(trained.task, name)
        assert digest(served.task.limits) == digest(trained.task.limits)
        assert digest(served.workspace) == digest(trained.workspace)
        assert set(served.verifier.fail_to_pass) == set(trained.verifier.fail_to_pass)


def test_the_function_that_all_failing_tests_share_is_the_suspect(tier: SandboxTier) -> None:
    source = SOURCE.replace("return low", "return high", 1)
    found = diagnosed(
        with_source(source, test_more="from tiny.words import initials\n\ndef test_i():\n    assert 0\n"), tier
    )
    first = suspects(found)[0]
    assert first.qualname == "clamp" and 0 < first.score < 1
    assert [one.qualname for one in suspects(found, ["tests/test_words.py::test_clamp[0-1]"])] == ["clamp"]


def test_tests_are_found_by_the_start_of_their_id(tier: SandboxTier) -> None:
    found = diagnosed(with_source(SOURCE.replace("return high", "return low", 1)), tier)
    assert len(found.failing) >= 1
    first = found.failing[0]
    assert first in matching_tests(found, first.split("::")[0])
    assert first in matching_tests(found, first.split("[")[0])
    with pytest.raises(UsageError, match=r"no test 'tests/test_none\.py' was run"):
        matching_tests(found, "tests/test_none.py")
    passing = next(id_ for id_, status in found.statuses.items() if status == "passed")
    with pytest.raises(UsageError, match="passes: give the id of one that fails"):
        matching_tests(found, passing)


def test_a_patch_that_breaks_another_test_is_found_out(tier: SandboxTier) -> None:
    found = diagnosed(with_source(SOURCE.replace("return low", "return high", 1)), tier)
    assert asyncio.run(broken_by(found, PATH, SOURCE, tier)) == ([], len(found.statuses))
    broken, _ = asyncio.run(broken_by(found, PATH, SOURCE.replace("self.total + amount", "0"), tier))
    assert broken and all("clamp" not in id_ for id_ in broken)
    broken, num_passing = asyncio.run(broken_by(found, PATH, SOURCE + "\nimport os\nos._exit(0)\n", tier))
    assert len(broken) == sum(status == "passed" for status in found.statuses.values()) and num_passing == 0


def test_nothing_to_mend_is_said_in_a_line(tier: SandboxTier) -> None:
    with pytest.raises(UsageError, match=r"no test fails \(\d+ run\): nothing to mend"):
        diagnosed(tiny_layout(), tier)
    lost = {path: "import nowhere_at_all\n" + text for path, text in tiny_layout().tests.items()}
    with pytest.raises(UsageError, match=r"import nowhere_at_all, which the sandbox's layer lacks: pip install"):
        diagnosed(msgspec.structs.replace(tiny_layout(), tests=lost), tier)
    with pytest.raises(UsageError, match="not one test could be collected"):
        diagnosed(with_source("raise RuntimeError('at import')\n"), tier)


def test_requirements_are_those_that_a_project_declares() -> None:
    text = '[project]\ndependencies = ["httpx>=0.2", "rich", "winreg2; sys_platform == \'win32\'"]\n'
    assert declared_requirements({"pyproject.toml": text.encode()}) == ("httpx", "rich")
    assert declared_requirements({}) == ()
