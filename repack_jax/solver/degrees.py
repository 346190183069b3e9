"""From thresholds to degrees: what the search begins with."""

from __future__ import annotations

import numpy as np

from repack_jax.solver.compiled import compiled
from repack_jax.solver.problem import Degrees, Problem

# A sample's degree is the smallest at which its share of a rank is at most so many times the mean; 0 asks for
# the widest, 1e9 for the smallest that holds it, -p for the smallest of at least p. The last ones are for few
# samples, where it matters that all are of one degree.
LIMITS = np.array([1.0, 1.15, 1.5, 2.5, 1e9, 0.0, -4.0, -8.0, -16.0, -2.0])
LIMITS_OF_MANY = 8
# Samples of up to so many times a rank's mean tokens are solo; with -1 those that fit, but for the shortest
# that are not enough for one more on each rank.
SOLO_LIMITS = np.array([1e9, 1.2, 0.9, 0.6, 0.3, 0.0, -1.0])


@compiled
def smallest_degrees(problem: Problem, load: np.ndarray, limit: float, widest: int) -> np.ndarray:
  """Returns for each sample the smallest degree that holds it and satisfies one of `LIMITS` for its load.

  Args:
    load: float64 [samples], in any unit.
    widest: no degree is larger.

  Returns int64 [samples].
  """
  least = 1
  if limit < 0:
    least, limit = min(int(-limit), widest), 1e9
  most = limit * load.sum() / problem.ranks
  degree = np.zeros(len(problem.tokens), np.int64)
  for s in range(len(problem.tokens)):
    p = least
    while p < widest and (problem.tokens[s] > p * problem.capacity or load[s] > most * p):
      p *= 2
    degree[s] = p
  return degree


@compiled
def degrees_by_limits(
  problem: Problem, repack: bool, load: np.ndarray, limit: float, children_limit: float, widest: int
) -> Degrees:
  """Returns the degrees that follow from one of `LIMITS` for parents and one for children, none solo.

  Args:
    load: float64 [samples], what the parents' degrees follow; the children's follow tokens.
  """
  children = smallest_degrees(problem, problem.tokens, children_limit, widest)
  parents = smallest_degrees(problem, load, limit, widest)
  if not repack:  # a parent is its own child, and has to balance tokens as well
    parents = np.maximum(parents, children)
  return Degrees(parents, children)


@compiled
def make_solo(problem: Problem, solo_limit: float, degrees: Degrees) -> None:
  """Makes the samples solo that one of `SOLO_LIMITS` names: their parents' degree becomes 0."""
  samples = len(problem.tokens)
  longest = min(abs(solo_limit) * problem.tokens.sum() / problem.ranks, problem.capacity)
  if solo_limit < 0:
    longest, samples = problem.capacity, samples // problem.ranks * problem.ranks
  for s in range(samples):
    if problem.tokens[s] <= longest:
      degrees.parents[s] = 0
