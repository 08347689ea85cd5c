"""Laws of the transformer: packed equals unpacked, cached equals packed, replayed routes keep the router's gradient."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.errors import ModelError
from tidemill.core.records import ROUTE_SENTINEL
from tidemill.models import logprobs
from tidemill.models.config import ModelConfig
from tidemill.models.experts import mix_experts, replay_routes
from tidemill.models.logprobs import token_logprobs
from tidemill.models.transformer import KVCache, Span, Transformer, init_model

CONFIG = ModelConfig(
    vocab_size=53,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    num_experts=5,
    experts_per_token=2,
    expert_size=12,
    max_positions=96,
)

PROBE = torch.linspace(-1, 1, CONFIG.hidden_size, dtype=torch.float64).exp()


def model64() -> Transformer:
    return init_model(CONFIG, 1, std=0.3).double()


def packed(sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    tokens = torch.tensor([t for s in sequences for t in s])
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    return tokens, positions, [0, *np.cumsum([len(s) for s in sequences]).tolist()]


sequences = st.lists(st.lists(st.integers(0, CONFIG.vocab_size - 1), min_size=1, max_size=24), min_size=1, max_size=5)


@settings(max_examples=15, deadline=None)
@given(sequences)
def test_packed_equals_unpacked_values_and_gradients(parts: list[list[int]]) -> None:
    model = model64()
    together = model.forward_packed(*packed(parts))
    (together.hidden_TD @ PROBE).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    alone = [model.forward_packed(*packed([part])) for part in parts]
    sum((out.hidden_TD @ PROBE).sum() for out in alone).backward()  # type: ignore[union-attr]
    assert torch.equal(torch.cat([out.routes_TLK for out in alone]), together.routes_TLK)
    torch.testing.assert_close(torch.cat([out.hidden_TD for out in alone]), together.hidden_TD, rtol=1e-10, atol=1e-12)
    for found, expected in zip(gradients, (p.grad for p in model.parameters()), strict=True):
        assert found is not None and expected is not None
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@settings(max_examples=15, deadline=None)
@given(sequences, st.data())
def test_a_neighbour_in_the_pack_changes_nothing(parts: list[list[int]], data: st.DataObject) -> None:
    model = model64()
    which = data.draw(st.integers(0, len(parts) - 1))
    changed = [part if i == which else [(t + 1) % CONFIG.vocab_size for t in part] for i, part in enumerate(parts)]
    first, second = model.forward_packed(*packed(parts)), model.forward_packed(*packed(changed))
    bounds = packed(parts)[2]
    rows = slice(bounds[which], bounds[which + 1])
    torch.testing.assert_close(first.hidden_TD[rows], second.hidden_TD[rows], rtol=1e-12, atol=1e-13)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 2**31))
def test_cached_steps_equal_packed(chunks: list[int], seed: int) -> None:
    """Prompts in chunks beside rows that decode, against one packed forward pass, fp32: logprobs to 1e-5."""
    model = init_model(CONFIG, 1, std=0.3)
    generator = torch.Generator().manual_seed(seed)
    total = sum(chunks) + 3
    rows = [torch.randint(0, CONFIG.vocab_size, (total,), generator=generator) for _ in range(3)]
    cache = KVCache(CONFIG, 4, CONFIG.max_positions)
    hidden: list[list[torch.Tensor]] = [[], [], []]
    routes: list[list[torch.Tensor]] = [[], [], []]

    def step(decoding: int, spans: list[Span]) -> None:
        flat = [rows[r][positions[r] : positions[r] + 1] for r in range(decoding)]
        where = [torch.tensor([positions[r]]) for r in range(decoding)]
        flat += [rows[s.row][s.position : s.position + s.num_tokens] for s in spans]
        where += [torch.arange(s.position, s.position + s.num_tokens) for s in spans]
        out, ids = model.forward_cached(torch.cat(flat), torch.cat(where), cache, decoding, spans)
        for r in range(decoding):
            hidden[r].append(out[r : r + 1])
            routes[r].append(ids[r : r + 1])
            positions[r] += 1
        for s in spans:
            hidden[s.row].append(out[s.start : s.start + s.num_tokens])
            routes[s.row].append(ids[s.start : s.start + s.num_tokens])
            positions[s.row] += s.num_tokens

    positions = [0, 0, 0]
    with torch.inference_mode():
        for n in chunks:  # rows 0 and 2 take their prompts together
            step(0, [Span(0, 0, positions[0], n), Span(2, n, positions[2], n)])
        cache.swap_rows(1, 2, total)
        rows[1], rows[2], positions[1], positions[2] = rows[2], rows[1], positions[2], 0
        hidden[1], hidden[2], routes[1], routes[2] = hidden[2], [], routes[2], []
        step(2, [Span(2, 2, 0, 4)])
        step(2, [])
        cache.copy_row(0, 3, positions[0])
        for row in range(2):
            n = positions[row]
            full = model.forward_packed(rows[row][:n], torch.arange(n), [0, n])
            assert torch.equal(torch.cat(routes[row]), full.routes_TLK)
            found = model.logits(torch.cat(hidden[row])).log_softmax(-1)
            torch.testing.assert_close(found, model.logits(full.hidden_TD).log_softmax(-1), rtol=0, atol=1e-5)
        assert torch.equal(cache.data[:, 3, :, :, : positions[0]], cache.data[:, 0, :, :, : positions[0]])


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 80), st.integers(2, 6), st.integers(0, 2**31))
def test_experts_equal_their_definition(num_tokens: int, num_experts: int, seed: int) -> None:
    """However many rows there are, and whichever way it is computed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, 6, generator=generator, dtype=torch.float64)
    gate_up = torch.randn(num_experts, 10, 6, generator=generator, dtype=torch.float64)
    down = torch.randn(num_experts, 5, 6, generator=generator, dtype=torch.float64)
    ids = torch.rand(num_tokens, num_experts, generator=generator).topk(2).indices
    gates = torch.rand(num_tokens, 2, generator=generator, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for t in range(num_tokens):
        for k in range(2):
            gate, up = (gate_up[ids[t, k]] @ x[t]).chunk(2)
            expected[t] += gates[t, k] * ((torch.nn.functional.silu(gate) * up) @ down[ids[t, k]])
    torch.testing.assert_close(mix_experts(x, gate_up, down, ids, gates), expected, rtol=1e-10, atol=1e-12)


def test_own_routes_replayed_change_nothing_and_the_router_keeps_its_gradient() -> None:
    model = model64()
    tokens, positions, bounds = packed([[1, 2, 3, 4, 5], [6, 7, 8]])
    own = model.forward_packed(tokens, positions, bounds)
    again = model.forward_packed(tokens, positions, bounds, own.routes_TLK.to(torch.int32), min_gate_share=0.5)
    assert torch.equal(again.hidden_TD, own.hidden_TD)
    assert again.num_replaced == again.num_missing == 0
    (again.hidden_TD @ PROBE).sum().backward()
    router = model.layers[0].router_ED.grad  # type: ignore[union-attr]
    assert isinstance(router, torch.Tensor) and float(router.abs().max()) > 0


def test_forced_routes_are_used_and_sentinels_fall_back() -> None:
    model = model64()
    tokens, positions, bounds = packed([[1, 2, 3, 4, 5]])
    own = model.forward_packed(tokens, positions, bounds)
    forced = (own.routes_TLK + 1) % CONFIG.num_experts
    forced[4] = ROUTE_SENTINEL
    out = model.forward_packed(tokens, positions, bounds, forced)
    assert torch.equal(out.routes_TLK[:4].sort(-1).values, forced[:4].sort(-1).values)
    # The last token, alone in a pack, meets no forced one: its routes are the router's own.
    alone = packed([[5]])
    sentinel = torch.full((1, CONFIG.num_layers, CONFIG.experts_per_token), ROUTE_SENTINEL)
    assert torch.equal(model.forward_packed(*alone, sentinel).routes_TLK, model.forward_packed(*alone).routes_TLK)
    assert out.num_missing == CONFIG.num_layers and out.num_replaced == 0
    assert not torch.allclose(out.hidden_TD[:4], own.hidden_TD[:4])


def test_implausible_routes_give_way_and_are_counted() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.049, 0.001], [0.5, 0.3, 0.15, 0.049, 0.001]])
    forced = torch.tensor([[2, 4], [ROUTE_SENTINEL, ROUTE_SENTINEL]])
    ids, num_replaced, num_missing = replay_routes(probs, forced, min_gate_share=0.1)
    assert ids.tolist() == [[2, 0], [0, 1]] and (num_replaced, num_missing) == (1, 1)
    ids, num_replaced, _ = replay_routes(probs, forced, min_gate_share=0.0)
    assert sorted(ids[0].tolist()) == [2, 4] and num_replaced == 0


