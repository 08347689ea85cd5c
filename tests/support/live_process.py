"""`python live_process.py RUN SERVICE`: a run of small services under its live view, in the terminal that it is given.

SERVICE is Python for the one service beside an idle one; the run is done when it ends.
"""

import sys
from pathlib import Path

from tidemill.core.errors import TrainingHalted
from tidemill.run.config import (
    DemonstrationConfig,
    EvaluationConfig,
    PretrainingConfig,
    Recipe,
    ReinforcementConfig,
)
from tidemill.run.display import display
from tidemill.run.folder import RunFolder
from tidemill.run.progress import Progress
from tidemill.run.supervisor import RestartPolicy, Service, Supervisor

IDLE = "import time\nwhile True: time.sleep(60)"


def main() -> None:
    folder = RunFolder(Path(sys.argv[1]))
    recipe = Recipe(
        name="live",
        tasks="tasks",
        pretraining=PretrainingConfig(num_steps=0),
        demonstrations=DemonstrationConfig(num_episodes=0, num_steps=0),
        rl=ReinforcementConfig(num_updates=3),
        evaluation=EvaluationConfig(every=1),
    )
    services = [
        Service(who="worker-0", argv=(sys.executable, "-S", "-c", IDLE)),
        Service(who="learner-0", argv=(sys.executable, "-S", "-c", sys.argv[2]), ends_run=True),
    ]
    with folder.lock():
        info = folder.prepare(recipe="a" * 64, recipe_name="live")
        say = Progress(folder, recipe, info.created_s)
        policy = RestartPolicy(max_restarts=1, first_pause_s=0.01, stop_s=5.0)
        try:
            with display(folder, recipe, say, plain=False) as tick:
                end = Supervisor(folder, services, policy=policy, on_tick=tick).run()
        except TrainingHalted as error:
            print(f"halted: {error}")
            sys.exit(1)
    say(end)
    sys.exit(130 if end == "stopped" else 0)


if __name__ == "__main__":
    main()
