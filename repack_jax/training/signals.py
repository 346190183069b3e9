"""SIGTERM and Ctrl-C: noted whenever they come, looked at between steps."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def collected_signals() -> Iterator[list[signal.Signals]]:
  """Yields a list to which SIGTERM and Ctrl-C are appended as they come; a second Ctrl-C stops at once.

  Python runs a handler between its own instructions, so one that comes during a compilation is seen when
  that ends.
  """
  received: list[signal.Signals] = []

  def note(number: int, frame: object) -> None:
    if received and number == signal.SIGINT:
      raise KeyboardInterrupt
    received.append(signal.Signals(number))
    # Not print: it may have been interrupted in the middle, and is not reentrant.
    os.write(2, f'\n{received[-1].name}: saving after the step that runs\n'.encode())

  before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield received
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
