"""Work beside the current stream's, between a fork and a join; in a captured graph they are branches."""

from __future__ import annotations

from collections.abc import Callable

import torch


class SideStream:
    """A second stream of a GPU; on any other device work is done at once, in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[], object]) -> None:
        """Queues `work` behind everything that the current stream holds, and lets that stream go on."""
        if self._stream is None:
            work()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()

    def join(self) -> None:
        """Lets the current stream wait for the work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
