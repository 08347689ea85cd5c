"""One suite over the sandbox tiers: the one for training and the shipped fake."""

import asyncio
import functools
import os
import stat
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tidemill.core.errors import SandboxError, SandboxFault, SandboxUnavailable, UsageError
from tidemill.core.records import Layer, Tree, TreeFile
from tidemill.core.seams import ExecResult, Sandbox, SandboxLimits, SandboxTier
from tidemill.sandboxes.cgroups import detect
from tidemill.sandboxes.layers import installed_layer
from tidemill.sandboxes.local import LocalTier
from tidemill.sandboxes.namespaces import NamespacesTier

LIMITS = SandboxLimits(
    memory_bytes=256 << 20, max_processes=32, disk_bytes=16 << 20, max_inodes=500, output_bytes=1 << 16
)
LABEL = f"contract-{os.getpid()}"
LAYER = installed_layer(["pytest"])


def tree(**files: bytes) -> Tree:
    return Tree(files=tuple(TreeFile(path=name.replace("__", "/"), data=data) for name, data in sorted(files.items())))


SMALL = Tree(
    files=(
        TreeFile(path="greeting.txt", data=b"hello\n"),
        TreeFile(path="pkg/__init__.py", data=b"VALUE = 41\n"),
        TreeFile(path="run.sh", data=b"#!/bin/sh\necho ran\n", executable=True),
    )
)


@functools.cache
def reason_against() -> str:
    """Why this machine runs no sandbox of the tier for training; empty where it does."""

    async def attempt() -> None:
        tier = NamespacesTier(LABEL)
        try:
            await (await tier.open(SMALL, LAYER, LIMITS)).close()
        finally:
            await tier.close()

    try:
        asyncio.run(attempt())
    except SandboxUnavailable as error:
        return str(error)
    return ""


@pytest.fixture(params=["namespaces", "local"])
def tier(request: pytest.FixtureRequest) -> SandboxTier:
    if request.param == "local":
        return LocalTier(LABEL, i_know_this_is_not_a_sandbox=True)
    if reason_against():
        pytest.skip(reason_against())
    return NamespacesTier(LABEL)


def in_sandbox(
    tier: SandboxTier,
    body: Callable[[Sandbox], Awaitable[None]],
    *,
    tree: Tree = SMALL,
    layer: Layer = LAYER,
    limits: SandboxLimits = LIMITS,
) -> None:
    async def main() -> None:
        sandbox = await tier.open(tree, layer, limits)
        try:
            await body(sandbox)
        finally:
            await sandbox.close()
            await tier.close()

    asyncio.run(main())


def sh(sandbox: Sandbox, script: str, timeout_s: float = 20.0, **more: object) -> Awaitable[ExecResult]:
    return sandbox.run(["sh", "-c", script], timeout_s=timeout_s, **more)  # type: ignore[arg-type]


def test_a_command_sees_the_tree_and_tells_how_it_ended(tier: SandboxTier) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert sandbox.tier == tier.tier
        result = await sh(sandbox, "cat greeting.txt; ./run.sh; echo wrong >&2; exit 7")
        assert (result.status, result.exit_code) == ("ok", 7)
        assert (result.stdout, result.stderr) == (b"hello\nran\n", b"wrong\n")
        assert 0 < result.wall_s < 20 and result.cpu_s >= 0

        missing = await sandbox.run(["no-such-program"], timeout_s=20)
        assert (missing.status, missing.exit_code) == ("ok", 127)
        assert b"no-such-program" in missing.stderr

        killed = await sh(sandbox, "kill -9 $$")
        assert (killed.status, killed.exit_code) == ("ok", -9)

    in_sandbox(tier, body)


def test_a_command_gets_stdin_and_environment(tier: SandboxTier) -> None:
    async def body(sandbox: Sandbox) -> None:
        big = bytes(range(256)) * 200  # more than a pipe holds at once would be 64 KiB; the answer must fit the cap
        result = await sandbox.run(["cat"], timeout_s=20, stdin=big)
        assert result.stdout == big
        assert (await sh(sandbox, "cat", stdin=b"")).stdout == b""
        unread = await sandbox.run(["true"], timeout_s=20, stdin=bytes(1 << 20))
        assert (unread.status, unread.exit_code) == ("ok", 0)
        assert (await sh(sandbox, "echo $WORD", env={"WORD": "given"})).stdout == b"given\n"
        assert (await sh(sandbox, "echo $WORD")).stdout == b"\n"
        with pytest.raises(ValueError, match="argv"):
            await sandbox.run([], timeout_s=1)

    in_sandbox(tier, body)


