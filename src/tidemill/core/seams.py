"""The seams: what a stage asks of another, few methods each. `tests/contract` runs one suite over every implementation.

| seam         | real                            | shipped fake             | asked by                        |
|--------------|---------------------------------|--------------------------|---------------------------------|
| Blobs        | core.blobs.FolderBlobs          | core.blobs.MemoryBlobs   | everyone                        |
| Engine       | engines (embedded, HTTP client) | episodes.scripted        | the harness                     |
| SandboxTier  | sandboxes.namespaces            | sandboxes.local          | environments, grader, synthesis |
| Environment  | episodes.mend                   | recipes                  | the harness                     |
| Coordinator  | batches.client (HTTP)           | batches.coordinator      | workers, learner                |
| Store        | deltas.store.FolderStore        | deltas.store.MemoryStore | learner, engines, evaluator     |
| Vault        | tasks.vault.FolderVault         | tasks.vault.MemoryVault  | the grader                      |
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tidemill.core.grammar import Grammar
from tidemill.core.records import (
    Array,
    Attempt,
    AttemptResult,
    Batch,
    Layer,
    Observation,
    Outcome,
    Record,
    Snapshot,
    Stage,
    StopReason,
    Task,
    ToolCall,
    Tree,
    Verifier,
)


class Blobs(Protocol):
    """Content-addressed payloads."""

    def put(self, data: bytes) -> str:
        """Store, durably; returns the sha256 in hex. Storing the same bytes again changes nothing."""
        ...

    def get(self, name: str) -> bytes:
        """Raises `BlobError` where the blob is missing, or where its bytes do not have that name."""
        ...

    def has(self, name: str) -> bool: ...


# --- engine --------------------------------------------------------------------------------------------------


class GenerationRequest(Record, frozen=True):
    """Token ids in; the engine never sees text."""

    session: str
    """Requests of one session extend each other; a hint for KV reuse, never needed for the result."""
    prompt_ids: list[int]
    """All of the segment so far."""
    max_tokens: int
    stop_ids: list[int]
    temperature: float = 1.0
    """0: greedy; logprobs are then those at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    allowed_ids: list[int] | None = None
    """Where given, only these ids are sampled; logprobs are under that support, and the support is recorded."""
    grammar: Grammar | None = None
    """Where given, the continuation follows it; supports are recorded as above. Not together with `allowed_ids`."""
    seed: int = 0


class Chunk(Record, frozen=True):
    """A piece of a stream. All but the last have `stop_reason` None; the last may bring no token."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    supports: list[list[int]] | None = None
    """A support set per token, where top-p, top-k, `allowed_ids` or a grammar was used; an empty one: any id."""
    stop_reason: StopReason | None = None
    row_start: int = 0
    """Last chunk only: the segment position of row 0 below; the rows end at the last token that was fed."""
    kv_versions: Array | None = None
    """int32 [R]"""
    routes: Array | None = None
    """uint16 [R, L, k]"""


class EngineStatus(Record, frozen=True):
    name: str
    version: int
    stage: Literal["loading", "ready", "swapping"]
    running: int
    waiting: int
    prefill_tokens: int
    """Positions computed as prompt, since the start."""
    sampled_tokens: int
    num_swaps: int
    last_swap_s: dict[str, float]
    """Split timings: `fetch`, `prepare`, `pause`."""
    refused_loads: int


class Engine(Protocol):
    """A policy at some version, that may move to the next one in the middle of a generation."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Stream a continuation. Closing the iterator aborts it.

        Raises `RequestRefused` where it can never be served, `EngineUnavailable` where the engine went away: resume
        by asking again with the received ids appended to the prompt.
        """
        ...

    async def status(self) -> EngineStatus: ...

    async def close(self) -> None: ...


# --- sandbox -------------------------------------------------------------------------------------------------

ExecStatus = Literal["ok", "timeout", "oom", "disk_full", "output_limit", "killed"]


class ExecResult(Record, frozen=True):
    """Of one command. Untrusted: the policy may have written all of it."""

    status: ExecStatus
    """`ok` means that it ended by itself, whatever its exit code."""
    exit_code: int
    stdout: bytes
    stderr: bytes
    wall_s: float
    cpu_s: float


class SandboxLimits(Record, frozen=True):
    memory_bytes: int = 512 << 20
    max_processes: int = 64
    num_cpus: float = 1.0
    disk_bytes: int = 128 << 20
    """Of all places that can be written, together."""
    max_inodes: int = 20_000
    max_open_files: int = 512
    output_bytes: int = 1 << 20
    """Of one command."""


class Sandbox(Protocol):
    """One live sandbox: single use, one agent process inside that takes commands over a pipe."""

    tier: str

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Run a command in `/workspace`. Raises `SandboxFault` where the sandbox itself is gone."""
        ...

    async def python(
        self, source: str, *, timeout_s: float, preload: Sequence[str] = (), stdin: bytes = b""
    ) -> ExecResult:
        """Run Python source in a fork of the live agent: `__name__` is `__main__`, `/workspace` is the working folder.

        `preload` names modules of the layer (never of the workspace) that the agent imports once, before it forks.
        """
        ...

    async def write(self, files: Tree) -> None:
        """Put files into the workspace."""
        ...

    async def collect(self, paths: Sequence[str], *, max_bytes: int) -> dict[str, bytes]:
        """Regular files under exactly these relative paths, without running anything of the workspace and without
        following links; a missing path, a link or an oversized file is left out."""
        ...

    @property
    def cpu_s(self) -> float:
        """CPU seconds used so far by everything inside."""
        ...

    async def close(self) -> None:
        """Nothing of it is left when this returns. Idempotent."""
        ...


