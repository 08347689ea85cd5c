"""What a policy reads before it acts: the corpus, the tokenizer and the documents of pre-training.

A document looks like the opening of an episode and its first turns, so that nothing has to be learnt twice:
the statement, the window on a faulty function, the edit that mends it, the test that then passes, the submission.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import zstandard

from tidemill.core.files import write_whole
from tidemill.core.records import Observation, ToolCall
from tidemill.core.seams import Renderer
from tidemill.episodes.mend import PASSED, TOOLS
from tidemill.run.config import PretrainingConfig
from tidemill.tasks.corpora import CodeFunction, code_corpus, machine_roots, python_files
from tidemill.tasks.denoise import Repair, repairs
from tidemill.text.tokenizer import Tokenizer
from tidemill.text.windows import numbered, window
from tidemill.updates.corpus import Document, document

REPAIRS_PER_FUNCTION = 4
MAX_FAULTS = 4
MAX_LINES, MAX_CHARS = 16, 500
MAX_FILES = 4000


def read_machine(config: PretrainingConfig, *, held_out: Sequence[str], seed: int) -> list[CodeFunction]:
    """Functions of this machine's Python files, none of them in the `held_out` sources."""
    files = python_files(machine_roots(), max_files=MAX_FILES, seed=seed)
    return code_corpus(
        files, held_out=held_out, max_functions=config.max_functions, max_lines=MAX_LINES, max_chars=MAX_CHARS
    )


def save_corpus(corpus: Sequence[CodeFunction], path: Path) -> None:
    """Kept with the run: the machine's own files may change before it is resumed."""
    write_whole(path, zstandard.compress(msgspec.msgpack.encode(list(corpus))))


def load_corpus(path: Path) -> list[CodeFunction]:
    return msgspec.msgpack.decode(zstandard.decompress(path.read_bytes()), type=list[CodeFunction])


def train_tokenizer(corpus: Sequence[CodeFunction], vocab_size: int) -> Tokenizer:
    """Byte-level BPE on numbered windows: what the policy will read."""
    return Tokenizer.train((opening(repair) for repair in repairs(corpus, per_function=1, seed=0)), vocab_size)


def opening(repair: Repair) -> str:
    """The first text of an episode (`MendEnvironment.open`), as far as a function without tests has one."""
    statement = f"{repair.name} in {repair.path} has a fault: test_{repair.name} fails. Mend the function."
    return f"{statement}\n{repair.path}\n{window(repair.faulty.split(chr(10)))}\n"


def documents(
    corpus: Sequence[CodeFunction], renderer: Renderer, *, code_weight: float, max_tokens: int, seed: int
) -> Iterator[Document]:
    """Mended episodes, with the loss on code at `code_weight` and on what the agent says at 1."""
    for repair in repairs(corpus, per_function=REPAIRS_PER_FUNCTION, seed=seed, max_faults=MAX_FAULTS):
        ids: list[int] = []
        weights: list[float] = []
        for piece, weight in _pieces(repair, renderer, code_weight):
            ids += piece
            weights += [weight] * len(piece)
        if len(ids) <= max_tokens:
            yield document(ids, weights)


def _pieces(repair: Repair, renderer: Renderer, code_weight: float) -> Iterator[tuple[list[int], float]]:
    yield renderer.open(TOOLS, opening(repair)), code_weight
    lines = repair.faulty.split("\n")
    for number, (line, old, new) in enumerate(repair.edits):
        yield renderer.say([_call("edit", line=line, old=old, new=new)]), 1.0
        changed = numbered(lines[line - 1].replace(old, new, 1).split("\n"), line)
        yield renderer.observe([Observation(call_id="", text=changed)], 10**6), 0.0
        if number == len(repair.edits) - 1:
            yield renderer.say([_call("test")]), 1.0
            yield renderer.observe([Observation(call_id="", text=PASSED)], 10**6), 0.0
            yield renderer.say([_call("submit")]), 1.0


def _call(name: str, **arguments: str | int) -> ToolCall:
    return ToolCall(id="", name=name, arguments=arguments)
