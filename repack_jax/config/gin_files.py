"""Run configs from gin files and `--set` overrides, and back to gin text.

The files bind fields of the config classes and nothing else:

    TrainConfig.steps = 20
    DataConfig.source = 'stdlib'

Values are Python literals or macros (`%name`). A file may include one other, which itself includes none.
gin parses and binds; this module checks each statement before it is bound, since only here are its file
and line known, so that a mistake is one `ConfigError` that says where it is and what to write instead.
Nothing here imports JAX.

A relative path is looked up in several places, and the first that has such a file or folder wins:

- the path in a field (`DataConfig.source`, `SimulatorConfig.lengths`): in the folder of the gin file that it
  is written in, then in the current folder; if written in a `--set`, in the current folder only;
- `--config`: in the current folder, then among the configs that come with the package;
- `include`: in the folder of the file that includes, then like `--config`.

`~` is expanded, and the config holds the absolute path. A field may name a file that does not exist: that is
an error when the file is opened, since a run need not open all that its config names.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import tokenize
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path

import gin
from gin import config as gin_config
from gin import config_parser

from repack_jax.checks import ConfigError
from repack_jax.config import RunConfig, paths
from repack_jax.config.run import parts

_OVERRIDE = '--set'
_OVERRIDE_FORM = 'write Class.field=value, for example --set TrainConfig.steps=20'

# Name of each config class -> the class, its own fields' types, and the fields that hold further configs.
_SECTIONS = {type(config).__name__: config for config in RunConfig().sections()}
_CLASSES: dict[str, type[typing.Any]] = {name: type(config) for name, config in _SECTIONS.items()}
_PARTS = {name: parts(config) for name, config in _SECTIONS.items()}


def _own_fields(config: typing.Any) -> list[dataclasses.Field[typing.Any]]:
  """The fields of a config that hold values, not further configs."""
  held = parts(config)
  return [field for field in dataclasses.fields(config) if field.name not in held]


def _own_types(config: typing.Any) -> dict[str, typing.Any]:
  hints = typing.get_type_hints(type(config))
  return {field.name: hints[field.name] for field in _own_fields(config)}


_FIELD_TYPES = {name: _own_types(config) for name, config in _SECTIONS.items()}
_CONFIG_FOLDERS = (paths.CURRENT_FOLDER, paths.packaged_configs())

for _name, _cls in _CLASSES.items():
  gin.external_configurable(_cls, name=_name, module='repack_jax')


def load(config_files: list[str], overrides: list[str]) -> RunConfig:
  """Returns the run that the files and then the overrides describe; what they leave out has its default.

  Later bindings win: files in their order, then overrides in theirs. gin's global state is cleared before
  and after.

  Args:
    config_files: paths of gin files; may be empty. The module says where they are looked up.
    overrides: what followed each `--set`, such as `TrainConfig.steps=20` or `DataConfig.source='stdlib'`.
      A macro that a file defines can be overridden by `name=value`.

  Raises:
    ConfigError: a file is missing or broken, names no class or field that exists, or binds a bad value.
  """
  gin.clear_config()
  try:
    loader = _Loader()
    for file in config_files:
      loader.read_file(_find_config(file, _CONFIG_FOLDERS, file))
    for text in overrides:
      loader.read_override(text)
    return loader.build()
  finally:
    gin.clear_config()


def resolved(run: RunConfig) -> str:
  """Returns gin text that binds every field of every config, from which `load` makes an equal run anywhere.

  Paths are absolute in a run from `load`. A relative one, of a run made in Python, is written as what it
  means in the current folder.

  Raises:
    ConfigError: a float is infinite or not a number, which gin text cannot hold.
  """
  lines = [
    '# The resolved config of a run: every field, defaults and --set overrides included.',
    '# Pass this file as the config to run the same again.',
  ]
  for config in run.sections():
    lines.append('')
    for field in _own_fields(config):
      key, value = f'{type(config).__name__}.{field.name}', getattr(config, field.name)
      if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f'{key} = {value!r}: must be a finite number')
      if isinstance(value, str) and paths.is_path(field, value):
        value = paths.located(key, value, (paths.CURRENT_FOLDER,))
      lines.append(f'{key} = {value!r}')
  return '\n'.join(lines) + '\n'


def _nearest(name: str, options: Iterable[str]) -> str | None:
  """The option most like `name`, upper and lower case alike, or None where none is near."""
  by_lower = {option.lower(): option for option in options}
  found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
  return by_lower[found[0]] if found else None


def _did_you_mean(name: str, options: Iterable[str]) -> str:
  """The tail of a message about an unknown name: the nearest option, or all of them."""
  options = list(options)
  nearest = _nearest(name, options)
  return f"did you mean '{nearest}'?" if nearest else f'choose one of {", ".join(options)}'


def _check_field(where: str, cls: str, field: str) -> None:
  """Raises ConfigError unless `cls` is a config class that has `field`; `where` leads the message."""
  if cls not in _CLASSES:
    raise ConfigError(f'{where}: {cls}: no such class; {_did_you_mean(cls.split(".")[-1], _CLASSES)}')
  if field in _FIELD_TYPES[cls]:
    return
  if field in _PARTS[cls]:
    names = ' or '.join(type(part).__name__ for part in _PARTS[cls][field])
    raise ConfigError(f'{where}: {cls}.{field}: not bound as a whole; bind the fields of {names}')
  owners = [f'{other}.{field}' for other, types in _FIELD_TYPES.items() if field in types]
  remedy = f'did you mean {" or ".join(owners)}?' if owners else _did_you_mean(field, _FIELD_TYPES[cls])
  raise ConfigError(f'{where}: {cls}.{field}: no such field; {remedy}')


def _value_remedy(where: str, text: str) -> str:
  """What to write instead of the value in `text`, a binding that gin could not parse.

  Raises ConfigError where the binding's class or field is already wrong, which is then the thing to fix.
  """
  bound = re.match(r'\s*(\w+)\.(\w+)\s*=\s*(.*)', text)
  if not bound:
    return "a line is Class.field = value, with strings in quotes, for example DataConfig.source = 'stdlib'"
  cls, field, value = bound.groups()
  _check_field(where, cls, field)
  kind = _FIELD_TYPES[cls][field]
  if kind is bool:
    return 'write True or False'
  if kind in (int, float):
    return f'write a number of type {kind.__name__}'
  quoted = f'{cls}.{field}={value.split("#")[0].strip().strip(chr(34) + chr(39))!r}'
  if where == _OVERRIDE:
    return f'quote the string, and the whole for the shell, which takes one pair of quotes off: "{quoted}"'
  return f'quote the string: {quoted}'


class _Reference:
  """Stands for `@name` in a value, so that the check of the field's type reports it like any wrong value."""

  def __init__(self, text: str):
    self._text = text

  def __repr__(self) -> str:
    return self._text


