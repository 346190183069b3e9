"""What a token sends to its peers, against slow loops over heads, ranks and bytes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from repack_jax.plan.wire import MOST_ROW_BYTES, Wire

HEADS = st.one_of(st.integers(1, 24), st.sampled_from([32, 48, 64]))


@st.composite
def wires(draw) -> Wire:
  """Any operands; as often as not those of attention with grouped queries."""
  head_dim, dtype = draw(st.sampled_from([1, 2, 6, 64, 80, 128])), draw(st.sampled_from([2, 4]))
  if draw(st.booleans()):
    kv, group = draw(HEADS), draw(st.integers(1, 8))
    return Wire((kv * group, kv, kv), kv * group, head_dim, dtype)
  return Wire(tuple(draw(st.lists(HEADS, min_size=1, max_size=4))), draw(HEADS), head_dim, dtype)


def meetings(heads: int, ranks: int) -> list[tuple[int, int]]:
  """(head, rank) wherever the two overlap, if both are laid evenly on the same line."""
  return [
    (head, rank)
    for head in range(heads)
    for rank in range(ranks)
    if head * ranks < (rank + 1) * heads and rank * heads < (head + 1) * ranks
  ]


def is_whole(heads: int, ranks: int) -> bool:
  """Whether each head goes to one rank, or each rank gets one head."""
  pairs = meetings(heads, ranks)
  return len({head for head, _ in pairs}) == len(pairs) or len({rank for _, rank in pairs}) == len(pairs)


def slow_degrees(wire: Wire, widest: int) -> list[int]:
  """Powers of two whose ranks share the result, and share or each have one head of every operand."""
  return [
    ranks
    for ranks in range(1, widest + 1)
    if bin(ranks).count('1') == 1
    and all(is_whole(heads, ranks) for heads in wire.operand_heads)
    and is_whole(wire.result_heads, ranks)
    and wire.result_heads >= ranks
  ]


def peer_bytes(wire: Wire, degrees: list[int]) -> list[int]:
  """What a token sends to one peer at each degree: in dispatch of all operands, in combine of the result."""
  found = []
  for ranks in degrees:
    operands = sum(rank == 0 for heads in wire.operand_heads for _, rank in meetings(heads, ranks))
    result = sum(rank == 0 for _, rank in meetings(wire.result_heads, ranks))
    found += [heads * wire.head_dim * wire.itemsize for heads in (operands, result)]
  return found


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(wires(), st.sampled_from([1, 2, 3, 8, 32, 64]))
def test_heads_and_degrees(wire, widest):
  degrees = list(wire.degrees(widest))
  assert degrees == slow_degrees(wire, widest)
  assert degrees == [1 << i for i in range(len(degrees))]  # a layout can always be halved
  for ranks in degrees:
    for rank in (0, ranks - 1):
      counted = [sum(to == rank for _, to in meetings(heads, ranks)) for heads in wire.operand_heads]
      assert list(wire.rank_heads(ranks)) == counted
    assert (wire.dispatch_heads(ranks), wire.combine_heads(ranks)) == (
      sum(counted), wire.result_heads / ranks,
    )  # fmt: skip
    assert wire.bytes_per_peer(ranks) == sum(peer_bytes(wire, [ranks]))
  many = np.array(degrees)
  for of in (wire.dispatch_heads, wire.combine_heads, wire.bytes_per_peer):
    assert of(many).tolist() == [of(ranks) for ranks in degrees]
  of_each = zip(*(wire.rank_heads(ranks) for ranks in degrees), strict=True)
  assert [heads.tolist() for heads in wire.rank_heads(many)] == [list(heads) for heads in of_each]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(wires(), st.sampled_from([1, 2, 8, 32]), st.sampled_from([1, 2, 64, 512]))
def test_rows(wire, widest, row_bytes):
  degrees = slow_degrees(wire, widest)
  sent = peer_bytes(wire, degrees)
  tokens = wire.row_tokens(widest, row_bytes)
  whole = (1 << i for i in range(10) if all((n << i) % row_bytes == 0 for n in sent))
  assert tokens == next(whole)
  for rows in (tokens, 1, 4):
    elements = wire.row_elements(tuple(degrees), rows)
    most = max(wire.head_dim, MOST_ROW_BYTES // wire.itemsize)
    fitting = (n for n in range(most, 0, -1) if all(rows * b % (n * wire.itemsize) == 0 for b in sent))
    assert elements == next(fitting)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(wires(), st.integers(1, 9))
def test_chunks(whole, chunks):
  """Each head of an operand travels once, with the first chunk whose core works on it."""
  wire = whole.cut(chunks)
  for degree in wire.degrees(32):
    of_rank, result = wire.rank_heads(degree), wire.combine_heads(degree)
    count = wire.chunk_count(degree)
    even = [n for n in range(1, chunks + 1) if all(is_whole(heads, n) for heads in of_rank)]
    assert count == max(n for n in even if result % n == 0)
    for operand, heads in enumerate(of_rank):
      needed = [[head for head, core in meetings(heads, count) if core == chunk] for chunk in range(count)]
      sent = [wire.chunk_heads(degree, chunk)[operand] for chunk in range(count)]
      ends = np.cumsum([0, *sent])
      assert ends[-1] == heads
      for chunk, worked_on in enumerate(needed):
        source = wire.chunk_sources(degree, chunk)[operand]
        assert list(range(ends[source], ends[source + 1])) == worked_on and source <= chunk
        of_core = wire.core_heads(degree, chunk)[operand]
        assert list(range(of_core.start, of_core.stop)) == worked_on
    sites = [(wire.dispatched(chunk)(degree), wire.combined(chunk)(degree)) for chunk in range(chunks)]
    assert np.sum(sites, axis=0).tolist() == [wire.dispatch_heads(degree), result]
    assert all(site == (0, 0) for site in sites[count:])
    assert wire.shown_heads(degree) == (sites[0][0], sites[count - 1][1])
    fitted = wire.fitted([1, degree])
    assert fitted.chunks == (count if degree > 1 else 1) and fitted.chunk_count(degree) == fitted.chunks


def test_rows_by_hand():
  """32 query and 4 key/value heads of 128 in bfloat16, 256 bytes each: at SP32 a rank sends back one head."""
  wire = Wire.of_attention(32, 4, 128, 'bfloat16')
  assert wire == Wire((32, 4, 4), 32, 128, 2)
  assert wire.degrees(32) == (1, 2, 4, 8, 16, 32) and wire.degrees(8) == (1, 2, 4, 8)
  assert wire.rank_heads(8) == (4, 1, 1)
  assert [wire.row_tokens(32, row_bytes) for row_bytes in (1, 256, 512)] == [1, 1, 2]
  assert wire.row_tokens(16, 512) == 1
  # One token at SP32 sends 3 heads there and one back: rows of a head. Two tokens fill rows of 512 bytes.
  assert (wire.row_elements((1, 32), 1), wire.row_elements((1, 32), 2)) == (128, 256)
  # In two chunks a rank of 16 sends back a head in each, as at SP32.
  assert [wire.cut(2).row_tokens(widest, 512) for widest in (8, 16)] == [1, 2]
