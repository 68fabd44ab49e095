"""What a user of this package can be told, beside Python's own TypeError and ValueError."""


class StageNotFound(LookupError):
    """No stage, or more than one, answers to the name that was given. The text lists the nearest names."""


class KernelFault(RuntimeError):
    """A kernel did something no kernel may do on the CPU device: a deadlock, a divergent barrier, a crash, a race.

    The text names the fault, the source line, the block and the thread.
    """


class NotAvailable(RuntimeError):
    """Something that this machine lacks was asked for, a GPU, one of a kind, or matplotlib.

    The text says what, and how to get it or what to use instead.
    """
