"""An emulation of the ragged all-to-all, which XLA:CPU lacks, for the tests of what is built on it."""

import functools

import jax
import jax.numpy as jnp


def emulated_ragged_all_to_all(
  operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
  """The operation as documented, from all-gathers; NaN where receive sizes are not what peers send."""
  me = jax.lax.axis_index(axis_name)
  everyone = functools.partial(jax.lax.all_gather, axis_name=axis_name)
  data, starts, sizes, places = map(everyone, (operand, input_offsets, send_sizes, output_offsets))
  row = jnp.arange(operand.shape[0])
  for peer in range(data.shape[0]):
    inside = row < sizes[peer, me]
    rows = data[peer, jnp.where(inside, starts[peer, me] + row, 0)]
    target = jnp.where(inside, places[peer, me] + row, output.shape[0])
    output = output.at[target].set(rows, mode='drop')
  return jnp.where((recv_sizes == sizes[:, me]).all(), output, jnp.nan)
