"""Advantages, policy losses and KL: pure functions."""
