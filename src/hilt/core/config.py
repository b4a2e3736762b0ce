"""Settings as dataclasses: a function returns a complete one, files and ``a.b=c`` overrides change it.

    @dataclass
    class Training:
        batch_size: int = 256
        "Elements per update"

    config = build(Training(), "run.yaml", "batch_size=128")

An unknown key is an error with the nearest name; a value of the wrong type is one with the type. `freeze` writes the
whole of it into a run's folder, `thaw` reads it back. A class whose settings had other names in earlier versions has a
static method `of_former_names`, which gives a mapping with those the names of today.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_omega_conf_dumper
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from hilt.core import trust, validate
from hilt.core.errors import ConfigError, HiltError, Problems, suggest
from hilt.core.files import DISK, read
from hilt.core.validate import value_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

try:
    from omegaconf._yaml import get_yaml_loader
except ImportError:  # before OmegaConf 2.4
    from omegaconf._utils import get_yaml_loader  # type: ignore[attr-defined,no-redef]

T = TypeVar("T", bound="DataclassInstance")
MAX_VALUES = 100_000
"""In a file of settings"""
MAX_PLAIN_DEPTH = 50
"""Levels of a file that is read without `yaml.compose`, which refuses what is nested too deeply"""
_GIVEN = "_given"
_CALLS = re.compile(r"\$\{[^}]*?:")  # ${name:...} calls a resolver; ${a.b} is another setting
_OVERRIDE = re.compile(r"[\w.\[\]/]+=")  # a slash is in names such as agent.proprio_floor.state/tcp_pose


def build(base: T, *layers: str | Path | Mapping[str, Any]) -> T:
    """A new config: `base` changed by each layer in turn, in which later layers take precedence.

    A layer is a mapping, the path of a YAML file, or an override such as
    ``replay.capacity_steps=1000``. Options by name are added to those that are there; ``options={}``
    empties them. Which settings the layers gave is remembered: see `given`.
    """
    if not dataclasses.is_dataclass(base) or isinstance(base, type):
        raise ConfigError(f"expected a config (an instance of a dataclass), got {base!r}.")
    # everything that is wrong is reported below
    with contextlib.suppress(_NotSimpleError, HiltError, OmegaConfBaseException, yaml.YAMLError, ValueError, NameError):
        simple = [_simple_layer(base, layer) for layer in layers]
        return cast(T, _remembering(_changed(base, simple), base, simple))
    return _built_whole(base, layers)


def _built_whole(base: T, layers: Sequence[str | Path | Mapping[str, Any]]) -> T:
    """Builds the config with OmegaConf, which makes a node of every setting: tens of milliseconds."""
    config: Any = _structured(base)
    problems, read = Problems(), []
    for layer in layers:
        with problems.collected():
            where, values = _read_layer(base, layer)
            _rename(base, values)
            config = _merged(config, values, where)
            read.append(values)
    problems.report()
    try:
        built: Any = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {_first_line(error)}") from None
    return cast(T, _remembering(built, base, read))


def override(base: T, *layers: str | Path | Mapping[str, Any]) -> T:
    """Does what `build` does, as a command line means it: where an override switches something off,
    such as ``demonstrations=0``, the settings that `base` had for it, and that need it, go back to
    their defaults. See `hilt.core.validate`."""
    config = build(base, *layers)
    usual = validate.defaults_of(type(base))
    for name, need in validate.needs(type(base)):
        if need.there(base) and not need.there(config) and value_of(config, name) == value_of(base, name):
            first, _, rest = name.partition(".")
            owner, _, leaf = name.rpartition(".")
            setattr(value_of(config, owner), leaf, copy.deepcopy(value_of(usual[first], rest)))
    return config


def given(config: object) -> frozenset[str]:
    """The dotted keys that the layers of `build` have given this config, those equal to a default too. Of a config that
    was made without `build`, as by its class or by `dataclasses.replace`, none are known."""
    known: frozenset[str] = getattr(config, _GIVEN, frozenset())
    return known


def _remembering(built: Any, base: Any, layers: Sequence[Any]) -> Any:
    """The config that was built, which knows from now on what was `given`. That is no
    field: it is not compared, shown or frozen."""
    object.__setattr__(built, _GIVEN, given(base).union(*(_leaves(values) for values in layers)))
    return built


class _NotSimpleError(Exception):
    """Values that OmegaConf would convert, resolve or refuse, or of a kind that only it knows."""


def _simple_layer(base: Any, layer: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(layer, Mapping):
        values = copy.deepcopy(dict(layer))
    elif isinstance(layer, Path) or not _OVERRIDE.match(layer):
        values = _read_plain(Path(layer))
    else:
        values = cast(dict[str, Any], OmegaConf.to_container(_read_layer(base, layer)[1], resolve=False))
    _check_plain(values)
    _rename(base, values)
    return values


def _read_plain(path: Path) -> dict[str, Any]:
    """The same as `read_yaml`, of a file without aliases, and without a node of OmegaConf for every value."""
    if path.suffix not in (".yaml", ".yml") or not _is_plain(text := (data := read(path)).decode()):
        raise _NotSimpleError
    values: Any = yaml.load(text, _loader())
    if type(values) is not dict:
        raise _NotSimpleError
    _refuse_references(values, path)
    trust.came_from(path, data, values)
    return values


@functools.cache
def _loader() -> Any:
    return get_yaml_loader()


def _changed(base: Any, layers: list[dict[str, Any]]) -> Any:
    """The same as `_built_whole`, but OmegaConf sees only the settings that a layer
    names: the others are copied as they are."""
    kind: Any = type(base)
    hints = _hints(kind)
    fields = {item.name: getattr(base, item.name) for item in dataclasses.fields(base)}
    if hasattr(kind, "__post_init__") or not all(item.init for item in dataclasses.fields(base)):
        raise _NotSimpleError
    named = {name: [layer[name] for layer in layers if name in layer] for layer in layers for name in layer}
    if not named.keys() <= fields.keys():
        raise _NotSimpleError
    below = {name for name, value in fields.items() if dataclasses.is_dataclass(value) and not isinstance(value, type)}
    for name, value in fields.items():
        if name in below:
            parts = named.get(name, [])
            if not all(isinstance(part, dict) for part in parts):
                raise _NotSimpleError
            fields[name] = _changed(value, parts)
        else:
            _check_type(hints[name], value)
            fields[name] = copy.deepcopy(value)
    leaves = {name for name in named.keys() - below if not _is_taken(fields, name, named[name], hints[name])}
    if leaves:
        part: Any = _structured(_part(kind, tuple(sorted(leaves)))(**{name: fields[name] for name in sorted(leaves)}))
        for layer in layers:
            values = OmegaConf.create({name: value for name, value in layer.items() if name in leaves})
            part.merge_with(values)
            _clear(part, values)
        built: Any = OmegaConf.to_object(part)
        fields |= {name: getattr(built, name) for name in leaves}
    return kind(**fields)


def _is_taken(fields: dict[str, Any], name: str, values: Sequence[Any], hint: Any) -> bool:
    """Sets a field to the last of its values, where no layer needs more than that: plain values of exactly its type,
    which are merged with nothing. Returns whether it did."""
    if hint is Any or ((typing.get_origin(hint) or hint) is dict and (fields[name] or len(values) > 1)):
        return False  # options are added to those that are there
    try:
        for value in values:
            _check_type(hint, value)
    except _NotSimpleError:
        return False
    fields[name] = values[-1]
    return True


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


@functools.cache
def _part(kind: Any, names: tuple[str, ...]) -> Any:
    """A dataclass with only these fields of another one."""
    return dataclasses.make_dataclass(kind.__name__, [(name, _hints(kind)[name]) for name in names])


def _check_plain(value: Any) -> None:
    """Refuses what OmegaConf would not give back as it is: references to other values, and types that it converts."""
    if isinstance(value, str):
        if "${" in value or value == "???":
            raise _NotSimpleError
    elif type(value) is list:
        for one in value:
            _check_plain(one)
    elif type(value) is dict:
        for name, one in value.items():
            if type(name) is not str:
                raise _NotSimpleError
            _check_plain(one)
    elif value is not None and type(value) not in (bool, int, float):
        raise _NotSimpleError


def _check_type(hint: Any, value: Any) -> None:
    """Refuses a value that is not exactly of the type of its field."""
    _check_plain(value)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if (
        hint is Any
        or (value is None and type(None) in inner)
        or (isinstance(hint, type) and type(value) is hint and origin is None)
    ):
        return
    if origin in (typing.Union, types.UnionType):
        lists = [one for one in inner if typing.get_origin(one) is list]
        if type(value) is list and len(lists) == 1:
            _check_type(lists[0], value)
        elif not any(type(value) is one for one in inner):
            raise _NotSimpleError
    elif origin is list and type(value) is list and len(inner) == 1:
        for one in value:
            _check_type(inner[0], one)
    elif origin is dict and type(value) is dict and len(inner) == 2 and inner[0] is str:
        for one in value.values():
            _check_type(inner[1], one)
    else:
        raise _NotSimpleError


def _merged(config: Any, values: Any, where: str) -> Any:
    """The config with these values. Where one does not fit, each is tried alone, so that all that do not are named."""
    try:
        return _merged_whole(config, values, where)
    except ConfigError:
        problems = Problems()
        for path, node in _leaves(values).items():
            alone = OmegaConf.create()
            OmegaConf.update(alone, path, node, force_add=True)
            problems.check(_merged_whole, config, alone, where)
        problems.report()
        raise


def _merged_whole(config: Any, values: Any, where: str) -> Any:
    try:
        merged = OmegaConf.merge(config, values)
        _clear(merged, values)  # type: ignore[arg-type]
    except ConfigKeyError as error:
        raise ConfigError(_unknown_key(error, config, where)) from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}{error.full_key}: {_wrong_value(error, config, values)}") from None
    return merged


def _leaves(values: Any, prefix: str = "") -> dict[str, Any]:
    """All values by their dotted keys, unresolved: what is no mapping, an empty one,
    or one of whose keys has a dot of its own."""
    if not _is_mapping(values) or not values or any("." in str(name) for name in values):
        return {prefix: values} if prefix else {}
    below = values if isinstance(values, dict) else {str(name): values._get_node(name) for name in values}
    return {
        path: leaf
        for name, node in below.items()
        for path, leaf in _leaves(node, f"{prefix}.{name}" if prefix else name).items()
    }


def _is_mapping(values: Any) -> bool:
    return isinstance(values, dict) or (isinstance(values, DictConfig) and not values._is_none())


def freeze(config: DataclassInstance, path: str | Path) -> None:
    """Writes a config as YAML, whole or not at all. The user's word for code that it
    names is remembered: see `hilt.core.trust`."""
    data = to_yaml(config).encode()
    DISK.replace(Path(path), data)
    trust.remember(Path(path), data, trust.named_in(config))


def to_yaml(config: DataclassInstance) -> str:
    """A config as YAML. OmegaConf sees it only where a value is not exactly of the type of its setting."""
    try:
        plain = _plain(config)
    except (_NotSimpleError, NameError):
        return OmegaConf.to_yaml(_structured(config))
    options = {"default_flow_style": False, "allow_unicode": True, "sort_keys": False}
    return str(yaml.dump(plain, Dumper=get_omega_conf_dumper(), **options))


def _plain(config: Any) -> dict[str, Any]:
    kind: Any = type(config)
    hints, values = _hints(kind), {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value) and type(value) is hints[item.name]:
            values[item.name] = _plain(value)
        else:
            _check_type(hints[item.name], value)
            values[item.name] = copy.deepcopy(value)  # a list that is there twice would be an alias
    return values


def thaw(kind: type[T], path: str | Path) -> T:
    """The config that `freeze` wrote."""
    return build(kind(), Path(path))


def describe(kind: type[DataclassInstance], prefix: str = "") -> list[tuple[str, str, object, str]]:
    """(key, type, default, what it means) of every setting, nested ones by their dotted keys."""
    meanings, rows = _docstrings(cast(Any, kind)), []
    for item in dataclasses.fields(kind):
        default = validate.default(item) if validate.default(item) is not dataclasses.MISSING else None
        if dataclasses.is_dataclass(default) and not isinstance(default, type):
            rows += describe(type(default), f"{prefix}{item.name}.")
        else:
            rows.append((f"{prefix}{item.name}", str(item.type), default, meanings.get(item.name, "")))
    return rows


def _structured(config: Any) -> DictConfig:
    try:
        structured = OmegaConf.structured(config)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {_first_line(error)}") from None
    assert isinstance(structured, DictConfig)
    return structured


def _read_layer(base: Any, layer: str | Path | Mapping[str, Any]) -> tuple[str, Any]:
    """Returns the layer's name for errors, and its values."""
    if isinstance(layer, Mapping):
        return "", OmegaConf.create(dict(layer))
    text = str(layer)
    if isinstance(layer, str) and _OVERRIDE.match(layer):  # also one whose value is a file: task=robot/arm.yaml
        key, _, value = layer.partition("=")
        return "", OmegaConf.from_dotlist([f'{key}=""' if not value.strip() and _is_text(base, key) else layer])
    if not text.endswith((".yaml", ".yml")):
        raise ConfigError(f"{text!r}: expected an override such as key=value, or the path of a .yaml file.")
    return f"{text}: ", read_yaml(Path(layer))


