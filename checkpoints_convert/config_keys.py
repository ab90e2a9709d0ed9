"""Read strangers' configs: every key is honoured, known to be irrelevant to attacks, or refused by name."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from dime_jax._util.typing import JsonObject
from dime_jax.models import NetworkSpec


class ConfigKeys(NamedTuple):
    """What is known about the keys of one kind of config.

    Attributes:
      class_names: of the class that it is for; none if it does not say.
      fixed: keys with the only values that our network has; the first is the default.
      fields: keys that are fields of the network's spec: the field, and the default.
      honoured: other keys that the spec follows from, with their defaults.
      ignored: keys that change nothing here; if none are listed, all other keys are.
      reasons: what a key's other values would mean, for the error.
    """

    class_names: tuple[str, ...]
    fixed: Mapping[str, tuple[object, ...]]
    fields: Mapping[str, tuple[str, object]]
    honoured: Mapping[str, object]
    ignored: tuple[str, ...]
    reasons: Mapping[str, str] = {}

    def defaults(self) -> JsonObject:
        """Return the default of every key that counts."""
        return {**{key: default for key, (_, default) in self.fields.items()}, **self.honoured}

    def values(self, spec: NetworkSpec) -> JsonObject:
        """Return the keys that are fields of the spec, as a config has them."""
        return {key: getattr(spec, field) for key, (field, _) in self.fields.items()}


def check_class(name: object, expected: tuple[str, ...]) -> None:
    """Require the class that a config is for to be among those expected."""
    if name not in expected:
        raise ValueError(f"cannot honour _class_name={repr(name)[:60]}: must be {' or '.join(expected)}")


def refuse_code(config: JsonObject) -> None:
    """Refuse a config that names Python code."""
    if "auto_map" in config:
        raise ValueError("cannot honour auto_map: it names code to run")


def refuse_unknown(config: JsonObject, known: Collection[str]) -> None:
    """Refuse keys that are not known, by name."""
    unknown = sorted(set(config) - set(known))
    if unknown:
        shown = ", ".join(f"{key}={str(config[key])[:40]!r}" for key in unknown[:5])
        raise ValueError(f"cannot honour unknown keys: {shown}")


class KeyValues(NamedTuple):
    """The fields of a spec that a config gives, and all keys that count, with their defaults."""

    fields: JsonObject
    keys: JsonObject


def read_keys(config: JsonObject, keys: ConfigKeys) -> KeyValues:
    """Return what counts in a config, once the rest is known to change nothing."""
    if keys.class_names:
        names = config.get("architectures")  # as transformers has it
        check_class(names[0] if isinstance(names, list) and names else config.get("_class_name"), keys.class_names)
    refuse_code(config)
    for key, values in keys.fixed.items():
        if config.get(key, values[0]) not in values:
            if key in keys.reasons:
                raise ValueError(f"not supported, because {keys.reasons[key]} ({key}={str(config[key])[:60]})")
            expected = " or ".join(map(repr, values))
            raise ValueError(f"cannot honour {key}={repr(config[key])[:60]}: must be {expected}")
    if keys.ignored:
        refuse_unknown(config, {*keys.fixed, *keys.defaults(), *keys.ignored})
    given = {key: config.get(key, default) for key, default in keys.defaults().items()}
    return KeyValues({field: given[key] for key, (field, _) in keys.fields.items()}, given)
