"""What the coordinator's HTTP server and client say to each other: POST, MessagePack both ways."""

from typing import Literal

from tidemill.core.records import Record

MEDIA_TYPE = "application/msgpack"
MAX_REQUEST_BYTES = 1 << 20
MAX_WAIT_S = 30.0
"""Of one request; the client asks again until its own time is up."""


class LeaseCall(Record, frozen=True):
    worker: str
    instance: str
    num: int
    wait_s: float
    request: str
    """Names the call: its repetition is given the same attempts."""


class RenewCall(Record, frozen=True):
    worker: str
    instance: str
    lease_ids: list[str]


class BatchCall(Record, frozen=True):
    index: int
    wait_s: float


class DemonstrationsCall(Record, frozen=True):
    wait_s: float


class HaltCall(Record, frozen=True):
    cause: str


class StatusCall(Record, frozen=True):
    pass


class Failure(Record, frozen=True):
    """Body of every answer that is not 200."""

    kind: Literal["halted", "refused", "failed"]
    message: str
