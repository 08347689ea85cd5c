"""The records that cross between stages and processes.

Frozen `msgspec` structs without equality (they may hold arrays): compare them by `digest`. Arrays travel as
buffer + dtype + shape. On disk and on the wire a record is MessagePack (`encode`/`decode`).

Legend of axes: P prompt tokens, T sampled tokens, N tokens of a trajectory, L MoE layers, k experts per token.
"""

import hashlib
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

Outcome = Literal[
    "submitted",  # the agent said that it was done
    "flagged_impossible",  # the agent said that it cannot be done
    "step_limit",
    "token_limit",
    "wall_limit",
    "loop",  # the same call with the same result, too often
    "format_errors",  # too many malformed calls in a row
    "env_fault",  # judged by the worker, never caused by the agent; re-issued, then rejected
]
"""How an episode ended, apart from what it earned. Everything but `env_fault` is scored and trained on."""

StopReason = Literal["stop", "length", "abort"]
Stage = Literal["sft", "rl", "eval"]
Split = Literal["train", "dev", "heldout"]

ROUTE_SENTINEL = 0xFFFF
"""Expert id of a position whose route is not known (the last token of a trajectory was never fed)."""


class Record(msgspec.Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    """Base of all records."""


class Array(Record, frozen=True):
    """A dense array: little-endian, C order."""

    data: bytes
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, values: ArrayLike, dtype: str) -> "Array":
        """Copy `values` into a record. `dtype` is a numpy name, such as `int32`."""
        array = np.array(values, dtype=np.dtype(dtype).newbyteorder("<"), order="C")
        return cls(data=array.tobytes(), dtype=dtype, shape=array.shape)

    def numpy(self) -> NDArray[Any]:
        """A read-only view. Raises `ValueError` where buffer and shape disagree."""
        return np.frombuffer(self.data, dtype=np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)


# --- tasks ---------------------------------------------------------------------------------------------------


class TreeFile(Record, frozen=True):
    path: str
    """Relative, POSIX, without `..`."""
    data: bytes
    executable: bool = False


class Tree(Record, frozen=True):
    """A snapshot of files, sorted by path; stored as one blob."""

    files: tuple[TreeFile, ...]


class Layer(Record, frozen=True):
    """What a sandbox offers to run code with: the interpreter and the packages inside it."""

    python: str
    """Full version of the interpreter, such as `3.11.7`."""
    packages: tuple[str, ...]
    """Exact requirements, sorted, such as `pytest==9.0.2`; their dependencies are spelled out too."""


class Limits(Record, frozen=True):
    """What one episode may use. Counts are of tokens, never of characters."""

    max_steps: int
    max_sampled_tokens: int
    max_context_tokens: int
    max_observation_tokens: int
    """Longer observations are cut in the middle, with a marker."""
    wall_s: float


class Task(Record, frozen=True):
    """A piece of work. The hidden verifier is not here: only the grader can resolve it, by `id`, from the vault."""

    id: str
    family: str
    """What kind of work, such as `mend`; figures are reported by family."""
    environment: str
    """Name of the environment class, in `run`'s registry."""
    split: Split
    statement: str
    """What the agent is told. Generated without sight of the solution."""
    repository: str | None
    """Blob hash of a `Tree`, the workspace at the start; None where the environment needs no files."""
    layer: str | None
    """Digest of the `Layer`; None where the environment needs no sandbox."""
    limits: Limits
    shown_checks: tuple[str, ...]
    """Test ids that the agent's `test` tool runs."""
    data: dict[str, str | int | float | list[str]]
    """What the environment needs beside this to open the task (shown to the agent's harness, never a solution)."""
    provenance: dict[str, str]
    """Where it came from: package, version, module, operator, seed. Exported, so never a solution."""


class RecordedCall(Record, frozen=True):
    """A call recorded on the gold version, to be replayed where pytest is absent (law 10)."""

    expression: str
    """Python expression over the module's public names, in literals only."""
    expected: str
    """Canonical text of the result on the gold version; compared by the grader, outside the sandbox."""