def _is_text(base: Any, key: str) -> bool:
    """Whether the setting is a text: with nothing after its ``=`` it is the empty
    one, where others have no value then."""
    *path, name = key.strip().split(".")
    for part in path:
        base = getattr(base, part, None)
    if not dataclasses.is_dataclass(base):
        return False
    kind: Any = type(base)
    return _hints(kind).get(name) is str


def read_yaml(path: Path) -> DictConfig:
    """The settings in a file, by name. Nothing in it reaches beyond it: see
    `hilt.core.trust`, and `_refuse_references`."""
    data = read(path)
    try:
        if not _is_plain(data.decode()) and _size(yaml.compose(data.decode(), yaml.SafeLoader), {}) > MAX_VALUES:
            raise ConfigError(
                f"{path}: it stands for more than {MAX_VALUES:,} values, with what its aliases "
                "(*name) repeat. Write it out."
            )
        values = OmegaConf.create(data.decode())
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply, or within itself.") from None
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: not readable as YAML ({_first_line(error)}).") from None
    if not isinstance(values, DictConfig):
        raise ConfigError(f"{path}: expected settings by name, got a list.")
    plain = OmegaConf.to_container(values, resolve=False)
    _refuse_references(plain, path)
    trust.came_from(path, data, plain)
    return values


