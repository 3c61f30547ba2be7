"""Data sets as an endless, seeded, resumable stream of prompts. The chat template is applied here, and only here."""

from pa_core.data.prompts import PromptSet, load_prompts, without
from pa_core.data.stream import PromptStream

__all__ = ["PromptSet", "PromptStream", "load_prompts", "without"]