class SandboxTier(Protocol):
    """Opens sandboxes of one tier."""

    tier: str

    async def open(self, tree: Tree, layer: Layer, limits: SandboxLimits) -> Sandbox:
        """A fresh sandbox with `tree` as `/workspace`. Raises `SandboxUnavailable`, `SandboxFault`."""
        ...

    def reap(self) -> int:
        """Remove what earlier, killed owners of the same run label have left; returns how many things it removed."""
        ...

    async def close(self) -> None: ...


# --- environment ---------------------------------------------------------------------------------------------


class ToolSpec(Record, frozen=True):
    """A tool as the policy sees it. `parameters` keeps its order: the compact grammar is positional."""

    name: str
    description: str
    parameters: dict[str, Literal["string", "integer"]]
    required: tuple[str, ...]


class Feedback(Record, frozen=True):
    """What a tool call brought."""

    text: str
    error: str | None = None
    ends: Outcome | None = None
    """The episode ends here, with this outcome (`submitted` or `flagged_impossible`)."""


class Score(Record, frozen=True):
    """What an episode earned."""

    rewards: dict[str, float]
    """Named parts, already weighted; the reward is their sum."""
    measures: dict[str, float] = {}
    verdict: dict[str, str] = {}
    patch: dict[str, bytes] = {}
    cpu_s: dict[str, float] = {}


class Spans(NamedTuple):
    """A tool whose first arguments are a line's number and a text that stands on it; what else it takes is free."""

    tool: str
    lines: Mapping[int, str]
    """Number → text, of the lines that may be named: at least one, none of them empty."""


@runtime_checkable
class Pointing(Protocol):
    """What an environment may offer beside the rest, for constrained decoding."""

    def spans(self) -> Spans | None:
        """What a call may point at now; None: nothing."""
        ...


class Environment(Protocol):
    """One attempt at one task: how it opens, what its tools do, what it is worth. This is the seam for users.

    The harness makes one object per episode and calls `open` once, `call` per tool call, `score` once, `close`
    always. Raise `SandboxFault` where the machine, not the agent, failed: the attempt is then issued again.
    """

    @property
    def tools(self) -> Sequence[ToolSpec]: ...

    @property
    def reward_version(self) -> str:
        """Changes with the rule of `score`: episodes of one batch share it."""
        ...

    async def open(self, task: Task) -> str:
        """The first text that the agent sees, after the tools."""
        ...

    async def call(self, call: ToolCall) -> Feedback: ...

    async def score(self, outcome: Outcome) -> Score: ...

    async def close(self) -> None: ...


class Vault(Protocol):
    """Hidden verifiers. Only the grader holds one."""

    def verifier(self, task_id: str) -> Verifier: ...


# --- text ----------------------------------------------------------------------------------------------------


class Turn(Record, frozen=True):
    """A parsed continuation of the policy."""

    text: str
    calls: tuple[ToolCall, ...]
    errors: tuple[Observation, ...]
    """One per malformed call: what was wrong, as the policy is told."""


