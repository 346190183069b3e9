"""`plan_page`: a batch's plans and simulated steps as one HTML page that needs nothing else."""

from __future__ import annotations

import html
import json
import string
from collections.abc import Sequence
from importlib import resources

from repack_jax.config import RunConfig
from repack_jax.report.case import Case
from repack_jax.report.data import page_data

_SCRIPTS = ('common.js', 'rows.js', 'layouts.js', 'timeline.js', 'bars.js', 'page.js')


def plan_page(run: RunConfig, cases: Sequence[Case], title: str) -> str:
  """Returns the page's text. The other cases are compared with the first.

  Raises ValueError where the cases cannot be compared: other samples, other ranks, a name twice.
  """
  return string.Template(_file('plan.html')).substitute(
    title=html.escape(title),
    style=_file('plan.css'),
    data=script_json(page_data(run, cases)),
    script='\n'.join(_file(name) for name in _SCRIPTS),
  )


def script_json(data: object) -> str:
  """Returns JSON that no text in it can end the script element around it."""
  text = json.dumps(data, separators=(',', ':'), allow_nan=False)
  return text.replace('<', r'\u003c').replace('>', r'\u003e').replace('&', r'\u0026')


def _file(name: str) -> str:
  return resources.files('repack_jax.report').joinpath(name).read_text(encoding='utf-8')
