"""Plain progress lines: what changed since the last one."""

import time

from tidemill.core.metrics import read_metrics
from tidemill.run.config import Recipe
from tidemill.run.folder import RunFolder

TEXT_EVERY_S = 10.0


class Progress:
    """Call it with a line to print; `tick` prints what the learner has written since."""

    def __init__(self, folder: RunFolder, recipe: Recipe, started_s: float) -> None:
        self._folder = folder
        self._recipe = recipe
        self._started_s = started_s
        self._num_seen = len(read_metrics(folder.metrics)) if folder.metrics.exists() else 0
        self._last_text_s = 0.0
        self._starts: dict[str, int] = {}

    def __call__(self, line: str) -> None:
        passed_s = time.time() - self._started_s
        print(f"[{int(passed_s // 60):3}:{int(passed_s % 60):02}] {line}", flush=True)

    def tick(self) -> None:
        for service in self._folder.all_services():
            if service.starts > self._starts.get(service.who, 0):
                if service.starts > 1:
                    self(f"{service.who} was started again ({service.starts - 1}×)")
                self._starts[service.who] = service.starts
        try:
            rows = read_metrics(self._folder.metrics) if self._folder.metrics.exists() else []
        except ValueError:  # a line that is being written; the next tick sees it whole
            return
        self._num_seen = min(self._num_seen, len(rows))  # a resumed learner takes back what it does again
        for row in rows[self._num_seen :]:
            self._row(row)
        self._num_seen = len(rows)

    def _row(self, row: dict[str, float | int | str]) -> None:
        stage = row["stage"]
        if stage == "rl":
            self(
                f"update {row['version']:>3}/{self._recipe.rl.num_updates}  reward {row['reward_mean']:.3f}  "
                f"age {row.get('age_p50', 0):.0f} to {row.get('age_max', 0):.0f}  entropy {row['entropy']:.2f}  "
                f"{row['tokens_per_s']:.0f} tokens/s"
            )
        elif time.time() - self._last_text_s > TEXT_EVERY_S:
            self._last_text_s = time.time()
            name = "pre-training" if stage == "cpt" else "demonstrations"
            steps = self._recipe.pretraining.num_steps if stage == "cpt" else self._recipe.demonstrations.num_steps
            at = int(float(row["stage_step"]))
            self(f"{name} {at}/{steps}  nll {row['nll']:.3f}  {row['tokens_per_s']:.0f} tokens/s")
