"""The questions of the page as TypeScript: run this file after a change of ``protocol.py``."""

from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Struct
from msgspec.structs import fields

from regard import view
from regard.view.tiles.manifest import Opening
from regard.view.tiles.protocol import QUESTIONS

WRITTEN = Path(view.__file__).parent / "web" / "protocol" / "questions.ts"
_WIDTH = 120
_WORDS = {
    int: "number",
    float: "number",
    str: "string",
    bool: "boolean",
    NoneType: "null",
}


def typescript() -> str:
    """The table as TypeScript."""
    structures: dict[type, str] = {}
    for kind, (question, answer) in QUESTIONS.items():
        _declare(answer, [], structures)
        _declare(question, [f'kind: "{kind}"'], structures)
    answers = [f"{kind}: {answer.__name__}" for kind, (_, answer) in QUESTIONS.items()]
    kinds = [f"  | {_name(question)}" for question, _ in QUESTIONS.values()]
    return (
        "\n".join(
            [
                "/** The questions of the page and their answers, as protocol.py writes them. */",
                "",
                *structures.values(),
                "/** The answer to a question of each kind. */",
                *(_alias("Answers", answers), "", "export type Question =", *kinds),
            ]
        )
        + ";\n"
    )


def _name(structure: type) -> str:
    is_question = any(question is structure for question, _ in QUESTIONS.values())
    return f"{structure.__name__}Question" if is_question else structure.__name__


def _declare(structure: type, members: list[str], structures: dict[type, str]) -> None:
    """Add a type, after those that it uses."""
    if structure in structures:
        return
    hints = get_type_hints(structure, include_extras=True)
    for hint in hints.values():
        for used in _structures_in(hint):
            _declare(used, [], structures)
    members_of = () if structure is Opening else fields(structure)
    optional = {field.name for field in members_of if field.default is None}
    members += [f"{name}{'?' * (name in optional)}: {_word(hint)}" for name, hint in hints.items()]
    first = (structure.__doc__ or "").partition("\n")[0]
    structures[structure] = f"/** {first} */\n{_alias(_name(structure), members)}"


def _alias(name: str, members: list[str]) -> str:
    """Return a type on one line, if it fits as prettier counts."""
    line = f"export type {name} = {{ {'; '.join(members)} }};"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"export type {name} = {{", *(f"  {member};" for member in members), "};"])


def _structures_in(hint: Any) -> list[type]:
    if isinstance(hint, type) and (issubclass(hint, Struct) or hint is Opening):
        return [hint]
    return [used for part in get_args(hint) for used in _structures_in(part)]


def _word(hint: Any) -> str:
    """Return a type in TypeScript."""
    parts = get_args(hint)
    if get_origin(hint) is Annotated:
        return parts[1] if isinstance(parts[1], str) else _word(parts[0])
    if get_origin(hint) in (UnionType, Union):
        return " | ".join(_word(part) for part in parts)
    if get_origin(hint) is Literal:
        return " | ".join(f'"{word}"' for word in parts)
    if get_origin(hint) is tuple:
        return f"[{', '.join(_word(part) for part in parts)}]"
    if get_origin(hint) is list:
        word = _word(parts[0])
        return f"({word})[]" if " " in word and not word.startswith("[") else f"{word}[]"
    return _WORDS.get(hint) or hint.__name__


if __name__ == "__main__":
    WRITTEN.write_text(typescript(), encoding="utf-8")
