"""What every test may use: the device, a fresh seed, and Triton's interpreter where no GPU is."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import secrets
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from tests.draws import left_out
from tests.interpreter import interpret_faster
from tests.line_counter import LineCounter
from tests.warm import real_starts, warm_starts

# Compilers make many objects that stay.  With Python's threshold of 700, the files that compile
# most spend 8% of their time on garbage collection.
gc.set_threshold(50_000, 20, 20)

# Workers spread over the GPUs; alone, pytest sees all.  CUDA reads this when it is first asked.
gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and gpus > 1:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(worker.removeprefix("gw")) % gpus)

# Triton reads this once, at import: it must be set before any test module is collected.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    interpret_faster()

# torch.compile starts a process that imports torch to compile for GPUs, also where there is none.
os.environ["TORCH_WARM_POOL"] = "0"

# By default an example that takes 0.2 s fails, as it may wherever a machine pauses.
hypothesis.settings.register_profile(
    "fusewright", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("fusewright")

# pytest-xdist gives its workers one of 80, for which tables would be wrapped.
os.environ.pop("COLUMNS", None)

# A GPU machine may lack what tests of the server import, none of which needs a GPU.
collect_ignore = [] if find_spec("openai") and find_spec("httpx2") else ["serve"]
if not find_spec("zmq"):
    collect_ignore += [
        f"engine/test_{name}.py"
        for name in (
            "gpu_ranks",
            "pipeline_parallel",
            "process",
            "rank_faults",
            "ray",
            "replicas",
            "torchrun",
        )
    ]

# Artifacts of one run are shared by its tests and by its worker processes, and by nothing else.
if "FUSEWRIGHT_CACHE_DIR" not in os.environ:
    _STORE = tempfile.mkdtemp(prefix="fusewright-tests-")
    os.environ["FUSEWRIGHT_CACHE_DIR"] = _STORE
    atexit.register(shutil.rmtree, _STORE, ignore_errors=True)
os.environ["FUSEWRIGHT_BAKED_DIR"] = os.environ["FUSEWRIGHT_CACHE_DIR"] + "/baked"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fw-seed",
        type=int,
        default=None,
        help="seed of the random inputs; without it a fresh one, named by header and failures",
    )
    parser.addoption(
        "--fw-update-golden",
        action="store_true",
        help="write tests/serve/golden anew instead of comparing with it",
    )
    parser.addoption(
        "--fw-coverage",
        action="store_true",
        help="count the lines that tests run, see make coverage",
    )
    parser.addoption(
        "--fw-storm",
        type=int,
        default=160,
        help="requests of the storm on the server; 20000 is the full size",
    )
    parser.addoption(
        "--fw-drafts",
        default="",
        metavar="CONFIG",
        help="the speculative_config of every server of tests/serve that is given none; one that "
        "names a model is for servers of abacus",
    )
    parser.addoption(
        "--fw-cases",
        type=int,
        default=1,
        help="how many times as many random graphs and requests as usual; from 2 on all tests",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Its own code against newer numpy; nothing a kernel could change.
    config.addinivalue_line(
        "filterwarnings", "ignore::DeprecationWarning:triton.runtime.interpreter"
    )
    # Workers of xdist have the one that is printed, by which tests are drawn.
    if hasattr(config, "workerinput"):
        config.option.fw_seed = config.workerinput["fw_seed"]
    elif config.getoption("--fw-seed") is None:
        config.option.fw_seed = secrets.randbelow(2**31)
    hands_out_tests = getattr(config.option, "tx", None) and not hasattr(config, "workerinput")
    if config.getoption("--fw-coverage") and not hands_out_tests:
        config.pluginmanager.register(LineCounter())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand xdist's worker the seed."""
    node.workerinput["fw_seed"] = node.config.option.fw_seed


def pytest_report_header(config: pytest.Config) -> str:
    where = "cuda" if torch.cuda.is_available() else "cpu (Triton interpreted)"
    return f"fusewright: device {where}, --fw-seed={config.option.fw_seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    whole = len(config.args) == 0 or config.args == config.getini("testpaths")
    if whole and config.option.fw_cases == 1 and not torch.cuda.is_available():
        without = left_out(items, config.option.fw_seed)
        config.hook.pytest_deselected(items=[*without])
        items[:] = [item for item in items if item not in without]
    # `make test` hands out whole files, so that no fixture is built twice; the long ones first, so
    # that no worker ends long after the others.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if torch.cuda.is_available():
        # What runs on "the device" is a GPU test there and a CPU test elsewhere.
        for item in items:
            if "device" in getattr(item, "fixturenames", ()):
                item.add_marker("gpu")
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    # A test without a seed of its own draws by the run's, whatever tests came before it.
    torch.manual_seed(zlib.crc32(f"{item.config.option.fw_seed} {item.nodeid}".encode()))
    # Dynamo measures the guards of each graph, for which it flushes the processor's caches, 15 ms
    # every time; and it collects garbage.  Nobody reads the one or misses the other.
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda *_: 0.0
        sys.modules["torch._dynamo.config"].run_gc_after_compile = False


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    # pytest collects five times when it ends, to hear of errors in finalizers, and Python twice.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> Iterator[None]:
    """A collection, as by an engine that is closed, looks at what its own module makes, not at the
    million objects that imports and the modules before it have left."""
    gc.freeze()
    yield
    gc.collect()


@pytest.fixture
def no_engine_is_left() -> Iterator[None]:
    """A process has one engine of several ranks at a time."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def fw_seed(pytestconfig: pytest.Config) -> int:
    """Seed of this run's random inputs; a failure that depends on it must name it."""
    return int(pytestconfig.option.fw_seed)


@pytest.fixture(scope="session")
def fw_cases(pytestconfig: pytest.Config) -> int:
    """How many times as many random cases a test shall draw as usual."""
    return int(pytestconfig.getoption("--fw-cases"))


@pytest.fixture(scope="module")
def warm() -> Iterator[None]:
    """The processes that this module's tests start have imported torch; see ``tests/warm.py``."""
    with warm_starts():
        yield


@pytest.fixture(scope="module")
def warm_servers() -> Iterator[None]:
    """As ``warm``, and so have those that these processes start."""
    with warm_starts(nested=True):
        yield


@pytest.fixture
def cold() -> Iterator[None]:
    """Those of this test have not."""
    with real_starts():
        yield


@pytest.fixture(autouse=True, scope="session")
def quiet() -> None:
    """No ``LLM`` of a test sends its log to stderr, whichever test was the first to make one, and
    none says there what goes on for ten seconds, as all does on a busy machine."""
    from fusewright.config.process.logs import be_quiet
    from fusewright.engine.worker import progress

    progress._EVERY_S = 3600.0
    be_quiet()


@pytest.fixture
def said() -> Iterator[list[logging.LogRecord]]:
    """What the package logs."""
    records: list[logging.LogRecord] = []

    class Records(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    log, handler = logging.getLogger("fusewright"), Records()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield records
    log.setLevel(before)
    log.removeHandler(handler)
