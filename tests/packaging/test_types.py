"""The types that we promise (py.typed), in a user's project."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dape

PROJECT = Path(__file__).parent / "user_project.py"


def test_the_project_runs():
    exec(compile(PROJECT.read_text(), str(PROJECT), "exec"), {})


@pytest.mark.slow
def test_pyright_accepts_it(tmp_path):
    if (pyright := shutil.which("pyright")) is None:
        pytest.skip("needs pyright (`pip install pyright`)")
    shutil.copy(PROJECT, tmp_path / "use.py")
    source = Path(dape.__file__).parents[1]
    (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{source}"]}}')
    command = [pyright, "--pythonpath", sys.executable, "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
