"""Tidemill: reinforcement learning for coding agents, inside the harness that they are deployed in."""

__version__ = "0.1.0"
