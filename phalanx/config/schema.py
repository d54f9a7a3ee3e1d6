"""A JSON schema of config files, with which editors complete and check them: types, values, defaults and meanings.
Rules between keys are not in it."""

from __future__ import annotations

import json
import typing
from typing import Any

from pydantic import TypeAdapter

from phalanx.base import tree
from phalanx.base.registry import configs, names
from phalanx.config.model_source import FROM
from phalanx.config.run import Fp8Config, Run
from phalanx.config.validate import FALLBACK, NAMED, families, named_sections, run_schema
from phalanx.optim.config import OptimConfig

MEANING = " ".join(FROM.splitlines()[1].split())


def schema_text() -> str:
    return json.dumps(config_schema(), indent=1)


def config_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of a YAML config."""
    made = run_schema(named_sections({})[0]).model_json_schema(mode="validation")
    for name, family in families().items():  # a family of another package is accepted as any text
        says = made["$defs"][family.__name__]["properties"]["family"]
        if "const" not in says and "enum" not in says:
            says["const"] = name
    for cls in sections_of(Run):
        place = made if cls is Run else made["$defs"].get(cls.__name__)
        if place is not None:
            describe_fields(place, cls)
    allow_folders(made)
    allow_named(made)
    recipe = made["$defs"][Fp8Config.__name__]["properties"]["recipe"]
    recipe["anyOf"] = [{"enum": list(names("fp8_recipe"))}, {"pattern": ":"}]
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Phalanx config",
        "description": "The config of a training run.",
    }
    return {**head, **{name: value for name, value in made.items() if name not in head}}


def allow_folders(made: dict[str, Any]) -> None:
    """A Hugging Face folder supplies unset fields of `model`: with model.from, and with init_from, where `model` may be
    left out."""
    whole = made["properties"]["model"]
    refs = {name: f"#/$defs/{cls.__name__}" for name, cls in families().items()}
    whole["discriminator"] = {"mapping": refs, "propertyName": "family"}
    every = [made["$defs"][choice["$ref"].rpartition("/")[2]]["properties"] for choice in whole["oneOf"]]
    fields: dict[str, Any] = {}
    for family in every:
        for name, field in family.items():
            kinds = fields.setdefault(name, {"description": field.get("description", ""), "anyOf": []})["anyOf"]
            if (kind := {k: v for k, v in field.items() if k not in ("default", "description")}) not in kinds:
                kinds.append(kind)
    part = {
        "type": "object",
        "additionalProperties": False,
        "properties": {"from": {"type": "string", "description": MEANING}, **fields},
    }
    made["$defs"]["PartOfModel"] = part
    made["properties"]["model"] = {"$ref": "#/$defs/PartOfModel"}
    made["required"] = [name for name in made["required"] if name != "model"]
    made["if"] = {"required": ["init_from"], "properties": {"init_from": {"type": "string"}}}
    made["else"] = {"required": ["model"], "properties": {"model": {"anyOf": [whole, {"required": ["from"]}]}}}


def allow_named(made: dict[str, Any]) -> None:
    """Each of our optimizers, objectives and methods of adapters has a section of its own; one from the user's own
    package adds keys that are not known here."""
    every = {base.seam: [section_schema(made, cls) for cls in configs(base.seam)] for base, _ in NAMED.values()}
    for config in configs(OptimConfig.seam):
        fallback = made["$defs"][config.__name__]["properties"]["fallback"]
        fallback["anyOf"] = [*every[OptimConfig.seam], foreign(OptimConfig.named_by), {"type": "null"}]
    made["$defs"].pop(OptimConfig.__name__, None)
    for section, (base, _) in NAMED.items():
        if section != FALLBACK:
            given = made["properties"][section]
            choices = given.pop("anyOf", None) or [{key: given.pop(key) for key in ("$ref", "default") if key in given}]
            known = [choice.get("$ref") for choice in choices]
            choices += [choice for choice in every[base.seam] if choice["$ref"] not in known]
            made["properties"][section] = {**given, "anyOf": [*choices, foreign(base.named_by)]}


def section_schema(made: dict[str, Any], cls: type) -> dict[str, Any]:
    """A reference to the schema of a section, which is added if it is not there yet."""
    if cls.__name__ not in made["$defs"]:
        own = TypeAdapter(cls).json_schema(mode="validation")
        inner = own.pop("$defs", {})
        made["$defs"] = {**inner, **made["$defs"], cls.__name__: own}
        describe_fields(own, cls)
    return {"$ref": f"#/$defs/{cls.__name__}"}


def foreign(key: str) -> dict[str, Any]:
    """A section that names code of a package."""
    return {"type": "object", "required": [key], "properties": {key: {"type": "string", "pattern": ":"}}}


def sections_of(cls: type) -> list[type]:
    """The dataclass and all those below it, including those in maps; each once."""
    found, rest = dict[type, None](), [cls]
    while rest:
        one = rest.pop()
        if one in found:
            continue
        found[one] = None
        for hint in tree.hints(one).values():
            for member in tree.members(hint):
                rest += [
                    *tree.sections(member),
                    *(s for inside in typing.get_args(member) for s in tree.sections(inside)),
                ]
    return list(found)


def describe_fields(place: dict[str, Any], cls: type) -> None:
    """Add meanings, and texts accepted in place of lists; no other keys are allowed."""
    place["additionalProperties"] = False
    place.pop("title", None)
    docs, whole = tree.field_docs(cls), typing.get_type_hints(cls, include_extras=True)
    for name, field in place["properties"].items():
        field.pop("title", None)
        if is_read_from_text(whole[name]):
            kept = {k: v for k, v in field.items() if k == "default"}
            plain = {k: v for k, v in field.items() if k != "default"}
            field = place["properties"][name] = {"anyOf": [plain, {"type": "string"}, {"type": "array"}], **kept}
        if docs.get(name):
            field["description"] = " ".join(docs[name].split())


def is_read_from_text(hint: Any) -> bool:
    """Whether a value of another type is converted to this one before it is checked."""
    return any(isinstance(m, tree.FromText) for m in getattr(hint, "__metadata__", ()))
