"""Defines the errors whose message is one line that says what to do."""


class UserError(ValueError):
    """Bad input.  The message names the thing, its value, what was expected and the remedy;
    the command line prints it alone and exits with code 2."""


class VerificationError(RuntimeError):
    """A pass broke the graph, a rewrite changed values by more than its tier allows, or the
    reference of an op differs from its definition: a bug of this program or of an added pass."""


class EngineDeadError(UserError):
    """The device is lost; a new process is needed."""


class BusyError(UserError):
    """Too much of it goes on at the moment; the same request may succeed later."""


class MachineError(UserError):
    """The machine lacks or fails at something: a compiler, space on a disk.  The command line exits
    with code 1."""
