"""The documents: what they show runs, what they link to exists, and every message of the package is explained.

Python blocks run as they stand, a page's one after the other, with the names of ``docs/stand_ins.py`` at hand. Compiled
code is traced and not translated by inductor, which is slow and is run by ``test_compile_models.py``.
"""

import functools
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

from tests.conftest import ROOT, load_tool
from tests.docs import messages, pages, stand_ins
from tests.docs.pages import GUIDE, GUIDE_JA, TEMPLATE

README = ROOT / "README.md"
PAGES = pages.all_pages()
# Pages with Python blocks. Those of the Japanese guide are the English ones, byte for byte.
RUN = ["README.md", "CARD.md", "docs/functions.md", "docs/guide.md", "docs/loading.md"]
# Files that raise what is made elsewhere, as a text that says nothing by itself; the places that make it are read too.
MADE_ELSEWHERE = {
    ("__init__.py", "…"),
    ("_autograd.py", "…"),
    ("_checks.py", "…: … must …, got …"),
    ("_checks.py", "…: … must … or None, got …"),
    ("torch-ext/bindings/tensors.h", "…: …"),
}
# Where the messages of other packages that the guide explains are written.
OTHERS = {"kernels": "*.py", "transformers": "integrations/hub_kernels.py", "h11": "_headers.py"}
# Where the paths in sentences begin.
BASES = ["", "kernel_src", "kernel_src/cpu", "tests", "torch-ext", "torch-ext/packfree_kernels"]
NAMED_PATH = re.compile(r"(?<![\w/.])(?:[\w.*-]+/)+[\w.*-]+\.(?:h|cpp|cuh|py|md|sh|json|png|svg|toml)\b")
# Commands of consoles that are no part of the repository.
USERS_PROGRAMS = {"train.py"}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def rendered(page: Path) -> str:
    """A page as its readers see it."""
    if page != TEMPLATE:
        return page.read_text()
    publish = load_tool("publish")
    return publish.render_card(publish.Project.read(ROOT))


# ---- code ----


