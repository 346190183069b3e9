"""Two processes on this machine, connected as those of a run are: they must hold the same plan."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from repack_jax.parallel.agreement import check_same_plan

ROOT = Path(__file__).resolve().parents[1]
CODE = """
import sys
import jax
from repack_jax.parallel.agreement import PlansDiffer, check_same_plan
address, process, digest = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update('jax_platforms', 'cpu')
jax.distributed.initialize(address, 2, process)
try:
  check_same_plan(digest)
  print('same')
except PlansDiffer as error:
  print(error)
"""


def shown_by_two(digests: tuple[str, str]) -> list[str]:
  """What each of two processes with these digests prints."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{free.getsockname()[1]}'
  env = os.environ | {'PYTHONPATH': str(ROOT)}
  env.pop('XLA_FLAGS', None)
  processes = [
    subprocess.Popen(
      [sys.executable, '-c', CODE, address, str(number), digest],
      env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    for number, digest in enumerate(digests)
  ]  # fmt: skip
  results = [process.communicate(timeout=120) for process in processes]
  assert all(process.returncode == 0 for process in processes), results
  return [out.strip().splitlines()[-1] for out, _ in results]


def test_alone_there_is_nothing_to_compare():
  check_same_plan('0123456789abcdef')


@pytest.mark.parametrize(
  'digests, expected',
  [
    (('0123456789abcdef', '0123456789abcdef'), 'same'),
    (
      ('0123456789abcdef', 'fedcba9876543210'),
      'plans differ between processes: 0123456789abcdef in process 0, fedcba9876543210 in process 1. '
      'They must read the same documents with the same config, and the same versions of numpy and numba',
    ),
  ],
  ids=['same', 'different'],
)
def test_two_processes(digests, expected):
  assert shown_by_two(digests) == [expected, expected]
