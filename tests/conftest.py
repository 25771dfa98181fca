"""What holds for every test: pinned threads, no network, no display, fixed dates, poisoned empty memory."""

import os

# Before torch is imported, and by force: with more threads than free cores torch becomes many times slower.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["SOURCE_DATE_EPOCH"] = "0"  # dates inside figures and pages
os.environ["MPLBACKEND"] = "Agg"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import hypothesis
import pytest
import torch

from workbench.kernels.poisoned_memory import poisoned_memory

torch.set_num_threads(1)

# The same examples on every machine, and no deadline: a busy machine is not a fault of the code.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _poisoned_empty_memory():
    with poisoned_memory():
        yield
