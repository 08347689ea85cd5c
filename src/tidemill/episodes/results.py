"""What a worker reports about an episode."""

from tidemill.core.records import Attempt, AttemptResult, Episode


def attempt_result(episode: Episode, blob: str, attempt: Attempt) -> AttemptResult:
    """What a worker returns about an episode that lies in the blobs under `blob`."""
    generations = [step.generation for segment in episode.segments for step in segment.steps]
    versions = [int(version) for generation in generations for version in generation.versions.numpy()]
    prompts = sum(generation.prompt_ids.shape[0] for generation in generations)
    closing = sum(segment.closing_ids.shape[0] for segment in episode.segments)
    faults = [event.detail for event in episode.events if event.what == "fault"]
    return AttemptResult(
        attempt_id=attempt.id,
        lease_id=attempt.lease_id,
        episode=blob,
        outcome=episode.outcome,
        reward=episode.reward,
        oldest_version=min(versions, default=-1),
        newest_version=max(versions, default=-1),
        sampled_tokens=len(versions),
        total_tokens=len(versions) + prompts + closing,
        reason=faults[-1] if faults and episode.outcome == "env_fault" else "",
    )


def fault_result(attempt: Attempt, reason: str) -> AttemptResult:
    """What a worker returns where not even an episode came about."""
    return AttemptResult(
        attempt_id=attempt.id,
        lease_id=attempt.lease_id,
        episode=None,
        outcome="env_fault",
        reward=0.0,
        oldest_version=-1,
        newest_version=-1,
        sampled_tokens=0,
        total_tokens=0,
        reason=reason,
    )