class Renderer(Protocol):
    """Between messages and token ids, for one episode. What it returns is appended: nothing is ever rendered again."""

    name: str
    stop_ids: list[int]

    @property
    def glossary(self) -> tuple[str, ...]:
        """The words that name tokens stand for since `open`; empty where a tokenizer has none."""
        ...

    def open(self, tools: Sequence[ToolSpec], text: str) -> list[int]:
        """Ids that open a segment, up to where the policy speaks."""
        ...

    def observe(self, observations: Sequence[Observation], max_tokens: int) -> list[int]:
        """Ids of what the tools brought, up to where the policy speaks again."""
        ...

    def say(self, calls: Sequence[ToolCall]) -> list[int]:
        """Ids, stop token included, by which a policy would make these calls: for demonstrations."""
        ...

    def grammar(self, tools: Sequence[ToolSpec], spans: Spans | None) -> Grammar | None:
        """Calls that name a tool and point at what is there; free arguments may still be wrong. None: it cannot say."""
        ...

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec], turn: int) -> Turn:
        """Never raises: what cannot be parsed becomes an error for the policy to see."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text for people."""
        ...


# --- coordinator ---------------------------------------------------------------------------------------------


class RunStatus(Record, frozen=True):
    run_id: str
    stage: Stage
    version: int
    """Learner version, derived from the store."""
    num_updates: int
    """Of the recipe."""
    issued: int
    accepted: int
    trained: int
    queued: int
    rejected: int
    leased: int
    finished: bool
    halted: str
    """The cause, where the run was stopped by a failure; else empty."""


class Coordinator(Protocol):
    """The journal's keeper. Every call is idempotent: repeat it where the coordinator went away."""

    async def lease(self, worker: str, instance: str, num: int, wait_s: float) -> list[Attempt]:
        """Up to `num` attempts, waiting up to `wait_s` for the first. Leases of an earlier instance of the same
        worker are taken back at once."""
        ...

    async def renew(self, worker: str, instance: str, lease_ids: Sequence[str]) -> list[str]:
        """Heartbeat; returns the lease ids that still stand."""
        ...

    async def complete(self, result: AttemptResult) -> bool:
        """False where the lease no longer stands and the result was refused."""
        ...

    async def batch(self, index: int, wait_s: float) -> Batch | None:
        """Batch `index`, the same one for ever; None where it is not ready in time."""
        ...

    async def demonstrations(self, wait_s: float) -> list[AttemptResult] | None:
        """All results of the SFT stage, ordered by attempt, once all are in; None where they are not in time."""
        ...

    async def halt(self, cause: str) -> None:
        """A failure that stops the run."""
        ...

    async def status(self) -> RunStatus: ...


# --- weights -------------------------------------------------------------------------------------------------

Tensors = dict[str, NDArray[Any]]
"""Name → array; bfloat16 travels as uint16 bit patterns."""


class Weights(Record, frozen=True):
    """A policy in the Hugging Face layout: what a version consists of."""

    config: dict[str, Any]
    """Of `config.json`."""
    tokenizer: dict[str, bytes]
    """File name → content."""
    tensors: dict[str, Array]
    """Name → array of dtype `uint16`, the bit patterns of bfloat16."""


class Store(Protocol):
    """Published versions of the policy. `versions/k` is created exclusively: that is the only commit."""

    def publish(self, weights: Weights, *, version: int, batch: str | None, step: int, run_id: str) -> Snapshot:
        """Raises `VersionTaken` where `version` exists with other weights or another batch; a repeat with the same
        ones returns the manifest that stands. Also where `version − 1` is of another run, both naming theirs. Raises
        `StoreError` where `version − 1` does not exist."""
        ...

    def head(self) -> int | None:
        """The newest version, derived from the manifests."""
        ...

    def manifest(self, version: int) -> Snapshot:
        """Raises `StoreError` where there is none."""
        ...

    def load(self, version: int) -> Weights:
        """Verified against the manifest's hashes; raises `StoreError` for a missing, damaged or cut-off one."""
        ...

    def export(self, version: int, folder: Path) -> None:
        """The Hugging Face folder (`config.json`, `model.safetensors`, tokenizer files) of a version."""
        ...


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to bfloat16, to nearest, ties to even; NaN stays NaN. Returns the bit patterns, same shape."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
