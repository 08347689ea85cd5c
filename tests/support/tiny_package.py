"""A package of one's own with tests, small enough to make tasks from in seconds."""

from tidemill.tasks.layout import Layout, layout

SOURCE = '''"""Numbers and words."""


def clamp(value, low, high):
    """Put a value between two others."""
    if value < low:
        return low
    if value > high:
        return high
    return value


def initials(text, sep=" "):
    words = text.split(sep)
    return "".join(word[0].upper() for word in words if word)


class Tally:
    def __init__(self, start=0):
        self.total = start

    def plus(self, amount):
        return self.total + amount
'''
TESTS = """import pytest

from tiny.words import Tally, clamp, initials


@pytest.mark.parametrize("value, expected", [(0, 1), (3, 3), (9, 5)])
def test_clamp(value, expected):
    assert clamp(value, 1, 5) == expected


def test_clamp_inside():
    assert clamp(2, 1, 5) == 2


def test_clamp_low():
    assert clamp(-7, -3, 5) == -3


class TestInitials:
    def test_two(self):
        assert initials("ab cd") == "AC"

    def test_other(self):
        assert initials("ab-cd", "-") == "AC"

    def test_none(self):
        assert initials("") == ""


def test_plus():
    assert Tally(2).plus(3) == 5


def test_plus_nothing():
    assert Tally(2).plus(0) == 2
"""
FILES = {
    "pyproject.toml": b"[project]\nname='tiny'\n",
    "src/tiny/__init__.py": b"",
    "src/tiny/words.py": SOURCE.encode(),
    "tests/test_words.py": TESTS.encode(),
    "setup.py": b"raise SystemExit('never run')\n",
}


def tiny_layout(**changes: str | None) -> Layout:
    """`changes`: path with `__` for `/` and without `.py` → another text, or None to leave the file out."""
    files = dict(FILES)
    for key, text in changes.items():
        path = key.replace("__", "/") + ".py"
        files.pop(path, None)
        if text is not None:
            files[path] = text.encode()
    return layout(files, "tiny")
