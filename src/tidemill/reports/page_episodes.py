"""Episodes to be read: what the policy saw, what it called, what came back, and what the grader said.

All of it may have been written by the policy: every piece is escaped, and cut where it is endless.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from html import escape

from tidemill.core.errors import BlobError
from tidemill.core.journal import AttemptRow
from tidemill.core.records import Episode, Step
from tidemill.reports.rundata import RunData
from tidemill.text.glossary import Glossary
from tidemill.text.tokenizer import SPECIAL_TOKENS, Tokenizer

MAX_CHARACTERS = 6000
"""Of one piece of text on the page."""
PASSED = ("passed", "ok")
"""How the answer of the `test` tool begins where the shown checks pass."""

Originals = Callable[[Episode], Mapping[str, bytes]]


def episodes(data: RunData, originals: Originals | None) -> str:
    """The chosen episodes as folded cards, the first one open."""
    tokenizer = _tokenizer(data)
    chosen = choose(data)
    if not chosen:
        return '<p class="nothing">no episode has finished yet</p>'
    return "".join(
        _card(title, row, episode, tokenizer=tokenizer, originals=originals, is_open=index == 0)
        for index, (title, row, episode) in enumerate(chosen)
    )


def choose(data: RunData) -> list[tuple[str, AttemptRow, Episode]]:
    """Five that tell the run's story: the first solved, a late solved one, a failed one, one that corrected itself,
    one that spans two versions; where a kind is not there, it is left out."""
    chosen: list[tuple[str, AttemptRow, Episode]] = []
    taken: set[str] = set()
    wanted: list[tuple[str, list[AttemptRow], Callable[[Episode], bool]]] = [
        ("The first one solved", data.finished, is_solved),
        ("Solved late in the run", data.finished[::-1], is_solved),
        ("Corrected itself", data.finished[::-1], corrected_itself),
        ("Failed", data.finished[len(data.finished) // 2 :], lambda episode: not is_solved(episode)),
        ("Spans two versions of the policy", data.finished[::-1], spans_versions),
    ]
    for title, rows, fits in wanted:
        for row in rows:
            if row.id in taken:
                continue
            episode = data.episode(row.episode)
            if episode is not None and episode.segments and fits(episode):
                chosen.append((title, row, episode))
                taken.add(row.id)
                break
    return chosen


def steps_of(episode: Episode) -> list[Step]:
    return [step for segment in episode.segments for step in segment.steps]


def is_solved(episode: Episode) -> bool:
    return episode.measures.get("solved", 0.0) > 0


def corrected_itself(episode: Episode) -> bool:
    """Solved by another edit than the first one that was accepted."""
    edits = [
        call
        for step in steps_of(episode)
        for call, seen in zip(step.calls, step.observations, strict=False)  # a turn may hold malformed calls as well
        if call.name == "edit" and seen.error is None
    ]
    return is_solved(episode) and len(edits) >= 2


def spans_versions(episode: Episode) -> bool:
    seen = {int(version) for step in steps_of(episode) for version in step.generation.versions.numpy()}
    return len(seen) >= 2


def _tokenizer(data: RunData) -> Tokenizer | None:
    """That of the first version; None where none was published, or it is of another kind."""
    content = data.version_file(0, "tokenizer.json")
    try:
        return None if content is None else Tokenizer.from_files({"tokenizer.json": content})
    except (ValueError, KeyError):
        return None


def _card(
    title: str,
    row: AttemptRow,
    episode: Episode,
    *,
    tokenizer: Tokenizer | None,
    originals: Originals | None,
    is_open: bool,
) -> str:
    solved = is_solved(episode)
    badge = f'<span class="badge {"good" if solved else "bad"}">{"solved" if solved else "not solved"}</span>'
    outcome = f'<span class="badge plain">{escape(episode.outcome.replace("_", " "))}</span>'
    steps = steps_of(episode)
    versions = sorted({int(v) for step in steps for v in step.generation.versions.numpy()})
    told = f"version {versions[0]}" if len(versions) == 1 else f"versions {', '.join(map(str, versions))}"
    sampled = sum(step.generation.token_ids.shape[0] for step in steps)
    facts = (
        f"Task {episode.task_id}, attempt {row.id}. Sampled from {told}: {sampled} tokens in {len(steps)} turns. "
        f"Reward {episode.reward:.3g} = "
        + " + ".join(f"{value:.3g} {name}" for name, value in episode.rewards.items())
        + "."
    )
    turns = "".join(_turn(index, step, tokenizer) for index, step in enumerate(steps))
    opening = _shown(steps[0], episode.segments[0].glossary, tokenizer)
    summary = f"<summary><strong>{escape(title)}</strong>{badge}{outcome}</summary>"
    return (
        f'<details class="episode"{" open" if is_open else ""}>{summary}'
        f'<div class="story"><p class="facts">{escape(facts)}</p>'
        f'<p class="who">What the policy was shown</p>{_pre(opening)}{turns}'
        f"{_verdict(episode)}{_patch(episode, originals)}</div></details>"
    )


def _shown(step: Step, glossary: Sequence[str], tokenizer: Tokenizer | None) -> str:
    ids = step.generation.prompt_ids.numpy().tolist()
    if tokenizer is None:
        return f"({len(ids)} tokens; the run's tokenizer is not there to decode them)"
    text = Glossary(tokenizer, glossary).decode(ids)
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "")
    return text.strip("\n")


def _turn(index: int, step: Step, tokenizer: Tokenizer | None) -> str:
    errors = [seen.error for seen in step.observations if seen.error is not None]
    passed = any(
        call.name == "test" and seen.error is None and seen.text.lstrip().startswith(PASSED)
        for call, seen in zip(step.calls, step.observations, strict=False)  # a turn may hold malformed calls as well
    )
    css = "error" if errors else "passed" if passed else ""
    versions = sorted({int(version) for version in step.generation.versions.numpy()})
    who = f"Turn {index + 1}, version {' → '.join(map(str, versions))}, {step.generation.token_ids.shape[0]} tokens"
    if len(step.generation.logprobs.numpy()):
        chance = float(step.generation.logprobs.numpy().mean())
        who += f", mean logprob {chance:.2f}"
    said = "".join(_call(call.name, call.arguments) for call in step.calls) or (
        f'<p class="call">said, and it was no call: <code>{escape(_cut(step.text)) or "nothing"}</code></p>'
    )
    seen = "".join(_observation(one.text, one.error) for one in step.observations)
    return f'<div class="turn {css}"><p class="who">{escape(who)}</p>{said}{seen}</div>'


def _call(name: str, arguments: Mapping[str, str | int]) -> str:
    """Values are quoted: the spaces of an edit matter."""
    tool = f'<code class="tool">{escape(name)}</code>'
    if name == "edit" and set(arguments) == {"line", "old", "new"}:
        old, new = (escape(_cut(repr(arguments[key]))) for key in ("old", "new"))
        line = f"line {escape(str(arguments['line']))}"
        return f'<p class="call">{tool} {line}: <code class="del">{old}</code> → <code class="add">{new}</code></p>'
    values = " ".join(f"<code>{escape(f'{key}: {_cut(repr(value))}')}</code>" for key, value in arguments.items())
    return f'<p class="call">{tool} {values}</p>'


def _observation(text: str, error: str | None) -> str:
    label = f'<p class="who">error: {escape(error)}</p>' if error else ""
    return label + (_pre(text) if text.strip() else "")


def _verdict(episode: Episode) -> str:
    if not episode.verdict:
        return ""
    statuses = list(episode.verdict.items())
    good = sum(status == "passed" for _, status in statuses)
    failed = [f"{name}: {status}" for name, status in statuses if status != "passed"]
    text = f"The grader, in a fresh sandbox: {good} of {len(statuses)} hidden checks passed."
    return f'<p class="facts">{escape(text)}</p>' + (_pre("\n".join(failed[:8])) if failed else "")


def _patch(episode: Episode, originals: Originals | None) -> str:
    if not episode.patch:
        return '<p class="facts">The file was left as it was.</p>'
    before: Mapping[str, bytes] = {}
    if originals is not None:
        try:
            before = originals(episode)
        except (BlobError, KeyError, OSError):
            before = {}
    parts = []
    for path, content in sorted(episode.patch.items()):
        if path in before:
            lines = difflib.unified_diff(
                before[path].decode("utf-8", "replace").splitlines(),
                content.decode("utf-8", "replace").splitlines(),
                f"a/{path}",
                f"b/{path}",
                lineterm="",
                n=3,
            )
            parts.append(_diff(_cut("\n".join(lines)).splitlines()))
        else:
            parts.append(f'<p class="facts">{escape(path)} was changed ({len(content)} bytes), by these edits:</p>')
            parts.append(_diff(_edits(episode)))
    return f'<p class="who">The patch</p>{"".join(parts)}'


def _edits(episode: Episode) -> list[str]:
    """Accepted edits as removed and added lines: what can be told of a patch without the file it began from."""
    lines: list[str] = []
    for step in steps_of(episode):
        for call, seen in zip(step.calls, step.observations, strict=False):  # a turn may hold malformed calls as well
            if call.name == "edit" and seen.error is None:
                lines.append(f"@@ line {call.arguments.get('line', '?')} of the window @@")
                lines += [f"-{part}" for part in str(call.arguments.get("old", "")).split("\n")]
                lines += [f"+{part}" for part in str(call.arguments.get("new", "")).split("\n")]
    return lines


def _diff(lines: Sequence[str]) -> str:
    classes = {"+": "add", "-": "del", "@": "hunk"}
    rows = []
    for line in lines:
        css = "hunk" if line.startswith(("+++", "---")) else classes.get(line[:1])
        rows.append(f'<span class="{css}">{escape(line)}</span>' if css else escape(line) + "\n")
    return f"<pre>{''.join(rows)}</pre>"


def _pre(text: str) -> str:
    return f"<pre>{escape(_cut(text))}</pre>"


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"
