"""SIGTERM and Ctrl-C: noted whenever they come, looked at between steps, and never waited for too long."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator


class StopSignals:
  """The signals that came.

  Attributes:
    received: in their order; truthy between steps means to stop.
    is_ending: set when the run ends by itself, and whatever saving takes is waited for.
    last_resort: called in another thread when the grace time is over; it returns what is saved, in words.
  """

  def __init__(self) -> None:
    self.received: list[signal.Signals] = []
    self.is_ending = threading.Event()
    self.last_resort: Callable[[], str] = lambda: 'nothing was trained, so nothing is saved'


@contextlib.contextmanager
def collected_signals(grace_s: float) -> Iterator[StopSignals]:
  """Yields what collects SIGTERM and Ctrl-C; a second Ctrl-C raises KeyboardInterrupt.

  Python runs handlers between its own instructions, so one that comes during a compilation is seen when that
  ends. A thread learns of it at once. If the run is not ending by itself when the grace time is over, or a
  second after the second Ctrl-C, it calls `last_resort` and ends the process with the signal's exit code.
  """
  stop = StopSignals()
  here, there = socket.socketpair()
  there.setblocking(False)

  def note(number: int, frame: object) -> None:
    again = bool(stop.received)
    stop.received.append(signal.Signals(number))
    if again and number == signal.SIGINT:
      raise KeyboardInterrupt

  def watch() -> None:
    seen: list[signal.Signals] = []
    ends_s = math.inf
    while not stop.is_ending.is_set():
      here.settimeout(None if math.isinf(ends_s) else max(0.001, ends_s - time.monotonic()))
      number = b''
      with contextlib.suppress(TimeoutError):
        number = here.recv(1)
      if number and number[0] in (signal.SIGTERM, signal.SIGINT):
        seen.append(signal.Signals(number[0]))
        if len(seen) == 1:
          ends_s = time.monotonic() + grace_s
          _say(f'{seen[0].name}: saving after the step that runs, or in {grace_s:g} s at the latest')
        elif seen[-1] == signal.SIGINT:
          ends_s = min(ends_s, time.monotonic() + 1)
      if time.monotonic() >= ends_s and not stop.is_ending.is_set():
        try:
          _say(f'{seen[0].name}: ends now; {stop.last_resort()}')
        finally:
          os._exit(128 + seen[0])

  before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
  wakeup = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
  thread = threading.Thread(target=watch, name='signals', daemon=True)
  thread.start()
  try:
    yield stop
  finally:
    stop.is_ending.set()
    signal.set_wakeup_fd(wakeup)
    for number, handler in before.items():
      signal.signal(number, handler)
    there.send(b'\0')
    thread.join()
    here.close()
    there.close()


def _say(text: str) -> None:
  """Not print, which is not reentrant: whatever the main thread does may hold its lock."""
  with contextlib.suppress(OSError):  # whoever read it may be gone
    os.write(2, f'\n{text}\n'.encode())
