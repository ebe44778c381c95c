"""The errors that ladderize raises on purpose. Imports nothing."""


class LadderizeError(Exception):
    """Base of all errors that ladderize raises on purpose; the message is for the user."""


class UserError(LadderizeError):
    """An error that the user can mend: one sentence that says what is wrong, where, and what to do. Exit code 1."""


class UsageError(UserError):
    """An error that the options alone decide, whatever the files hold. Exit code 2."""
