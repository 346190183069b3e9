"""The background thread: order, errors, lookahead, an early end."""

import itertools
import threading
import time

import pytest

from repack_jax.checks import ConfigError
from repack_jax.data.prefetch import Prefetcher


def prefetch_threads():
  return [thread for thread in threading.enumerate() if thread.name == 'prefetch']


def test_passes_everything_in_order():
  with Prefetcher(range(100), lookahead=3) as prefetched:
    items = list(prefetched)
    assert list(prefetched) == []  # the end stays the end
  assert [item for item, _ in items] == list(range(100))
  assert all(wait_s >= 0 for _, wait_s in items)
  assert not prefetch_threads()


def test_takes_a_function():
  with Prefetcher(iter('abc').__next__, lookahead=1) as prefetched:
    assert [item for item, _ in prefetched] == ['a', 'b', 'c']


@pytest.mark.parametrize('error', [ConfigError('bad'), OSError(5, 'io'), SystemExit(3)])
def test_raises_what_the_producer_raised(error):
  def producer():
    yield 1
    raise error

  with pytest.raises(type(error)) as caught, Prefetcher(producer(), lookahead=4) as prefetched:
    for item, _ in prefetched:
      assert item == 1
  assert caught.value is error
  assert not prefetch_threads()


def test_raises_where_iteration_cannot_begin():
  with pytest.raises(TypeError), Prefetcher(7, lookahead=1) as prefetched:
    next(prefetched)


def test_stays_within_its_lookahead_and_closes_early():
  made, moved = [], threading.Semaphore(0)

  def producer():
    for i in itertools.count():
      made.append(i)
      moved.release()
      yield i

  with Prefetcher(producer(), lookahead=3) as prefetched:
    for _ in range(3):
      assert moved.acquire(timeout=10)
    time.sleep(0.05)
    assert made == [0, 1, 2]
    assert next(prefetched)[0] == 0
    assert moved.acquire(timeout=10)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3]
  assert not prefetch_threads()
  assert list(prefetched) == []


def test_closes_when_the_consumer_raises():
  with pytest.raises(KeyError), Prefetcher(itertools.count(), lookahead=2) as prefetched:
    next(prefetched)
    raise KeyError
  assert not prefetch_threads()


def test_measures_the_wait():
  finished = threading.Event()

  def producer():
    time.sleep(0.1)
    yield 'slow'
    yield 'ready'
    finished.set()

  with Prefetcher(producer(), lookahead=3) as prefetched:
    _, first_s = next(prefetched)
    assert finished.wait(timeout=10)
    _, second_s = next(prefetched)
  assert first_s > 0.05 > second_s


def test_needs_a_lookahead():
  with pytest.raises(ValueError, match='lookahead = 0: must be at least 1'):
    Prefetcher([], 0)
