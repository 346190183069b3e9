"""Simulated steps as Chrome trace events, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from repack_jax.config import RunConfig
from repack_jax.predict.simulator import CAUSES
from repack_jax.report.case import Case, check_cases, family

Event = dict[str, Any]


def trace(run: RunConfig, cases: Sequence[Case]) -> dict[str, Any]:
  """Returns the events: one process a node and one thread a rank; each case has processes of its own.

  Thread ids are ranks. Process ids are `process_base(run) * (1 + case) + node`, so that none equals a
  thread's, which viewers would take for the process's main thread.
  """
  check_cases(run, cases)
  events: list[Event] = []
  for number, case in enumerate(cases):
    base = process_base(run) * (1 + number)
    events += _names(run, case, base)
    events += _spans(run, case, base)
  return {'traceEvents': events, 'displayTimeUnit': 'ms'}


def write_trace(path: str | Path, run: RunConfig, cases: Sequence[Case]) -> None:
  """Writes `trace` as JSON, compressed where the path ends with `.gz`: Perfetto opens that too."""
  text = json.dumps(trace(run, cases), separators=(',', ':')).encode('ascii')
  Path(path).write_bytes(gzip.compress(text, 6, mtime=0) if str(path).endswith('.gz') else text)


def process_base(run: RunConfig) -> int:
  """Returns a round number that is above every rank."""
  return 1000 * (1 + run.cluster.num_ranks // 1000)


def _names(run: RunConfig, case: Case, base: int) -> Iterator[Event]:
  per_node = run.cluster.ranks_per_node
  for rank in range(run.cluster.num_ranks):
    node = rank // per_node
    if rank % per_node == 0:
      yield _meta('process_name', base + node, {'name': f'{case.name}: node {node}'})
      yield _meta('process_sort_index', base + node, {'sort_index': base + node})
    yield {**_meta('thread_name', base + node, {'name': f'rank {rank}'}), 'tid': rank}
    yield {**_meta('thread_sort_index', base + node, {'sort_index': rank}), 'tid': rank}


def _meta(name: str, pid: int, args: dict[str, Any]) -> Event:
  return {'ph': 'M', 'name': name, 'pid': pid, 'args': args}


def _spans(run: RunConfig, case: Case, base: int) -> Iterator[Event]:
  """Spans, cut to whole nanoseconds (what viewers keep) so that neighbours neither overlap nor part."""
  spans = case.spans
  start, end = (np.rint(times * 1e9).astype(np.int64).tolist() for times in (spans.start_s, spans.end_s))
  columns = (spans.rank, spans.cause, spans.layer, spans.micro_batch, spans.backward)
  for begin, stop, rank, cause, layer, micro_batch, backward in zip(
    start, end, *(column.tolist() for column in columns), strict=True
  ):
    if stop > begin:
      yield {
        'ph': 'X',
        'name': CAUSES[cause],
        'cat': family(CAUSES[cause]),
        'pid': base + rank // run.cluster.ranks_per_node,
        'tid': rank,
        'ts': begin / 1000,
        'dur': (stop - begin) / 1000,
        'args': {
          'layer': layer if layer >= 0 else 'none',
          'direction': 'backward' if backward else 'forward',
          'micro-batch': micro_batch,
        },
      }