def test_time_is_limited_and_the_sandbox_lives_on(tier: SandboxTier) -> None:
    async def body(sandbox: Sandbox) -> None:
        slow = await sh(sandbox, "echo begun; trap '' TERM; sleep 600", timeout_s=0.5)
        assert (slow.status, slow.stdout) == ("timeout", b"begun\n")
        assert 0.5 <= slow.wall_s < 10
        loop = await sandbox.python("while True: pass", timeout_s=0.3)
        assert loop.status == "timeout"
        assert (await sh(sandbox, "echo alive")).stdout == b"alive\n"

    in_sandbox(tier, body)


def test_output_is_limited_and_the_sandbox_lives_on(tier: SandboxTier) -> None:
    async def body(sandbox: Sandbox) -> None:
        flood = await sh(sandbox, "yes out & yes err >&2")
        assert flood.status == "output_limit"
        assert 0 < len(flood.stdout) + len(flood.stderr) <= LIMITS.output_bytes
        burst = await sandbox.python(f"import os; os.write(1, b'x' * {LIMITS.output_bytes - 1})", timeout_s=20)
        assert (burst.status, len(burst.stdout)) == ("ok", LIMITS.output_bytes - 1)
        assert (await sh(sandbox, "echo alive")).stdout == b"alive\n"

    in_sandbox(tier, body)


def test_python_runs_as_the_main_program(tier: SandboxTier) -> None:
    async def body(sandbox: Sandbox) -> None:
        async def python(source: str, **more: object) -> ExecResult:
            return await sandbox.python(source, timeout_s=20, **more)  # type: ignore[arg-type]

        told = await python("import pkg, sys, os; print(__name__, pkg.VALUE, os.path.exists('greeting.txt'))")
        assert told.stdout == b"__main__ 41 True\n", told.stderr
        assert (await python("import sys; sys.exit(5)")).exit_code == 5
        assert (await python("raise SystemExit")).exit_code == 0
        refused = await python("import sys; sys.exit('no')")
        assert (refused.exit_code, refused.stderr) == (1, b"no\n")
        failed = await python("1 / 0")
        assert failed.exit_code == 1 and b"ZeroDivisionError" in failed.stderr
        assert (await python("print(input())", stdin=b"line\n")).stdout == b"line\n"
        assert (await python("import atexit; atexit.register(print, 'last')")).stdout == b"last\n"
        thread = "import threading as t, time; t.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()"
        assert (await python(thread)).stdout == b"thread\n"

    in_sandbox(tier, body)


def test_python_forks_from_what_was_preloaded_and_keeps_nothing(tier: SandboxTier) -> None:
    async def body(sandbox: Sandbox) -> None:
        loaded = "import sys; print('colorsys' in sys.modules, 'pkg' in sys.modules, hasattr(sys, 'mark'))"
        assert (await sandbox.python(loaded, timeout_s=20)).stdout == b"False False False\n"
        preload = ("colorsys", "pkg", "no_such_module")  # one of the layer, one of the workspace, one of neither
        marked = await sandbox.python(loaded + "; sys.mark = 1", timeout_s=20, preload=preload)
        assert marked.stdout == b"True False False\n"
        assert (await sandbox.python(loaded, timeout_s=20)).stdout == b"True False False\n"

    in_sandbox(tier, body)


def test_pytest_runs_in_a_fork_of_the_agent(tier: SandboxTier) -> None:
    async def body(sandbox: Sandbox) -> None:
        source = "import os, pytest; os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'; "
        source += "raise SystemExit(pytest.main(['-q', '-p', 'no:cacheprovider', 'test_it.py']))"
        for answer, exit_code in ((b"42", 1), (b"41", 0)):
            # The second edit has the size of the first, and comes within its second: stale bytecode would hide it.
            test = b"import pkg\ndef test_it(): assert pkg.VALUE == %s\n" % answer
            await sandbox.write(tree(**{"test_it.py": test}))
            result = await sandbox.python(source, timeout_s=60, preload=("pytest",))
            assert (result.status, result.exit_code) == ("ok", exit_code), result.stdout
        alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        by_name = await sandbox.run(["python3", "-m", "pytest", "-q", "test_it.py"], timeout_s=60, env=alone)
        assert by_name.exit_code == 0, by_name.stdout + by_name.stderr

    in_sandbox(tier, body)