@pytest.mark.parametrize(
    ("tokens", "positions", "bounds", "routes", "says"),
    [
        ([1, 99], [0, 1], [0, 2], None, "token id 99"),
        ([1, 2], [0, 96], [0, 2], None, "position 96"),
        ([1, 2], [0, 1], [0, 1], None, "bounds"),
        ([1, 2], [0, 1], [0, 0, 2], None, "bounds"),
        ([1, 2], [0, 1], [0, 2], torch.zeros(2, 2, 3), "shape"),
        ([1, 2], [0, 1], [0, 2], torch.full((2, 2, 2), 5), "expert"),
    ],
)
def test_what_does_not_fit_is_refused(
    tokens: list[int], positions: list[int], bounds: list[int], routes: torch.Tensor | None, says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        model64().forward_packed(torch.tensor(tokens), torch.tensor(positions), bounds, routes)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 1100), st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.integers(0, 2**31))
def test_token_logprobs_equal_log_softmax(num_rows: int, temperature: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with patch.object(logprobs, "_CHUNK_BYTES", 72 * 100):  # 100 rows at a time
        _check_logprobs(num_rows, temperature, generator)


def _check_logprobs(num_rows: int, temperature: float, generator: torch.Generator) -> None:
    hidden = torch.randn(num_rows, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(9, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 9, (num_rows,), generator=generator)
    weights = torch.randn(num_rows, generator=generator, dtype=torch.float64)
    found, entropy = token_logprobs(hidden, head, targets, temperature)
    log_softmax = (hidden @ head.T / (temperature or 1.0)).log_softmax(-1)
    expected = log_softmax.gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, -(log_softmax.exp() * log_softmax).sum(-1).detach(), rtol=1e-10, atol=1e-12)
    assert not entropy.requires_grad
    ours = torch.autograd.grad((found * weights).sum(), (hidden, head))
    theirs = torch.autograd.grad((expected * weights).sum(), (hidden, head))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
