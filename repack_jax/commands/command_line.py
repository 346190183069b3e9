"""What the commands share: config arguments, checked outputs, and how a mistake ends."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from repack_jax.checks import ConfigError


def add_config_arguments(parser: argparse.ArgumentParser, required: bool = False) -> None:
  """Adds `--config FILE` and `--set Class.field=value`, for `gin_files.load(args.config, args.set)`."""
  parser.add_argument(
    '--config', action='append', default=[], metavar='FILE', required=required,
    help='a gin file, in the current folder or else of those that come with the package, such as '
    'sim/paper_1f3s.gin; repeatable, later ones win. Relative paths that it holds are looked up in its own '
    'folder, then in the current one',
  )  # fmt: skip
  parser.add_argument(
    '--set', action='append', default=[], metavar='CLASS.FIELD=VALUE',
    help="overrides the files, for example --set 'TrainConfig.steps=20'; repeatable. Relative paths are "
    'looked up in the current folder',
  )  # fmt: skip


def described(doc: str | None, prog: str | None = None) -> argparse.ArgumentParser:
  """Returns a parser that describes a command by its docstring; `prog` is its name, if it is no script."""
  return argparse.ArgumentParser(
    prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
  )


def output_file(name: str) -> Path:
  """Returns the path of an argument that is a file to write; as its type, checked before any work starts."""
  path = Path(name)
  if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
    raise argparse.ArgumentTypeError(f'{name}: cannot be written; name a file in a folder that exists')
  return path


def run(main: Callable[[], None]) -> None:
  """Runs a command; a user's mistake is one line and exit code 2."""
  try:
    main()
  except ConfigError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)
  except KeyboardInterrupt:
    sys.exit(130)
  except BrokenPipeError:  # the reader of a pipe has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)
