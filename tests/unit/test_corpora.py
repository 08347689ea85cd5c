"""The pre-training corpus: real functions, none that the policy will be examined on, repairs that repair."""

from pathlib import Path

from tidemill.tasks.corpora import code_corpus, functions_of, machine_roots, python_files
from tidemill.tasks.denoise import repairs

HELD_OUT = '''
class Box:
    def total(self, values):
        """Sum of the positive ones."""
        result = 0
        for value in values:
            if value > 0:
                result += value
        return result
'''
COPY = """
def total(self, values):
    result = 0
    for value in values:  # a vendored copy, laid out anew
        if value > 0:
            result += value

    return result


def other(values):
    if not values:
        return None
    return max(values) - min(values)
"""


def test_held_out_functions_stay_out_wherever_they_lie(tmp_path: Path) -> None:
    (tmp_path / "vendored.py").write_text(COPY)
    (tmp_path / "again.py").write_text(COPY)
    (tmp_path / "broken.py").write_text("def f(:\n")
    files = python_files([tmp_path], max_files=10, seed=0)
    assert len(files) == 3
    names = [function.name for function in code_corpus(files, held_out=[HELD_OUT], max_functions=10)]
    assert names == ["other"]
    assert sorted(f.name for f in code_corpus(files, held_out=[], max_functions=10)) == ["other", "total"]


def test_methods_are_dedented_and_bounded() -> None:
    (function,) = functions_of(HELD_OUT, "box.py", max_lines=40, max_chars=1200)
    assert function.source.startswith("def total(self, values):\n    ")
    assert list(functions_of(HELD_OUT, "box.py", max_lines=3, max_chars=1200)) == []
    assert list(functions_of(HELD_OUT, "box.py", max_lines=40, max_chars=20)) == []


def test_edits_of_a_repair_give_the_original_back() -> None:
    functions = list(functions_of(COPY, "copy.py", max_lines=40, max_chars=1200))
    originals = {without_blank_lines(function.source) for function in functions}
    found = list(repairs(functions, seed=1, max_faults=3, passes=20))
    assert len(found) > 10
    for repair in found:
        lines = repair.faulty.split("\n")
        for line, old, new in repair.edits:
            assert old in lines[line - 1]
            lines[line - 1] = lines[line - 1].replace(old, new, 1)
        assert without_blank_lines("\n".join(lines)) in originals, "a line that has to go may leave an empty one"
        assert without_blank_lines(repair.faulty) not in originals


def without_blank_lines(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if line.strip())


def test_this_machine_has_code_to_read() -> None:
    files = python_files(machine_roots()[:1], max_files=5, seed=3)
    assert len(files) == 5
    assert files == python_files(machine_roots()[:1], max_files=5, seed=3)
