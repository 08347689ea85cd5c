"""Failures, typed by the boundary that they crossed. Every message says what was wrong and how to mend it.

TidemillError
├── UsageError            the user's input: a recipe, a flag, a repository            exit code 2
├── RunFolderError        the run folder: in use, of another recipe, on a network disk
├── BlobError             content-addressed storage: missing or damaged
├── StoreError            the weight store
│   └── VersionTaken      another writer created this version first
├── DeltaError            a weight delta that is damaged, cut off, or of another base
├── ModelError            a checkpoint or a model configuration that cannot be used
├── TaskError             a task or a repository that cannot be used
├── SandboxError          the sandbox
│   ├── SandboxUnavailable   this machine cannot run this tier
│   └── SandboxFault         a sandbox died through no fault of the agent: an `env_fault`
├── EngineError           the engine
│   ├── RequestRefused       a request that can never be served (too long, malformed)
│   └── EngineUnavailable    the engine is away: retry, resuming from the tokens received so far
├── CoordinatorError      the coordinator
│   └── CoordinatorUnavailable   it is away: retry, every call is idempotent
└── TrainingHalted        the learner stopped the run, with its cause
"""


class TidemillError(Exception):
    """Base of every failure that Tidemill raises on purpose; `str()` is one line for the user."""

    exit_code = 1


class UsageError(TidemillError):
    exit_code = 2


class RunFolderError(TidemillError):
    pass


class BlobError(TidemillError):
    pass


class StoreError(TidemillError):
    pass


class VersionTaken(StoreError):
    pass


class DeltaError(TidemillError):
    pass


class ModelError(TidemillError):
    pass


class TaskError(TidemillError):
    pass


class SandboxError(TidemillError):
    pass


class SandboxUnavailable(SandboxError):
    pass


class SandboxFault(SandboxError):
    pass


class EngineError(TidemillError):
    pass


class RequestRefused(EngineError):
    pass


class EngineUnavailable(EngineError):
    pass


class CoordinatorError(TidemillError):
    pass


class CoordinatorUnavailable(CoordinatorError):
    pass


class TrainingHalted(TidemillError):
    pass
