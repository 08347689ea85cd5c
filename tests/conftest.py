"""One thread per process: what the two cores of a small machine like best, and what makes sums repeatable."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
