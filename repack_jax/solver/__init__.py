"""`solve(lengths, cluster, model, config) -> list[Plan]`: one plan a micro-batch."""

from repack_jax.solver.solve import SampleTooLong, solve, static_degree

__all__ = ['SampleTooLong', 'solve', 'static_degree']
