"""The one exception for mistakes a user can mend; its text is a single line."""


class UserError(ValueError):
    """Bad input.  The message names the thing, its value, what was expected and the remedy;
    the command line prints it alone and exits with code 2."""


class VerificationError(RuntimeError):
    """A pass broke the graph, a rewrite changed values beyond its tier, or the reference of an op
    is not what the op says: a bug of this program, or of a pass that was added to it."""


class EngineDeadError(UserError):
    """The device is lost; a new process is needed."""


class MachineError(UserError):
    """The machine lacks or fails at something: a compiler, space on a disk.  The command line exits
    with code 1."""
