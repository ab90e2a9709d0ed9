"""Add to the site what is not in this folder: pages of the clone, figures, the example's report, the notebook.

`make docs` makes them first, under out/; a part that is missing stops the build.
"""

import inspect
import json
import pathlib
import re
import types

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[1]
FIGURES, REPORT = ROOT / "out" / "docs" / "figures", ROOT / "out" / "audit" / "report.html"
NOTEBOOK = ROOT / "out" / "docs" / "five_minutes.ipynb"
# Pages that lie elsewhere in the clone, where their readers look for them.
PAGES = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "experiments.md": "experiments/README.md",
    "security.md": "SECURITY.md",
}
_LINKS = (
    (r"\]\((?:\.\./)?experiments/README\.md\)", "](experiments.md)"),
    (r"\]\((?:\.\./)?docs/([\w.]+)\)", r"](\1)"),
    (r"\[(\w+)\]\((results/[\w/]+)\)", r"`docs/\2`"),  # score tables stay in the clone
)
_CAPTIONS = {
    "distributions": "Scores of members and held-out images, by the attacks as they were frozen.",
    "frontier": "What each attack gets for its queries.",
    "roc": "ROC curves on the test half, with the rate of false alarms on a logarithmic scale.",
    "stability": "How the result depends on the timestep.",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what was made for the site."""
    figures = sorted(FIGURES.glob("*.svg"))
    for path in (*figures, REPORT, NOTEBOOK) if figures else (FIGURES,):
        if not path.is_file():
            raise PluginError(f"nothing at {path.relative_to(ROOT)}: build the site with `make docs`")
    contents: dict[str, str | bytes] = {
        **{name: (ROOT / path).read_text(encoding="utf-8") for name, path in PAGES.items()},
        **{f"figures/{figure.name}": figure.read_bytes() for figure in figures},
        "example_report.html": REPORT.read_bytes(),
        "figures.md": _figures_page(),
        "five_minutes.md": _notebook_page(),
        "api.md": api_page(),
        "options.md": options_page(),
    }
    for name, content in contents.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links for readers of the clone into links of the site."""
    for pattern, replacement in _LINKS:
        markdown = re.sub(pattern, replacement, markdown)
    return markdown


def _figures_page() -> str:
    lines = ["# Figures", "", "Drawn from the score tables in `docs/results`, by `python -m experiments.figures`.", ""]
    for figure in sorted(FIGURES.glob("*.svg")):
        caption = _CAPTIONS.get(figure.stem, figure.stem)
        lines += [f"## {figure.stem.capitalize()}", "", caption, "", f"![{caption}](figures/{figure.name})", ""]
    return "\n".join(lines)


def _notebook_page() -> str:
    """The executed notebook: its text, its code, what it printed, and its pictures."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) if cell["cell_type"] == "markdown" else _code(cell) for cell in cells)


def _code(cell: dict) -> str:
    parts = [f"```python\n{''.join(cell['source'])}\n```"]
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            picture = data["image/png"].strip()
            parts.append(f'<img alt="What the cell above drew" src="data:image/png;base64,{picture}">')
        elif output.get("text") or "text/plain" in data:
            parts.append(f"```text\n{''.join(output.get('text') or data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts)


def options_page() -> str:
    """Every command with its options, from the parser that reads them."""
    from dime_jax import cli

    lines = ["# Options", "", "As `dime-jax COMMAND --help` shows them. `--flag-name` and `--flag_name` are the same."]
    lines += ["In Python, those of `audit` are arguments of `dj.AuditConfig`."]
    for command, parser in cli.commands().items():
        lines += ["", f"## {command}", "", (parser.description or "").partition("\n")[0].capitalize() + "."]
        for group in parser._action_groups:
            rows = [action for action in group._group_actions if action.dest != "help"]
            lines += ["", f"| {group.title} | |", "|---|---|"] if rows else []
            for action in rows:
                name = "/".join(action.option_strings) or action.metavar
                text = (action.help or "") % {"default": action.default}
                lines.append(f"| `{name}` | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def api_page() -> str:
    """Every public name, where it is defined: those of `dime_jax` first, then those of its public modules."""
    import dime_jax

    modules = [one for one in map(dime_jax.__getattr__, dime_jax.__all__) if inspect.ismodule(one)]
    names = "`import dime_jax as dj`; the first names are attributes of `dj`, the others of `dj.data`, `dj.metrics`, …"
    scores = "Lower scores mean member, for every statistic, everywhere."
    lines = ["# API reference", "", names, scores, "", "## dime_jax", ""]
    top = _defined(dime_jax, set())
    lines += [f"::: {path}" for path in top]
    for module in modules:
        lines += ["", f"## {module.__name__}", "", inspect.getdoc(module) or "", ""]
        lines += [f"::: {path}" for path in _defined(module, set(top))]
    return "\n".join(lines) + "\n"


def _defined(module: types.ModuleType, seen: set[str]) -> list[str]:
    """The full names of a module's public classes and functions, without those seen before."""
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    found = {name: getattr(module, name) for name in names}
    paths = [
        f"{one.__module__}.{one.__qualname__}"
        for one in found.values()
        if (inspect.isclass(one) or inspect.isfunction(one)) and _ours(one, module)
    ]
    return [path for path in dict.fromkeys(paths) if path not in seen]


def _ours(one: type | types.FunctionType, module: types.ModuleType) -> bool:
    if hasattr(module, "__path__"):  # a package shows what its modules define
        return one.__module__.split(".")[0] in ("dime_jax", "checkpoints_convert")
    return one.__module__ == module.__name__
