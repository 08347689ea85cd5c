"""`tidemill doctor`: what this machine can do, and how to mend what it lacks."""

import argparse
import asyncio
import json
import os
import platform
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import msgspec

from tidemill.sandboxes.doctor import Fact, facts
from tidemill.sandboxes.namespaces import NamespacesTier
from tidemill.sandboxes.selftest import run as selftest

MIN_CORES, MIN_MEMORY_GIB, MIN_DISK_GIB = 2, 4.0, 2.0
OPTIONAL = frozenset({"memory", "cores", "accelerator"})
"""Facts whose absence makes a run slow or small, not impossible."""


def doctor_command(arguments: argparse.Namespace) -> int:
    found = [*machine_facts(), *facts()]
    if arguments.sandbox and all(fact.ok or _is_optional(fact) for fact in found):
        found += asyncio.run(_escapes())
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(found), indent=2))
    else:
        wide = max(len(fact.name) for fact in found)
        for fact in found:
            print(f"{'ok  ' if fact.ok else 'no  '}  {fact.name:<{wide}}  {fact.detail}")
            if not fact.ok and fact.mend:
                print(f"{'':<{wide + 8}}mend: {fact.mend}")
    return 0 if all(fact.ok or _is_optional(fact) for fact in found) else 1


def _is_optional(fact: Fact) -> bool:
    return fact.name in OPTIONAL or fact.name.startswith("limit")


def machine_facts() -> list[Fact]:
    """Interpreter, torch, cores, memory, disk."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    disk_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    cuda = torch.cuda.is_available()
    return [
        Fact(
            name="python",
            ok=sys.version_info >= (3, 11),
            detail=f"{platform.python_version()} in {sys.prefix}",
            mend="use Python 3.11 or later: make PYTHON=/path/to/python3.11",
        ),
        Fact(name="torch", ok=True, detail=f"{version('torch')}, {torch.get_num_threads()} threads"),
        Fact(
            name="accelerator",
            ok=True,
            detail=torch.cuda.get_device_name(0) if cuda else "none; everything runs on the CPU",
        ),
        Fact(
            name="cores",
            ok=cores >= MIN_CORES,
            detail=f"{cores}",
            mend="with one core, rollouts and learner take turns: expect a demo of twice the time",
        ),
        Fact(
            name="memory",
            ok=memory_gib >= MIN_MEMORY_GIB,
            detail=f"{memory_gib:.1f} GiB",
            mend=f"a demo wants {MIN_MEMORY_GIB:.0f} GiB: lower rollouts.num_slots",
        ),
        Fact(
            name="disk",
            ok=disk_gib >= MIN_DISK_GIB,
            detail=f"{disk_gib:.1f} GiB free here",
            mend=f"free {MIN_DISK_GIB:.0f} GiB, or work in another folder",
        ),
    ]


async def _escapes() -> list[Fact]:
    tier = NamespacesTier("doctor")
    tier.reap()
    try:
        return [Fact(name=f"holds: {p.name}", ok=p.held, detail=p.detail) for p in await selftest(tier)]
    finally:
        await tier.close()
