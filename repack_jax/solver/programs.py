"""Which compiled program runs a plan: few serve all plans of a run, since each is compiled for minutes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from repack_jax.config.run import PlannerConfig
from repack_jax.plan.plan import Plan
from repack_jax.plan.program import Program
from repack_jax.predict.costs import Costs
from repack_jax.predict.simulator import simulate


class Programs:
  """The programs of a run so far, and the choice of one for each plan.

  A plan takes the fastest program there is that serves it, by the simulator, unless one of its own would save
  more over the rest of the run than compiling it takes (`PlannerConfig.compile_s`). How much it would save is
  what it would have saved so far, a step. All of this follows from configs and plans alone, so all processes
  of a run choose alike.

  Where no program serves a plan, one is made that will serve most others: of all degrees and slots. A program
  of its own knows all degrees too where exchanges are ragged, since those that a plan lacks cost it nothing;
  where they are dense, just the plan's.

  Attributes:
    compiled: in the order in which they were asked for.
  """

  def __init__(self, costs: Costs, config: PlannerConfig, steps: int):
    """
    Args:
      steps: of the run, those before a resume included.
    """
    self.compiled: list[Program] = []
    self._costs, self._config, self._steps = costs, config, steps
    self._degrees = costs.degrees(config)
    # A core for solo samples costs nothing where there are none, so it is in every program that may need it.
    self._with_solo = any('solo' in way for way in config.ways(costs.halo_tokens is not None))
    self._first_step: int | None = None
    self._saved_s: Counter[Program] = Counter()  # by programs that are not compiled

  def choose(self, step: int, plans: Sequence[Plan]) -> tuple[Program, ...]:
    """Returns what runs each plan of a step; steps are counted from 1 and come in order."""
    if self._first_step is None:
      self._first_step = step
    return tuple(self._choose(step, plan) for plan in plans)

  def _choose(self, step: int, plan: Plan) -> Program:
    own = self._program(plan, None if self._costs.cluster.exchange == 'dense' else self._degrees)
    if own in self.compiled:
      return own
    serving = [program for program in self.compiled if program.serves(plan)]
    if serving:
      seconds = {program: simulate(self._costs, [plan], programs=[program]).step_s for program in serving}
      best = min(serving, key=seconds.__getitem__)
      saved_s = seconds[best] - simulate(self._costs, [plan], programs=[own]).step_s
      self._saved_s[own] += max(0.0, saved_s)  # type: ignore[assignment]
      assert self._first_step is not None
      a_step_s = self._saved_s[own] / (step - self._first_step + 1)
      if a_step_s * (self._steps - step + 1) <= self._config.compile_s:
        return best
    if not serving:  # one that will also serve fuller plans, and samples over two ranks
      own = self._program(plan, self._degrees)._replace(capacity_tokens=self._config.capacity_tokens)
      if own.halo_tokens is not None:
        own = own._replace(halo_hops=max(1, own.halo_hops))
    self.compiled.append(own)
    return own

  def _program(self, plan: Plan, degrees: tuple[int, ...] | None) -> Program:
    return Program.of_plan(plan, degrees)._replace(has_solo=self._with_solo)
