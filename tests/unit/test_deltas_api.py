"""Publish, pull, follow: what another trainer relies on."""

import threading
from pathlib import Path

import numpy as np
import pytest

from tidemill.core.errors import StoreError
from tidemill.deltas.api import follow, publish, pull
from tidemill.deltas.store import FolderStore

torch = pytest.importorskip("torch")


def test_float32_masters_arrive_as_their_bfloat16_image(tmp_path: Path) -> None:
    model = torch.nn.Linear(30, 20)
    store = FolderStore(tmp_path)
    for step in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.001 * torch.randn_like(parameter))
        publish(store, model.state_dict(), step=step)
    version = pull(tmp_path)
    assert (version.manifest.version, version.manifest.kind, version.manifest.step) == (2, "delta", 2)
    for name, tensor in version.tensors_as_torch().items():
        assert torch.equal(tensor, model.state_dict()[name].to(torch.bfloat16))
    assert pull(store, 0).manifest.kind == "full"


def test_numpy_masters_round_as_torch_does(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    publish(tmp_path, {"w": values}, step=0)
    assert torch.equal(pull(tmp_path).tensors_as_torch()["w"], torch.from_numpy(values).to(torch.bfloat16))
    with pytest.raises(StoreError, match="w is float64"):
        publish(tmp_path, {"w": np.zeros(1000)}, step=1)
    with pytest.raises(StoreError, match=r"ids is torch\.int64"):
        publish(tmp_path, {"ids": torch.arange(3)}, step=1)


def test_a_follower_gets_the_newest_and_outlives_faults(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no version yet"):
        pull(tmp_path)
    store, stop, faults = FolderStore(tmp_path), threading.Event(), list[Exception]()
    words = np.arange(3000, dtype=np.uint16)
    seen = []
    followed = follow(tmp_path, stop=stop, poll_s=0.01, on_fault=faults.append)

    def publish_steps(*steps: int) -> None:
        for step in steps:
            words[step] += 1
            publish(store, {"w": words}, step=step)

    publish_steps(0, 1)
    seen.append(next(followed))
    publish_steps(2, 3, 4)
    blob = store.manifest(4).files["model.delta"]
    path = tmp_path / "blobs" / blob[:2] / blob[2:]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    timer = threading.Timer(0.2, lambda: path.write_bytes(whole))
    timer.start()
    seen.append(next(followed))
    timer.join()
    stop.set()
    assert next(followed, None) is None
    assert [version.manifest.version for version in seen] == [1, 4]
    assert np.array_equal(seen[-1].tensors["w"], words)
    assert len(faults) == 1 and "damaged" in str(faults[0])
