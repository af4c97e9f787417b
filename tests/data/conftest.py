import pytest


@pytest.fixture
def corpus(tmp_path):
    """A folder of forty small text files in two subfolders."""
    root = tmp_path / "corpus"
    for index in range(40):
        path = root / ("even" if index % 2 == 0 else "odd") / f"{index:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        more = f"and {index} more\n" * (index + 1)
        path.write_text(f"Document {index}: naïve café, line one\n{more}", "utf-8")
    return root


@pytest.fixture(autouse=True)
def _hub_in_reach(monkeypatch):
    """Data sets of the hub are made up in these tests, wherever they run."""
    monkeypatch.setattr("dape.data.hub.hub_reachable", lambda: True)
