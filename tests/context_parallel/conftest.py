import pytest

from tests.context_parallel.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Processes that live as long as the session: starting them takes longer than all they do."""
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()
