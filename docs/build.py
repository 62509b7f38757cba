"""Write what the documentation takes from the code: generated pages, and the listing in the README.

python docs/build.py               # all but the table of model families
python docs/build.py --families    # that table alone: traces each family at its real sizes, minutes
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import fusion
from fusion.frontend import hf
from fusion.frontend.catalogue import OperatorEntry, RuleEntry, operator_entries, rule_entries
from fusion.frontend.library import installed
from fusion.graph.launches import is_launch
from fusion.language import Word
from fusion.language.vocabulary import FUNCTIONS, Vocabulary

ROOT = Path(__file__).parents[1]
MARKS = re.compile(r"(<!-- listing -->\n).*?(<!-- end of listing -->)", re.DOTALL)
FAMILIES_MARKS = re.compile(r"(<!-- families -->\n).*?(<!-- end of families -->)", re.DOTALL)
WIDTH = 76
FAMILIES = {
    "Llama 2, 3": "llama", "Qwen3": "qwen3", "Mistral": "mistral", "Gemma 3": "gemma3_text", "Phi-3, Phi-4": "phi3",
    "OLMo 2": "olmo2", "GLM-4": "glm4", "SmolLM3": "smollm3", "Qwen3-MoE": "qwen3_moe", "Mixtral": "mixtral",
    "gpt-oss": "gpt_oss", "Ernie 4.5 MoE": "ernie4_5_moe", "DeepSeek-V2": "deepseek_v2",
    "DeepSeek-V3, R1, Kimi-K2": "deepseek_v3", "LongCat-Flash": "longcat_flash",
    "DeepSeek-V3.2": "deepseek_v32", "GLM-5": "glm_moe_dsa",
}  # fmt: skip
"""Families of the table in README -> their type in transformers."""


def generated() -> dict[Path, str]:
    """Every file with generated text, as it should be."""
    readme = ROOT / "README.md"
    return {
        ROOT / "docs" / "operators.md": operators_page(),
        ROOT / "docs" / "rules.md": rules_page(),
        ROOT / "docs" / "words.md": words_page(),
        ROOT / "docs" / "forms.md": forms_page(),
        ROOT / "docs" / "families.md": families_page(),
        readme: MARKS.sub(lambda found: f"{found[1]}{listing()}{found[2]}", readme.read_text()),
    }


def operators_page() -> str:
    """Return the page of the operators that the pass emits."""
    head = (
        "# Operators\n\nThe fused operators that the pass can emit, as `cann-fusion ops` lists them. A call that "
        "breaks a limit of the target is refused, and the report says which limit. *host* stands for what every "
        "machine asks for. Called directly where there is no kernel, an operator is computed by its decomposition: of "
        "the arguments that are listed as computed, within the limits of *host*. A call that breaks one of them, or "
        "gives another argument a value that is not its default, raises an `OperatorError` that names the argument; "
        "fake tensors raise it too. Written by `make docs`.\n"
    )
    return head + "".join(_operator(each) for each in operator_entries())


def _operator(entry: OperatorEntry) -> str:
    lines = [f"\n## {entry.name}\n", f"{entry.summary}\n", f"```\n{entry.schema}\n```\n", _answers(entry)]
    lines += ["| argument | dims | dtypes |", "|---|---|---|"]
    for name, dims in entry.dims.items():
        lines.append(f"| {name} | {_cell(f'[{dims}]')} | {', '.join(entry.dtypes.get(name, ()))} |")
    lines += ["\n| target | a call must keep to |", "|---|---|"]
    for target, limits in entry.limits.items():
        lines.append(f"| {target} | {'<br>'.join(_cell(each) for each in limits)} |")
    older = f" In older packages `{entry.older}`." if entry.older else ""
    lines.append(f"\nLowered by {', '.join(entry.lowerings)}.{older} Read in {entry.source}.\n")
    return "\n".join(lines)


def _answers(entry: OperatorEntry) -> str:
    """Return which arguments are computed, which raise unless they are at their defaults, and which change nothing."""
    because: dict[str, list[str]] = {}
    for name, reason in entry.uncomputed.items():
        because.setdefault(reason, []).append(f"`{name}`")
    raising = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in because.items())
    parts = {
        "Computed": ", ".join(f"`{name}`" for name in entry.computed),
        "Raise unless they are at their defaults": raising,
        "Without effect": ", ".join(f"`{name}`" for name in entry.without_effect),
    }
    return "\n".join(f"- {what}: {names}." for what, names in parts.items() if names) + "\n"


def _cell(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def words_page() -> str:
    """Return the page of the words of the default library."""
    head = (
        "# Words\n\n"
        "What the readers of this package say of values, beside the names of rules: the words that forms "
        "are made of, and what each is applied to. B sequences, N heads, M key heads, S queries, T keys, "
        "D lanes; C lanes of a latent, Dr of its rotated key. Written by `make docs`.\n"
    )
    return head + "".join(map(_word, sorted(installed().words().values(), key=lambda each: each.name)))


def _word(entry: Word) -> str:
    lines = [f"\n## {entry.name}\n", f"{_escaped(entry.meaning)}\n", "| applied to | |", "|---|---|"]
    lines += [f"| {name} | {_escaped(what)} |" for name, what in (entry.captures or {}).items()]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def forms_page() -> str:
    """Return the page of the functions of `p`, each with the shortest call of it in the default library."""
    head = (
        "# Forms\n\nThe functions of `p`, the first parameter of a form: of each its arguments, what the term that it "
        "builds matches, and a call of it in this package. Terms are also added, subtracted and multiplied with `+`, "
        "`-` and `*`. Any other name is a rule or a word of a reader and takes its captures by name, as "
        "`p.rms_norm(x=x, gamma=gamma, eps=eps)`: [rules](rules.md), [words](words.md). Written by `make docs`.\n"
    )
    calls = _calls_of_p()
    return head + "".join(_function(name, calls[name]) for name in sorted(FUNCTIONS))


def _function(name: str, calls: list[tuple[str, str]]) -> str:
    function = getattr(Vocabulary, name)
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    first = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    example, path = min(calls, key=lambda each: (len(each[0]), each))
    where = f"[{path.removeprefix('patterns/')}](../{path})"
    return f"\n## {name}\n\n`p.{name}{inspect.Signature(bare)}`: {_escaped(first)}\n\n    {example}\n\nIn {where}.\n"


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


def rules_page() -> str:
    """Return the page of the rules of the default library."""
    head = (
        "# Rules\n\nThe rules that this package installs, as `cann-fusion rules` lists them: what each means, the "
        "forms in which it is recognised in any spelling, what looks alike but is refused, and what it becomes: the "
        "lowering that is legal and cheapest on the target. Written by `make docs`.\n"
    )
    return head + "".join(_rule(each) for each in rule_entries())


def _rule(entry: RuleEntry) -> str:
    uses = f" Made of {', '.join(f'`{each}`' for each in entry.uses)}." if entry.uses else ""
    off = " Opt-in: off unless the option `opt_in` names it." if entry.opt_in else ""
    lines = [f"\n## {entry.name}\n", f"{entry.meaning}{off}{uses}\n", f"> {entry.formula}\n"]
    lines += _list("Written forms", entry.patterns) + _list("Lowerings", entry.lowerings)
    return "\n".join(lines + _list("Refused", entry.refuses))


def _list(title: str, described: dict[str, str]) -> list[str]:
    return [f"{title}:\n", *(f"* `{name}`: {text}" for name, text in described.items()), ""] if described else []


def families_page() -> str:
    """Return the page of code in the manner of public repositories, from the texts in tests/goldens/expected."""
    sys.path.insert(0, str(ROOT))
    from tests.repositories.families import told
    from tests.repositories.pieces import PIECES

    found = {piece: told(piece) for piece in PIECES}
    names = dict.fromkeys(piece.repository for piece in PIECES)
    fused, all_of_them = sum(each.attentions for each in found.values()), sum(piece.attentions for piece in PIECES)
    head = (
        "# Families\n\nHow public repositories write attention, norms, rotations, caches and routers, and what "
        "becomes of it in bfloat16 on ascend910_93. Each piece is written anew, in the manner of its repository: "
        "[tests/repositories](../tests/repositories/pieces.py). "
        f"{len(PIECES)} pieces of {len(names)} repositories; {fused} of {all_of_them} attentions become one operator "
        "each, the last column says why the others do not. Written by `make docs`.\n"
    )
    return head + "".join(_family(name, found) for name in names) + _indexers()


def _family(name: str, found: dict[Any, Any]) -> str:
    lines = [f"\n## {name}\n", *_COLUMNS]
    lines += [_row(piece.what, each, piece.attentions) for piece, each in found.items() if piece.repository == name]
    return "\n".join(lines) + "\n"


_COLUMNS = ("| | launches | attentions | fused by | not, because |", "|---|---|---|---|---|")


def _row(what: str, each: Any, attentions: int) -> str:
    rules = ", ".join(f"{rule}{f' ×{count}' if count > 1 else ''}" for rule, count in each.rules.items())
    many = f"{each.attentions} of {attentions}" if attentions else ""
    reasons = "<br>".join(_escaped(reason) for reason in each.refused)
    return f"| {what} | {each.before} → {each.after} | {many} | {_escaped(rules)} | {reasons} |"


def _indexers() -> str:
    """Return the rows of the families of transformers with an indexer, one step of two layers each."""
    from tests.models import indexers
    from tests.models.families import LAYERS
    from tests.repositories.families import of_case

    head = (
        "\n## huggingface/transformers, families with an indexer\n\n"
        "Untouched models of two layers, a prompt and a step over a static cache. DeepSeek-V4 lists pools of keys, "
        "MiniMax-M3 blocks of them for each group of heads, Doge keys for each head. Glm5Next and Qwen4Exp are several "
        "graphs each: "
        "[a test](../tests/models/test_sparse_attention.py) says what their attention becomes, and why it is dense.\n"
    )
    steps = [(name, mode) for name in indexers.INDEXED for mode in indexers.MODES]
    found = {f"{name}, {mode.partition('_')[0]}": (indexers.FILE, f"{name} {mode}") for name, mode in steps}
    found |= {"DeepseekV4, prefill": ("model_DeepseekV4", "prefill eager")}
    found |= {f"{name}, prefill": (f"model_{name}", "prefill sdpa") for name in ("MiniMaxM3VL", "Doge")}
    rows = [_row(what, of_case(*case), LAYERS) for what, case in found.items()]
    return "\n".join([head, *_COLUMNS, *rows]) + "\n"


def families_table() -> str:
    """Trace one step of decoding of each family at its real sizes, one layer of every kind, for `ascend910_93`."""
    head = (
        "One token behind a static cache, models of `transformers` at their real sizes with one or two layers of each "
        "kind, in bfloat16 for `ascend910_93`; for yours, `cann-fusion explain hf:TYPE --mode decode`:\n\n"
        "| family (type) | launches | calls of fused operators, by rule |\n|---|---|---|\n"
    )
    return head + "".join(_traced(name, kind) for name, kind in FAMILIES.items()) + "\n"


def _traced(name: str, kind: str) -> str:
    call = hf.build(hf.Request(kind, "decode"))
    report = fusion.explain(call.model, *call.args, options={"target": "ascend910_93"}, **call.kwargs)
    rules = ", ".join(f"`{rule}` {count}" for rule, count in Counter(each.rule for each in report.matches).items())
    return f"| {name} (`{kind}`) | {report.launches[0]} → {report.launches[1]} | {rules} |\n"


def listing() -> str:
    """List the launches of the block of examples/first_fusion.py before and after, as text."""
    sys.path.insert(0, str(ROOT / "examples"))
    from first_fusion import HIDDEN, LENGTH, Block, tables

    model = Block().bfloat16().eval()
    inputs = (torch.zeros(1, LENGTH, HIDDEN, dtype=torch.bfloat16), *tables())
    blocks: list[str] = []
    for title, fuel in (("before", 0), ("after", None)):
        report = fusion.explain(model, *inputs, options={"target": "ascend910_93", "fuel": fuel})
        names = [_short(str(node.target)) for node in report.graphs[0].graph.nodes if is_launch(node)]
        blocks.append(f"{title}, {len(names)} launches\n" + _wrapped(names))
    return "```\n" + "\n".join(blocks) + "```\n"


def _short(target: str) -> str:
    namespace, name = target.split(".")[:2]
    return name if namespace == "aten" else f"{namespace}.{name}"


def _wrapped(names: list[str]) -> str:
    lines = [""]
    for name in names:
        if len(lines[-1]) + len(name) > WIDTH:
            lines.append("")
        lines[-1] += f"  {name}"
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write what has changed."""
    if "--families" in sys.argv:
        readme = ROOT / "README.md"
        readme.write_text(
            FAMILIES_MARKS.sub(lambda found: f"{found[1]}{families_table()}{found[2]}", readme.read_text())
        )
        return
    for path, text in generated().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
