"""What a run does every so many steps besides training: a list of `Every`, called in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Event = TypeVar('Event')


@dataclass(frozen=True)
class Every(Generic[Event]):
  """Calls `call` with what happened at each step whose number `steps` divides; never where that is 0."""

  steps: int
  call: Callable[[Event], None]


def call_hooks(hooks: Sequence[Every[Event]], step: int, event: Event) -> None:
  """Calls those whose turn it is at this step."""
  for hook in hooks:
    if hook.steps and step % hook.steps == 0:
      hook.call(event)
