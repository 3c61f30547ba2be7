"""Periodic asynchrony: on-policy reinforcement learning of language models that overlaps generation and training."""

__version__ = "0.1.0"
