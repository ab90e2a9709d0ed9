"""Every command and code block of the pages is run by a test, or marked as needing files that only the reader has.

Marked blocks are still read: options must exist, and Python must parse.
"""

import ast
import importlib.util
import json
import pathlib
import re
import shlex
from typing import NamedTuple

import pytest
import yaml

import dime_jax as dj
from dime_jax import cli

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "experiments/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
MARK = re.compile(r"<!-- needs (your files|the files that the command above makes) -->\n$")
# What runs a block that is not marked: by page and the block's first line, or by command.
RUN_BY = {
    ("README.md", "import jax, numpy as np"): "tests/test_readme.py",
    ("add_attack.md", '"""nudge.py: the mean norm of the response to three images, each with a little noise."""'): (
        "tests/auditing/test_audit_own_attack.py"
    ),
    ("add_attack.md", "import dime_jax as dj"): "tests/auditing/test_audit_own_attack.py",
    ("audit_function.md", "import numpy as np"): "tests/parity/test_docs_parity.py",  # needs PyTorch
    ("audit_function.md", "import dime_jax as dj"): "tests/test_docs.py",
}
COMMANDS_RUN_BY = {
    "dime-jax audit": "tests/test_wheel.py",
    "dime-jax audit --model digits --lora digits_lora --output out/audit-lora": (
        "tests/auditing/test_audit_shipped_lora.py"
    ),
    'eval "$(dime-jax --print-completion bash)"': "tests/test_cli.py",
}


class Block(NamedTuple):
    page: str
    language: str
    text: str
    marked: bool

    def commands(self):
        """Shell commands, with continued lines joined and comments cut."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line).strip())]


def blocks():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
            yield Block(page.name, found[1], found[2], MARK.search(text[: found.start()]) is not None)


BLOCKS = list(blocks())
PYTHON = [block for block in BLOCKS if block.language in ("py", "python")]
SHELL = [block for block in BLOCKS if block.language in ("sh", "")]


def test_the_blocks_are_found_and_of_known_languages():
    assert len(PYTHON) >= 6
    assert len(SHELL) >= 15
    # Configurations of other people's servers are tried in tests/remote, by hand or not at all, as the page says.
    assert {block.language for block in BLOCKS} == {"py", "python", "sh", "", "json", "yaml", "text"}


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.page)
def test_python_parses_and_is_run_or_marked(block):
    ast.parse(block.text)
    test = RUN_BY.get((block.page, block.text.partition("\n")[0]))
    assert block.marked or (test is not None and (ROOT / test).is_file()), block.text


def test_pages_import_only_what_is_public():
    notebook = json.loads((ROOT / "docs/five_minutes.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code = "\n".join([*(block.text for block in PYTHON), *cells])
    imported = re.findall(r"^\s*(?:from|import) (dime_jax\S*|checkpoints_convert\S*)", code, re.MULTILINE)
    assert "dime_jax.attacks" in imported
    assert set(imported) <= {"dime_jax", "dime_jax.attacks", "dime_jax.data"}


def test_the_budget_of_audit_function_is_one():
    (block,) = [block for block in PYTHON if "dj.Budget" in block.text]
    names: dict = {}
    exec(block.text, names)
    assert names["options"].budget.total == 10_000


COMMANDS = [(block, command) for block in SHELL for command in block.commands()]


@pytest.mark.parametrize(("block", "command"), COMMANDS, ids=[command[:60] for _, command in COMMANDS])
def test_commands_are_run_or_marked_and_their_options_exist(block, command):
    assert block.marked or runs_without_files(command), command
    if command.startswith("dime-jax"):
        cli.build_parser().parse_args(shlex.split(command.replace("…", ""))[1:])


def runs_without_files(command):
    """Whether a command can be typed as it stands, and something sees to it that it works."""
    if command in COMMANDS_RUN_BY:
        return (ROOT / COMMANDS_RUN_BY[command]).is_file()
    if command.startswith("pip install"):  # of this clone, with extras that there are
        extras = re.findall(r"\[(\w+)\]", command)
        return all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text(encoding="utf-8") for extra in extras)
    if target := re.fullmatch(r"make ([\w-]+)", command):
        return re.search(rf"^{target[1]}:.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    if command.startswith(".venv/bin/python -m pytest"):
        return (ROOT / command.split()[-1]).exists()
    return is_experiment(command)


def is_experiment(command):
    """Each is run by tests/experiments at the scale of a smoke test; here its module and config must exist."""
    module = re.match(r"(?:\.venv/bin/)?python -m (experiments\.\w+) ", command)
    config = re.search(r"--config=(\S+\.py)", command)
    return (
        module is not None
        and importlib.util.find_spec(module[1]) is not None
        and (config is None or (ROOT / config[1]).is_file())
    )


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            made_by_the_build = page.parent.name == "docs" and target in MADE
            assert target.startswith("http") or made_by_the_build or (page.parent / target).exists(), (page, target)


MADE = {"api.md", "changelog.md", "contributing.md", "example_report.html", "experiments.md", "figures.md"}
MADE |= {"five_minutes.md", "options.md", "security.md"}


def test_every_page_has_a_place_in_the_site():
    text = re.sub(r"!!\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = set(re.findall(r"[\w]+\.md", str(yaml.safe_load(text)["nav"])))
    assert pages == MADE - {"example_report.html"} | {page.name for page in (ROOT / "docs").glob("*.md")}


def test_the_api_reference_has_every_public_name(monkeypatch):
    hooks = pytest.importorskip("mkdocs") and load(ROOT / "docs/site_hooks.py")
    listed = {line.removeprefix("::: ").rpartition(".")[2] for line in hooks.api_page().splitlines() if ":::" in line}
    modules = {"attacks", "calibration", "data", "evidence", "metrics"}
    assert set(dj.__all__) - modules <= listed
    assert {"open_source", "fraction_used", "evaluate", "conformal_p_values", "calibrate"} <= listed


def test_the_page_of_options_has_every_option_of_every_command():
    hooks = pytest.importorskip("mkdocs") and load(ROOT / "docs/site_hooks.py")
    page = hooks.options_page()
    for command, parser in cli.commands().items():
        section = page.partition(f"\n## {command}\n")[2].partition("\n## ")[0]
        rows = {row.strip("`") for row in re.findall(r"^\| (`\S+`) \|", section, re.MULTILINE)}
        options = {option for action in parser._actions for option in action.option_strings if len(option) > 2}
        assert options - {"--help"} == {row for row in rows if row.startswith("--")}
    assert "| `--level` | the false discovery rate of the verdicts" in page


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
