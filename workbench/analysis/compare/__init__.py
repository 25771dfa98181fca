"""Two runs of the same tokens side by side: backends, policies, dtypes, saved runs, another engine.

>>> result = compare("data/miniature", "torch_chunk", "torch_recurrent", prompt="To be, or not to be")
>>> result.verdict.verdict                                  # same, rounding, or different at <op>
>>> result.stages[["tap", "error", "roundings"]]
>>> save_side(result.a, "run")                              # to be compared with on another machine: a="run"
"""

from workbench.analysis.compare.comparison import Comparison, compare
from workbench.analysis.compare.saved import save_side
from workbench.analysis.compare.sides import Side

__all__ = ["Comparison", "Side", "compare", "save_side"]
