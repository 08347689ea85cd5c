"""An environment of your own: a few lines, no sandbox, no files. The agent has to find a number by halving."""

from tidemill.core.records import Outcome, Task, ToolCall
from tidemill.core.seams import Feedback, Score, ToolSpec


class GuessNumber:
    """`task.data["number"]` is to be found between 1 and `task.data["highest"]`."""

    tools = (
        ToolSpec(name="guess", description="Name a number.", parameters={"number": "integer"}, required=("number",)),
    )
    reward_version = "guess-number-1"

    async def open(self, task: Task) -> str:
        self.number, self.highest = int(str(task.data["number"])), int(str(task.data["highest"]))
        self.guesses: list[int] = []
        return f"{task.statement}\nA number between 1 and {self.highest}."

    async def call(self, call: ToolCall) -> Feedback:
        guess = int(call.arguments["number"])
        self.guesses.append(guess)
        if guess == self.number:
            return Feedback(text="right", ends="submitted")
        return Feedback(text="higher" if guess < self.number else "lower")

    async def score(self, outcome: Outcome) -> Score:
        solved = float(self.number in self.guesses)
        distance = min((abs(guess - self.number) for guess in self.guesses), default=self.highest)
        return Score(
            rewards={"solved": solved, "near": 0.2 * (1 - min(1.0, distance / self.highest))},
            measures={"solved": solved, "num_guesses": float(len(self.guesses))},
        )

    async def close(self) -> None:
        pass
