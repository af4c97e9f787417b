"""A page in headless Chromium: its document after the scripts ran, what a probe saw, and the console's lines."""

import base64
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--enable-logging=stderr",
    "--virtual-time-budget=5000", "--dump-dom"
)  # fmt: skip


NARROWEST = 500
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><body style="margin: 0">
<iframe src="{page}" style="width: {width}px; height: {height}px; border: 0"></iframe><script>
addEventListener("message", event => {{
  const note = document.createElement("pre"); note.id = "probe"; note.textContent = event.data; document.body.append(note);
}});
</script>"""


class Visit(NamedTuple):
    document: str
    seen: Any
    console: list[str]


def chromium() -> str:
    """The browser's path; without one the test is skipped, in continuous integration it fails."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    reason = "no Chromium on this machine: `make browser` installs it"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def visit(
    page: Path,
    folder: Path,
    probe: str,
    *,
    size: tuple[int, int] = (1200, 900),
    dark: bool = False,
) -> Visit:
    """Open a copy of the page that ends with a probe: JavaScript whose value, or what it promises, comes back.

    size: of the window; a width below Chromium's least, 500, is that of a frame in it.
    """
    script = (
        "addEventListener('load', () => setTimeout(() => {"
        "const note = document.createElement('pre'); note.id = 'probe';"
        f"Promise.resolve((() => {{ {probe} }})()).then(value => {{ note.textContent = JSON.stringify(value);"
        "document.body.append(note); parent.postMessage(note.textContent, '*'); }); }, 300));"
    )
    copy = folder / f"probed-{size[0]}-{'dark' if dark else 'light'}.html"
    # The page's policy allows the probe as well.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = page.read_text("utf-8").replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    head, end, rest = text.rpartition("</body>")
    copy.write_text(f"{head or rest}<script>{script}</script>{end + rest if head else ''}", "utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    if size[0] < NARROWEST:
        frame = FRAME.format(page=copy.name, width=size[0], height=size[1])
        copy = folder / f"frame-{copy.name}"
        copy.write_text(frame)
    place = f"--user-data-dir={folder / 'profile'}"
    command = [chromium(), *FLAGS, place, scheme, f"--window-size={size[0]},{size[1]}", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, timeout=300, check=True)
    document = done.stdout.decode()
    console = [line for line in done.stderr.decode(errors="replace").splitlines() if "CONSOLE" in line]
    note = re.search(r'<pre id="probe">(.*?)</pre>', document, re.DOTALL)
    assert note, f"the probe did not run: {console}"
    return Visit(document, json.loads(html.unescape(note[1])), console)


# Text that runs, or ends an element, wherever it is not escaped; `$` begins a formula in a figure.
HOSTILE = (
    "$\\frac$x\"'>--!><!--<script></template></textarea></style></svg>]]></script>"
    "<script>hacked=1</script><img src=x onerror=hacked=1>{{ 7 * 7 }}<svg onload=hacked=1>"
)


def check_unharmed(page: Path, folder: Path) -> Visit:
    """Assert that the page shows hostile text as text: no script of it runs, even without the policy, and none asks to."""
    text = page.read_text("utf-8")
    assert "script-src &#39;sha256-" in text
    probe = "return [typeof hacked, document.querySelectorAll('img[onerror], svg[onload], base').length]"
    visited = visit(page, folder, probe)
    assert visited.seen == ["undefined", 0]
    assert visited.console == [], visited.console
    bare = folder / "bare.html"
    bare.write_text(re.sub(r"<meta http-equiv[^>]*>", "", text), "utf-8")
    assert visit(bare, folder, probe).seen == ["undefined", 0]
    return visited
