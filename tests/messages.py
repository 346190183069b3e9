"""What a user reads of a mistake."""

import pytest

from repack_jax.checks import ConfigError


def message_of(function, *arguments):
  """The one line of the ConfigError that a call raises."""
  with pytest.raises(ConfigError) as caught:
    function(*arguments)
  message = str(caught.value)
  assert '\n' not in message
  return message
