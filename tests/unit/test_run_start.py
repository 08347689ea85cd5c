"""A run that starts from another one's version 0."""

from pathlib import Path

import msgspec
import pytest

from support.mend_task import mend_world
from tidemill.core.errors import UsageError
from tidemill.core.records import Split, encode
from tidemill.core.seams import Weights
from tidemill.deltas.store import FolderStore
from tidemill.models.hf import save_folder, weights_of
from tidemill.models.transformer import init_model
from tidemill.run.config import (
    DemonstrationConfig,
    EvaluationConfig,
    PolicyConfig,
    PretrainingConfig,
    Recipe,
    ReinforcementConfig,
)
from tidemill.run.folder import RunFolder
from tidemill.run.services.context import corpus_file, model_config, tokenizer_folder
from tidemill.run.start import find_start, refuse_leak, start_weights, take_over
from tidemill.sandboxes.layers import installed_layer
from tidemill.tasks.folder import TaskSet
from tidemill.text.tokenizer import Tokenizer

POLICY = PolicyConfig(
    vocab_size=512, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, num_experts=2, expert_size=8
)


def recipe(policy: PolicyConfig = POLICY) -> Recipe:
    return Recipe(
        name="r",
        tasks="t",
        policy=policy,
        pretraining=PretrainingConfig(num_steps=0),
        demonstrations=DemonstrationConfig(num_episodes=0, num_steps=0),
        rl=ReinforcementConfig(num_updates=0),
        evaluation=EvaluationConfig(every=1),
    )


def folder(path: Path) -> RunFolder:
    made = RunFolder(path)
    made.prepare(recipe="d" * 64, recipe_name="r")
    return made


def published(path: Path) -> tuple[RunFolder, Weights]:
    """A run with a version 0 and a corpus."""
    other = folder(path)
    tokenizer = Tokenizer.train(["def f(x): return x + 1"] * 3, 512)
    weights = weights_of(init_model(model_config(POLICY, tokenizer.vocab_size), 3), tokenizer.files())
    FolderStore(other.store).publish(weights, version=0, batch=None, step=9, run_id="other")
    corpus_file(other).write_bytes(b"corpus")
    return other, weights


def test_policy_tokenizer_and_corpus_are_taken_over_bit_for_bit(tmp_path: Path) -> None:
    other, weights = published(tmp_path / "other")
    mine = folder(tmp_path / "mine")
    take_over(mine, recipe(), other.path.resolve())
    assert encode(start_weights(mine)) == encode(weights)
    assert Tokenizer.load(tokenizer_folder(mine)).files() == weights.tokenizer
    assert corpus_file(mine).read_bytes() == b"corpus"


def test_a_copy_that_was_killed_half_way_is_done_again(tmp_path: Path) -> None:
    other, weights = published(tmp_path / "other")
    mine = folder(tmp_path / "mine")
    take_over(mine, recipe(), other.path.resolve())
    tokenizer_folder(mine).rename(tmp_path / "elsewhere")  # as if it had not come so far
    take_over(mine, recipe(), other.path.resolve())
    assert encode(start_weights(mine)) == encode(weights)


def test_another_shape_is_named(tmp_path: Path) -> None:
    other, _ = published(tmp_path / "other")
    wide = PolicyConfig(**{**vars(POLICY), "hidden_size": 32})
    with pytest.raises(UsageError, match=r"hidden_size 16, not 32") as caught:
        take_over(folder(tmp_path / "mine"), recipe(wide), other.path)
    assert "\n" not in str(caught.value)


def test_a_run_that_has_published_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no version 0"):
        take_over(folder(tmp_path / "mine"), recipe(), folder(tmp_path / "other").path)


def test_a_run_cannot_start_from_itself(tmp_path: Path) -> None:
    mine, _ = published(tmp_path / "mine")
    with pytest.raises(UsageError, match="own folder"):
        take_over(mine, recipe(), mine.path.resolve())


def test_a_policy_in_the_hugging_face_layout_will_do(tmp_path: Path) -> None:
    _, weights = published(tmp_path / "other")
    save_folder(weights, tmp_path / "policy")
    mine = folder(tmp_path / "mine")
    take_over(mine, recipe(), tmp_path / "policy")
    assert encode(start_weights(mine).tensors) == encode(weights.tensors)
    assert not corpus_file(mine).exists()


def test_where_to_start_from_is_looked_up_here_and_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    assert find_start("policy", tmp_path) == (tmp_path / "policy").resolve()
    with pytest.raises(UsageError, match="start_from is nowhere"):
        find_start("nowhere", tmp_path)


def test_a_run_that_trained_on_what_is_held_out_here_is_refused(tmp_path: Path) -> None:
    def tasks(split: Split) -> TaskSet:
        task = msgspec.structs.replace(
            mend_world(layer=installed_layer(["pytest"])).task, split=split, data={"path": "pkg/module.py"}
        )
        return TaskSet(tmp_path, [task], [])

    refuse_leak(tasks("train"), tasks("train"))
    refuse_leak(tasks("heldout"), tasks("dev"))
    with pytest.raises(UsageError, match=r"trained on pkg/module\.py"):
        refuse_leak(tasks("heldout"), tasks("train"))