class Verifier(Record, frozen=True):
    """What decides a task; a blob in the vault, which only the grader opens."""

    task_id: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    files: Tree
    """Tests and configuration, laid over the pristine snapshot before the patch's allow-listed files."""
    allowed_paths: tuple[str, ...]
    """Files of the workspace that a patch may change."""
    calls: tuple[RecordedCall, ...]
    module: str | None
    """Module whose names `calls` use."""
    gold: Tree
    """The allow-listed files as they were before the fault; for demonstrations, validation and AST comparison."""


# --- episodes ------------------------------------------------------------------------------------------------


class ToolCall(Record, frozen=True):
    id: str
    name: str
    arguments: dict[str, str | int]


class Observation(Record, frozen=True):
    call_id: str
    text: str
    error: str | None = None
    """Kind of error (`unknown_tool`, `bad_arguments`, `malformed`, …) or None."""


class Generation(Record, frozen=True):
    """One sampled continuation. Its segment's ids are the concatenation of `prompt_ids + token_ids` over its steps.

    Where a row of `kv_versions` or `routes` belongs to a position that an earlier generation of the segment has
    reported, the earlier one stands: those were the states under which its tokens were sampled.
    """

    position: int
    """Index in the segment of `prompt_ids[0]`."""
    prompt_ids: Array
    """int32 [P]: ids that entered the segment since the last generation (all of the prompt in the first one)."""
    token_ids: Array
    """int32 [T]: sampled ids, the stop token included."""
    logprobs: Array
    """float32 [T], natural log, under the distribution really sampled from: temperature and support applied."""
    versions: Array
    """int32 [T]: policy version of each sampled token, fixed when it was sampled."""
    temperature: float
    top_p: float
    top_k: int
    """0: off."""
    support_ids: Array | None
    """int32 [S]: the ids that could be sampled, over all T steps, under top-p, top-k or a grammar; else None."""
    support_offsets: Array | None
    """int32 [T+1]: the support of step t is `support_ids[offsets[t]:offsets[t+1]]`; an empty one: any id."""
    row_start: int
    """Index in the segment of row 0 of `kv_versions` and `routes`."""
    kv_versions: Array
    """int32 [R]: version that computed the KV of positions `row_start + r`; R runs to the last token that was fed."""
    routes: Array | None
    """uint16 [R, L, k]: expert ids of the same positions, prompt and observations too; None for dense models."""
    stop_reason: StopReason
    engine: str


class Step(Record, frozen=True):
    generation: Generation
    text: str
    """The sampled ids decoded: for people; never encoded again."""
    calls: tuple[ToolCall, ...]
    observations: tuple[Observation, ...]


class Segment(Record, frozen=True):
    """Steps between two compactions: one contiguous sequence of ids."""

    steps: tuple[Step, ...]
    opened_by: Literal["start", "compaction"]
    closing_ids: Array
    """int32 [C]: ids that entered the segment after its last generation (a final observation); may be empty."""
    glossary: tuple[str, ...] = ()
    """The words that the tokenizer's name tokens stand for in this segment, in order of their ids."""


class EpisodeEvent(Record, frozen=True):
    at_s: float
    """Since the episode's start."""
    what: str
    detail: str


class Episode(Record, frozen=True):
    """All that happened in one attempt."""

    attempt_id: str
    group_id: str
    task_id: str
    stage: Stage
    seed: int
    segments: tuple[Segment, ...]
    outcome: Outcome
    reward: float
    """What is trained on: the sum of `rewards`."""
    rewards: dict[str, float]
    """Named parts, weighted."""
    measures: dict[str, float]
    """Named facts that earn nothing: `solved`, `ast_equal`, `malformed_calls`, …"""
    verdict: dict[str, str]
    """Test id → status in grading; for people, never shown to the agent."""
    patch: dict[str, bytes]
    """Allow-listed path → content at the end, where it differs from the start."""
    events: tuple[EpisodeEvent, ...]
    timings_s: dict[str, float]
    """Wall seconds by stage: `sandbox_open`, `generate`, `tools`, `grade`, …"""
    cpu_s: dict[str, float]
    """CPU seconds by stage, without the model."""
    harness_hash: str
    """Of the tool schemas, the renderer and the harness's version: equal in training, evaluation and service."""
    reward_version: str
    sandbox_tier: str
    """`namespaces`, `local`, … or `none`."""


