"""Recipes: what is wrong is said in one line that names the value and the mend."""

import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.core.errors import UsageError
from tidemill.run.config import ReinforcementConfig, load_recipe, recipe_digest, resolved

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.py"


def test_overrides_reach_the_field_and_the_digest() -> None:
    plain = load_recipe(QUICKSTART)
    other = load_recipe(QUICKSTART, ["--rl.max-age", "0"])
    assert (plain.rl.max_age, other.rl.max_age) == (2, 0)
    assert recipe_digest(plain) != recipe_digest(other)
    assert recipe_digest(plain) == recipe_digest(load_recipe(QUICKSTART))
    assert resolved(other)["rl"]["max_age"] == 0


@pytest.mark.parametrize(
    "text, told",
    [
        (
            "from tidemill.run.config import ReinforcementConfig\nReinforcementConfig(num_updates=1, grop_size=2)",
            "group_size",
        ),
        ("recipe = 3", "defines no `recipe`"),
        ("def f(:", "SyntaxError"),
        ("import nothing_like_it", "nothing_like_it"),
    ],
)
def test_a_wrong_recipe_is_one_clear_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "recipe.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=told) as caught:
        load_recipe(path)
    assert "\n" not in str(caught.value)


def test_a_missing_recipe(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no recipe at"):
        load_recipe(tmp_path / "none.py")


def test_values_are_checked_when_made() -> None:
    with pytest.raises(UsageError, match="max_age is -1"):
        ReinforcementConfig(num_updates=1, max_age=-1)
    with pytest.raises(UsageError, match=r"group_size is 0"):
        ReinforcementConfig(num_updates=1, group_size=0)


@pytest.mark.parametrize(
    "arguments, code, told",
    [
        (["run", "nowhere.py"], 2, "no recipe at nowhere.py"),
        (["audit", "nowhere"], 1, "holds no run"),
        (["status", "nowhere"], 1, "holds no run"),
        (["tasks", "check", "nowhere"], 1, "nowhere is no task set"),
        (["run", str(QUICKSTART), "--rl.nonsense", "3"], 2, "nonsense"),
    ],
)
def test_the_command_line_says_what_is_wrong(tmp_path: Path, arguments: list[str], code: int, told: str) -> None:
    command = [sys.executable, "-m", "tidemill.run.cli", *arguments]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert told in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
