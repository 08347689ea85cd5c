"""`tidemill status`, `stop`, `audit`, `report`: looking at a run from outside, while it lives or after."""

import argparse
import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tidemill.core.errors import RunFolderError
from tidemill.core.records import Episode
from tidemill.reports.audit import audit
from tidemill.reports.audit.readers import NoRun
from tidemill.reports.page import Originals, write_report
from tidemill.reports.status import status, status_lines
from tidemill.run.display import LOOK_EVERY_S, display
from tidemill.run.folder import RunFolder
from tidemill.run.progress import Progress
from tidemill.run.services.context import saved_recipe, tasks_folder
from tidemill.tasks.folder import load

STOP_S = 60.0


def _folder(arguments: argparse.Namespace) -> RunFolder:
    folder = RunFolder(Path(arguments.run))
    folder.info()
    return folder


def status_command(arguments: argparse.Namespace) -> int:
    folder = _folder(arguments)
    if arguments.watch:
        _watch(folder, plain=arguments.plain)
    if not folder.journal.exists():
        stage = "preparing" if folder.owner() is not None else "not started"
        run_id = folder.info().run_id
        print(json.dumps({"run_id": run_id, "stage": stage}) if arguments.json else f"{run_id}: {stage}")
    elif arguments.json:
        print(json.dumps(status(folder.path), indent=2))
    else:
        print("\n".join(status_lines(folder.path)))
    return 0


def _watch(folder: RunFolder, *, plain: bool) -> None:
    """Until the run is over or Ctrl-C: what `tidemill run` shows, of a run that another process is running."""
    if folder.owner() is None:
        return
    recipe = saved_recipe(folder)
    say = Progress(folder, recipe, folder.info().created_s)
    with suppress(KeyboardInterrupt), display(folder, recipe, say, plain=plain) as tick:
        while folder.owner() is not None:
            tick()
            time.sleep(LOOK_EVERY_S)


def stop_command(arguments: argparse.Namespace) -> int:
    """Ask the owner to stop and wait until it has let go of the folder."""
    folder = _folder(arguments)
    owner = folder.owner()
    if owner is None:
        print(f"{folder.path} is not running")
        return 0
    os.kill(owner, signal.SIGTERM)
    deadline_s = time.monotonic() + STOP_S
    while folder.owner() == owner:
        if time.monotonic() > deadline_s:
            raise RunFolderError(f"process {owner} has not stopped within {STOP_S:.0f} s: look at {folder.logs}")
        time.sleep(0.1)
    print(f"{folder.path} is stopped; `tidemill run` with the same recipe and folder goes on")
    return 0


def audit_command(arguments: argparse.Namespace) -> int:
    try:
        report = audit(_folder(arguments).path)
    except NoRun as error:
        raise RunFolderError(str(error)) from None
    print(report.to_json() if arguments.json else report.table())
    return 0 if report.ok else 1


def report_command(arguments: argparse.Namespace) -> int:
    folder = _folder(arguments)
    out = write_report(folder.path, Path(arguments.out or folder.report), originals=_originals(folder))
    print(f"wrote {out}")
    return 0


def _originals(folder: RunFolder) -> Originals:
    """Episode → its files as they were before the agent came."""
    path = tasks_folder(folder)
    tasks = load(path) if path.exists() else None

    def originals(episode: Episode) -> Mapping[str, bytes]:
        if tasks is None:
            return {}
        workspace = tasks.workspace(tasks.task(episode.task_id))
        return {file.path: file.data for file in workspace.files if file.path in episode.patch}

    return originals