def test_write_puts_files_and_refuses_paths_that_leave(tier: SandboxTier) -> None:
    async def body(sandbox: Sandbox) -> None:
        files = (
            TreeFile(path="new/deep/tool", data=b"#!/bin/sh\necho tool\n", executable=True),
            TreeFile(path="greeting.txt", data=b"changed\n"),
        )
        await sandbox.write(Tree(files=files))
        assert (await sh(sandbox, "new/deep/tool; cat greeting.txt")).stdout == b"tool\nchanged\n"
        await sh(sandbox, "echo kept > target; ln -s target link")
        await sandbox.write(tree(link=b"file"))
        assert (await sh(sandbox, "cat target; cat link; test -L link || echo file")).stdout == b"kept\nfilefile\n"
        for path in ("/etc/x", "../x", "a/../../x", "", "a//b", "./a", "a\0b"):
            with pytest.raises(UsageError, match="relative"):
                await sandbox.write(Tree(files=(TreeFile(path=path, data=b""),)))
        await sh(sandbox, "mkdir folder")
        with pytest.raises(SandboxError, match="folder"):
            await sandbox.write(tree(folder=b""))

    in_sandbox(tier, body)


def test_collect_takes_plain_files_only(tier: SandboxTier) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sh(
            sandbox,
            "echo made > made; ln -s made link; ln -s pkg way; ln -s /etc/passwd out; mkfifo fifo; mkdir folder;"
            "head -c 101 /dev/zero > big; head -c 100 /dev/zero > fits; echo pwned > git; chmod 755 git",
        )
        paths = [
            "made", "greeting.txt", "pkg/__init__.py", "fits",  # these
            "link", "way/__init__.py", "out", "fifo", "folder", "big", "missing", "pkg/../made", "../etc/passwd",
            "/etc/passwd", "./made", "", "pkg/", "made/x",
        ]  # fmt: skip
        found = await sandbox.collect(paths, max_bytes=100)
        assert found == {
            "made": b"made\n",
            "greeting.txt": b"hello\n",
            "pkg/__init__.py": b"VALUE = 41\n",
            "fits": bytes(100),
        }
        assert await sandbox.collect([], max_bytes=100) == {}

    in_sandbox(tier, body)


def test_sandboxes_do_not_see_each_other(tier: SandboxTier) -> None:
    async def main() -> None:
        first, second = await asyncio.gather(tier.open(SMALL, LAYER, LIMITS), tier.open(SMALL, LAYER, LIMITS))
        try:
            await asyncio.gather(sh(first, "echo 1 > greeting.txt"), sh(second, "rm pkg/__init__.py"))
            assert (await first.collect(["greeting.txt"], max_bytes=9)) == {"greeting.txt": b"1\n"}
            assert (await second.collect(["greeting.txt", "pkg/__init__.py"], max_bytes=9)) == {
                "greeting.txt": b"hello\n"
            }
        finally:
            await asyncio.gather(first.close(), second.close())
        third = await tier.open(SMALL, LAYER, LIMITS)
        assert (await third.collect(["greeting.txt"], max_bytes=9)) == {"greeting.txt": b"hello\n"}
        await third.close()
        await tier.close()

    asyncio.run(main())


