"""Prefect flows: start, watch, stop and report a run's processes. No training logic lives here."""
