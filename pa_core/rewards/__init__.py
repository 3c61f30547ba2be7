"""Reward functions, and the worker processes that run them.

A reward is a function ``f(response, answer, *, metadata, **options) -> float | bool | None``: ``response`` is the
decoded response, ``answer`` the canonical gold answer, ``metadata`` what the data set knows besides. True counts as 1
and False as 0; None and NaN mean "no score", which is not zero.
"""
