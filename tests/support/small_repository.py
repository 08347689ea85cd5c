"""A repository of a user's own, small: three modules of plain functions with their tests."""

from pathlib import Path

NUMBERS = '''"""Numbers."""


def clamp(value, low, high):
    """Put a value between two others."""
    if value < low:
        return low
    if value > high:
        return high
    return value


def digits(number):
    """Sum of the decimal digits."""
    total = 0
    while number > 0:
        total += number % 10
        number //= 10
    return total


def gcd(a, b):
    while b != 0:
        a, b = b, a % b
    return a
'''
WORDS = '''"""Words."""


def initials(text, sep=" "):
    """First letters of the words."""
    letters = []
    for word in text.split(sep):
        if word:
            letters.append(word[0].upper())
    return "".join(letters)


def is_palindrome(text):
    left, right = 0, len(text) - 1
    while left < right:
        if text[left] != text[right]:
            return False
        left += 1
        right -= 1
    return True
'''
LISTS = '''"""Lists."""


def chunked(items, size):
    """Pieces of at most `size` items."""
    pieces = []
    for start in range(0, len(items), size):
        pieces.append(items[start : start + size])
    return pieces


def flatten(items):
    flat = []
    for item in items:
        if isinstance(item, list):
            flat.extend(flatten(item))
        else:
            flat.append(item)
    return flat
'''
TESTS = """import pytest

from small.lists import chunked, flatten
from small.numbers import clamp, digits, gcd
from small.words import initials, is_palindrome


@pytest.mark.parametrize("value, expected", [(0, 1), (3, 3), (9, 5)])
def test_clamp(value, expected):
    assert clamp(value, 1, 5) == expected


@pytest.mark.parametrize("number, expected", [(0, 0), (7, 7), (49, 13), (1001, 2)])
def test_digits(number, expected):
    assert digits(number) == expected


@pytest.mark.parametrize("a, b, expected", [(4, 6, 2), (9, 3, 3), (5, 0, 5)])
def test_gcd(a, b, expected):
    assert gcd(a, b) == expected


@pytest.mark.parametrize("text, expected", [("ada lovelace", "AL"), ("x", "X"), ("", "")])
def test_initials(text, expected):
    assert initials(text) == expected


@pytest.mark.parametrize("text, expected", [("abba", True), ("ab", False), ("", True), ("axa", True)])
def test_palindrome(text, expected):
    assert is_palindrome(text) is expected


@pytest.mark.parametrize("items, size, expected", [([], 2, []), ([1, 2, 3], 2, [[1, 2], [3]]), ([1], 1, [[1]])])
def test_chunked(items, size, expected):
    assert chunked(items, size) == expected


@pytest.mark.parametrize("items, expected", [([], []), ([1, [2, [3]]], [1, 2, 3]), ([[4]], [4])])
def test_flatten(items, expected):
    assert flatten(items) == expected
"""
RECIPE = '''"""A run of a minute: shapes as small as they come, every joint as in the demo."""

from tidemill.run.config import (
    DemonstrationConfig,
    EvaluationConfig,
    PolicyConfig,
    PretrainingConfig,
    Recipe,
    ReinforcementConfig,
    RolloutConfig,
)

recipe = Recipe(
    name="small",
    tasks="tasks",
    policy=PolicyConfig(
        vocab_size=600, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, num_experts=4, expert_size=32
    ),
    pretraining=PretrainingConfig(num_steps=30, tokens_per_step=1024, max_functions=150, num_threads=1),
    demonstrations=DemonstrationConfig(num_episodes=6, num_steps=10),
    rl=ReinforcementConfig(
        num_updates=6, group_size=2, groups_per_batch=2, max_age=2, kl_weight=0.01, constrained=True
    ),
    rollouts=RolloutConfig(num_slots=6),
    evaluation=EvaluationConfig(every=6, num_tasks=3),
    num_validated_tasks=4,
)
'''


def write_repository(folder: Path) -> Path:
    """Write it; returns its root."""
    files = {
        "src/small/__init__.py": "",
        "src/small/numbers.py": NUMBERS,
        "src/small/words.py": WORDS,
        "src/small/lists.py": LISTS,
        "tests/test_small.py": TESTS,
        "pyproject.toml": '[project]\nname = "small"\nversion = "1"\n',
    }
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder
