"""Pages: every template escapes what it shows, and scripts run by their hash alone."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from browser import HOSTILE, check_unharmed, visit

from dape.inspection import inspect
from dape.inspection.page import Named, write_maps_page
from dape.models import DapeForCausalLM, preset
from dape.pages import embedded, environment, policy

ROOT = Path(__file__).parents[1]
SOURCES = [path for folder in ("src", "papers") for path in (ROOT / folder).rglob("*.*")]
TEMPLATES = [path for path in SOURCES if re.fullmatch(r".*\.html?(\.j2)?", path.name)]


def test_every_page_is_a_template_of_jinja() -> None:
    names = {path.name for path in TEMPLATES}
    assert {"page.html.j2"} <= names
    assert [name for name in names if not name.endswith(".html.j2")] == []


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_template_has_no_way_around_escaping_and_the_policy(path: Path) -> None:
    text = path.read_text("utf-8")
    assert not re.search(r"\|\s*safe\b|autoescape|\bMarkup\b", text)
    # Code is a file beside the template, in an element of its own; an attribute holds none.
    for opening, content in re.findall(r"(<script[^>]*>)(.*?)</script>", text, re.DOTALL):
        data = opening.startswith('<script type="application/json"') and content.endswith("|embedded }}")
        assert data or (opening, content) == ("<script>", "{{ script }}"), content[:60]
    assert not re.search(r"\son\w+\s*=|javascript:|srcdoc|=\{\{", text)
    if "<!doctype" in text:
        policies = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
        assert policies
        assert all(re.fullmatch(r"\{\{ policy\(.*\) \}\}", found) for found in policies)


def test_one_module_marks_text_as_html() -> None:
    for path in (path for path in SOURCES if path.suffix == ".py"):
        if path != ROOT / "src/dape/pages.py":
            found = re.search(r"\b(Markup\b|Environment\(|Template\()|autoescape|<script", path.read_text())
            assert not found, f"{path}: {found}"


def test_the_policy_names_scripts_by_their_hash() -> None:
    told = policy(["alert(1)"])
    assert "script-src 'sha256-bhHHL3z2vDgxUt0W3dWQOrprscmda2Y5pLsLg4GF+pI='" in told
    assert "unsafe" not in told.partition("style-src")[0]
    assert "'none'" in told


def test_a_script_without_its_hash_does_not_run(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy(["ran=1"])}">'
    page.write_text(f"<head>{meta}</head><body><script>ran=1</script><script>hacked=1</script></body>")
    visited = visit(page, tmp_path, "return [typeof ran, typeof hacked]")
    assert visited.seen == ["number", "undefined"]
    assert any("Content Security Policy" in line for line in visited.console)


def test_json_in_a_page_does_not_end_its_element() -> None:
    assert "<" not in embedded({"a": HOSTILE})
    assert environment("dape.inspection").from_string("{{ a }}").render(a=1) == "1"


def test_hostile_text_in_the_page_of_an_inspection_is_text(tmp_path: Path) -> None:
    model = DapeForCausalLM(preset("tiny", "kerple", num_hidden_layers=1, hidden_size=16)).eval()
    found = replace(inspect(model, [1, 2, 3]), method=HOSTILE)
    named = [Named(HOSTILE, found, [HOSTILE] * 3), Named("b", found, ["a", "b", "c"])]
    page = write_maps_page(named, tmp_path)
    document = check_unharmed(page, tmp_path).document
    assert "hacked" in document
