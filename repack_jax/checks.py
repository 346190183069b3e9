"""Checks of the config classes' fields: each failure is one `ConfigError` that says what to write instead."""

from __future__ import annotations

import dataclasses
import math
import types
import typing


class ConfigError(ValueError):
  """A user's mistake in a config or on the command line: field, value and remedy, in one message."""


def is_power_of_two(n: int) -> bool:
  return n > 0 and n & (n - 1) == 0


def require(ok: bool, field: str, value: object, remedy: str) -> None:
  if not ok:
    raise ConfigError(f'{field} = {value!r}: {remedy}')


def check_types(config: object) -> None:
  """Raises ConfigError where a field's value is not of its annotated type (int is taken for float)."""
  hints = typing.get_type_hints(type(config))
  for field in dataclasses.fields(config):  # type: ignore[arg-type]
    value = getattr(config, field.name)
    hint = hints[field.name]
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    ok = any(
      (kind is float and isinstance(value, int | float) and not isinstance(value, bool))
      or (kind is int and isinstance(value, int) and not isinstance(value, bool))
      or (kind not in (int, float) and isinstance(value, kind))
      for kind in allowed
    )
    names = ' or '.join(kind.__name__ for kind in allowed)
    hint_quotes = ' (quote strings in gin)' if allowed == (str,) else ''
    name = f'{type(config).__name__}.{field.name}'
    require(ok, name, value, f'must be of type {names}{hint_quotes}')
    require(not isinstance(value, float) or math.isfinite(value), name, value, 'must be a finite number')


def check_choice(config: object, **choices: tuple[str, ...]) -> None:
  for name, allowed in choices.items():
    value = getattr(config, name)
    require(value in allowed, f'{type(config).__name__}.{name}', value, f'choose one of {", ".join(allowed)}')


def check_min(config: object, minimum: float, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    require(value >= minimum, f'{type(config).__name__}.{name}', value, f'must be at least {minimum}')
