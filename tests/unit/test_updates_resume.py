"""Killed and resumed, a learner goes on bit for bit; a damaged checkpoint is one clear line."""

import dataclasses
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.update_samples import TINY, group_batch, learner_config, trajectory
from tidemill.core.errors import ModelError
from tidemill.updates.corpus import Corpus, document
from tidemill.updates.learner import Learner
from tidemill.updates.resume import checkpoint_steps

NUM_STEPS = 9


def corpus() -> Corpus:
    return Corpus([document([(i * j) % 40 for j in range(3, 12 + i)]) for i in range(5)], row_tokens=16, seed=4)


def do_step(learner: Learner, number: int) -> None:
    """Three updates of each stage, in the way that a run feeds them."""
    if number < 3:
        texts = corpus()
        if learner.position:
            texts.seek(learner.position)
        learner.train_text(texts.next_rows(2))
        learner.position = texts.position
    elif number < 6:
        learner.train_demonstrations([trajectory(f"d{number}", number), trajectory(f"e{number}", 50 + number)])
    else:
        learner.train_batch(*group_batch(number - 6, [1.0, 0.0, 0.5, 0.5], group_size=2))


def fresh() -> Learner:
    return Learner(learner_config(), TINY, 0)


def everything(learner: Learner) -> dict[str, object]:
    tensors = {name: tensor.numpy().tobytes() for name, tensor in learner.master.state().items()}
    images = {name: parameter.detach().numpy().tobytes() for name, parameter in learner.model.named_parameters()}
    counters = (learner.stage, learner.stage_step, learner.step, learner.version, learner.position)
    return {"tensors": tensors, "images": images, "counters": counters}


@pytest.fixture(scope="module")
def uninterrupted() -> list[dict[str, object]]:
    learner = fresh()
    states = []
    for number in range(NUM_STEPS):
        do_step(learner, number)
        states.append(everything(learner))
    return states


@pytest.mark.parametrize("stops", [[1], [3], [4, 6], [6], [8], [1, 2, 3, 4, 5, 6, 7, 8]], ids=str)
def test_a_resumed_learner_is_bit_identical(
    tmp_path: Path, uninterrupted: list[dict[str, object]], stops: list[int]
) -> None:
    learner = fresh()
    for number in range(NUM_STEPS):
        if number in stops:
            learner.save(tmp_path)
            learner = Learner(learner_config(), TINY, 99)  # other weights, all of which must be overwritten
            assert learner.load(tmp_path)
            assert everything(learner) == uninterrupted[number - 1]
        do_step(learner, number)
    assert everything(learner) == uninterrupted[-1]


def test_a_checkpoint_before_the_first_step_is_one_too(tmp_path: Path, uninterrupted: list[dict[str, object]]) -> None:
    fresh().save(tmp_path)
    learner = Learner(learner_config(), TINY, 99)
    assert learner.load(tmp_path)
    do_step(learner, 0)
    assert everything(learner) == uninterrupted[0]


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    learner = fresh()
    before = everything(learner)
    assert not learner.load(tmp_path / "none")
    assert everything(learner) == before


def test_the_random_state_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(5)
    fresh().save(tmp_path)
    expected = torch.rand(3)
    torch.manual_seed(6)
    fresh().load(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_the_last_two_steps_are_kept_and_a_step_can_be_saved_again(tmp_path: Path) -> None:
    learner = fresh()
    for number in range(4):
        do_step(learner, number)
        learner.save(tmp_path)
    learner.save(tmp_path)
    assert checkpoint_steps(tmp_path) == [3, 4]
    assert sorted(os.listdir(tmp_path)) == ["step-00000003", "step-00000004"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    learner = fresh()
    for number in range(2):
        do_step(learner, number)
        learner.save(tmp_path)
    return tmp_path


def damage_flip(step: Path) -> None:
    (path,) = (step / "tensors").glob("*.distcp")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_cut(step: Path) -> None:
    (path,) = (step / "tensors").glob("*.distcp")
    os.truncate(path, 100)


DAMAGES = {
    "flipped bit": damage_flip,
    "cut off": damage_cut,
    "no tensors": lambda step: shutil.rmtree(step / "tensors"),
    "no metadata": lambda step: (step / "tensors" / ".metadata").unlink(),
    "a file too many": lambda step: (step / "tensors" / "extra").write_bytes(b"x"),
    "no manifest": lambda step: (step / "learner.json").unlink(),
    "half a manifest": lambda step: os.truncate(step / "learner.json", 20),
    "binary manifest": lambda step: (step / "learner.json").write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_one_clear_line(saved: Path, damage: str) -> None:
    newest = saved / "step-00000002"
    DAMAGES[damage](newest)
    learner = fresh()
    before = everything(learner)
    with pytest.raises(ModelError, match="step-00000002 is damaged") as refused:
        learner.load(saved)
    assert "\n" not in str(refused.value)
    assert f"delete {newest}" in str(refused.value)
    assert everything(learner) == before
    shutil.rmtree(newest)  # as the message says
    assert learner.load(saved)
    assert learner.step == 1


def test_a_checkpoint_of_another_model_is_refused(saved: Path) -> None:
    other = Learner(learner_config(), dataclasses.replace(TINY, num_layers=1), 0)
    with pytest.raises(ModelError, match="of another model"):
        other.load(saved)


def in_a_fork(action: Callable[[], None]) -> int:
    """Run in a child that shares nothing afterwards; returns its exit code. The child only saves: no training there."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except OSError:
            os._exit(7)
        except BaseException:
            os._exit(8)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("moment", ["before", "after", "same step"])
def test_killed_while_saving_it_resumes_from_a_whole_step(saved: Path, moment: str) -> None:
    learner = fresh()
    learner.load(saved)
    if moment != "same step":
        do_step(learner, 2)
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if Path(source).parent != saved:
            return real(source, target)  # the library's own, inside the new step
        if moment != "before":  # for the same step: the standing one is aside, its replacement not yet there
            real(source, target)
        os._exit(9)

    def save() -> None:
        os.rename = rename  # type: ignore[assignment]
        learner.save(saved)

    assert in_a_fork(save) == 9
    again = fresh()
    assert again.load(saved)
    assert again.step == (3 if moment == "after" else 2)
    assert not [name for name in os.listdir(saved) if name.startswith(".")]


def test_a_full_disk_is_an_os_error_and_leaves_the_earlier_steps(saved: Path) -> None:
    learner = fresh()
    learner.load(saved)
    do_step(learner, 2)

    def save() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        learner.save(saved)

    assert in_a_fork(save) == 7
    assert sorted(os.listdir(saved)) == ["step-00000001", "step-00000002"]
    again = fresh()
    assert again.load(saved)
    assert again.step == 2
