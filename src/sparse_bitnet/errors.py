"""The one exception that means "what you gave us is wrong", as opposed to "we are wrong"."""


class UserError(ValueError):
    """Bad input, file or option. The message is one line: what is wrong, where, and what to do.

    The command line prints the message alone and exits with code 2; any other exception is a defect
    of ours and keeps its traceback.
    """


class EngineLacks(UserError):
    """A sound model that the CPU engine cannot run; transformers can."""
