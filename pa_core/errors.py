"""Errors whose message is meant for the person who runs the program: shown without a traceback."""


class UserError(Exception):
    """Something the user can mend; the message names the field, the value and the fix."""

    exit_code = 1


class ConfigError(UserError):
    """A wrong configuration or command line (exit code 2)."""

    exit_code = 2


class DataError(UserError):
    """A data set that cannot be read, is empty, lacks a column or does not fit the model (exit code 2)."""

    exit_code = 2


class ModelError(UserError):
    """A model that cannot be found, loaded or served exactly (exit code 2)."""

    exit_code = 2


class RewardError(UserError):
    """A reward that leaves too many samples unscored, or workers that do not answer."""


class RewardSetupError(RewardError):
    """A reward that cannot be found or loaded (exit code 2)."""

    exit_code = 2


class EngineError(UserError):
    """A replica that did not start, died, or does not answer."""


class StoreError(UserError):
    """A store that cannot be read or written, or whose content fails its digest."""


class TrainingError(UserError):
    """Training that cannot go on, such as a gradient that is not finite."""


class Stopped(UserError):
    """The run was stopped from outside and can be resumed (exit code 3)."""

    exit_code = 3


def first_line(error: BaseException) -> str:
    """The first line of a message, of which libraries write pages; the error's type where there is none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
