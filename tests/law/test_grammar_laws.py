"""Constrained decoding: whatever the automaton lets pass can be parsed and points at what is there, and all that could
be said in good faith passes."""

import inspect
import random
import textwrap

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.grammar import Grammar
from tidemill.core.records import Array, ToolCall, Trajectory, decode, encode
from tidemill.core.seams import Spans
from tidemill.episodes.mend import TOOLS
from tidemill.models.logprobs import support_logprobs, token_logprobs
from tidemill.tasks.corpora import functions_of
from tidemill.tasks.denoise import repairs
from tidemill.text.compact import CompactRenderer
from tidemill.text.tokenizer import Tokenizer, pieces
from tidemill.updates.packing import pack

TEXT = "1|def merge(first, second):\n2|    return first + second\n3|\n4|    raise ValueError(second)\n"
TOKENIZER = Tokenizer.train([TEXT, "edit test submit read undo grep"], 512)
LINES = {1: "def merge(first, second):", 2: "    return first + second", 4: "    raise ValueError(second)"}
SPANS = Spans(tool="edit", lines=LINES)


def renderer() -> CompactRenderer:
    made = CompactRenderer(TOKENIZER)
    made.open(TOOLS, TEXT)
    return made


def walk(grammar: Grammar, rng: random.Random, free: list[int], stop: int, max_free: int = 6) -> list[int]:
    """A continuation that the grammar lets pass; at most `max_free` ids where it leaves the choice."""
    state, said, num_free = grammar.start, list[int](), 0
    while not said or said[-1] != stop:
        allowed = grammar.allowed(state)
        if allowed is None:
            num_free += 1
            token = stop if num_free > max_free else rng.choice(free)
        else:
            token = rng.choice(allowed)
        said.append(token)
        state = grammar.next(state, token)
    return said


@given(st.integers(0, 10**6))
def test_what_passes_is_an_edit_of_a_text_that_stands_on_a_line_or_another_tool(seed: int) -> None:
    made = renderer()
    ordinary = [id_ for id_ in range(TOKENIZER.vocab_size) if id_ not in TOKENIZER.special_ids]
    letters = [id_ for id_ in ordinary if id_ not in TOKENIZER.name_ids and TOKENIZER.decode([id_]).isascii()]
    said = walk(made.grammar(TOOLS, SPANS), random.Random(seed), letters, made.stop_ids[0])
    turn = made.parse(said, TOOLS, 0)
    if turn.errors:  # free arguments of other tools may be wrong; an edit's number of arguments too
        assert turn.errors[0].error in ("bad_arguments", "malformed")
        return
    call = turn.calls[0]
    if call.name == "edit":
        assert str(call.arguments["old"]) in LINES[int(call.arguments["line"])]


@given(st.sampled_from(sorted(LINES)), st.data(), st.text(max_size=8))
def test_every_edit_of_whole_pieces_passes(line: int, data: st.DataObject, new: str) -> None:
    cut = pieces(LINES[line])
    start = data.draw(st.integers(0, len(cut) - 1))
    old = "".join(cut[start : data.draw(st.integers(start + 1, len(cut)))])
    made = renderer()
    call = ToolCall(id="", name="edit", arguments={"line": line, "old": old, "new": new})
    made.grammar(TOOLS, SPANS).after(made.say([call]))


def test_every_repair_of_a_planted_fault_passes() -> None:
    source = inspect.getsource(textwrap)
    functions = list(functions_of(source, "textwrap.py", max_lines=40, max_chars=2000))
    found = list(repairs(functions, seed=1, passes=20))
    assert len(found) > 50
    for repair in found:
        made = CompactRenderer(TOKENIZER)
        made.open(TOOLS, repair.faulty)
        lines = {number: text for number, text in enumerate(repair.faulty.split("\n"), 1) if text.strip()}
        grammar = made.grammar(TOOLS, Spans(tool="edit", lines=lines))
        for line, old, new in repair.edits[:1]:  # later ones are made on what the first leaves
            grammar.after(made.say([ToolCall(id="", name="edit", arguments={"line": line, "old": old, "new": new})]))