def _processes_with(word: bytes) -> list[str]:
    """Processes that were started with `word` in their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if word in (entry / "cmdline").read_bytes():
                    found.append(entry.name)
            except OSError:
                continue
    return found


def test_what_a_command_leaves_running_ends_with_it(tier: SandboxTier) -> None:
    word = f"77{os.getpid()}1"

    async def body(sandbox: Sandbox) -> None:
        script = f"(setsid sh -c 'sleep {word} & sleep {word}' >/dev/null 2>&1 &); sleep {word} & echo done"
        result = await sh(sandbox, script)
        assert (result.status, result.stdout) == ("ok", b"done\n")
        assert _processes_with(word.encode()) == []

    in_sandbox(tier, body)


def _traces(tier: SandboxTier) -> list[str]:
    """What a sandbox of ours could leave on this machine."""
    cache: Path = tier._cache.root  # type: ignore[attr-defined]
    names = [str(path) for kind in ("owners", "local") for path in cache.glob(f"{kind}/{LABEL}/*/*")]
    for parent in set(detect().parents.values()):
        names += [str(path) for path in parent.glob(f"tidemill-{LABEL}-*")]
    return names


def test_close_leaves_nothing_and_may_be_repeated(tier: SandboxTier) -> None:
    word = f"78{os.getpid()}2"

    def mounts() -> str:
        return Path("/proc/self/mountinfo").read_text()

    before = mounts()

    async def main() -> None:
        sandbox = await tier.open(SMALL, LAYER, LIMITS)
        assert _traces(tier) != []
        running = asyncio.ensure_future(sh(sandbox, f"echo x > /tmp/file; sleep {word}", timeout_s=60))
        deadline = time.monotonic() + 20
        while not _processes_with(word.encode()):
            assert time.monotonic() < deadline, "the command did not start"
            await asyncio.sleep(0.01)
        assert mounts() == before
        await asyncio.gather(sandbox.close(), sandbox.close())
        assert _processes_with(word.encode()) == []
        assert _traces(tier) == []
        await sandbox.close()
        outcome = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(outcome[0], SandboxFault) or outcome[0].status == "killed"  # type: ignore[union-attr]
        with pytest.raises(SandboxFault, match="closed"):
            await sh(sandbox, "true")
        used_s = sandbox.cpu_s
        assert used_s > 0 and sandbox.cpu_s == used_s

        left_open = await tier.open(SMALL, LAYER, LIMITS)
        await tier.close()
        with pytest.raises(SandboxFault, match="closed"):
            await sh(left_open, "true")
        assert _traces(tier) == []

    asyncio.run(main())
    assert mounts() == before


def test_a_cancelled_command_ends_the_sandbox(tier: SandboxTier) -> None:
    word = f"79{os.getpid()}3"

    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await sh(sandbox, f"sleep {word}", timeout_s=60)
        assert _processes_with(word.encode()) == []
        assert (await sh(sandbox, "true")).status == "killed"

    in_sandbox(tier, body)


def test_killing_the_agent_is_the_commands_own_doing(tier: SandboxTier) -> None:
    async def body(sandbox: Sandbox) -> None:
        first = await sh(sandbox, "kill -9 $PPID; sleep 600", timeout_s=60)
        assert (first.status, first.exit_code) == ("killed", -9)
        for _ in range(2):
            assert (await sh(sandbox, "true")).status == "killed"
            assert (await sandbox.python("pass", timeout_s=5, preload=("json",))).status == "killed"
            assert await sandbox.collect(["greeting.txt"], max_bytes=100) == {}
            await sandbox.write(tree(x=b""))

    in_sandbox(tier, body)


def test_files_of_the_tree_can_be_changed_in_every_way(tier: SandboxTier) -> None:
    async def body(sandbox: Sandbox) -> None:
        script = "echo more >> greeting.txt; mv pkg moved; chmod 600 run.sh; rm -r moved; mkdir pkg; ls pkg;"
        script += "stat -c %a run.sh"
        result = await sh(sandbox, script)
        assert (result.exit_code, result.stdout, result.stderr) == (0, b"600\n", b"")

    in_sandbox(tier, body)


def test_reap_leaves_the_living_alone(tier: SandboxTier) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert tier.reap() == 0
        assert (await sh(sandbox, "echo alive")).stdout == b"alive\n"

    in_sandbox(tier, body)


def test_the_local_tier_wants_to_be_asked_for() -> None:
    with pytest.raises(SandboxUnavailable, match="i_know_this_is_not_a_sandbox"):
        LocalTier()
    with pytest.raises(UsageError, match="label"):
        LocalTier("a/b", i_know_this_is_not_a_sandbox=True)


def test_the_cache_is_ours_alone() -> None:
    info = NamespacesTier(LABEL)._cache.root
    if info.exists():
        assert stat.S_IMODE(info.stat().st_mode) & 0o022 == 0
