"""Runs a producer ahead of its consumer, in one background thread."""

from __future__ import annotations

import queue
import threading
import time
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar('T')


class Prefetcher(Generic[T]):
  """An iterator over (item, wait_s): what the producer makes, and the seconds the consumer waited for it.

  A context manager. The thread starts on entering; on leaving it is stopped and joined, which waits for
  the item it is making, however the block is left:

      with Prefetcher(batches, lookahead=2) as prefetched:
        for batch, wait_s in prefetched:
          ...

  What the producer raises is raised in the consumer, as it is, after the items made before it. Only the
  thread calls the producer, and only the consumer's thread may use the Prefetcher.
  """

  def __init__(self, producer: Iterable[T] | Callable[[], T], lookahead: int):
    """Args:
    producer: an iterable, or a function that returns the next item and raises StopIteration at the end.
    lookahead: items at most that are finished or being made and not yet consumed; at least 1.
    """
    if lookahead < 1:
      raise ValueError(f'lookahead = {lookahead}: must be at least 1')
    self._producer = producer
    # Each entry is (item, None), or (None, what ended the items).
    self._results: queue.SimpleQueue[tuple[typing.Any, BaseException | None]] = queue.SimpleQueue()
    # The bound is on slots taken before an item is made, since a bounded queue admits one more in hand.
    self._slots = threading.Semaphore(lookahead)
    self._stopping = threading.Event()
    # A daemon, so that a program that dies without leaving the block still exits.
    self._thread = threading.Thread(target=self._run, name='prefetch', daemon=True)
    self._ended = False

  def __enter__(self) -> typing.Self:
    self._thread.start()
    return self

  def __exit__(self, *exception: object) -> None:
    self._ended = True
    self._stopping.set()
    self._slots.release()  # wakes a thread that waits for a slot
    self._thread.join()

  def __iter__(self) -> Iterator[tuple[T, float]]:
    return self

  def __next__(self) -> tuple[T, float]:
    assert self._thread.ident is not None, 'use the Prefetcher in a with block'
    if self._ended:
      raise StopIteration
    start = time.perf_counter()
    item, end = self._results.get()
    wait_s = time.perf_counter() - start
    if end is not None:
      self._ended = True
      raise end
    self._slots.release()
    return item, wait_s

  def _run(self) -> None:
    try:
      produce = self._producer if callable(self._producer) else iter(self._producer).__next__
      while True:
        self._slots.acquire()
        if self._stopping.is_set():
          return
        self._results.put((produce(), None))
    except BaseException as end:  # StopIteration and SystemExit too: the consumer must not wait for ever
      self._results.put((None, end))