def test_tools_without_arguments_and_edits_elsewhere() -> None:
    made = renderer()
    grammar = made.grammar(TOOLS, SPANS)
    for name in ("test", "undo", "submit"):
        grammar.after(made.say([ToolCall(id="", name=name, arguments={})]))
    for arguments in ({"line": 3, "old": "x", "new": "y"}, {"line": 2, "old": "raise", "new": "y"}):
        with pytest.raises(ValueError, match="may not come"):
            grammar.after(made.say([ToolCall(id="", name="edit", arguments=arguments)]))
    assert encode(decode(encode(grammar), Grammar)) == encode(grammar)
    assert grammar.fault(made.stop_ids, TOKENIZER.vocab_size) == ""


def test_an_automaton_that_cannot_be_followed_says_why() -> None:
    assert "nothing may come" in Grammar.of([{5: 1}, {}], [-1, -1]).fault([9], 10)
    assert Grammar.of([{5: 1}, {}], [-1, -1]).fault([5], 10) == ""
    assert "vocabulary" in Grammar.of([{50: 0}], [-1]).fault([5], 10)
    assert "none of the 1" in Grammar.of([{5: 3}], [-1]).fault([5], 10)


@given(st.integers(0, 10**6), st.floats(0.3, 2.0))
def test_logprobs_under_a_support_are_those_of_the_full_softmax_renormalised(seed: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(5, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(30, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    rng = random.Random(seed)
    rows = [rng.sample(range(30), rng.randint(1, 30)) for _ in range(5)]
    targets = torch.tensor([rng.choice(row) for row in rows])
    padded = torch.full((5, 30), -1)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = torch.tensor(row)
    found, entropy = support_logprobs(hidden, head, targets, padded, torch.full((5,), temperature))
    full = (hidden @ head.T / temperature).log_softmax(-1)
    expected = torch.stack([full[n, targets[n]] - full[n, rows[n]].logsumexp(0) for n in range(5)])
    assert torch.allclose(found, expected)
    assert bool((entropy >= -1e-12).all())
    grads = torch.autograd.grad(found.sum(), (hidden, head), retain_graph=True)
    others = torch.autograd.grad(expected.sum(), (hidden, head))
    assert all(torch.allclose(a, b) for a, b in zip(grads, others, strict=True))
    assert all(bool(grad.isfinite().all()) for grad in grads)


def test_a_support_of_the_whole_vocabulary_is_none() -> None:
    hidden, head, targets = torch.randn(3, 8), torch.randn(20, 8), torch.tensor([1, 2, 3])
    found, entropy = support_logprobs(hidden, head, targets, torch.arange(20).expand(3, 20), torch.ones(3))
    expected, expected_entropy = token_logprobs(hidden, head, targets)
    assert torch.allclose(found, expected, atol=1e-5) and torch.allclose(entropy, expected_entropy, atol=1e-5)


def test_a_sampled_token_outside_of_its_support_is_refused() -> None:
    trajectory = Trajectory(
        attempt_id="a",
        segment=0,
        token_ids=Array.of([1, 2, 3], "int32"),
        sampled_mask=Array.of([False, True, True], "bool"),
        logprobs=Array.of([np.nan, -1, -1], "float32"),
        versions=Array.of([-1, 0, 0], "int32"),
        routes=None,
        temperature=1.0,
        support_ids=Array.of([2, 5, 4], "int32"),
        support_offsets=Array.of([0, 0, 2, 3], "int32"),
    )
    with pytest.raises(ValueError, match="token 2 is outside of its support"):
        pack([trajectory], {"a": 1.0}, max_tokens=8)
    fine = msgspec.structs.replace(trajectory, support_ids=Array.of([2, 5, 3], "int32"))
    (packed,) = pack([fine], {"a": 1.0}, max_tokens=8)
    assert packed.supports_TS is not None and packed.supports_TS.tolist() == [[2, 5], [3, -1]]
