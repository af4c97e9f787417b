import pytest
from builders import write_texts


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """The folder of twelve short texts, for tests that leave it as it is."""
    return write_texts(tmp_path_factory.mktemp("corpus") / "text")