def _is_plain(text: str) -> bool:
    """Whether YAML has no aliases, few levels, and at most `MAX_VALUES` values."""
    levels = 0
    for number, event in enumerate(yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))):
        levels += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or levels > MAX_PLAIN_DEPTH or number > MAX_VALUES:
            return False
    return True


def _size(node: Any, known: dict[int, int]) -> int:
    """The number of values that a YAML node stands for: a few aliases of aliases can stand for billions."""
    if node is None or isinstance(node.value, str):
        return 1
    if id(node) not in known:
        children = [child for entry in node.value for child in (entry if isinstance(entry, tuple) else (entry,))]
        known[id(node)] = 1 + sum(_size(child, known) for child in children)
    return known[id(node)]


def _refuse_references(values: Any, path: Path, key: str = "") -> None:
    """Refuses ``${oc.env:HOME}`` and everything else in a file that OmegaConf would
    call; ``${a.b}``, another setting, is fine."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            _refuse_references(name, path, f"{key}{name}")
            _refuse_references(value, path, f"{key}{name}.")
    elif isinstance(values, list):
        for number, value in enumerate(values):
            _refuse_references(value, path, f"{key}{number}.")
    elif isinstance(values, str) and (found := _CALLS.search(values)):
        raise ConfigError(
            f"{path}: {key.rstrip('.')} is {values!r}: a file of settings calls nothing ({found[0]}...) and "
            "reads no variables of the environment. Write the value itself, or give it on the command line."
        )


def _rename(base: Any, values: Any) -> None:
    """Settings of a layer that have the names of an earlier version get those of today."""
    if not _is_mapping(values):
        return
    if rename := getattr(base, "of_former_names", None):
        items = values.items() if isinstance(values, dict) else values.items_ex(resolve=False)
        before = {str(name): value for name, value in items}
        after = rename(before)
        for name in before.keys() - after.keys():
            del values[name]
        for name in after.keys() - before.keys():
            values[name] = after[name]
    for item in dataclasses.fields(base):
        if dataclasses.is_dataclass(below := getattr(base, item.name)) and item.name in values:
            _rename(below, values[item.name])


def _clear(config: DictConfig, values: Any) -> None:
    """``options={}`` empties them: what is merged into a mapping would only be added to it."""
    for name in map(str, values) if isinstance(values, DictConfig) and not values._is_none() else ():
        if isinstance(values.get(name), DictConfig) and isinstance(config.get(name), DictConfig):
            if not values[name] and OmegaConf.get_type(config, name) is dict:
                config[name] = {}
            else:
                _clear(config[name], values[name])


def _unknown_key(error: ConfigKeyError, config: Any, where: str) -> str:
    key = str(error.full_key or error.key)
    parent = OmegaConf.select(config, key.rpartition(".")[0]) if "." in key else config
    known = [str(name) for name in parent] if parent is not None else []
    near = suggest(key.rpartition(".")[2], known)
    deeper = [path for path in _keys(config) if path.endswith(f".{key}")]
    near = f"; did you mean {deeper[0]!r}?" if deeper else near
    return f"{where}no setting named {key!r}{near} Known here: {', '.join(known)}."


def _keys(config: DictConfig, prefix: str = "") -> list[str]:
    """The dotted keys of all settings."""
    found: list[str] = []
    for name in map(str, config):
        below = None if OmegaConf.is_missing(config, name) else config[name]
        found += [f"{prefix}{name}", *(_keys(below, f"{prefix}{name}.") if isinstance(below, DictConfig) else [])]
    return found


def _wrong_value(error: Exception, config: DictConfig, values: Any) -> str:
    """What is wrong with a value; of one thing where several are expected, how several are written."""
    key = str(getattr(error, "full_key", "") or "")
    given = OmegaConf.select(values, key) if key and isinstance(values, DictConfig) else None
    if key and OmegaConf.is_list(OmegaConf.select(config, key)) and isinstance(given, (str, int, float)):
        return f"expected a list, got {given!r}: write {key}=[{given}]."
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


@functools.cache
def _docstrings(kind: Any) -> dict[str, str]:
    """The text under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found
