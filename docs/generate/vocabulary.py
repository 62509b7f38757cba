"""Pages of what forms are written of: the functions of `p`, and the words of the readers."""

from __future__ import annotations

import ast
import inspect

from docs.generate.markdown import ROOT, escaped, link, wrapped
from fusion.frontend.library import installed
from fusion.language import Word
from fusion.language.vocabulary import FUNCTIONS, Vocabulary

_WORDS = """# Words

What the readers of this package say of values, beside the names of rules: the words that forms are made of, and what
each is applied to. B sequences, N heads, M key heads, S queries, T keys, D lanes; C lanes of a latent, Dr of its
rotated key. Written by `make docs`.
"""
_FORMS = """# Forms

The functions of `p`, the first parameter of a form: of each its arguments, what the term that it builds matches, and a
call of it in this package. Terms are also added, subtracted and multiplied with `+`, `-` and `*`. Any other name is a
rule or a word of a reader and takes its captures by name, as `p.rms_norm(x=x, gamma=gamma, eps=eps)`:
[rules](rules.md), [words](words.md). Written by `make docs`.
"""


def words() -> str:
    """Return docs/words.md, the words of the default library."""
    return _WORDS + "".join(map(_word, sorted(installed().words().values(), key=lambda each: each.name)))


def _word(entry: Word) -> str:
    lines = [f"\n## {entry.name}\n", wrapped(escaped(entry.meaning)) + "\n", "| applied to | |", "|---|---|"]
    lines += [f"| {name} | {escaped(what)} |" for name, what in (entry.captures or {}).items()]
    return "\n".join(lines) + "\n"


def forms() -> str:
    """Return docs/forms.md: the functions of `p`, each with the shortest call of it in the default library."""
    calls = _calls_of_p()
    return _FORMS + "".join(_function(name, calls[name]) for name in sorted(FUNCTIONS))


def _function(name: str, calls: list[tuple[str, str]]) -> str:
    function = getattr(Vocabulary, name)
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    first = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    example, path = min(calls, key=lambda each: (len(each[0]), each))
    where = link(path.removeprefix("patterns/"), path, "forms.md")
    described = wrapped(f"`p.{name}{inspect.Signature(bare)}`: {escaped(first)}")
    return f"\n## {name}\n\n{described}\n\n    {example}\n\nIn {where}.\n"


def _calls_of_p() -> dict[str, list[tuple[str, str]]]:
    """Return for each name of `p` its calls in the modules of the default library: text, and path of the module."""
    calls: dict[str, list[tuple[str, str]]] = {}
    for path in sorted((ROOT / "patterns").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name("p"), attr=name)):
                    calls.setdefault(name, []).append((ast.unparse(node), path.relative_to(ROOT).as_posix()))
                case _:
                    pass
    return calls
