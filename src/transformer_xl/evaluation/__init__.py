"""How good a model is, with the rule that made the figure."""

from transformer_xl.evaluation.scoring import UNIT_NAMES, Figures, Rule, evaluate, figures, make_rule, score_split

__all__ = ["UNIT_NAMES", "Figures", "Rule", "evaluate", "figures", "make_rule", "score_split"]
