"""What the planner did to a batch, for people: an HTML page and a trace for ui.perfetto.dev."""

from repack_jax.report.case import Case
from repack_jax.report.html import plan_page
from repack_jax.report.perfetto import trace, write_trace

__all__ = ['Case', 'plan_page', 'trace', 'write_trace']
