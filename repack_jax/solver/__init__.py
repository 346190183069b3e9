"""`solve(lengths, costs, config) -> Solution`: one plan a micro-batch."""

from repack_jax.solver.solve import BASELINE, SampleTooLong, Solution, solve, solve_modes

__all__ = ['BASELINE', 'SampleTooLong', 'Solution', 'solve', 'solve_modes']
