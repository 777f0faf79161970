"""Write the line counts of docs/recipes.md; tests/house compares them.

Counted are lines of code: not blank ones, comments, docstrings and imports. Data, model and whatever else a program
with Accelerate imports from the recipe, with all that these refer to, count in neither.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "recipes.md"
RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
BEGIN, END = "<!-- lines:begin -->", "<!-- lines:end -->"
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str, without: frozenset[str] = frozenset()) -> int:
    """Lines of code, `without` the definitions of these names at the top level."""
    tree = ast.parse(text)
    left_out = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node)]
    left_out += [node for node in tree.body if set(_defined(node)) & without]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = {line for each in tokens if each.type not in _NO_CODE for line in range(each.start[0], each.end[0] + 1)}
    return len(found - {line for node in left_out for line in _lines(node)})


def shared(recipe: str, peer: str, name: str) -> frozenset[str]:
    """What the peer imports from the recipe, and the names that these definitions use."""
    imports = [node for node in ast.walk(ast.parse(peer)) if isinstance(node, ast.ImportFrom) and node.module == name]
    reached, queue = set[str](), [alias.name for node in imports for alias in node.names]
    definitions = {defined: node for node in ast.parse(recipe).body for defined in _defined(node)}
    while queue:
        if (each := queue.pop()) in definitions and each not in reached:
            reached.add(each)
            queue += [node.id for node in ast.walk(definitions[each]) if isinstance(node, ast.Name)]
    return frozenset(reached)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name))


def _lines(node: ast.AST) -> range:
    decorators = [each.lineno for each in getattr(node, "decorator_list", ())]
    return range(min([*decorators, getattr(node, "lineno", 0)]), (getattr(node, "end_lineno", 0) or 0) + 1)


def table() -> str:
    """One row for each recipe: lines with ddpkit, lines with Accelerate."""
    rows = ["| recipe | ddpkit | Accelerate |", "|---|---|---|"]
    for path in sorted(RECIPES.glob("*.py")):
        recipe, peer = path.read_text(), (RECIPES / "peers" / f"accelerate_{path.name}").read_text()
        lines = code_lines(recipe, shared(recipe, peer, path.stem)), code_lines(peer)
        links = f"[{path.stem}](../examples/recipes/{path.name})"
        rows.append(f"| {links} | {lines[0]} | [{lines[1]}](../examples/recipes/peers/accelerate_{path.name}) |")
    return "\n".join(rows)


def updated(text: str) -> str:
    """The document with its table as it should be, between its two marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
