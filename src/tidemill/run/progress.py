"""Plain progress lines: what changed since the last one."""

import time
from contextlib import suppress

import msgspec

from tidemill.core.metrics import Row
from tidemill.reports.live.tail import Tail
from tidemill.run.config import Recipe
from tidemill.run.folder import RunFolder

TEXT_EVERY_S = 10.0


class Progress:
    """Call it with a line to print; `tick` prints what the learner has written since."""

    def __init__(self, folder: RunFolder, recipe: Recipe, started_s: float) -> None:
        self._folder = folder
        self._recipe = recipe
        self._started_s = started_s
        self._metrics = Tail(folder.metrics)
        self._has_read = bool(self._metrics.read()[0])  # what an earlier start has told
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
        lines, begins = self._metrics.read()
        is_kept = begins and self._has_read  # a resumed learner has taken back what it does again: the rest was told
        self._has_read = self._has_read or bool(lines)
        for line in [] if is_kept else lines:
            with suppress(msgspec.DecodeError):  # the audit tells of it
                self._row(msgspec.json.decode(line, type=Row))

    def _row(self, row: Row) -> None:
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
