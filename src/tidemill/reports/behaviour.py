"""What an agent did on its way, read from its episode: does it use the test to mend its own mistakes? Pure."""

from tidemill.core.records import Episode


def behaviours(episode: Episode, *, passed: str = "passed") -> dict[str, float]:
    """Named measures of one episode; `passed` is what the `test` tool says where all shown checks pass.

    | measure            | is 1 where                                                                              |
    |--------------------|-----------------------------------------------------------------------------------------|
    | `tested_an_edit`   | a test came while an accepted edit stood, not taken back                                |
    | `test_told_wrong`  | such a test failed                                                                      |
    | `tried_again`      | and an accepted edit followed it                                                        |
    | `corrected_itself` | and the episode was solved                                                              |
    """
    num_standing = 0
    tested = failed = again = False
    for segment in episode.segments:
        for step in segment.steps:
            # Errors of the turn stand behind the observations of its calls.
            for call, observation in zip(step.calls, step.observations, strict=False):
                if call.name == "edit" and observation.error is None:
                    num_standing += 1
                    again = again or failed
                elif call.name == "undo" and observation.error is None:
                    num_standing -= 1
                elif call.name == "test" and num_standing:
                    tested = True
                    failed = failed or observation.text.strip() != passed
    solved = episode.measures.get("solved", 0.0) == 1.0
    facts = {
        "tested_an_edit": tested,
        "test_told_wrong": failed,
        "tried_again": again,
        "corrected_itself": again and solved,
    }
    return {name: float(value) for name, value in facts.items()}
