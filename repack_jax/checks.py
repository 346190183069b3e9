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
    value, hint = getattr(config, field.name), hints[field.name]
    name = f'{type(config).__name__}.{field.name}'
    hint_quotes = ' (quote strings in gin)' if hint is str else ''
    require(_is_of(value, hint), name, value, f'must be of type {_type_name(hint)}{hint_quotes}')
    require(not isinstance(value, float) or math.isfinite(value), name, value, 'must be a finite number')


def _is_of(value: object, hint: typing.Any) -> bool:
  """Whether a value is of a type, of one of a union, or a tuple[type, ...]."""
  if isinstance(hint, types.UnionType):
    return any(_is_of(value, option) for option in typing.get_args(hint))
  if typing.get_origin(hint) is tuple:
    return isinstance(value, tuple) and all(_is_of(item, typing.get_args(hint)[0]) for item in value)
  if hint in (int, float):
    return isinstance(value, int | hint) and not isinstance(value, bool)
  return isinstance(value, hint)


def _type_name(hint: typing.Any) -> str:
  if isinstance(hint, types.UnionType):
    return ' or '.join(map(_type_name, typing.get_args(hint)))
  if typing.get_origin(hint) is tuple:
    return f'tuple of {_type_name(typing.get_args(hint)[0])}'
  return str(hint.__name__)


def check_choice(config: object, **choices: tuple[str, ...]) -> None:
  for name, allowed in choices.items():
    value = getattr(config, name)
    require(value in allowed, f'{type(config).__name__}.{name}', value, f'choose one of {", ".join(allowed)}')


def check_min(config: object, minimum: float, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    require(value >= minimum, f'{type(config).__name__}.{name}', value, f'must be at least {minimum}')
