"""The one exception for mistakes a user can mend; its text is a single line."""


class UserError(ValueError):
    """Bad input.  The message names the thing, its value, what was expected and the remedy;
    the command line prints it alone and exits with code 2."""


class EngineDeadError(UserError):
    """The device is lost; a new process is needed."""


class MachineError(UserError):
    """What the machine lacks or fails at: a compiler, space on a disk.  The command line exits
    with code 1."""
