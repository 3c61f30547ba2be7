"""Prefect flows: start, watch, stop and report a run's processes. No training logic lives here."""

import os

os.environ.setdefault("DO_NOT_TRACK", "1")  # before Prefect is imported: its SDK would report usage otherwise