# --- trajectories and batches --------------------------------------------------------------------------------


class Trajectory(Record, frozen=True):
    """A token-exact training sequence: one segment, or one branch, of an episode."""

    attempt_id: str
    segment: int
    token_ids: Array
    """int32 [N]"""
    sampled_mask: Array
    """bool [N]: True where this trajectory trains the token: sampled, and first contained here."""
    logprobs: Array
    """float32 [N]; NaN where not sampled, so that a wrong mask is loud."""
    versions: Array
    """int32 [N]; −1 where not sampled."""
    routes: Array | None
    """uint16 [N, L, k]; `ROUTE_SENTINEL` where not known."""
    temperature: float
    support_ids: Array | None = None
    """int32 [S]: the ids that could be sampled, over all N tokens; None where all were always free."""
    support_offsets: Array | None = None
    """int32 [N+1]: those of token t are `support_ids[offsets[t]:offsets[t+1]]`; none: any id, or not sampled."""


class Attempt(Record, frozen=True):
    """A leased piece of work: one episode to run."""

    id: str
    group_id: str
    task_id: str
    stage: Stage
    seed: int
    lease_id: str
    """Changes with every lease: a result under an old lease is refused."""
    lease_until_s: float
    """Unix time; renewed by heartbeat."""
    try_index: int
    min_version: int = -1
    """Sample from this version or a later one only: an engine that is behind would make the episode too old to be
    trained by its group's deadline. −1: any."""


class AttemptResult(Record, frozen=True):
    """What a worker returns. The episode itself lies in the blobs."""

    attempt_id: str
    lease_id: str
    episode: str | None
    """Blob hash of the `Episode`; None only for an `env_fault` before anything was recorded."""
    outcome: Outcome
    reward: float
    oldest_version: int
    """Smallest version over all sampled tokens; −1 where nothing was sampled from a policy."""
    newest_version: int
    sampled_tokens: int
    total_tokens: int
    reason: str = ""
    """For an `env_fault`: what happened."""


class BatchItem(Record, frozen=True):
    """One attempt inside a batch."""

    attempt_id: str
    group_id: str
    task_id: str
    episode: str
    reward: float
    advantage: float
    """A_i = R_i − mean(R) over the attempt's group (law 4); in the control `shuffled_rewards`, R is another's."""
    oldest_version: int


class Batch(Record, frozen=True):
    """Whole groups, immutable once assigned. Version `index + 1` of the policy carries this record's digest."""

    index: int
    stage: Stage
    items: tuple[BatchItem, ...]
    """In order of group, then attempt."""
    group_size: int


class Snapshot(Record, frozen=True):
    """The manifest of one published version."""

    version: int
    kind: Literal["full", "delta"]
    parent: int | None
    """The base version of a delta; None for a full one."""
    files: dict[str, str]
    """File name in the Hugging Face layout → blob hash."""
    tensors: dict[str, str]
    """Tensor name → xxh3-128 of its bytes in the published dtype."""
    num_bytes: int
    batch: str | None
    """Digest of the batch that made it; None for version 0."""
    step: int
    """Learner steps so far, over all stages."""
    model: str
    """Digest of the model configuration."""
    run_id: str


# --- encoding ------------------------------------------------------------------------------------------------

R = TypeVar("R", bound=Record)


def encode(record: Record) -> bytes:
    """MessagePack with sorted keys: equal records give equal bytes."""
    return msgspec.msgpack.encode(record, order="deterministic")


def decode(data: bytes, kind: type[R]) -> R:
    """Inverse of `encode`. Raises `ValueError` naming the field that does not fit."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ValueError(f"not a {kind.__name__}: {error}") from error


def digest(record: Record) -> str:
    """sha256 of the encoding, in hex: the name of the record."""
    return hashlib.sha256(encode(record)).hexdigest()