class _Text(str):
  """A string in a config, with the folders in which it is looked up where it is a path.

  The string itself has to remember them: behind a macro, it may stand in another file than its field.
  """

  folders: tuple[Path, ...] = ()


class _Delegate(gin_config.ParserDelegate):
  """gin's own treatment of macros, with a note of the names used; references are left unresolved."""

  def __init__(self) -> None:
    super().__init__()
    self.macros_used: list[str] = []

  def configurable_reference(self, scoped_selector: str, evaluate: bool) -> typing.Any:
    return _Reference(f'@{scoped_selector}{"()" if evaluate else ""}')

  def macro(self, name: str) -> typing.Any:
    self.macros_used.append(name)
    return super().macro(name)


class _Loader:
  """Binds statements in gin's global state and remembers where each came from."""

  def __init__(self) -> None:
    self._origins: dict[str, str] = {}  # 'Class.field' -> 'file:line' or '--set', for messages
    self._macros_defined: dict[str, str] = {}
    self._macros_used: dict[str, str] = {}

  def read_file(self, path: Path, included: bool = False) -> None:
    """Binds what a file says; `included` forbids an include in it."""
    bound_here: dict[str, int] = {}
    folders = path.parent, paths.CURRENT_FOLDER
    for statement in self._statements(_read(path), str(path)):
      line = statement.location.line_num
      where = f'{path}:{line}'
      if isinstance(statement, config_parser.IncludeStatement):
        if included or bound_here:
          raise ConfigError(
            f'{where}: include {statement.filename!r}: a file includes at most one other, in front of its '
            'first binding, and that one includes none; put the bindings here instead'
          )
        bound_here['include'] = line
        name, shown = statement.filename, f'{where}: include {statement.filename!r}'
        self.read_file(_find_config(name, (path.parent, *_CONFIG_FOLDERS), shown), included=True)
      elif isinstance(statement, config_parser.BindingStatement):
        key = f'{statement.selector}.{statement.arg_name}' if statement.arg_name else statement.selector
        if key in bound_here:
          raise ConfigError(f'{where}: {key}: also bound in line {bound_here[key]}; remove one of the two')
        bound_here[key] = line
        self._bind(statement, where, folders)
      elif isinstance(statement, config_parser.BlockDeclaration):
        if statement.selector not in _CLASSES:
          _check_field(where, statement.selector, '')
      else:
        raise ConfigError(f'{where}: import: a config only binds fields and imports nothing; remove the line')

  def read_override(self, text: str) -> None:
    """Binds what followed one `--set`."""
    key, equals, value = (part.strip() for part in text.partition('='))
    shown = ' '.join(text.split())
    if not key or not equals or not value:
      raise ConfigError(f'{_OVERRIDE} {shown}: {_OVERRIDE_FORM}')
    statements = list(self._statements(text, _OVERRIDE))
    if len(statements) != 1 or not isinstance(statements[0], config_parser.BindingStatement):
      raise ConfigError(f'{_OVERRIDE} {shown}: {_OVERRIDE_FORM}')
    statement = statements[0]
    if not statement.arg_name and statement.selector not in self._macros_defined:
      raise ConfigError(f'{_OVERRIDE} {shown}: {_unknown_macro(statement.selector, self._macros_defined)}')
    self._bind(statement, _OVERRIDE, (paths.CURRENT_FOLDER,))

  def build(self) -> RunConfig:
    """Returns the run of all that was bound."""
    for name, where in self._macros_used.items():
      if name not in self._macros_defined:
        remedy = _did_you_mean(name, self._macros_defined) if self._macros_defined else 'define it first'
        raise ConfigError(f'{where}: %{name}: no such macro; {remedy}')
    for name, where in self._macros_defined.items():
      if name not in self._macros_used:
        raise ConfigError(f'{where}: {_unknown_macro(name, ())}')
    try:
      run: RunConfig = self._built(RunConfig())
      return run
    except ConfigError as error:
      field = str(error).partition(' = ')[0]
      where = f'{self._origins[field]}: ' if field in self._origins else ''
      raise ConfigError(f'{where}{error}') from None
    except RecursionError:
      names = ', '.join(f'%{name}' for name in self._macros_defined)
      raise ConfigError(f'macros {names}: one of them refers to itself; give it a plain value') from None

  def _built(self, default: typing.Any) -> typing.Any:
    """Returns a config of this class and its parts from what is bound to their fields."""
    values = self._values(default) if type(default).__name__ in _CLASSES else {}
    for name, held in parts(default).items():
      built = tuple(self._built(part) for part in held)
      values[name] = built if isinstance(getattr(default, name), tuple) else built[0]
    # The class itself, not gin's wrapper of it: that one would append its own text to our errors.
    return type(default)(**values)

  def _values(self, config: typing.Any) -> dict[str, typing.Any]:
    """Returns what is bound to the fields of a config's class, macros resolved and files located."""
    cls = type(config).__name__
    values = gin.get_bindings(cls)
    for field in _own_fields(config):
      text = values.get(field.name)
      if isinstance(text, _Text):
        key, plain = f'{cls}.{field.name}', str(text)
        is_path = paths.is_path(field, plain)
        values[field.name] = (
          paths.located(f'{self._origins[key]}: {key}', plain, text.folders) if is_path else plain
        )
    return values

  def _bind(self, statement: config_parser.BindingStatement, where: str, folders: tuple[Path, ...]) -> None:
    scope, cls, field, value, _ = statement
    if isinstance(value, str):
      value = _Text(value)
      value.folders = folders
    if scope:
      raise ConfigError(f'{where}: {scope}/{cls}: scopes are not used here; remove {scope + "/"!r}')
    if field:
      _check_field(where, cls, field)
      self._origins[f'{cls}.{field}'] = where
      gin.bind_parameter(f'{cls}.{field}', value)
    else:
      self._macros_defined[cls] = where
      gin.bind_parameter((cls, 'gin.macro', 'value'), value)

  def _statements(self, text: str, source: str) -> Iterator[typing.Any]:
    """Yields gin's statements of `text`; its syntax errors become ConfigErrors that name the line."""
    delegate = _Delegate()
    try:
      parser = config_parser.ConfigParser(text, delegate)
      while statement := parser.parse_statement():
        where = source if source == _OVERRIDE else f'{source}:{statement.location.line_num}'
        for name in delegate.macros_used:
          if '/' in name:
            raise ConfigError(f'{where}: %{name}: scopes are not used here; name the macro without one')
          self._macros_used.setdefault(name, where)
        delegate.macros_used.clear()
        yield statement
    except (SyntaxError, tokenize.TokenError, RecursionError, StopIteration) as error:
      raise _syntax_error(error, text, source) from None


