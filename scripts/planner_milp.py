"""Solves the MILP of `planner_peers.flexsp_milp`: numbers as JSON on stdin, outcome and groups on stdout.

It imports OR-tools alone, so that a process of its own starts fast.
"""

from __future__ import annotations

import json
import sys
from typing import Any

Groups = list[tuple[int, list[int]]]


def solve(problem: dict[str, Any]) -> tuple[str, Groups | None]:
  """Returns `optimal` or `limit`, with each group's size and its samples of each bucket; `greedy` with None.

  Args:
    problem: `of_degree`, a list of `degree`, `groups` (how many there can be), `tokens` (that one holds),
      `of_one_ms` (of a sample of each bucket) and `latency_ms` (of a group); `counts` and `bucket_tokens` of
      buckets; `ranks`; `limit_s`.
  """
  from ortools.linear_solver import pywraplp

  solver = pywraplp.Solver.CreateSolver('SCIP')
  solver.SetTimeLimit(int(1e3 * problem['limit_s']))
  slowest_ms = solver.NumVar(0, solver.infinity(), '')
  candidates = [of for of in problem['of_degree'] for _ in range(of['groups'])]
  used = [solver.BoolVar('') for _ in candidates]
  holds = [[solver.IntVar(0, count, '') for count in problem['counts']] for _ in candidates]
  for of, chosen, held in zip(candidates, used, holds, strict=True):
    busy_ms = sum(ms * n for ms, n in zip(of['of_one_ms'], held, strict=True)) + of['latency_ms'] * chosen
    solver.Add(busy_ms <= slowest_ms)
    tokens = sum(tokens * n for tokens, n in zip(problem['bucket_tokens'], held, strict=True))
    solver.Add(tokens <= of['tokens'] * chosen)
  solver.Add(
    sum(of['degree'] * chosen for of, chosen in zip(candidates, used, strict=True)) <= problem['ranks']
  )
  for bucket, count in enumerate(problem['counts']):
    solver.Add(sum(held[bucket] for held in holds) == count)
  for i in range(1, len(candidates)):  # groups of one degree are alike
    if candidates[i] is candidates[i - 1]:
      solver.Add(used[i] <= used[i - 1])
  solver.Minimize(slowest_ms)
  status = solver.Solve()
  if status not in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE):
    return 'greedy', None
  found = [[round(n.solution_value()) for n in held] for held in holds]
  groups = [(of['degree'], held) for of, held in zip(candidates, found, strict=True) if any(held)]
  return 'optimal' if status == pywraplp.Solver.OPTIMAL else 'limit', groups


if __name__ == '__main__':
  json.dump(solve(json.load(sys.stdin)), sys.stdout)
