"""`tidemill weights …` as a user calls it."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tidemill.core.records import Array
from tidemill.core.seams import Weights
from tidemill.deltas.store import FolderStore
from tidemill.run.cli import main

torch = pytest.importorskip("torch")


def tidemill(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(words)
    return int(end.value.code or 0)


def policy(folder: Path, scale: float) -> Path:
    """A folder in two files, of three dtypes, with a configuration."""
    from safetensors.torch import save_file

    folder.mkdir()
    base = torch.linspace(-1, 1, 600).reshape(20, 30)
    moved = base * torch.where(torch.arange(600).reshape(20, 30) % 29 == 0, scale, 1.0)
    save_file({"b": moved.to(torch.bfloat16), "ids": torch.arange(5)}, folder / "model-1.safetensors")
    save_file({"a": torch.full((3,), scale), "c": torch.zeros(0, 4)}, folder / "model-2.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def tensors_of(folder: Path) -> dict[str, "torch.Tensor"]:
    from safetensors.torch import load_file

    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)], ids=["differential", "overwrite"])
def test_a_delta_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str], overwrite: tuple[str, ...]) -> None:
    one, two = policy(tmp_path / "one", 1.0), policy(tmp_path / "two", 1.1)
    delta, out = tmp_path / "deltas" / "two.delta", tmp_path / "out"
    assert tidemill("weights", "diff", str(one), str(two), "-o", str(delta), *overwrite, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bytes"] == delta.stat().st_size
    assert {row["name"] for row in told["tensors"]} == {"a", "b", "c", "ids"}
    assert tidemill("weights", "apply", str(one), str(delta), "-o", str(out)) == 0
    wanted, got = tensors_of(two), tensors_of(out)
    assert wanted.keys() == got.keys()
    for name, tensor in wanted.items():
        assert tensor.dtype == got[name].dtype and torch.equal(tensor, got[name])
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert list(delta.parent.iterdir()) == [delta]


def test_what_cannot_be_done_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = policy(tmp_path / "one", 1.0), policy(tmp_path / "two", 1.1)
    delta = tmp_path / "two.delta"
    assert tidemill("weights", "diff", str(one), str(two), "-o", str(delta)) == 0
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = [
        (("diff", str(one), str(empty), "-o", str(tmp_path / "x")), "holds no .safetensors"),
        (("apply", str(two), str(delta), "-o", str(tmp_path / "x")), "not the base"),
        (("apply", str(one), str(delta), "-o", str(one)), "is not empty"),
        (("apply", str(one), str(one / "config.json"), "-o", str(tmp_path / "x")), "ends too early"),
        (("log", str(empty)), "is no weight store"),
        (("verify", str(empty)), "is no weight store"),
    ]
    for words, message in cases:
        capsys.readouterr()
        assert tidemill("weights", *words) in (1, 2)
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1, err
    assert not (tmp_path / "x").exists()
    (one / "model-1.safetensors").write_bytes((one / "model-1.safetensors").read_bytes()[:-1])
    assert tidemill("weights", "diff", str(one), str(two), "-o", str(delta)) == 1
    assert "cut off" in capsys.readouterr().err


def test_a_store_is_shown_verified_and_pulled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = FolderStore(tmp_path / "store")
    words = np.arange(4000, dtype=np.uint16)
    for version in range(3):
        words = np.where(np.arange(4000) % 100 == version, words + 1, words).astype(np.uint16)
        store.publish(
            Weights(config={}, tokenizer={}, tensors={"w": Array.of(words, "uint16")}),
            version=version, batch=f"{version}", step=10 * version, run_id="run",
        )  # fmt: skip
    folder = str(tmp_path / "store")
    assert tidemill("weights", "log", folder, "--moved", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["version"], row["kind"], row["step"]) for row in rows] == [
        (0, "full", 0),
        (1, "delta", 10),
        (2, "delta", 20),
    ]
    assert [row["moved"] for row in rows] == [None, 0.01, 0.01]
    assert tidemill("weights", "log", folder) == 0
    assert "1.000 %" not in capsys.readouterr().out
    assert tidemill("weights", "verify", folder) == 0
    assert "3 of 3 versions" in capsys.readouterr().out
    assert tidemill("weights", "pull", folder, "1", "-o", str(tmp_path / "one")) == 0
    assert tidemill("weights", "pull", folder, "-o", str(tmp_path / "two")) == 0
    two = tensors_of(tmp_path / "two")["w"].view(torch.uint16).numpy()
    assert np.array_equal(two, words)
    blob = store.manifest(1).files["model.delta"]
    (store.folder / "blobs" / blob[:2] / blob[2:]).unlink()
    capsys.readouterr()
    assert tidemill("weights", "verify", folder) == 1
    told = capsys.readouterr()
    assert "1 of 3 versions" in told.out and "version 1" in told.err


def test_collected_versions_are_no_damaged_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = FolderStore(tmp_path / "store", keyframe_every=2)
    for version in range(6):
        words = np.arange(4000) + (np.arange(4000) < 40 * version)
        store.publish(
            Weights(config={}, tokenizer={}, tensors={"w": Array.of(words, "uint16")}),
            version=version, batch=f"{version}", step=version, run_id="run",
        )  # fmt: skip
    for path in (store.folder / "blobs").glob("*/*"):
        os.utime(path, (0, 0))
    folder = str(store.folder)
    assert tidemill("weights", "collect", folder, "--keep", "1", "--pin", "0", "--dry-run") == 0
    told = capsys.readouterr().out
    assert "3 payloads" in told and "would be deleted" in told and "from 4 on" in told
    assert tidemill("weights", "verify", folder) == 0
    assert "6 of 6 versions are whole\n" in capsys.readouterr().out
    assert tidemill("weights", "collect", folder, "--keep", "1", "--pin", "0") == 0
    assert tidemill("weights", "verify", folder) == 0
    assert "3 of 6 versions are whole, 3 were collected" in capsys.readouterr().out
    assert tidemill("weights", "log", folder, "--moved", "--json") == 0
    assert [row["moved"] for row in json.loads(capsys.readouterr().out)] == [None] * 5 + [0.01]
    blob = store.manifest(5).files["model.delta"]
    (store.folder / "blobs" / blob[:2] / blob[2:]).unlink()
    assert tidemill("weights", "verify", folder) == 1
    told = capsys.readouterr()
    assert "2 of 6 versions are whole, 3 were collected" in told.out and "version 5" in told.err
    assert tidemill("weights", "collect", "memory://none", "--keep", "1") == 2
    assert "is no folder" in capsys.readouterr().err
