"""The examples run as they stand, and the follower ends with the trainer's weights."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_publish_and_follow() -> None:
    command = [sys.executable, str(EXAMPLES / "publish_and_follow.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    trained = re.search(r"trainer: +version 19, checksum (\w+)", done.stdout)
    followed = re.search(r"follower: version 19, delta, .* checksum (\w+)", done.stdout)
    assert trained and followed and trained[1] == followed[1]
