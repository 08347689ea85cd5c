"""Text of others on a terminal: a test's message or a policy's edit may hold escape sequences."""

_KEPT = "\n\t"


def printable(text: str) -> str:
    """The text with every control character spelled out (`\\x1b`), but for line ends and tabs."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in _KEPT else one.encode("unicode_escape", "replace").decode() for one in text
    )


def one_line(text: str) -> str:
    """The same on one line, runs of white space as one space."""
    return " ".join(printable(text).split())
