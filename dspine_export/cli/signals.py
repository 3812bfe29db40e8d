"""SIGTERM means what Ctrl-C means: stop, clean up, exit 130."""

from __future__ import annotations

import signal
from types import FrameType


def install_handlers() -> None:
    """Turn the first SIGINT or SIGTERM into KeyboardInterrupt and ignore later ones, so that nothing interrupts the clean-up."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # started with nohup or in the background: leave it ignored
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt
