"""Studies: several runs of one config, planned together, trained as processes of their own, and read beside each other.

A comparison trains its runs one after the other and says what was equal; a sweep trains a grid and finds the best.
"""
