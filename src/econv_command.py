"""The command `econv`, which Ctrl-C ends quietly while it is still being imported, too.

A package is imported before what is in it: only a module beside it can come first.
"""

import signal
import sys

__all__ = ["main"]


def main() -> int:
    """Import the command as any program is started, which a signal simply ends, and run it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from econv.cli import main as command

    signal.signal(signal.SIGINT, before)
    return command()


if __name__ == "__main__":
    sys.exit(main())
