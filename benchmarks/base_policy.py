"""How well a policy copies and mends before any RL: `python benchmarks/base_policy.py POLICY_DIR [NUM]`.

Teacher-forced, on functions of the development modules of `tasksets/mend-v1`, which nothing trains on, one fault each:

    copied    share of the tokens of a shown line that are the likeliest, when it is repeated after its number
    right     share of repairs of which the likeliest token is right at each step: line, old text, new text, all of it
    chance    mean probability of the whole repair at temperature 1: free, and under the grammar of calls
"""

import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tidemill.core.records import Observation, ToolCall
from tidemill.core.seams import Spans
from tidemill.episodes.mend import TOOLS
from tidemill.models.hf import load_folder, model_of
from tidemill.models.transformer import Transformer
from tidemill.run.pretraining import MAX_CHARS, MAX_LINES, opening
from tidemill.tasks.corpora import CodeFunction, functions_of
from tidemill.tasks.denoise import Repair, repairs
from tidemill.tasks.layout import module_name
from tidemill.tasks.manifest import load_manifest, split_of
from tidemill.tasks.materialize import fetch_materials
from tidemill.text.compact import CompactRenderer
from tidemill.text.tokenizer import ARG, Tokenizer
from tidemill.text.windows import numbered

MANIFEST = Path(__file__).parents[1] / "tasksets/mend-v1/manifest.json"


def development_functions() -> list[CodeFunction]:
    manifest = load_manifest(MANIFEST)
    return [
        function
        for _, layout in fetch_materials(manifest.packages)
        for path, text in layout.sources.items()
        if split_of(module_name(path), manifest.split_seed) == "dev"
        for function in functions_of(text, path, max_lines=MAX_LINES, max_chars=MAX_CHARS)
    ]


def logits_of(model: Transformer, context: list[int], said: list[int]) -> Tensor:
    """float32 [len(said), V]: before each token that is said."""
    ids = torch.tensor([*context, *said])
    hidden = model.forward_packed(ids, torch.arange(len(ids)), [0, len(ids)]).hidden_TD
    return model.logits(hidden[len(context) - 1 : -1]).float()


def copied(model: Transformer, renderer: CompactRenderer, repair: Repair, rng: random.Random) -> list[bool]:
    lines = repair.faulty.split("\n")
    number = rng.randrange(len(lines))
    context = renderer.open(TOOLS, opening(repair, "failed: assert"))[:-1]
    seen = renderer.observe([Observation(call_id="", text=numbered([lines[number]], number + 1))], 10**6)[:-1]
    head = 3  # the mark, the number, the bar
    likeliest = logits_of(model, [*context, *seen[:head]], seen[head:]).argmax(-1)
    return (likeliest == torch.tensor(seen[head:])).tolist()


def mended(
    model: Transformer, renderer: CompactRenderer, tokenizer: Tokenizer, repair: Repair
) -> tuple[list[bool], list[float]]:
    """Right: line, old, new, all. Chance: free, under the grammar."""
    context = renderer.open(TOOLS, opening(repair, "failed: assert"))
    ((line, old, new),) = repair.edits
    said = renderer.say([ToolCall(id="", name="edit", arguments={"line": line, "old": old, "new": new})])
    logits = logits_of(model, context, said)
    right = (logits.argmax(-1) == torch.tensor(said)).tolist()
    first, second, third = [place for place, id_ in enumerate(said) if id_ == tokenizer.special(ARG)]
    parts = [
        all(right[first + 1 : second + 1]),
        all(right[second + 1 : third + 1]),
        all(right[third + 1 :]),
        all(right),
    ]
    free = float(logits.log_softmax(-1).gather(1, torch.tensor(said).unsqueeze(1)).sum().exp())
    shown = {number: text for number, text in enumerate(repair.faulty.split("\n"), 1) if text.strip()}
    grammar = renderer.grammar(TOOLS, Spans(tool="edit", lines=shown))
    state, narrow = grammar.start, 0.0
    for row, id_ in zip(logits, said, strict=True):
        allowed = grammar.allowed(state)
        scores = row.log_softmax(-1) if allowed is None else row[allowed].log_softmax(-1)
        try:
            state = grammar.next(state, id_)
        except ValueError:  # the text to replace is cut into other tokens than the line
            return parts, [free, 0.0]
        narrow += float(scores[id_ if allowed is None else allowed.index(id_)])
    return parts, [free, float(np.exp(narrow))]


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    weights = load_folder(Path(sys.argv[1]))
    num = int(sys.argv[2]) if len(sys.argv) > 2 else 400
    model, tokenizer = model_of(weights), Tokenizer.from_files(weights.tokenizer)
    renderer = CompactRenderer(tokenizer)
    found = [repair for repair in repairs(development_functions(), seed=5, passes=3) if len(repair.edits) == 1]
    rng = random.Random(0)
    chosen = rng.sample(found, min(num, len(found)))
    tokens = [hit for repair in chosen for hit in copied(model, renderer, repair, rng)]
    parts, chances = zip(*(mended(model, renderer, tokenizer, repair) for repair in chosen), strict=True)
    line, old, new, whole = np.mean(parts, 0)
    free, narrow = np.mean(chances, 0)
    print(f"{len(chosen)} repairs, {len(tokens)} tokens of lines")
    print(f"copied  {np.mean(tokens):.3f}")
    print(f"right   line {line:.3f}, old {old:.3f}, new {new:.3f}, all {whole:.3f}")
    print(f"chance  free {free:.4f}, under the grammar {narrow:.4f}")


if __name__ == "__main__":
    main()
