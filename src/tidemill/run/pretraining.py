"""What a policy reads before it acts: the corpus, the tokenizer and the documents of pre-training.

First, for some steps, random tokens that come twice: attention that copies forms on them within a minute or two, on
code alone not within ten (docs/log.md). Then documents like the opening of an episode and its first turns, so that
nothing has to be learnt twice: the statement, the window on a faulty function, the edits that mend it, the test.
"""

import random
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
from tidemill.text.tokenizer import OBS, TASK, Tokenizer
from tidemill.text.windows import numbered, window
from tidemill.updates.corpus import Document, document

MAX_FAULTS = 4
MAX_LINES, MAX_CHARS = 20, 640
MAX_FILES = 12_000
COPIED = 4, 10
"""Shortest and longest run of copied tokens: longer ones take longer to be learnt."""
SEEN_WEIGHT = 0.5
"""Loss weight of an observation that repeats the edited line, which is copying."""
HINT_PROBABILITY, TRUE_HINT_PROBABILITY = 0.3, 0.6
"""That a document names a line where an exception came up, and that it is a faulty one."""
EXCEPTIONS = ("TypeError", "ValueError", "AttributeError", "KeyError", "IndexError", "NameError", "UnboundLocalError")
WORDS = " ".join([*(tool.name for tool in TOOLS), PASSED, "failed"])
"""What is said in every episode, for the tokenizer's merges."""


def read_code(
    config: PretrainingConfig, *, own: Sequence[tuple[str, str]], held_out: Sequence[str], seed: int
) -> list[CodeFunction]:
    """Functions of `own` files (name, source), then of this machine's; none of them in the `held_out` sources."""
    return code_corpus(
        python_files(machine_roots(), max_files=MAX_FILES, seed=seed),
        first=own,
        held_out=held_out,
        max_functions=config.max_functions,
        max_lines=MAX_LINES,
        max_chars=MAX_CHARS,
    )


def save_corpus(corpus: Sequence[CodeFunction], path: Path) -> None:
    """Kept with the run: the machine's own files may change before it is resumed."""
    write_whole(path, zstandard.compress(msgspec.msgpack.encode(list(corpus))))


def load_corpus(path: Path) -> list[CodeFunction]:
    return msgspec.msgpack.decode(zstandard.decompress(path.read_bytes()), type=list[CodeFunction])


def train_tokenizer(corpus: Sequence[CodeFunction], vocab_size: int) -> Tokenizer:
    """Byte-level BPE on numbered windows and tool names: what the policy will read and say."""
    texts = (opening(repair) + WORDS for repair in repairs(corpus, seed=0))
    return Tokenizer.train(texts, vocab_size)


def opening(repair: Repair, failure: str = "") -> str:
    """The first text of an episode (`MendEnvironment.open`), as far as a function without tests has one."""
    statement = f"{repair.name} in {repair.path} has a fault: test_{repair.name} fails. Mend the function."
    return f"{statement}\n{window(repair.faulty.split(chr(10)))}\n{failure}"


def copying(tokenizer: Tokenizer, *, num_tokens: int, seed: int) -> list[Document]:
    """Short runs of random tokens that come twice; the loss is on the second time."""
    rng = random.Random(seed)
    task, obs = tokenizer.special(TASK), tokenizer.special(OBS)
    first = len(tokenizer.special_ids)
    made: list[Document] = []
    so_far = 0
    while so_far < num_tokens:
        num = rng.randint(*COPIED)
        ids = [rng.randrange(first, tokenizer.vocab_size) for _ in range(num)]
        made.append(document([task, *ids, obs, *ids], [0.0] * (num + 2) + [1.0] * num))
        so_far += 2 * num + 2
    return made


def documents(
    corpus: Sequence[CodeFunction],
    renderer: Renderer,
    *,
    code_weight: float,
    max_tokens: int,
    num_tokens: int,
    seed: int,
    stretch: int = 0,
) -> list[Document]:
    """Mended episodes, at least `num_tokens` in all where the corpus brings any: the loss on code is at `code_weight`,
    on what the agent says at 1. Another `stretch` takes the corpus in another order, with other faults."""
    rng = random.Random(f"{seed}/{stretch}")
    shuffled = rng.sample(list(corpus), len(corpus))  # each stretch is to see all of it, where it does not read it all
    made: list[Document] = []
    so_far = 0
    while True:
        before = so_far
        for repair in repairs(shuffled, seed=rng.getrandbits(64), max_faults=MAX_FAULTS):
            ids: list[int] = []
            weights: list[float] = []
            for piece, weight in _pieces(repair, renderer, code_weight, rng):
                ids += piece
                weights += [weight] * len(piece)
            if len(ids) <= max_tokens:
                made.append(document(ids, weights))
                so_far += len(ids)
            if so_far >= num_tokens:
                return made
        if so_far == before:
            return made


def _pieces(
    repair: Repair, renderer: Renderer, code_weight: float, rng: random.Random
) -> Iterator[tuple[list[int], float]]:
    lines = repair.faulty.split("\n")
    yield renderer.open(TOOLS, opening(repair, _failure(repair, len(lines), rng))), code_weight
    for line, old, new in repair.edits:
        yield renderer.say([_call("edit", line=line, old=old, new=new)]), 1.0
        changed = numbered(lines[line - 1].replace(old, new, 1).split("\n"), line)
        yield renderer.observe([Observation(call_id="", text=changed)], 10**6), SEEN_WEIGHT
    yield renderer.say([_call("test")]), 1.0
    yield renderer.observe([Observation(call_id="", text=PASSED)], 10**6), 0.0
    yield renderer.say([_call("submit")]), 1.0


def _failure(repair: Repair, num_lines: int, rng: random.Random) -> str:
    """What a test might say of it: nothing, or the line where an exception came up."""
    if rng.random() >= HINT_PROBABILITY:
        return "failed: assert"
    is_true = rng.random() < TRUE_HINT_PROBABILITY
    line = rng.choice(repair.edits)[0] if is_true else rng.randint(1, num_lines)
    return f"failed: {rng.choice(EXCEPTIONS)} (at line {line})"


def _call(name: str, **arguments: str | int) -> ToolCall:
    return ToolCall(id="", name=name, arguments=arguments)
