"""Law 1 over whole episodes: whatever an engine does in the middle of a stream, the ids are those that were sampled."""

from hypothesis import given, settings
from hypothesis import strategies as st

from support.episode_parts import Echo, echo_task, play, say
from tidemill.core.records import Episode, decode, encode
from tidemill.episodes.generation import Sampling
from tidemill.episodes.scripted import ScriptedEngine, script_of

turns = st.lists(
    st.one_of(
        st.text("abc \n<|end|>🙂", min_size=1, max_size=12).map(lambda text: say("echo", text=text)),
        st.lists(st.integers(0, 380), max_size=10),
    ),
    min_size=1,
    max_size=5,
)
counts = st.lists(st.integers(0, 40), max_size=3, unique=True)


@settings(max_examples=40, deadline=None)
@given(turns, counts, counts, st.dictionaries(st.integers(0, 40), st.integers(2, 9), max_size=3), st.integers(1, 5))
def test_interruptions_and_swaps_change_neither_ids_nor_order(
    said: list[list[int]], fail_at: list[int], abort_at: list[int], swap_at: dict[int, int], chunk_tokens: int
) -> None:
    said = [*said, say("submit")]
    task = echo_task(max_sampled_tokens=60)
    plain = play(ScriptedEngine(script_of(said)), Echo(), task)
    engine = ScriptedEngine(
        script_of(said),
        version=1,
        fail_at=fail_at,
        abort_at=abort_at,
        swap_at=swap_at,
        chunk_tokens=chunk_tokens,
        routes_shape=(2, 2),
    )
    rough = play(engine, Echo(), task, sampling=Sampling(top_k=5))
    assert rough.outcome == plain.outcome
    for one, other in zip(plain.segments[0].steps, rough.segments[0].steps, strict=True):
        left, right = one.generation, other.generation
        assert right.prompt_ids.numpy().tolist() == left.prompt_ids.numpy().tolist()
        assert right.token_ids.numpy().tolist() == left.token_ids.numpy().tolist()
        num = right.token_ids.shape[0]
        assert right.logprobs.shape == right.versions.shape == (num,)
        assert right.support_offsets is not None and right.support_offsets.shape == (num + 1,)
        assert right.routes is not None and right.routes.shape[0] == right.kv_versions.shape[0]
        stop = right.position + right.prompt_ids.shape[0] + num
        assert right.row_start + right.kv_versions.shape[0] <= stop
        assert [observation.text for observation in other.observations] == [
            observation.text for observation in one.observations
        ]
    budget = task.limits.max_sampled_tokens
    for request in engine.requests:
        assert request.max_tokens <= budget
    assert sum(step.generation.token_ids.shape[0] for step in rough.segments[0].steps) <= budget
    assert encode(decode(encode(rough), Episode)) == encode(rough)
