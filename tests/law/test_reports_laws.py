"""Laws of the statistics: what must hold of any two evaluations."""

from hypothesis import given
from hypothesis import strategies as st

from support.eval_rows import rows
from tidemill.reports.comparison import compare, figure, solved_in, solving
from tidemill.reports.resampling import estimate, paired_difference, share_difference

HITS = st.lists(st.integers(0, 1), min_size=4, max_size=4)
EVALUATIONS = st.dictionaries(st.sampled_from("abcdefghijkl"), HITS, min_size=1)
SHARES = st.lists(
    st.integers(0, 8).flatmap(lambda den: st.tuples(st.floats(0, den / 8), st.just(den / 8))), min_size=1, max_size=12
)
FEW = 500


@given(SHARES, st.integers(0, 3))
def test_an_interval_holds_its_estimate_and_repeats(shares: list[tuple[float, float]], seed: int) -> None:
    found = estimate(shares, seed=seed, level=0.999, num_resamples=FEW)
    if sum(den for _, den in shares) <= 0:
        assert found is None
        return
    assert found is not None
    assert found.low - 1e-9 <= found.value <= found.high + 1e-9
    assert 0.0 <= found.low <= found.high <= 1.0 + 1e-9
    again = estimate(shares, seed=seed, level=0.999, num_resamples=FEW)
    assert again == found


@given(EVALUATIONS)
def test_an_evaluation_does_not_differ_from_itself(rates: dict[str, list[int]]) -> None:
    same = rows(rates)
    for one in compare(same, same, solving(same)):
        assert one.difference is not None and one.before == one.after
        assert (one.difference.mean, one.difference.low, one.difference.high) == (0.0, 0.0, 0.0)
        assert one.difference.p_value == 1.0


@given(EVALUATIONS, st.randoms(use_true_random=False))
def test_exchanging_the_sides_turns_the_sign_alone(rates: dict[str, list[int]], random: object) -> None:
    before = rows(rates)
    after = rows({task: [1 - hit for hit in hits] for task, hits in rates.items()})
    (there,), (back,) = compare(before, after, [solved_in(1)]), compare(after, before, [solved_in(1)])
    assert there.difference and back.difference
    assert there.difference.mean == -back.difference.mean
    assert abs(there.difference.p_value - back.difference.p_value) < 1e-12
    assert abs(there.difference.low + back.difference.high) < 1e-9


@given(st.lists(st.floats(0, 1), min_size=4, max_size=10), st.floats(0.05, 0.2))
def test_pairing_shrinks_the_interval_of_a_difference(values: list[float], gain: float) -> None:
    """Each task gains the same: the difference is certain, however much the tasks differ among each other."""
    before = {str(i): value for i, value in enumerate(values)}
    after = {task: value + gain for task, value in before.items()}
    paired = paired_difference(before, after, num_resamples=FEW)
    single = estimate([(value, 1.0) for value in values], num_resamples=FEW)
    assert single is not None
    assert paired.high - paired.low < 1e-9
    assert single.high - single.low > 0.01 or max(values) - min(values) < 0.1


@given(EVALUATIONS)
def test_more_tries_solve_no_less(rates: dict[str, list[int]]) -> None:
    found = [figure(rows(rates), solved_in(k)) for k in (1, 2, 3, 4)]
    values = [one.value for one in found if one is not None]
    assert values == sorted(values) and len(values) == 4


@given(SHARES)
def test_a_p_value_is_a_probability_and_never_zero(shares: list[tuple[float, float]]) -> None:
    before = {str(i): share for i, share in enumerate(shares)}
    after = {str(i): (0.0, den) for i, (_, den) in enumerate(shares)}
    found = share_difference(before, after, num_resamples=FEW)
    assert found is None or 0.0 < found.p_value <= 1.0


def test_no_effect_is_rejected_as_often_as_the_level_says() -> None:
    """Coins without a difference: the share of p ≤ 0.05 is about 0.05, and no more."""
    import random

    rng = random.Random(0)
    hits = 0
    for _ in range(400):
        sides = [{str(i): float(rng.random() < 0.4) for i in range(30)} for _ in range(2)]
        hits += paired_difference(*sides, num_resamples=FEW).p_value <= 0.05
    assert 4 <= hits <= 30