@pytest.mark.parametrize("name", RUN)
def test_python_blocks_run(name, kernel, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    page = ROOT / name
    found = [block for block in pages.blocks(rendered(page)) if block.language == "python"]
    assert found
    namespace = {"__name__": "__main__", **stand_ins.names(tmp_path)}
    for block in found:
        # Line numbers of errors are those of the page.
        code = "\n" * (block.line - 1) + block.code
        exec(compile(code, str(page), "exec"), namespace)


def test_every_page_with_python_is_run():
    with_python = {
        page.relative_to(ROOT).as_posix()
        for page in PAGES
        if any(block.language == "python" for block in pages.blocks(page.read_text()))
    }
    # The blocks of a translation are those of the original, byte for byte.
    assert with_python - {GUIDE_JA.relative_to(ROOT).as_posix()} == set(RUN)


def test_the_first_block_is_the_example_that_lies_beside_it():
    example = (ROOT / "examples" / "quickstart.py").read_text()
    assert example.endswith('"""\n\n' + pages.blocks(README.read_text())[1].code)
    assert "from_pretrained(path, attn_implementation=" in example


@each_page
def test_console_commands_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for block in pages.blocks(page.read_text()):
        assert block.language in ("python", "console"), block
        if block.language == "python":
            continue
        commands = [line[2:].split("#")[0].split() for line in block.code.splitlines() if line.startswith("$ ")]
        assert commands, block
        for words in commands:
            program, *rest = [word for word in words if not re.match(r"[A-Z_]+=", word)]
            if program == "make":
                assert rest[0] in targets, rest
            elif program == "hf":
                command = [str(Path(sys.executable).parent / "hf"), *rest[:1], "--help"]
                helped = subprocess.run(command, capture_output=True, text=True)
                options = [word for word in rest if word.startswith("--")]
                assert helped.returncode == 0 and all(option in helped.stdout for option in options), rest
            else:
                assert program in ("python", ".venv/bin/python"), program
                if rest[0] == "-m":
                    modules = [rest[1].replace(".", "/") + ".py"] if rest[1].startswith("tests.") else []
                    assert modules or find_spec(rest[1]), rest
                    named = modules + [word for word in rest[2:] if word.startswith("tests/")]
                    assert all((ROOT / path).exists() for path in named), rest
                    continue
                script = re.sub(r"/leak_report$", "/leak_report/__main__.py", rest[0])
                assert script in USERS_PROGRAMS or (ROOT / script).is_file() or script.startswith("build/torch-"), rest


@each_page
def test_targets_and_files_that_are_named_exist(page):
    """Code inside sentences: ``make x``, ``python -m tests.x``, and paths, written from one of the places in BASES."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for code in pages.inline_code(page.read_text()):
        for target in re.findall(r"\bmake ([a-z-]+)", code):
            assert target in targets, code
        for module in re.findall(r"-m (tests[\w.]*)", code):
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), code
        for path in NAMED_PATH.findall(code):
            # X stands for any operator, <...> for any name, {...} for several.
            if not re.search(r"[{<]|[/_]X\b|\bX[/_]", code):
                places = [page.parent, *(ROOT / base for base in BASES)]
                assert any(list(place.glob(path)) for place in places), f"{code}: there is no such file"


def test_words_of_the_glossary_are_those_of_the_sources():
    """The names in the first column of its last table, which is about variables."""
    table = (ROOT / "kernel_src" / "README.md").read_text().split("## Names of")[1]
    folders = ("kernel_src", "torch-ext/packfree_kernels")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".h", ".py", ".md")]
    text = "\n".join(path.read_text() for path in sources if path != ROOT / "kernel_src" / "README.md")
    for row in re.findall(r"^\| (.+?) \|", table, re.MULTILINE):
        for name in re.findall(r"`(\w{2,})`", row):
            assert re.search(rf"\b{name}\b", text), name


# ---- links ----


@each_page
def test_links_resolve(page):
    text = page.read_text()
    for target in pages.links(text):
        if re.match(r"https?://|mailto:|\{\{", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{target}: there is no such file"
        if anchor:
            assert anchor in pages.anchors(linked.read_text()), f"{target}: there is no such heading"


def test_the_card_links_to_nothing_that_a_hub_lacks():
    """On the Hub the card is README.md, and nothing of the repository lies beside it."""
    assert all(re.match(r"https?://", target) for target in pages.links(rendered(TEMPLATE)))


def test_every_document_is_on_the_first_page():
    linked = {(README.parent / target.partition("#")[0]).resolve() for target in pages.links(README.read_text())}
    documents = {page for page in PAGES if page.parent in (ROOT, ROOT / "docs")} - {README, TEMPLATE}
    assert documents <= linked


# ---- what is said ----


def test_the_first_page_is_short_and_lists_its_sections():
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    assert text.startswith("---\ntags:\n- kernel\nlicense: apache-2.0\n---\n")
    sections = [heading.title for heading in pages.headings(text) if heading.level == 2]
    listed = re.findall(r"^- \[(.+)\]\(#", text, re.MULTILINE)
    assert listed == sections[: len(listed)] == sections


def test_numbers_of_model_types_are_those_of_the_table():
    outcomes = [row["outcome"] for row in json.loads((ROOT / "tests/data/loading_sweep.json").read_text())["types"]]
    refused = sum("refused" in outcome for outcome in outcomes)
    sentence = " ".join(README.read_text().split())
    assert f"Of {len(outcomes)} model types of transformers" in sentence
    assert f"{outcomes.count('equal')} gave packed what they give alone, {refused} are refused by name" in sentence
    assert f"and {outcomes.count('not built')} transformers does not build" in sentence


@pytest.mark.parametrize("name", ["packing", "speed", "steps", "architecture"])
def test_pictures_are_those_of_the_tool(name):
    assert load_tool("maintainers.pictures").source_digest(name) in (ROOT / "docs" / f"{name}.svg").read_text(), (
        "run tools/maintainers/pictures.py, and look at what it draws"
    )


def test_speeds_in_the_table_are_those_that_were_measured():
    """The picture's numbers are made of the measurements; those of the table beside it are written by hand."""
    tool = load_tool("maintainers.pictures")
    rows = json.loads(tool.SPEEDS.read_text())
    table = (ROOT / "docs" / "speed.md").read_text()
    for title, op, shape in tool.SHOWN[:5]:
        (line, *_) = [line for line in table.splitlines() if line.lower().startswith(f"| {title.lower()}")]
        for direction, _ in tool.DIRECTIONS:
            ratio = tool.ratio_of(rows, op, shape, "fp32", direction)
            assert f"{tool.short(ratio)}x" in line, (title, direction, ratio)


# ---- messages ----


@pytest.fixture(scope="module")
def texts():
    return messages.all_messages()


def test_every_message_is_explained(texts):
    pieces = pages.explained(GUIDE.read_text())[0]
    unexplained = [
        f"{message.where}: {message.text}"
        for message in texts
        if (message.where.partition(":")[0], message.text) not in MADE_ELSEWHERE
        and not any(piece in message.text for piece in pieces)
    ]
    assert not unexplained, "no row of docs/guide.md holds a piece of\n" + "\n".join(unexplained)


def test_what_is_explained_can_be_met(texts):
    ours, others = pages.explained(GUIDE.read_text())
    assert len(ours) > 100 and len(others) > 5
    stale = [piece for piece in ours if not any(piece in message.text for message in texts)]
    assert not stale, f"no message of the sources holds {stale}"
    short = [piece for piece in ours if len(piece) < 10]
    assert not short, f"{short} may be met by chance"
    folders = {Path(find_spec(package).origin).parent: pattern for package, pattern in OTHERS.items()}
    sources = "\n".join(path.read_text() for folder, pattern in folders.items() for path in folder.glob(pattern))
    missing = [piece for piece in others if piece not in sources]
    assert not missing, f"no source of the other packages holds {missing}"


def test_messages_are_found_in_each_of_their_forms(texts, tmp_path, monkeypatch):
    """What the reading of the sources rests on: variables, arguments, loops, functions that return a text, and C++."""
    found = {(message.where.partition(":")[0], message.text) for message in texts}
    for where, text in (
        ("packing.py", "…: … must start at 0, got …"),
        (
            "hooks/completion.py",
            "…: position_ids must start again at each sample in a packed call under … attention, got …",
        ),
        ("hooks/masks.py", "…: attention_mask must hide nothing but the ends of a row, got one with a gap"),
        ("flash_attn_varlen/api.py", "flash_attn_func: k must have q's dtype …, got …"),
        ("torch-ext/bindings/tensors.h", "…: cu_seqlens must start at 0, got …"),
        ("torch-ext/bindings/tiers.h", "PACKFREE_CPU_TIER must be one of …"),
    ):
        assert (where, text) in found, text
    (tmp_path / "new.py").write_text('def f(op, x):\n    must = "be new"\n    raise value_error(op, "x", must, x)\n')
    monkeypatch.setattr(messages, "PACKAGE", tmp_path)
    assert list(messages.python_messages()) == [("new.py:3", "…: x must be new, got …")]
    assert any(where == "_autograd.py" and "has no second derivative" in text for where, text in found)
    assert any(where == "hooks/guards.py" and "flash-style kernels do not compute" in text for where, text in found)