def _syntax_error(error: Exception, text: str, source: str) -> ConfigError:
  """The one message for what gin's parser or Python's tokenizer raised on `text`."""
  lines = text.splitlines() or ['']
  number = error.lineno if isinstance(error, SyntaxError) else None
  if isinstance(error, tokenize.TokenError) and len(error.args) > 1:
    number = error.args[1][0]
  # An end of file inside brackets or quotes is reported behind the last line.
  number = min(max(number or 1, 1), len(lines))
  line = lines[number - 1].strip()
  where = source if source == _OVERRIDE else f'{source}:{number}'
  if isinstance(error, IndentationError):
    remedy = 'start the line in the first column'
  else:
    remedy = _value_remedy(where, line)
  shown = line if len(line) <= 100 else f'{line[:97]}...'
  return ConfigError(f'{where}: cannot read `{shown}`: {remedy}')


def _unknown_macro(name: str, macros: Iterable[str]) -> str:
  """A message for `name = value` that has no effect: most likely a field without its class."""
  owners = [f'{cls}.{name}' for cls, types in _FIELD_TYPES.items() if name in types]
  if owners:
    return f'{name}: a field needs its class; write {" or ".join(owners)}'
  if name in _CLASSES:
    return f'{name}: a class needs a field; write {name}.field = value'
  nearest = _nearest(name, macros)
  if nearest:
    return f"{name}: no such macro; did you mean '{nearest}'?"
  return f'{name}: nothing uses this macro; remove it, or bind it with Class.field = %{name}'


def _read(path: Path) -> str:
  try:
    return path.read_text(encoding='utf-8-sig')
  except OSError as error:
    raise ConfigError(f'{path}: cannot read the config file ({error.strerror}); give a .gin file') from None
  except UnicodeDecodeError:
    raise ConfigError(f'{path}: the config file is not UTF-8 text; give a .gin file') from None


def _find_config(name: str, folders: Iterable[Path], shown: str) -> Path:
  """Returns the first existing one of the places that a config's name may mean.

  Raises ConfigError, which begins with `shown`, where there is none.
  """
  candidates = paths.places(name, folders)
  for place in candidates:
    if os.path.exists(place):
      return place
  stem, folder = Path(name).stem, Path(name).parent
  near = _nearest(stem, [file.stem for place in candidates for file in sorted(place.parent.glob('*.gin'))])
  remedy = f"did you mean '{folder / near}.gin'?" if near else 'give the path of a .gin file'
  raise ConfigError(f'{shown}: no such config file; {remedy} {paths.tried(candidates)}')
