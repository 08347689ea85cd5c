"""The documents of pre-training: what comes twice, what is new in each stretch, what is learnt of it."""

from tidemill.run.pretraining import copying, documents, train_tokenizer
from tidemill.run.services.learner import stretches
from tidemill.tasks.corpora import CodeFunction
from tidemill.text.compact import CompactRenderer

CORPUS = [
    CodeFunction(
        path=f"m{n}.py", name=f"f{n}", source=f"def f{n}(low, high):\n    if low < high:\n        return {n}\n"
    )
    for n in range(60)
]
TOKENIZER = train_tokenizer(CORPUS, 560)


def made(stretch: int, num_tokens: int = 2000) -> list[bytes]:
    found = documents(
        CORPUS,
        CompactRenderer(TOKENIZER),
        code_weight=0.2,
        max_tokens=400,
        num_tokens=num_tokens,
        seed=0,
        stretch=stretch,
    )
    assert sum(len(document.tokens) for document in found) >= num_tokens
    return [document.tokens.tobytes() for document in found]


def test_each_stretch_takes_other_functions_and_faults_and_the_same_one_is_the_same() -> None:
    first, second = made(0), made(2000)
    assert made(0) == first
    assert len(set(first) & set(second)) < len(first) // 4
    assert len(made(0, 40_000)) > len(CORPUS), "the corpus is read again where it is short"


def test_what_is_copied_is_learnt_at_its_second_time_alone() -> None:
    for document in copying(TOKENIZER, num_tokens=500, seed=1):
        num = (len(document.tokens) - 2) // 2
        assert document.tokens[1 : num + 1].tolist() == document.tokens[num + 2 :].tolist()
        assert document.weights.tolist() == [0.0] * (num + 2) + [1.0] * num


def test_stretches_end_where_the_steps_do() -> None:
    assert stretches(0, 0) == []
    assert stretches(260, 260) == [260]
    assert stretches(260, 5000) == [260, 2260, 4260, 5000]
    assert stretches(0, 1000) == [1000]
