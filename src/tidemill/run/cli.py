"""The command line: what is asked, who answers it, and one clear line where it fails.

Exit codes: 0 done, 1 failed, 2 wrong usage.
"""

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from tidemill import __version__
from tidemill.core.errors import TidemillError


class Command(NamedTuple):
    """One line of the table below."""

    words: str
    handler: str
    """`module:function` in `tidemill.run`, imported only when it is asked for: torch takes seconds."""
    help: str
    arguments: tuple[tuple[tuple[str, ...], dict[str, object]], ...]
    example: str


def _argument(*names: str, **options: object) -> tuple[tuple[str, ...], dict[str, object]]:
    return names, options


RUN = _argument("run", metavar="DIR", help="a run folder, such as runs/demo")
JSON = _argument("--json", action="store_true", help="print JSON for scripts")
PLAIN = _argument("--plain", action="store_true", help="plain lines, also on a terminal")
TIER = _argument("--tier", default="namespaces", choices=("namespaces", "local"), help="the sandbox tier")
STORE = _argument("store", metavar="STORE", help="a weight store, such as runs/demo/store")
THREADS = _argument("--threads", type=int, default=0, help="default: as many as there are cores")

COMMANDS = (
    Command(
        "doctor",
        "doctor:doctor_command",
        "what this machine can do, what is missing, and how to mend it",
        (_argument("--sandbox", action="store_true", help="also try the known escapes from inside a sandbox"), JSON),
        "tidemill doctor --sandbox",
    ),
    Command(
        "run",
        "launch:run_command",
        "train by a recipe; an existing folder is resumed",
        (
            _argument("recipe", metavar="RECIPE", help="a Python file that defines `recipe`"),
            _argument("--out", metavar="DIR", help="the run folder (default: runs/ and the recipe's name)"),
            _argument("--dry-run", action="store_true", help="print the resolved recipe, memory and time, and stop"),
            PLAIN,
        ),
        "tidemill run recipes/quickstart.py --out runs/demo --rl.num-updates 30",
    ),
    Command(
        "status",
        "inspect:status_command",
        "how a run stands",
        (RUN, JSON, _argument("--watch", action="store_true", help="go on looking, until it is over or Ctrl-C"), PLAIN),
        "tidemill status runs/demo --watch",
    ),
    Command("stop", "inspect:stop_command", "end a run; `run` resumes it", (RUN,), "tidemill stop runs/demo"),
    Command(
        "audit",
        "inspect:audit_command",
        "recompute what a run claims, from its journal, blobs and events",
        (RUN, JSON),
        "tidemill audit runs/demo",
    ),
    Command(
        "report",
        "inspect:report_command",
        "write one self-contained page about a run",
        (RUN, _argument("-o", "--out", metavar="FILE", help="default: report.html in the run folder")),
        "tidemill report runs/demo -o report.html",
    ),
    Command(
        "agent",
        "agent.command:agent_command",
        "mend a function of your own with a run's policy, in the harness that it was trained in",
        (
            _argument("--repo", metavar="DIR", required=True, help="a folder with a Python package and its tests"),
            _argument("--run", metavar="DIR", help="the run (default: the one below runs/ that published last)"),
            _argument("--version", metavar="N", type=int, help="of its policy (default: the newest)"),
            _argument("--file", metavar="PATH", help="where the fault is (default: where the tests point to)"),
            _argument("--function", metavar="NAME", help="the function to mend, such as Class.method"),
            _argument("--test", metavar="TEST_ID", help="a failing test, or the start of its id: only it has to pass"),
            _argument("--requires", metavar="NAME", action="append", help="a package that the tests need; repeatable"),
            _argument("--tries", metavar="K", type=int, default=4, help="attempts (default: 4)"),
            _argument("--seed", type=int, default=0),
            _argument("--apply", action="store_true", help="write the mended file; else the diff is only printed"),
            TIER,
        ),
        "tidemill agent --repo ./my-repo --run runs/demo --tries 8",
    ),
    Command(
        "eval",
        "evaluation.command:eval_command",
        "examine a checkpoint, a model behind an API, or a scripted agent, on tasks in the harness of training",
        (
            _argument(
                "--checkpoint", metavar="RUN[@VERSION]", help="a run folder; its newest version, or the one given"
            ),
            _argument("--endpoint", metavar="URL", help="base of an OpenAI-compatible API with tools"),
            _argument(
                "--agent",
                choices=("oracle", "noop", "blind", "inverse"),
                help="a scripted one: who knows, who does nothing, who guesses, who guesses as the task maker plants",
            ),
            _argument(
                "--tasks", metavar="TASKS", help="a manifest or a task set folder (default: of the checkpoint's run)"
            ),
            _argument("--split", default="heldout", choices=("dev", "heldout", "train")),
            _argument("--num", type=int, metavar="N", help="so many tasks (default: all of the split)"),
            _argument("--samples", type=int, default=1, metavar="S", help="attempts at each task"),
            _argument(
                "--temperature", type=float, metavar="T", help="0: greedy (default: the recipe's; 1 for an endpoint)"
            ),
            _argument(
                "--max-window-lines", type=int, metavar="N", help="leave longer tasks out (default: the recipe's)"
            ),
            _argument("--seed", type=int, help="draws the tasks (default: the recipe's, else 0)"),
            _argument("--slots", type=int, default=8, metavar="N", help="attempts at once"),
            _argument("--model", metavar="NAME", help="which model of the endpoint (default: its only one)"),
            _argument("--api-key-env", metavar="VAR", help="environment variable that holds the endpoint's key"),
            _argument(
                "--max-sampled-tokens", type=int, default=4096, metavar="N", help="of one attempt, of an endpoint's own"
            ),
            _argument("--wall-s", type=float, metavar="S", help="of one attempt of an endpoint (default: the task's)"),
            _argument("--out", metavar="FILE", help="a row per attempt; an existing one goes on (default: in evals/)"),
            _argument("--against", metavar="FILE", help="compare with the rows of another evaluation, task by task"),
            TIER,
        ),
        "tidemill eval --checkpoint runs/demo@0 --samples 8 --out evals/before.jsonl",
    ),
    Command(
        "tasks synth",
        "tasks:synth_command",
        "make tasks from a repository, or from packages by NAME==VERSION, each validated in a sandbox",
        (
            _argument(
                "source", metavar="SOURCE", nargs="+", help="a folder with Python code and tests, or NAME==VERSION"
            ),
            _argument("-o", "--out", metavar="DIR", required=True, help="the task set folder to write"),
            _argument("--seed", type=int, default=0),
            _argument("--max-tasks", type=int, default=300),
            TIER,
        ),
        "tidemill tasks synth ./my-repo -o tasks/mine",
    ),
    Command(
        "tasks check",
        "tasks:check_command",
        "validate a sample of a task set again",
        (
            _argument("tasks", metavar="TASKS", help="a task set folder, or a manifest"),
            _argument("--sample", type=int, default=20, help="how many tasks"),
            _argument("--seed", type=int, default=0),
            TIER,
        ),
        "tidemill tasks check tasksets/mend-v1/manifest.json --sample 20",
    ),
    Command(
        "tasks show",
        "tasks:show_command",
        "print one task as the agent gets it",
        (_argument("tasks", metavar="TASKS"), _argument("task", metavar="TASK", help="a task id, or the start of one")),
        "tidemill tasks show tasks/mine mend-0001",
    ),
    Command(
        "tasks solve",
        "tasks:solve_command",
        "grade the known solution of one task: 1 is what it must earn",
        (_argument("tasks", metavar="TASKS"), _argument("task", metavar="TASK"), TIER),
        "tidemill tasks solve tasks/mine mend-0001",
    ),
    Command(
        "weights diff",
        "weights:diff_command",
        "what makes one policy out of another, lossless: two folders of .safetensors files",
        (
            _argument("old", metavar="A"),
            _argument("new", metavar="B"),
            _argument("-o", "--out", metavar="FILE", required=True),
            _argument(
                "--overwrite", action="store_true", help="may be applied twice, or over a half; about twice the size"
            ),
            THREADS,
            JSON,
        ),
        "tidemill weights diff policy-6 policy-7 -o 7.delta",
    ),
    Command(
        "weights apply",
        "weights:apply_command",
        "the policy that a delta leads to, each tensor verified",
        (
            _argument("base", metavar="A"),
            _argument("delta", metavar="FILE"),
            _argument("-o", "--out", metavar="B", required=True, help="the folder to write"),
            THREADS,
        ),
        "tidemill weights apply policy-6 7.delta -o policy-7",
    ),
    Command(
        "weights log",
        "weights:log_command",
        "the versions of a store: kind, size, steps, times",
        (
            STORE,
            _argument("--moved", action="store_true", help="also the share of weights that moved: reads every version"),
            JSON,
        ),
        "tidemill weights log runs/demo/store",
    ),
    Command(
        "weights verify",
        "weights:verify_command",
        "read every version of a store by its chain, and compare every tensor with its hash",
        (STORE,),
        "tidemill weights verify runs/demo/store",
    ),
    Command(
        "weights collect",
        "weights:collect_command",
        "delete old payloads of a store that no follower needs; a run's own store is read until its audit is done",
        (
            STORE,
            _argument("--keep", metavar="N", type=int, required=True, help="the newest versions, all of them readable"),
            _argument("--pin", metavar="VERSION", type=int, nargs="+", default=(), help="versions to keep beside them"),
            _argument("--dry-run", action="store_true", help="say what would go"),
        ),
        "tidemill weights collect weights/store --keep 30",
    ),
    Command(
        "weights pull",
        "weights:pull_command",
        "a version of a store as a Hugging Face folder",
        (
            STORE,
            _argument("version", metavar="VERSION", type=int, nargs="?", help="default: the newest"),
            _argument("-o", "--out", metavar="DIR", required=True, help="the folder to write"),
        ),
        "tidemill weights pull runs/demo/store 7 -o policy-7",
    ),
    Command(
        "sandbox run",
        "sandbox:run_command",
        "one command in an episode's sandbox, with its verdict",
        (
            _argument("--repo", metavar="DIR", help="copied into the sandbox as its workspace"),
            TIER,
            _argument("--timeout-s", type=float, default=30.0),
            _argument("command", metavar="CMD", nargs=argparse.REMAINDER, help="after --"),
        ),
        "tidemill sandbox run -- python3 -c 'print(1)'",
    ),
)


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="tidemill", description="Reinforcement learning for coding agents, in the harness they are deployed in."
    )
    root.add_argument("--version", action="version", version=f"tidemill {__version__}")
    groups: dict[str, argparse._SubParsersAction[argparse.ArgumentParser]] = {
        "": root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    }
    helps = {
        "tasks": "make, check and show tasks",
        "sandbox": "the episode's sandbox by hand",
        "weights": "policies, deltas and stores",
    }
    for command in COMMANDS:
        group, _, name = command.words.rpartition(" ")
        if group not in groups:
            nested = groups[""].add_parser(group, help=helps[group])
            groups[group] = nested.add_subparsers(title="commands", metavar="COMMAND", required=True)
        sub = groups[group].add_parser(
            name, help=command.help, description=command.help, epilog=f"example: {command.example}"
        )
        for names, options in command.arguments:
            sub.add_argument(*names, **options)  # type: ignore[arg-type]
        sub.add_argument("--debug", action="store_true", help="a traceback where something fails")
        sub.set_defaults(handler=command.handler, words=command.words)
    return root


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `tidemill`; exits."""
    arguments, rest = parser().parse_known_args(argv)
    if rest and arguments.words != "run":
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.words == "run":
        arguments.overrides = rest
    module, _, function = arguments.handler.partition(":")
    try:
        code = getattr(importlib.import_module(f"tidemill.run.{module}"), function)(arguments)
    except KeyboardInterrupt:
        code = 130
    except (TidemillError, OSError) as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"tidemill {arguments.words}: {error}", file=sys.stderr)
        code = error.exit_code if isinstance(error, TidemillError) else 1
    except Exception as error:  # a fault of ours: still one line, unless asked for more
        if arguments.debug:
            traceback.print_exc()
        line = f"{type(error).__name__}: {error}".split("\n")[0]
        print(f"tidemill {arguments.words}: {line} (--debug shows where)", file=sys.stderr)
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
